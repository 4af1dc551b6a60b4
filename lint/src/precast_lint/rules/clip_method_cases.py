"""The cases of AMP203 in which methods share a step, or scalers a function."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case(
        """
        import torch

        class Base:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(net.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self):
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()

        class Child(Base):
            def step(self):
                self.scaler.unscale_(self.opt)
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                super().step()

            def train(self, xs):
                for x in xs:
                    with torch.autocast("cuda"):
                        loss = self.net(x)
                    self.scaler.scale(loss).backward()
                    self.step()
        """,
    ),
    Case(
        """
        import torch

        class Base:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(net.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def before_step(self):
                pass

            def train_step(self, x):
                with torch.autocast("cuda"):
                    loss = self.net(x)
                self.scaler.scale(loss).backward()
                self.before_step()
                self.scaler.step(self.opt)
                self.scaler.update()
                self.opt.zero_grad()

        class Clip(Base):
            def before_step(self):
                self.scaler.unscale_(self.opt)
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        """,
    ),
    Case(
        """
        import torch

        class AmpOptimizer(Base):
            def __init__(self, optimizer, params):
                self.optimizer = optimizer
                self.params = list(params)
                self.scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def step(self):
                torch.nn.utils.clip_grad_norm_(self.params, 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        note="The base may unscale.",
    ),
    Case("""
        import torch

        class AmpOptimizer:
            def __init__(self, optimizer, params, amp):
                self.optimizer = optimizer
                self.params = list(params)
                self.scaler = torch.amp.GradScaler("cuda")
                self.amp = amp

            def backward(self, loss):
                if self.amp:
                    self.scaler.scale(loss).backward()
                else:
                    loss.backward()

            def step(self):
                if self.amp:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    torch.nn.utils.clip_grad_norm_(self.params, 1.0)
                    self.optimizer.step()
    """),
    Case(
        """
        import torch

        def train(model, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                clip()
                scaler.step(opt)
                scaler.update()
        """,
    ),
    Case(
        """
        import torch

        def train(model, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            unscale = lambda: scaler.unscale_(opt)
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                unscale()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
        """,
    ),
    Case("""
        import torch

        def train(model, optimizer, batches, average):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
                average(flat)
                unused = [p for p in model.parameters() if p.grad.abs().sum() == 0]
                scaler.step(optimizer)
                scaler.update()
    """),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, optimizer, batches, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                total = sum((p.grad**2).sum() for p in model.parameters())
                total = total + sum(p.grad.data.pow(2).sum() for p in model.parameters())
                flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
                if flat.norm() > limit or total > limit:
                    continue
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, optimizer, batches, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                total = sum((p.grad**2).sum() for p in model.parameters())
                total = total + sum(p.grad.data.pow(2).sum() for p in model.parameters())
                flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
                if flat.norm() > limit or total > limit:
                    continue
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=3,
        note="Norms by hand.",
    ),
    Case(
        """
        import torch

        class AmpMixin:
            def backward(self, loss):
                if self.scaler is not None:
                    self.scaler.scale(loss).backward()
                else:
                    loss.backward()

            def optimizer_step(self):
                torch.nn.utils.clip_grad_value_(self.model.parameters(), self.clip)
                if self.scaler is not None:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                else:
                    self.optimizer.step()
                self.optimizer.zero_grad()

        class Trainer(AmpMixin):
            def __init__(self, model, optimizer, clip, amp):
                self.model, self.optimizer, self.clip = model, optimizer, clip
                self.scaler = torch.amp.GradScaler("cuda") if amp else None

            def run(self, loader):
                for batch in loader:
                    with torch.autocast("cuda", enabled=self.scaler is not None):
                        loss = self.model(batch)
                    self.backward(loss)
                    self.optimizer_step()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def forward_pass(model, batch, amp_dtype=torch.float16):
            with torch.autocast("cuda", dtype=amp_dtype):
                return model(**batch).loss

        def backward_pass(loss, scaler):
            scaler.scale(loss).backward()

        def optimizer_pass(optimizer, scaler, model, max_norm):
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        def run(model, loader):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in loader:
                loss = forward_pass(model, batch)
                backward_pass(loss, scaler)
                optimizer_pass(optimizer, scaler, model, 1.0)
        """,
        """
        import torch

        def forward_pass(model, batch, amp_dtype=torch.float16):
            with torch.autocast("cuda", dtype=amp_dtype):
                return model(**batch).loss

        def backward_pass(loss, scaler):
            scaler.scale(loss).backward()

        def optimizer_pass(optimizer, scaler, model, max_norm):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        def run(model, loader):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for batch in loader:
                loss = forward_pass(model, batch)
                backward_pass(loss, scaler)
                optimizer_pass(optimizer, scaler, model, 1.0)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class AmpOptimizer:
            def __init__(self, optimizer, params):
                self.optimizer = optimizer
                self.params = list(params)
                self._scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self._scaler.scale(loss).backward()

            def step(self):
                torch.nn.utils.clip_grad_norm_(self.params, 1.0)
                self._scaler.step(self.optimizer)
                self._scaler.update()
                self.optimizer.zero_grad()
        """,
        """
        import torch

        class AmpOptimizer:
            def __init__(self, optimizer, params):
                self.optimizer = optimizer
                self.params = list(params)
                self._scaler = torch.amp.GradScaler("cuda")

            def backward(self, loss):
                self._scaler.scale(loss).backward()

            def step(self):
                self._scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.params, 1.0)
                self._scaler.step(self.optimizer)
                self._scaler.update()
                self.optimizer.zero_grad()
        """,
        unsafe=True,
        note="Whoever calls the methods, the step comes behind the backward.",
    ),
    Case(
        """
        import torch

        def train(G, D, g, d, scaler_g, scaler_d, x):
            scaler_d.scale(D(x).mean()).backward()
            scaler_d.unscale_(d)
            torch.nn.utils.clip_grad_norm_(D.parameters(), 1.0)
            scaler_d.step(d)
            scaler_d.update()
            scaler_g.scale(-D(G(x)).mean()).backward()
            torch.nn.utils.clip_grad_norm_(G.parameters(), 1.0)
            scaler_g.step(g)
            scaler_g.update()
        """,
        """
        import torch

        def train(G, D, g, d, scaler_g, scaler_d, x):
            scaler_d.scale(D(x).mean()).backward()
            scaler_d.unscale_(d)
            torch.nn.utils.clip_grad_norm_(D.parameters(), 1.0)
            scaler_d.step(d)
            scaler_d.update()
            scaler_g.scale(-D(G(x)).mean()).backward()
            scaler_g.unscale_(g)
            torch.nn.utils.clip_grad_norm_(G.parameters(), 1.0)
            scaler_g.step(g)
            scaler_g.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(g, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x)
                scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)
                scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
        """,
        """
        import torch

        def train(g, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = g(x)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                clip()
                scaler.step(opt)
                scaler.update()
        """,
        """
        import torch

        def train(model, loader, opt):
            scaler = torch.amp.GradScaler("cuda")
            clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda"):
                    loss = model(x)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                clip()
                scaler.step(opt)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        def train(model: FSDP, opt, loader):
            scaler = ShardedGradScaler()
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).mean()
                scaler.scale(loss).backward()
                model.clip_grad_norm_(1.0)
                scaler.step(opt)
                scaler.update()
        """,
        """
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        def train(model: FSDP, opt, loader):
            scaler = ShardedGradScaler()
            for x in loader:
                opt.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).mean()
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                model.clip_grad_norm_(1.0)
                scaler.step(opt)
                scaler.update()
        """,
        unsafe=True,
    ),
)
