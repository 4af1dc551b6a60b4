"""The cases of AMP201."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=dtype):
            loss = model(batch)
        loss.backward()
        optimizer.step()
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            target = teacher(batch)
        loss = (model(batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        """,
        note="Nothing is differentiated in float16.",
    ),
    Case("""
        import torch

        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.float16):
            features = frozen(batch)
        loss = head(features.detach()).mean()
        loss.backward()
        optimizer.step()
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        """,
        note="Someone else calls backward.",
    ),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", enabled=False, dtype=torch.float16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            (model(batch) * loss_scale).backward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
    """),
    Case(
        """
        import torch

        SCALE = 1024.0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            (loss * SCALE).backward()
            for parameter in model.parameters():
                parameter.grad /= SCALE
            optimizer.step()
        """,
        note="The loss is scaled by hand.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(batch):
            model(batch).backward()
            optimizer.step()

        with torch.autocast("cuda", dtype=torch.float16):
            step(warm_up)
        for batch in batches:
            step(batch)
        """,
        note="Not all calls are in a region.",
    ),
    Case(
        """
        import torch
        from mine import LossScalingOptimizer

        def train(engine, model, loader, options):
            optimizer = LossScalingOptimizer(model.parameters())
            for x in loader:
                engine.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                loss.backward()
                engine.step()
                optimizer.step()
                optimizer.zero_grad()
                options.step()

        class Searcher:
            def step(self): ...
            def zero_grad(self): ...

        def search(model, data):
            optimizer = Searcher()
            for x in data:
                with torch.autocast("cuda"):
                    score = model(x)
                score.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        note="What is called something else, or made by a class that nobody knows, may do more than step.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def targets(teacher, x):
            with torch.autocast("cuda", dtype=torch.float16):
                out = teacher(x)
            return out

        def train(model, teacher, loader, opt):
            teacher.requires_grad_(False)
            for x, y in loader:
                opt.zero_grad()
                with torch.no_grad():
                    t = targets(teacher, x)
                loss = F.mse_loss(model(x), t)
                loss.backward()
                opt.step()
        """,
        note="What is a target without gradients.",
    ),
    Case(
        """
        from dataclasses import dataclass
        import torch
        import tyro

        @dataclass
        class Config:
            dtype: torch.dtype = torch.float16

        def train(model, batches, optimizer, config: Config, dtype=torch.float16):
            for batch in batches:
                with torch.autocast("cuda", dtype=config.dtype):
                    loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        train(model, batches, optimizer, tyro.cli(Config), torch.bfloat16)
        """,
        note="The command line, or a call, says another dtype.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def step(self, batch):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.loss(batch)
                self.apply(loss)

            def apply(self, loss):
                raise NotImplementedError

        class Scaled(Trainer):
            def apply(self, loss):
                (loss * 1024).backward()
                self.optimizer.step()

        class Plain(Trainer):
            def apply(self, loss):
                self.log(loss)
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        AMP = dict(device_type="cuda", dtype=torch.float16)

        def train(model, opt, loader):
            for x in loader:
                opt.zero_grad()
                with torch.autocast(**AMP):
                    loss = model(x).mean()
                loss.backward()
                opt.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Multi:
            def __init__(self, nets):
                self.nets = nets
                self.opts = []
                for n in nets:
                    self.opts.append(torch.optim.Adam(n.parameters()))

            def step(self, x):
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = sum(n(x).mean() for n in self.nets)
                for o in self.opts:
                    o.zero_grad()
                loss.backward()
                for o in self.opts:
                    o.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train_gan(gen, disc, loader, device="cuda"):
            opts = {
                "g": torch.optim.Adam(gen.parameters(), 2e-4, betas=(0.5, 0.999)),
                "d": torch.optim.Adam(disc.parameters(), 2e-4, betas=(0.5, 0.999)),
            }
            bce = torch.nn.BCEWithLogitsLoss()
            for real in loader:
                z = torch.randn(real.size(0), 128, device=device)
                with torch.autocast("cuda"):
                    fake = gen(z)
                    d_loss = bce(disc(real), ones) + bce(disc(fake.detach()), zeros)
                opts["d"].zero_grad()
                d_loss.backward()
                opts["d"].step()
                with torch.autocast("cuda"):
                    g_loss = bce(disc(fake), torch.ones_like(disc(fake)))
                opts["g"].zero_grad()
                g_loss.backward()
                opts["g"].step()
        """,
        count=2,
    ),
    Case(
        """
        import torch

        class Net(torch.nn.Module):
            @torch.autocast("cuda", dtype=torch.float16)
            def forward(self, x):
                return self.layers(x)

        net = Net().cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in batches:
            loss = torch.nn.functional.mse_loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        note="The region is that of a module's forward.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch
        from torch.cuda.amp import autocast
        from torch.optim import AdamW

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = AdamW(model.parameters())

            def step(self, batch, every):
                self.optimizer.zero_grad()
                with autocast():
                    output, loss = self.model(batch)
                loss = loss / every
                loss.backward()
                self.optimizer.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        @torch.autocast("cuda", dtype=torch.half)
        def train(model, batch):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(batch).sum().backward()
            optimizer.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        # TODO: a GradScaler
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        """,
    ),
    Case(
        """
        import torch

        print("training without a GradScaler")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            loss.backward()
            optimizer.step()
        """,
        note="A sentence scales nothing.",
    ),
    Case(
        """
        import torch

        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @torch.compile
        def step(batch):
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for batch in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                step(batch)
        """,
        count=1,
        note="A region around a step that is compiled.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = torch.compile(model)
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

            def fit(self, batches):
                for batch in batches:
                    with torch.autocast("cuda", dtype=torch.float16):
                        self.step(batch)

            def step(self, batch):
                self.model(batch).mean().backward()
                self.optimizer.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = torch.compile(model)
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def loss(self, batch):
                with torch.autocast("cuda", dtype=torch.float16):
                    return self.model(batch).mean()

            def step(self, batch):
                self.optimizer.zero_grad()
                (self.loss(batch) / 4).backward()
                self.optimizer.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def train(model, loader, optimizer, device):
            for data, target in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = F.nll_loss(model(data.to(device)), target.to(device))
                loss.backward()
                optimizer.step()

        class Learner:
            def __init__(self, model, opt):
                self.model, self.opt = model, opt

            def one_batch(self, x, y):
                with torch.autocast("cuda"):
                    self.loss = F.mse_loss(self.model(x), y)
                self.loss.backward()
                self.opt.step()
                self.opt.zero_grad()
    """,
        count=2,
        note="An optimizer by its name, its steps and its `zero_grad`.",
    ),
    Case(
        """
        import torch

        def losses(model, loader):
            for x, y in loader:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                yield loss

        def train(model, loader, opt):
            for loss in losses(model, loader):
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def compute(model, x, y):
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(x)
                loss = F.cross_entropy(out, y)
            return loss, out

        def train(model, loader, opt):
            for x, y in loader:
                opt.zero_grad()
                loss, out = compute(model, x, y)
                loss.backward()
                opt.step()
        """,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def loss(self, batch):
                raise NotImplementedError

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

        class Depth(Trainer):
            def loss(self, batch):
                return self.model(batch).abs().mean()
        """,
        count=1,
        note="What a base leaves open, the classes that come of it define.",
    ),
    Case(
        """
        import abc
        import torch

        class Trainer(abc.ABC):
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

            @abc.abstractmethod
            def loss(self, batch): ...

            def step(self, batch):
                self.optimizer.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()

        class Depth(Trainer):
            def loss(self, batch):
                with torch.autocast("cuda", dtype=torch.float16):
                    return self.model(batch).abs().mean()
        """,
        count=1,
    ),
    Case(
        """
        from dataclasses import dataclass
        import torch

        @dataclass
        class Config:
            lr: float = 1e-4
            dtype: torch.dtype = torch.float16

        def train(model, batches, config: Config):
            optimizer = torch.optim.SGD(model.parameters(), config.lr)
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=config.dtype):
                    loss = model(batch)
                loss.backward()
                optimizer.step()

        def other(model, batches, optimizer, precision="fp16"):
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = model(batch)
                loss.backward()
                optimizer.step()
        """,
        count=2,
        note="A default that nothing in the file changes.",
    ),
)
