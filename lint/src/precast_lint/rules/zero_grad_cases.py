"""Cases of AMP207: zero_grad between backward and step, or nowhere."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            scaler.scale(model(batch) / 4).backward()
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
    """),
    Case(
        """
        import torch

        def train(generator, critic, batches):
            first = torch.optim.Adam(generator.parameters())
            second = torch.optim.Adam(critic.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                first.zero_grad()
                scaler.scale(critic(generator(batch))).backward()
                second.zero_grad()
                scaler.step(first)
                scaler.scale(critic(batch)).backward()
                scaler.step(second)
                scaler.update()
        """,
        note="What the generator's loss left in the critic is not wanted.",
    ),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            loss = model(batch)
            scaler.scale(loss).backward()
            if not torch.isfinite(loss):
                optimizer.zero_grad()
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        def train(self, batches):
            optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(self.first()).backward()
            optimizer.zero_grad()
            self.backward(scaler, batches)
            scaler.step(optimizer)
            scaler.update()
        """,
        note="A method may run another backward.",
    ),
    Case("""
        import torch

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(batches[0])).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        from trainers import Base

        class Trainer(Base):
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()

        class Clearing:
            def __init__(self, model, clear):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")
                clear(self.optimizer)

            def train(self, batches):
                for batch in batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
        note="The base, or what gets the optimizer, may do it.",
    ),
    Case(
        """
        import torch

        first = torch.optim.SGD(generator.parameters(), 0.1)
        second = torch.optim.SGD(critic.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            generator.zero_grad()
            scaler.scale(critic(generator(batch)).mean()).backward()
            critic.zero_grad()
            scaler.step(first)
            scaler.scale(critic(batch).mean()).backward()
            scaler.step(second)
            scaler.update()
        """,
        note="Another model than the one whose optimizer steps.",
    ),
    Case("""
        import torch

        class Trainer:
            def __init__(self, model, teacher):
                self.model = model
                self.teacher = teacher
                self.optimizer = torch.optim.AdamW(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.optimizer.zero_grad()
                    with torch.autocast("cuda"):
                        loss = self.model(batch) - self.teacher(batch)
                    self.scaler.scale(loss).backward()
                    self.teacher.zero_grad()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """),
    Case("""
        def train(model, optimizer, batches, scaler, helper):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                helper.clear(optimizer)

        def step(loss, optimizer, scaler):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        import torch

        def train(model, optimizer, batches, scaler):
            for batch in batches:
                for attempt in range(3):
                    optimizer.zero_grad()
                    loss = model(batch)
                    scaler.scale(loss).backward()
                    if loss.isfinite():
                        break
                scaler.step(optimizer)
                scaler.update()

        def alternate(first, second, one, other, batches, scaler):
            for i, batch in enumerate(batches):
                other.zero_grad()
                one.zero_grad()
                scaler.scale(first(second(batch))).backward()
                scaler.step(one)
                if i % 4 == 0:
                    scaler.step(other)
                scaler.update()
    """),
)

INVALID = (
    Case(
        """
        import torch

        def step(model, optimizer, scaler, batches):
            for batch in batches:
                scaler.scale(model(batch) / len(batches)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            with torch.autocast("cuda"):
                loss = model(batch)
            scaler.scale(loss).backward()
            model.zero_grad()
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
        note="The model empties the gradients that the optimizer needs.",
    ),
    Case(
        """
        import torch

        first = torch.optim.Adam(generator.parameters())
        second = torch.optim.Adam(critic.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            first.zero_grad()
            scaler.scale(critic(generator(batch))).backward()
            second.zero_grad()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def step(model, optimizer, scaler, batch):
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            step(model, optimizer, scaler, batch)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            optimizer.zero_grad()
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            '''Trains; TODO: where does zero_grad go?'''
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    print("no zero_grad here")
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
    ),
    Case("""
        import torch

        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
    """),
    Case("""
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.AdamW(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    with torch.autocast("cuda"):
                        loss = self.model(batch)
                    self.scaler.scale(loss).backward()
                    self.model.zero_grad(set_to_none=True)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """),
    Case(
        """
        import torch

        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")

        def train(batches):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()

        train(batches)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            optimizer: torch.optim.Optimizer | None = None

            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, loader):
                for x in loader:
                    self.scaler.scale(self.model(x)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
    ),
    Case(
        """
        def train(model, optimizer, batches, scaler):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
        note="Nobody comes between the steps of a function that gets the optimizer.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batches):
                for batch in batches:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch) / len(batches)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

        def train(model, optimizer, batches, scaler):
            for i, batch in enumerate(batches):
                optimizer.zero_grad()
                scaler.scale(model(batch) / 4).backward()
                if (i + 1) % 4 == 0:
                    scaler.step(optimizer)
                    scaler.update()
        """,
        count=2,
        note="Gradients are gathered, and each batch empties them.",
    ),
)
