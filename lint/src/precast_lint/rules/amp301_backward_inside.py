"""AMP301: a backward pass inside a region."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import is_called_in_region
from precast_lint.meaning.regions import is_trainer, region_in_force
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.tail import end_before

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each backward pass that a region of its own function is around."""
    for call in source.all(cst.Call):
        if not _is_backward(source, call):
            continue
        region = region_in_force(source, call, trainers=True)
        if region is None and is_called_in_region(source, call):
            yield source.find(RULE, call)
        if region is not None:
            edits = end_before(source, region.node, call)
            message = "End the region before it"
            fix = source.fix(message, edits, unsafe=True) if edits else None
            yield source.find(RULE, call, fix=fix)


def _is_backward(source: Source, call: cst.Call) -> bool:
    if source.origin(call.func) == "torch.autograd.backward":
        return True
    if not isinstance(call.func, cst.Attribute):
        return False
    arguments = Arguments.of(call)
    owner, name = call.func.value, call.func.attr.value
    if name == "manual_backward" or (name == "backward" and is_trainer(source, owner)):
        return len(arguments.positional) == 1
    return name == "backward" and not arguments.starred and _is_loss(source, owner, arguments)


def _is_loss(source: Source, owner: Node, arguments: Arguments) -> bool:
    """A loss by what makes it, by its name, or by what backward is told; not an object with a method."""
    if {"gradient", "retain_graph", "create_graph"} & set(arguments.keywords):
        return True
    if arguments.positional or arguments.keywords:
        return False
    if isinstance(owner, cst.BinaryOperation):
        return any(_is_loss(source, side, arguments) for side in (owner.left, owner.right))
    if isinstance(owner, cst.UnaryOperation):
        return _is_loss(source, owner.expression, arguments)
    if isinstance(owner, cst.Call):
        scaled = isinstance(owner.func, cst.Attribute) and owner.func.attr.value == "scale"
        return scaled or _gives_loss(source, owner.func)
    last = (key(source, owner) or "").rpartition(".")[2].lower()
    is_named = "loss" in last and isinstance(owner, (cst.Name, cst.Attribute, cst.Subscript))
    return is_named or _is_made_as_loss(source, owner)


def _is_made_as_loss(source: Source, owner: Node) -> bool:
    """Whether all that a name is given is a mean or a sum, or what a loss of PyTorch gives."""
    bindings = source.names.bindings(owner) if isinstance(owner, cst.Name) else []
    return bool(bindings) and all(
        b.kind == "assign" and isinstance(b.value, cst.Call) and _gives_loss(source, b.value.func)
        for b in bindings
    )


def _gives_loss(source: Source, func: Node) -> bool:
    if isinstance(func, cst.Attribute) and func.attr.value in ("sum", "mean"):
        return True
    made = source.instance(func) or ""
    origin = source.origin(func) or ""
    is_function = origin.startswith("torch.nn.functional.") and origin.endswith(
        ("loss", "cross_entropy", "kl_div", "cross_entropy_with_logits")
    )
    return is_function or (made.startswith("torch.nn.") and made.endswith("Loss"))


