"""The cases of AMP205."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case(
        """
        import torch

        def fit(model, batches, loss_of):
            adam = torch.optim.Adam(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                adam.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = loss_of(model, batch)
                scaler.scale(loss).backward()
                scaler.step(adam)
                scaler.update()
            lbfgs = torch.optim.LBFGS(model.parameters())

            def closure():
                lbfgs.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            lbfgs.step(closure)
        """,
    ),
    Case(
        """
        import torch

        def step(net, opt, scaler, loss):
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            bad = any(not torch.isfinite(p.grad).all() for p in net.parameters())
            if bad:
                opt.zero_grad()
                scaler.update()
                return False
            opt.step()
            scaler.update()
            opt.zero_grad()
            return True
        """,
    ),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        def train(model, batches, amp, config):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda") if amp else None
            for batch in batches:
                loss = model(batch)
                if scaler:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if amp:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
    """),
    Case(
        """
        import torch

        def train(model, batches, config, scheduler):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        """,
        note="A scheduler is no optimizer.",
    ),
    Case("""
        import torch

        def train(generator, critic, batches):
            first = torch.optim.Adam(generator.parameters())
            second = torch.optim.Adam(critic.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                critic(batch).backward()
                second.step()
                scaler.scale(generator(batch)).backward()
                scaler.step(first)
                scaler.update()
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        scaler.update()
        """,
        note="Unscaled and looked at by hand.",
    ),
    Case("""
        import torch

        def train(model, opt, loader, scaler):
            for x, y in loader:
                scaler.scale(model(x, y)).backward()
                scaler.unscale_(opt)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                opt.step()
                scaler.update()
                opt.zero_grad()
    """),
    Case(
        """
        import torch

        def train(model, batches, optimizer, is_finite):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                if is_finite(optimizer):
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        note="Either the one or the other makes the step.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024)
        for rays in batches:
            optimizer.zero_grad()
            scaler.scale(field(rays)).backward()
            optimizer.step()
        """,
        note="Adam divides by the size of gradients, so that a fixed factor on all of them cancels.",
    ),
    Case("""
        def step(model, optimizer, x, amp, scaler, region):
            with region:
                loss = model(x)
            if amp:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        def train(model, opt, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(opt)
                old = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() >= old:
                    opt.step()
        """,
        note="A scale that got smaller says that there was an overflow.",
    ),
)

INVALID = (
    Case(
        """
        import abc
        import torch

        class BaseTrainer(abc.ABC):
            def __init__(self, model, lr):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
                self.scaler = torch.amp.GradScaler("cuda")

            @abc.abstractmethod
            def compute_loss(self, batch): ...

            def train_step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.compute_loss(batch)
                self.scaler.scale(loss).backward()
                self.optimizer.step()
                self.scaler.update()
                self.optimizer.zero_grad()
                return loss.item()

        class Classifier(BaseTrainer):
            def compute_loss(self, batch):
                x, y = batch
                return torch.nn.functional.cross_entropy(self.model(x), y)
        """,
        """
        import abc
        import torch

        class BaseTrainer(abc.ABC):
            def __init__(self, model, lr):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
                self.scaler = torch.amp.GradScaler("cuda")

            @abc.abstractmethod
            def compute_loss(self, batch): ...

            def train_step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.compute_loss(batch)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                return loss.item()

        class Classifier(BaseTrainer):
            def compute_loss(self, batch):
                x, y = batch
                return torch.nn.functional.cross_entropy(self.model(x), y)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                optimizer.step()
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
        note="Unscaled, and stepped twice.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            optimizer.step()
            scaler.update()
        """,
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
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

        def train(model, batches, amp):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.step()
                optimizer.zero_grad()
        """,
        """
        import torch

        def train(model, batches, amp):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        class Trainer:
            def __init__(self, model, optimizer, scaler=None):
                self.model, self.optimizer, self.scaler = model, optimizer, scaler

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.step()
        """,
        """
        class Trainer:
            def __init__(self, model, optimizer, scaler=None):
                self.model, self.optimizer, self.scaler = model, optimizer, scaler

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        unsafe=True,
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
                    self.backward(self.model(batch))
                    self.optimizer.step()

            def backward(self, loss):
                self.scaler.scale(loss).backward()
        """,
        count=1,
    ),
    Case(
        """
        def step(model, optimizer, x, amp, scaler, region):
            with region:
                loss = model(x)
            if amp:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        note="Right without the scaler alone.",
    ),
    Case(
        """
        import torch

        def train(model, opt, loader, scaler):
            for i, (x, y) in enumerate(loader):
                scaler.scale(model(x, y)).backward()
                if (i + 1) % 2 == 0:
                    scaler.unscale_(opt)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
                    opt.step()
                    scaler.update()
                    opt.zero_grad()
        """,
        """
        import torch

        def train(model, opt, loader, scaler):
            for i, (x, y) in enumerate(loader):
                scaler.scale(model(x, y)).backward()
                if (i + 1) % 2 == 0:
                    scaler.unscale_(opt)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()
        """,
        unsafe=True,
        count=1,
        note="Unscaled, but nobody skips the step after an overflow.",
    ),
    Case(
        """
        import torch

        def train(model, loader, opt, sched):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                old = scaler.get_scale()
                opt.step()
                scaler.update()
                if old <= scaler.get_scale():
                    sched.step()
        """,
        """
        import torch

        def train(model, loader, opt, sched):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                old = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                if old <= scaler.get_scale():
                    sched.step()
        """,
        unsafe=True,
    ),
)
