"""The cases of AMP216: scalers and regions that are on together, and those of which one is on alone."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
        for batch in batches:
            with torch.autocast("cuda", enabled=args.amp):
                loss = model(batch)
            scaler.scale(loss).backward()
    """),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=args.amp and args.dtype == "float16")
        for batch in batches:
            with torch.autocast("cuda", enabled=args.amp, dtype=dtype):
                loss = model(batch)
            scaler.scale(loss).backward()
        """,
        note="The scaler is for one of two dtypes.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
        for batch in batches:
            with torch.autocast("cuda"):
                loss = model(batch)
            scaler.scale(loss).backward()
        """,
        note="Without CUDA the region is off, too.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=False)
        for batch in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(batch)
            scaler.scale(loss).backward()
        """,
        note="bfloat16 needs no scaler.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            with torch.autocast("cuda", enabled=args.amp):
                loss = model(batch)
            scaler.scale(loss).backward()
        """,
        note="A scale does no harm to float32.",
    ),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=amp)
        for batch in batches:
            if amp:
                with torch.autocast("cuda"):
                    loss = model(batch)
            else:
                loss = model(batch)
            scaler.scale(loss).backward()
    """),
    Case(
        """
        import torch

        NO_AMP = False

        def train(model, optimizer, batches, args):
            one = torch.amp.GradScaler("cuda", enabled=not args.cpu)
            two = torch.amp.GradScaler("cuda", enabled=not args.no_cuda)
            three = torch.amp.GradScaler("cuda", enabled=not NO_AMP)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(batch)
                one.scale(loss).backward()
                two.scale(loss).backward()
                three.scale(loss).backward()
        """,
        note="Without CUDA the region is off, too; and a constant is no flag.",
    ),
    Case("""
        import torch

        def train(model, optimizer, batches, args):
            use_amp = not args.no_amp
            scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.float16, enabled=not args.no_amp):
                    loss = model(batch)
                scaler.scale(loss).backward()
    """),
    Case("""
        import torch

        def train(model, optimizer, batches, args):
            scaler = torch.amp.GradScaler("cuda", enabled=not args.no_amp)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(batch)
                scaler.scale(loss).backward()
    """),
    Case("""
        import torch

        USE_AMP = True

        def train(model, batches):
            scaler = torch.amp.GradScaler("cuda", enabled=USE_AMP)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(batch)
                scaler.scale(loss).backward()
    """),
    Case(
        """
        import torch

        def criterion(logits, target):
            with torch.autocast("cuda", enabled=False):
                return torch.nn.functional.cross_entropy(logits.float(), target)

        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            with torch.autocast("cuda"):
                logits = model(x)
            loss = criterion(logits, y)
            scaler.scale(loss).backward()
        """,
        note="The loss alone is computed in float32.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            with torch.autocast("cuda", enabled=False):
                loss = loss + penalty(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        note="The regions differ on purpose.",
    ),
    Case(
        """
        import torch

        def penalty(model, x, scaler: torch.amp.GradScaler):
            with torch.autocast("cuda", enabled=False):
                score = model(x.float())
                (grad,) = torch.autograd.grad(scaler.scale(score.sum()), x, create_graph=True)
            return (grad / scaler.get_scale()).norm()

        scaler = torch.amp.GradScaler("cuda")
        """,
        note="A penalty may be computed in float32.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for x, y in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                p = model(x)
                with torch.autocast("cuda", enabled=False):
                    loss = criterion(p.float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        note="The loss alone is computed in float32.",
    ),
    Case("""
        import torch

        def train(model, batches, optimizer, dtype=torch.float16):
            scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    """),
    Case("""
        from contextlib import nullcontext

        import torch

        def region(amp):
            if amp:
                return torch.autocast("cuda", dtype=torch.float16)
            return nullcontext()

        def other(amp):
            return torch.autocast("cuda", dtype=torch.float16) if amp else nullcontext()

        def main(model, optimizer, loader, amp=True):
            scaler = torch.amp.GradScaler("cuda", enabled=amp)
            third = lambda: torch.autocast("cuda", dtype=torch.float16) if amp else nullcontext()
            for x, y in loader:
                for made in (region(amp), other(amp), third()):
                    optimizer.zero_grad()
                    with made:
                        loss = model(x, y)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                with region(amp):
                    first = model(x, y)
                with other(amp):
                    second = model(x, y)
                with third():
                    last = model(x, y)
                scaler.scale(first).backward()
                scaler.scale(second).backward()
                scaler.scale(last).backward()
                scaler.step(optimizer)
                scaler.update()
    """),
)

INVALID = (
    Case(
        """
        import os
        import torch

        AMP = os.environ.get("AMP", "1") == "1"

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda", enabled=AMP)
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import os
        import torch

        AMP = os.environ.get("AMP", "1") == "1"

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda", enabled=AMP)
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16, enabled=AMP):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=False)
        for x, y in batches:
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            gradients = torch.autograd.grad(loss, model.parameters(), create_graph=True)
            with torch.autocast("cuda"):
                loss = loss + sum(g.square().sum() for g in gradients)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        note="Two regions that agree with each other.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, amp):
            scaler = torch.amp.GradScaler("cuda", enabled=amp)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, amp):
            scaler = torch.amp.GradScaler("cuda", enabled=amp)
            for batch in batches:
                with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch
        from torch.cuda.amp import GradScaler, autocast

        class Trainer:
            def __init__(self, args, model):
                self.args = args
                self.scaler = GradScaler(enabled=self.args.fp16)

            def step(self, batch):
                with autocast():
                    loss = self.model(batch)
                loss = loss / self.args.every
                self.scaler.scale(loss).backward()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=False)
        for batch in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=not args.amp)
        for batch in batches:
            with torch.autocast("cuda", enabled=args.amp):
                loss = model(batch)
            scaler.scale(loss).backward()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        AMP = False
        scaler = torch.GradScaler("cuda", enabled=True)
        for batch in batches:
            with torch.autocast("cuda", enabled=AMP):
                scaler.scale(model(batch)).backward()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model, optimizer):
                self.model = model
                self.optimizer = optimizer
                self.scaler = torch.amp.GradScaler("cuda", enabled=False)

            def loss(self, batch):
                with torch.autocast("cuda", dtype=torch.float16):
                    return self.model(batch)

            def step(self, batch):
                loss = self.loss(batch)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def backward(scaler, loss, optimizer):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        def train(model, optimizer, batches, amp):
            scaler = torch.amp.GradScaler("cuda", enabled=not amp)
            for batch in batches:
                with torch.autocast("cuda", enabled=amp):
                    loss = model(batch)
                backward(scaler, loss, optimizer)
        """,
        count=1,
    ),
    Case(
        """
        import argparse

        import torch

        def main(model, optimizer, batches):
            parser = argparse.ArgumentParser()
            parser.add_argument("--no-amp", action="store_true")
            args = parser.parse_args()
            use_amp = not args.no_amp
            scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
            for batch in batches:
                with torch.amp.autocast("cuda", dtype=torch.float16):
                    loss = model(batch)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import argparse

        import torch

        def main(model, optimizer, batches):
            parser = argparse.ArgumentParser()
            parser.add_argument("--no-amp", action="store_true")
            args = parser.parse_args()
            use_amp = not args.no_amp
            scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
            for batch in batches:
                with torch.amp.autocast("cuda", dtype=torch.float16, enabled=use_amp):
                    loss = model(batch)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, optimizer, batches, no_amp):
            scaler = torch.cuda.amp.GradScaler(enabled=not no_amp)
            for batch in batches:
                with torch.cuda.amp.autocast():
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, optimizer, batches, no_amp):
            scaler = torch.cuda.amp.GradScaler(enabled=not no_amp)
            for batch in batches:
                with torch.cuda.amp.autocast(enabled=not no_amp):
                    loss = model(batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
)