VALID = (
    Case(
        """
        import contextlib
        import torch

        def region(amp):
            if amp:
                return torch.autocast("cuda", dtype=torch.bfloat16)
            return contextlib.nullcontext()

        def step(net, opt, x, amp):
            with region(amp):
                loss = net(x).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        """,
    ),
    Case("""
        import contextlib
        import torch

        class Training:
            def backward(self, loss):
                loss.backward()

            def step(self, x):
                with torch.autocast("cuda"):
                    loss = self.net(x).mean()
                    self.backward(loss)

            def fine(self, x):
                self.backward(self.net(x).mean())

        def late(x, stack):
            with contextlib.ExitStack() as stack:
                loss = model(x).mean()
                loss.backward()
                stack.enter_context(torch.autocast("cuda"))
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            loss = model(x).mean()
        loss.backward()
    """),
    Case("""
        import torch

        with torch.autocast("cuda", enabled=False):
            loss = model(x).mean()
            loss.backward()

        with torch.autocast("cuda"):
            with torch.autocast("cuda", enabled=False):
                loss.backward()

        with torch.autocast("cuda", enabled=False) if amp else torch.no_grad():
            loss.backward()
    """),
    Case(
        """
        import torch

        with torch.autocast("cuda"):
            def closure():
                loss.backward()
            loss = model(x)
        """,
        note="When the function is called is not known.",
    ),
    Case(
        """
        import torch

        class Layer:
            @staticmethod
            def backward(ctx, grad):
                with torch.autocast("cuda"):
                    return Other.backward(ctx, grad)

            def step(self):
                with torch.autocast("cuda"):
                    self.pipe.backward()
                    engine.backward(stage=1)
        """,
        note="Methods of other things that are called the same.",
    ),
    Case("""
        from mine import autocast

        with autocast("cuda"):
            loss.backward()
    """),
)

