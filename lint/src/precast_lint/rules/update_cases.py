"""The cases of AMP204."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["HANDED", "INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        def train(model, batches, optimizer, last):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                scaler.scale(model(batch)).backward()
                if i < last:
                    continue
                scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                scaler.scale(model(batch)).backward()
                if i % 4 == 3:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                if i % 4 == 3:
                    scaler.update()
    """),
    Case(
        """
        import torch

        def train(opts, nets, loader):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                for o in opts:
                    o.zero_grad()
                with torch.autocast("cuda"):
                    losses = [n(x).mean() for n in nets]
                for l in losses:
                    scaler.scale(l).backward()
                for o in opts:
                    scaler.step(o)
                scaler.update()
        """,
    ),
    Case(
        """
        import torch

        class ScalerMixin:
            def finish(self):
                self.scaler.step(self.opt)
                self.advance()

        class Impl(ScalerMixin):
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.Adam(net.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def advance(self):
                self.scaler.update()
                self.opt.zero_grad()

            def run(self, xs):
                for x in xs:
                    with torch.autocast("cuda"):
                        loss = self.net(x)
                    self.scaler.scale(loss).backward()
                    self.finish()
        """,
    ),
    Case("""
        import torch

        def step(optimizers, loss, batches, opt):
            scaler = torch.amp.GradScaler("cuda")
            for loss in losses:
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for i, batch in enumerate(batches):
                scaler.scale(batch).backward()
                if i == len(batches) - 1:
                    scaler.step(opt)
            scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        def train(batches, generator, critic, first, second):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(critic(batch)).backward()
                scaler.step(second)
                scaler.scale(generator(batch)).backward()
                scaler.step(first)
                scaler.update()
        """,
        note="One update for several optimizers.",
    ),
    Case("""
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)

            def after_step(self):
                self.scaler.update()
    """),
    Case("""
        import torch

        def train(batches, model, optimizer, every):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                scaler.scale(model(batch) / every).backward()
                if (i + 1) % every == 0:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        def train(batches, model, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                step(scaler, optimizer)
        """,
        note="The scaler is handed to a function that is not seen.",
    ),
    Case("""
        import torch

        def test_one_step():
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
    """),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                if i > 0:
                    scaler.update()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        note="The step of the round before.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)

            def train(self, batches):
                self.step(next(batches))
                for batch in batches:
                    self.scaler.update()
                    self.step(batch)
                self.scaler.update()
        """,
        note="Each step has its update, if only in the next round.",
    ),
    Case("""
        import torch

        def train(G, D, g, d, batches):
            one, other = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
            scalers = one, other
            for x in batches:
                d.zero_grad()
                one.scale(D(x).mean()).backward()
                one.step(d)
                for scaler in scalers:
                    scaler.update()
    """),
)

HANDED = (
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)

        scaler = torch.amp.GradScaler("cuda")
        for part in parts:
            train(model, part, optimizer, scaler)
            scaler.update()
        """,
        note="Who hands the scaler over updates it.",
    ),
    Case("""
        import torch

        class Trainer(Base):
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, model, batches, optimizer):
                for batch in batches:
                    self.scaler.scale(model(batch)).backward()
                    self.scaler.step(optimizer)
    """),
    Case(
        """
        import torch
        from loop import fit

        scaler = torch.amp.GradScaler("cuda")

        def step(loss, optimizer):
            for _ in range(2):
                scaler.scale(loss).backward()
                scaler.step(optimizer)

        fit(step, scaler)
        """,
        note="Others get the scaler, and may update it.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        class Training:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.Adam(net.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def epoch(self, batches):
                for batch in batches:
                    self.scaler.scale(self.net(batch)).backward()
                    self.scaler.step(self.opt)
                    self.opt.zero_grad()
                self.scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")

        def train(model, optimizer, batches):
            for i, batch in enumerate(batches):
                with torch.autocast("cuda"):
                    loss = model(batch)
                scaler.scale(loss).backward()
                if i % 4 == 3:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")

        def train(model, optimizer, batches):
            for i, batch in enumerate(batches):
                with torch.autocast("cuda"):
                    loss = model(batch)
                scaler.scale(loss).backward()
                if i % 4 == 3:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        unsafe=True,
        note="No place of the file updates a scaler that its top level makes.",
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
                    self.step(batch)

            def step(self, batch):
                self.scaler.update()
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
        """,
        count=1,
        note="The first update comes before any step.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)

        train(model, batches, optimizer, torch.amp.GradScaler("cuda"))
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()

        train(model, batches, optimizer, torch.amp.GradScaler("cuda"))
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self):
                for batch in self.batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.unscale_(self.optimizer)
                    self.scaler.update()  # the scale
                    self.scaler.step(self.optimizer)  # the weights
        """,
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self):
                for batch in self.batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.unscale_(self.optimizer)
                    self.scaler.step(self.optimizer)  # the scale
                    self.scaler.update()  # the weights
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.update()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
        """,
        count=1,
        note="In the first round there is nothing to update from.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.scaler.scale(self.model(batch)).backward()
                    self.after_backward()
                    self.scaler.step(self.optimizer)

            def after_backward(self):
                self.scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def step(self):
                self.scaler.step(self.optimizer)
                self.optimizer.zero_grad()

            def train(self, batches):
                for batch in batches:
                    self.backward(self.model(batch))
                    self.step()
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def step(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

            def train(self, batches):
                for batch in batches:
                    self.backward(self.model(batch))
                    self.step()
        """,
        unsafe=True,
        note="Spread over methods.",
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
                    self.scaler.update()
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.model(batch)).backward()
                    self.scaler.step(self.optimizer)
        """,
        note="The first round has nothing to update from.",
    ),
    Case(
        """
        import torch

        def train(G, D, g, d, batches):
            for_g, for_d = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
            for x in batches:
                d.zero_grad()
                for_d.scale(D(x).mean()).backward()
                for_d.step(d)
                for_d.update()
                g.zero_grad()
                for_g.scale(-D(G(x)).mean()).backward()
                for_g.step(g)
        """,
        """
        import torch

        def train(G, D, g, d, batches):
            for_g, for_d = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
            for x in batches:
                d.zero_grad()
                for_d.scale(D(x).mean()).backward()
                for_d.step(d)
                for_d.update()
                g.zero_grad()
                for_g.scale(-D(G(x)).mean()).backward()
                for_g.step(g)
                for_g.update()
        """,
        unsafe=True,
    ),
)
