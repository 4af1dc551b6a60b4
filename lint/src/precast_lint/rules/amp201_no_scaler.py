"""AMP201: training in float16 without a scaler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from precast_lint.meaning.functions import called_method, methods_of
from precast_lint.meaning.regions import regions, regions_around
from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Say, flows
from precast_lint.training_step.flow_events import Event, key

__all__ = ["RULE"]

# Others that scale losses, or choose the dtype.
_HANDLED = re.compile(
    r"scaler|loss_scale|scale_loss|scaled_loss|accelerat|deepspeed|apex|set_autocast|fabric", re.I
)
_LARGE = 64  # a factor that is no weight of a loss, but a scale
_NO_GRAD = ("torch.no_grad", "torch.inference_mode")


@dataclass(frozen=True)
class _State:
    """The names that hold results of float16 regions, and the last backward of one."""

    lower: frozenset[str] = frozenset()
    backward: Node | None = None


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each backward of a float16 region's loss that an optimizer's step follows."""
    is_float16 = any(r.dtype == "torch.float16" for r in regions(source))
    if not is_float16 or _HANDLED.search(source.words):
        return

    def on(state: _State, event: Event, say: Say) -> _State:
        return _on(source, state, event, say)

    found = (node for flow in flows(source) for node, _ in flow.run(_State(), on))
    for node in dict.fromkeys(found):
        yield source.find(RULE, node)


def _on(source: Source, state: _State, event: Event, say: Say) -> _State:
    if event.kind == "assign":
        name = event.receiver or ""
        if _is_scaled(source, event.value):
            return replace(state, lower=state.lower - {name})
        comes = _in_region(source, event.node) or _uses(source, event.value, state.lower)
        comes = comes or _is_returned_from_region(source, event.value)
        return replace(state, lower=state.lower | {name} if comes else state.lower - {name})
    if event.kind == "backward":
        assert isinstance(event.node, cst.Call)
        is_lower = _in_region(source, event.node) or _uses(source, event.node, state.lower)
        is_lower = is_lower and not _is_scaled(source, event.node)
        return replace(state, backward=event.node if is_lower else None)
    if event.kind == "optimizer_step" and state.backward is not None:
        say.bad(state.backward)
        return replace(state, backward=None)
    return state


def _is_scaled(source: Source, node: Node | None) -> bool:
    """Whether a loss is scaled by hand in an expression: `loss * SCALE`, `loss * 1024`."""
    for inner in walk(node) if node is not None else ():
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Multiply):
            for side in (inner.left, inner.right):
                if (constant(source, side) or 0) >= _LARGE or "scale" in _last_name(side).lower():
                    return True
    return False


def _last_name(node: Node) -> str:
    last = node.attr if isinstance(node, cst.Attribute) else node
    return last.value if isinstance(last, cst.Name) else ""


def _is_returned_from_region(source: Source, value: Node | None) -> bool:
    """`loss = self.loss(batch)`, where the method returns from within a region, or so does a module's `forward`."""
    returned = source.values.returned(value) if isinstance(value, cst.Call) else []
    if returned:
        return all(_in_region(source, node) for node in returned)
    calls = (node for node in walk(value) if isinstance(node, cst.Call)) if value else ()
    return any(
        forward is not None and _in_region(source, forward.body.body[0])
        for forward in (_forward(source, call) for call in calls)
    )


def _forward(source: Source, call: cst.Call) -> cst.FunctionDef | None:
    """The `forward` that the call of a module runs whose class is in this file: `net(x)` after `net = Net().cuda()`."""
    made = source.values.constructed(call.func)
    while isinstance(made, cst.Call) and isinstance(made.func, cst.Attribute):
        if made.func.attr.value not in ("cuda", "to", "train"):
            return None
        made = made.func.value
    binding = source.names.only_binding(made.func) if isinstance(made, cst.Call) else None
    if binding is None or not isinstance(binding.node, cst.ClassDef):
        return None
    found = methods_of(source, binding.node).get("forward")
    return found.node if found is not None else None


def _uses(source: Source, node: Node | None, names: frozenset[str]) -> bool:
    if node is None or not names:
        return False
    return any(
        isinstance(inner, (cst.Name, cst.Attribute))
        and key(source, inner) in names
        and not _is_cut(source.parents.get(inner))
        for inner in walk(node)
    )


def _is_cut(parent: Node | None) -> bool:
    """`x.detach()`: no gradient comes back; `x.float()`: x may be what a frozen model says."""
    return isinstance(parent, cst.Attribute) and parent.attr.value in ("detach", "float", "item")


def _in_region(source: Source, node: Node) -> bool:
    """Whether a node runs in a float16 region and with gradients."""
    region = next(regions_around(source, node), None)
    if region is None:
        function = source.function(node)
        return function is not None and _is_called_in_region(source, function)
    if region.dtype != "torch.float16" or region.enabled is False:
        return False
    for outer in source.around(node):
        if isinstance(outer, cst.With):
            items = [i.item for i in outer.items if isinstance(i.item, cst.Call)]
            if any(source.origin(item.func) in _NO_GRAD for item in items):
                return False
    return True


def _is_called_in_region(source: Source, function: cst.FunctionDef) -> bool:
    """Whether all calls of a function, compiled or not, are in float16 regions of other functions."""
    known = source.cache.setdefault("called in float16 regions", {})
    assert isinstance(known, dict)
    if function not in known:
        known[function] = False  # of functions that call each other nothing is known
        calls = list(_calls_of(source, function))
        known[function] = bool(calls) and all(
            source.function(call) is not function and _in_region(source, call) for call in calls
        )
    return bool(known[function])


def _calls_of(source: Source, function: cst.FunctionDef) -> Iterator[cst.Call]:
    """The calls of a function by its name, or by that of what `torch.compile` makes of it; of a method by self."""
    for call in source.all(cst.Call):
        if called_method(source, call) is function or _is_function(source, call.func, function):
            yield call


def _is_function(source: Source, node: Node, function: cst.FunctionDef) -> bool:
    binding = source.names.only_binding(node)
    if binding is None:
        return False
    if binding.node in (function, function.name):
        return True
    made = binding.value if binding.kind == "assign" else None
    if not isinstance(made, cst.Call) or source.origin(made.func) != "torch.compile":
        return False
    return bool(made.args) and _is_function(source, made.args[0].value, function)


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
                loss = self.loss(batch)
                loss.backward()
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
)

RULE = Rule(
    code="AMP201",
    name="float16-without-scaler",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this loss comes from a float16 region and no scaler scales it: small gradients become zero",
    what="Training with `torch.autocast` in float16, the default on CUDA, without a `GradScaler`.",
    why=(
        "Gradients that pass through float16 operations are float16 too. Those below 6e-8 become zero, and the weights "
        "behind them stop learning. A scaler, or bfloat16, avoids that."
    ),
    fine="The gradients are known to be large enough, or something that the rule can't see scales the loss.",
    words=("autocast backward( .step(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
