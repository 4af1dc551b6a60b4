"""The cases of AMP204 about scalers that step several optimizers, and scripts without functions."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["SEVERAL_INVALID"]

SEVERAL_INVALID = (
    Case(
        """
        import torch

        def train(g, d, loader, opt_g, opt_d):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt_g.zero_grad()
                opt_d.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x) + d(x)
                scaler.scale(loss).backward()
                scaler.update()
                scaler.step(opt_g)
                scaler.step(opt_d)
        """,
        """
        import torch

        def train(g, d, loader, opt_g, opt_d):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt_g.zero_grad()
                opt_d.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x) + d(x)
                scaler.scale(loss).backward()
                scaler.step(opt_g)
                scaler.step(opt_d)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(g, d, loader, opt_g, opt_d):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt_g.zero_grad()
                opt_d.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x) + d(x)
                scaler.scale(loss).backward()
                scaler.step(opt_g)
                scaler.step(opt_d)
                print(loss)
        """,
        """
        import torch

        def train(g, d, loader, opt_g, opt_d):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt_g.zero_grad()
                opt_d.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x) + d(x)
                scaler.scale(loss).backward()
                scaler.step(opt_g)
                scaler.step(opt_d)
                scaler.update()
                print(loss)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        class T:
            def __init__(self, g, d):
                self.g, self.d = g, d
                self.opt_g = torch.optim.SGD(g.parameters(), 0.1)
                self.opt_d = torch.optim.SGD(d.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step_g(self):
                self.scaler.step(self.opt_g)

            def step_d(self):
                self.scaler.step(self.opt_d)

            def train(self, loader):
                for x in loader:
                    self.opt_g.zero_grad()
                    self.opt_d.zero_grad()
                    with torch.autocast("cuda"):
                        loss = self.g(x) + self.d(x)
                    self.scaler.scale(loss).backward()
                    self.step_g()
                    self.step_d()
        """,
        note="One update for both: where it belongs is not said.",
    ),
    Case(
        """
        import torch
        model = torch.nn.Linear(3, 3).cuda()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            opt.zero_grad()
            with torch.autocast("cuda"):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
        scaler.update()
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

            def loss(self, x):
                raise NotImplementedError

            def fit(self, batches):
                for x in batches:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.loss(x)).backward()
                    self.scaler.step(self.optimizer)

        class Squares(Trainer):
            def loss(self, x):
                return self.model(x).square().mean()
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def loss(self, x):
                raise NotImplementedError

            def fit(self, batches):
                for x in batches:
                    self.optimizer.zero_grad()
                    self.scaler.scale(self.loss(x)).backward()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()

        class Squares(Trainer):
            def loss(self, x):
                return self.model(x).square().mean()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for i, batch in enumerate(batches):
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                if i % 100 == 0:
                    scaler.update()
                    print(i)
        """,
        count=1,
        note="Every step needs its update.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch)
                if not torch.isfinite(loss):
                    continue
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Gan:
            def __init__(self, generator, critic):
                self.generator, self.critic = generator, critic
                self.first = torch.optim.Adam(generator.parameters())
                self.second = torch.optim.Adam(critic.parameters())
                self.one = torch.amp.GradScaler("cuda")
                self.other = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.first.zero_grad()
                self.one.scale(self.generator(batch)).backward()
                self.one.step(self.first)
                self.other.update()
                self.second.zero_grad()
                self.other.scale(self.critic(batch)).backward()
                self.other.step(self.second)
                self.other.update()
        """,
        """
        import torch

        class Gan:
            def __init__(self, generator, critic):
                self.generator, self.critic = generator, critic
                self.first = torch.optim.Adam(generator.parameters())
                self.second = torch.optim.Adam(critic.parameters())
                self.one = torch.amp.GradScaler("cuda")
                self.other = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.first.zero_grad()
                self.one.scale(self.generator(batch)).backward()
                self.one.step(self.first)
                self.one.update()
                self.other.update()
                self.second.zero_grad()
                self.other.scale(self.critic(batch)).backward()
                self.other.step(self.second)
                self.other.update()
        """,
        unsafe=True,
        count=1,
        note="The other scaler is updated twice.",
    ),
)
