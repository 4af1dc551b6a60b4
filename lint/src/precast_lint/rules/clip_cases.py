"""The cases of AMP203."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch
        from torch.nn.utils import clip_grad_norm_

        def train(model, batches, optimizer, amp):
            scaler = torch.amp.GradScaler() if amp else None
            for i, batch in enumerate(batches):
                loss = model(batch)
                if scaler is not None:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if i % 4 == 0:
                    if scaler is not None:
                        scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 1.0)
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
    """),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        for p in model.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad.div_(world_size)
        scaler.step(optimizer)
        scaler.update()
    """,
        note="A mean over processes is the same for scaled gradients.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad += q.grad
            p.grad.add_(momentum_grads[p])
            p.grad *= mask[p]
            p.grad = p.grad / world_size
        scaler.step(optimizer)
        scaler.update()
    """,
        note="Sums of scaled gradients, and factors.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    self.prepare(optimizer, scaler)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

            def prepare(self, optimizer, scaler):
                unscale(optimizer, scaler)
        """,
        note="What becomes of the scaler in `unscale` is not seen.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    self.prepare(optimizer, scaler)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

            def prepare(self, optimizer, scaler):
                scaler.unscale_(optimizer)
        """,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        norm = model.weight.grad.norm() / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    """
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def prepare(self):
                self.scaler.unscale_(self.optimizer)

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.prepare()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
    """,
        note="A method unscales them.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scale = scaler.get_scale()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scale)
                scaler.step(optimizer)
                scaler.update()
        """,
        note="The bound is scaled as the gradients are.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(batch)  # of scikit-learn, say
                model(batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def float32_step(self, batch):
                self.model(batch).backward()
                self.clip()
                self.optimizer.step()

            def float16_step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.unscale()
                self.clip()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def unscale(self):
                self.scaler.unscale_(self.optimizer)

            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        """,
    ),
    Case(
        """
        import torch

        def prepare(grad_scaler, opt):
            grad_scaler.unscale_(opt)

        def finish(amp, opt, params):
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            amp.step(opt)
            amp.update()

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                prepare(scaler, optimizer)
                finish(scaler, optimizer, model.parameters())
        """,
        note="A function unscales them.",
    ),
    Case("""
        import torch

        def private_step(model, optimizer, loss, scaler, sigma):
            scaler.scale(loss).backward()
            for p, q in zip(model.parameters(), others):
                p.grad.add_(q.grad * torch.ones_like(p.grad))
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad) * sigma)
            scaler.step(optimizer)
            scaler.update()
    """),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
    ),
    Case("""
        from torch.cuda.amp import GradScaler
        from torch.nn.utils import clip_grad_norm_

        class Trainer:
            def __init__(self, amp: bool):
                self.scaler = GradScaler() if amp else None

            def step(self, loss):
                if self.scaler:
                    loss = self.scaler.scale(loss)
                loss.backward()
                clip_grad_norm_(self.model.parameters(), 1.0)
                if self.scaler:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """),
    Case(
        """
        import torch

        def train(model, batches, optimizer, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                if limit:
                    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                if limit:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        print(sum(p.grad.data.norm() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        print(sum(p.grad.data.norm() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                print(scaler.get_scale())
        """,
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                print(scaler.get_scale())
        """,
        unsafe=True,
        note="Printing the scale unscales nothing.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        note="A scaler that comes from elsewhere is known by its use.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def train_step(self, batch):
                self.backward(self.model(batch))
                self.clip()
                self.step()

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

            def step(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        count=1,
        note="Methods of the same class are followed.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

        def tune(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

        def tune(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
            def train_epoch(self, model, optimizer, scaler, batches):
                for i, batch in enumerate(batches):
                    loss = model(batch)
                    if self.use_fp16:
                        scaler.scale(loss).backward()
                    else:
                        loss.backward()
                    if i % self.every == 0:
                        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                        if not torch.isfinite(norm):
                            optimizer.zero_grad()
                            continue
                        if self.use_fp16:
                            scaler.step(optimizer)
                            scaler.update()
                        else:
                            optimizer.step()
                        optimizer.zero_grad()
                    self.save_checkpoint(model, optimizer, scaler=scaler)
        """,
        count=1,
        note="What saves the scaler's state does not unscale.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler, decay):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                for p in model.parameters():
                    p.grad += decay * p.data
                    p.grad = p.grad + torch.randn_like(p)
                    p.grad.data.add_(p.data, alpha=decay)
                scaler.step(optimizer)
                scaler.update()
        """,
        count=3,
        note="What is added to a scaled gradient is divided by the scale with it.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    self.backward(model, scaler, batch)
                    self.update(model, optimizer, scaler=scaler)

            def backward(self, model, scaler, batch):
                scaler.scale(model(batch)).backward()

            def update(self, model, optimizer, scaler):
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    self.backward(model, scaler, batch)
                    self.update(model, optimizer, scaler=scaler)

            def backward(self, model, scaler, batch):
                scaler.scale(model(batch)).backward()

            def update(self, model, optimizer, scaler):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
        note="A scaler that methods hand on to one another.",
    ),
    Case(
        """
        import torch

        def backward(loss, grad_scaler):
            grad_scaler.scale(loss).backward()

        def optimize(loss, opt, params, amp):
            backward(loss, amp)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            amp.step(opt)
            amp.update()

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.optimizer.zero_grad()
                    optimize(self.model(batch), self.optimizer, self.model.parameters(), self.scaler)
        """,
        """
        import torch

        def backward(loss, grad_scaler):
            grad_scaler.scale(loss).backward()

        def optimize(loss, opt, params, amp):
            backward(loss, amp)
            amp.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            amp.step(opt)
            amp.update()

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.Adam(model.parameters())
                self.scaler = torch.amp.GradScaler("cuda")

            def train(self, batches):
                for batch in batches:
                    self.optimizer.zero_grad()
                    optimize(self.model(batch), self.optimizer, self.model.parameters(), self.scaler)
        """,
        unsafe=True,
        count=1,
        note="Through functions that are given the scaler by other names.",
    ),
    Case("""
        import torch

        def private_step(model, optimizer, loss, scaler, sigma):
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p.grad) * sigma)
            scaler.step(optimizer)
            scaler.update()
    """),
)