INVALID = (
    Case(
        """
        import torch
        import torch.nn.functional as F

        def step(net, optimizer, x, y, parts):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(x, y)
                (loss / parts).backward()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                F.cross_entropy(net(x, None), y).backward()
            optimizer.step()
        """,
        count=2,
        unsafe=True,
        fixed="""
        import torch
        import torch.nn.functional as F

        def step(net, optimizer, x, y, parts):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(x, y)
            (loss / parts).backward()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                F.cross_entropy(net(x, None), y).backward()
            optimizer.step()
        """,
    ),
    Case(
        """
        import contextlib
        import torch

        class T:
            def __init__(self, net, amp):
                self.net, self.amp = net, amp
                self.opt = torch.optim.Adam(net.parameters())

            @property
            def ctx(self):
                return torch.autocast("cuda", dtype=torch.bfloat16) if self.amp else contextlib.nullcontext()

            def step(self, x):
                with self.ctx:
                    loss = self.net(x).mean()
                    loss.backward()
                self.opt.step()
                self.opt.zero_grad()
        """,
        """
        import contextlib
        import torch

        class T:
            def __init__(self, net, amp):
                self.net, self.amp = net, amp
                self.opt = torch.optim.Adam(net.parameters())

            @property
            def ctx(self):
                return torch.autocast("cuda", dtype=torch.bfloat16) if self.amp else contextlib.nullcontext()

            def step(self, x):
                with self.ctx:
                    loss = self.net(x).mean()
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import contextlib
        import torch

        class Training:
            def region(self):
                if self.amp:
                    return torch.autocast("cuda", dtype=torch.bfloat16)
                return contextlib.nullcontext()

            def backward(self, loss):
                loss.backward()

            def step(self, x):
                with contextlib.ExitStack() as stack:
                    stack.enter_context(self.region())
                    loss = self.net(x).mean()
                    self.backward(loss)
        """,
        count=1,
        note="The method only runs in the region.",
    ),
    Case(
        """
        import torch

        with torch.autocast("cuda"):
            l = model(x).mean()
            l.backward()
        """,
        """
        import torch

        with torch.autocast("cuda"):
            l = model(x).mean()
        l.backward()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        criterion = torch.nn.MSELoss()
        for x, y in batches:
            with torch.autocast("cuda"):
                objective = criterion(model(x), y)
                objective.backward()
        """,
        """
        import torch

        criterion = torch.nn.MSELoss()
        for x, y in batches:
            with torch.autocast("cuda"):
                objective = criterion(model(x), y)
            objective.backward()
        """,
        unsafe=True,
        note="A loss by what makes it.",
    ),
    Case(
        """
        import torch

        for x in batches:
            with torch.autocast("cuda"):
                loss = model(x).mean()
                # now the gradients
                scaler.scale(loss).backward()

                scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        for x in batches:
            with torch.autocast("cuda"):
                loss = model(x).mean()
            # now the gradients
            scaler.scale(loss).backward()

            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        with torch.cuda.amp.autocast(enabled=use_amp):
            loss = sum(
                losses
            )
            loss.backward(
                retain_graph=True,
            )
            if done:
                print("done")
        """,
        """
        import torch

        with torch.cuda.amp.autocast(enabled=use_amp):
            loss = sum(
                losses
            )
        loss.backward(
            retain_graph=True,
        )
        if done:
            print("done")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        with model.no_sync(), torch.autocast("cuda"):
            loss = model(x)
            loss.backward()

        @torch.autocast("cpu")
        def step(x):
            model(x).sum().backward()
        """,
        count=2,
        note="What else ends with the region, or where it begins, is not for a tool to decide: there is no fix.",
    ),
    Case("""
        import torch

        with torch.autocast("cuda"):
            loss = model(x)
            if training:
                accelerator.backward(loss)
    """),
    Case(
        """
        from contextlib import nullcontext
        import torch

        def train(amp):
            region = torch.autocast("cuda") if amp else nullcontext()
            with region:
                loss = model(x)
                loss.backward()
            with nullcontext() if not amp else torch.autocast("cuda"):
                loss = model(x)
                loss.backward()
        """,
        """
        from contextlib import nullcontext
        import torch

        def train(amp):
            region = torch.autocast("cuda") if amp else nullcontext()
            with region:
                loss = model(x)
            loss.backward()
            with nullcontext() if not amp else torch.autocast("cuda"):
                loss = model(x)
            loss.backward()
        """,
        count=2,
        unsafe=True,
        note="A region that is not always entered.",
    ),
    Case(
        """
        import torch

        for x, y in batches:
            with torch.autocast("cuda"):
                loss = model(x).mean()
                loss.backward()
                other_loss = model(y).mean()
                other_loss.backward()
        """,
        """
        import torch

        for x, y in batches:
            with torch.autocast("cuda"):
                loss = model(x).mean()
                loss.backward()
                other_loss = model(y).mean()
            other_loss.backward()
        """,
        count=2,
        unsafe=True,
        note="The second forward pass stays in the region, so the first backward has no fix.",
    ),
    Case(
        """
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="fp16")
        for x in batches:
            with accelerator.autocast():
                loss = model(x)
                accelerator.backward(loss)
        """,
        """
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="fp16")
        for x in batches:
            with accelerator.autocast():
                loss = model(x)
            accelerator.backward(loss)
        """,
        unsafe=True,
        note="A trainer's region is one, too.",
    ),
    Case(
        """
        from accelerate import Accelerator

        acc = Accelerator(mixed_precision="fp16")
        for batch in batches:
            with acc.autocast():
                loss = model(batch)
                acc.backward(loss)
        """,
        """
        from accelerate import Accelerator

        acc = Accelerator(mixed_precision="fp16")
        for batch in batches:
            with acc.autocast():
                loss = model(batch)
            acc.backward(loss)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import contextlib

        import torch

        class Plugin:
            @contextlib.contextmanager
            def region(self):
                with torch.autocast("cuda"):
                    yield

        def train(model, batches, plugin: Plugin):
            for batch in batches:
                with plugin.region():
                    loss = model(batch)
                    loss.backward()
        """,
        """
        import contextlib

        import torch

        class Plugin:
            @contextlib.contextmanager
            def region(self):
                with torch.autocast("cuda"):
                    yield

        def train(model, batches, plugin: Plugin):
            for batch in batches:
                with plugin.region():
                    loss = model(batch)
                loss.backward()
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP301",
    name="backward-in-region",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="backward inside a region; PyTorch advises to end the region before it",
    what="`backward()` of a loss, by hand or by a trainer, inside a region that is not switched off.",
    why=(
        "Backward runs in the types that forward has chosen, without a region. Inside one, its own operations are cast "
        "as well: gradients of what was computed in float32 on purpose are computed in lower precision."
    ),
    fine="Nothing in the region was computed in float32 on purpose, and no Function of your own takes part.",
    words=("autocast backward",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
