"""AMP217: infinities and NaN taken out of scaled gradients before the scaler has looked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import hides, judged, only_here, scales_by_hand

__all__ = ["RULE"]

_SCALED, _UNSCALED, _UNKNOWN = "scaled", "unscaled", "unknown"
_CLEANS = ("nan_to_num", "nan_to_num_")
_ASKS = ("isnan", "isinf", "isfinite")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each place that takes them out between a scaled backward and its step."""

    def follow(flow: Flow, scaler: str) -> tuple[str, Callable[[str, Event, Say], str]] | None:
        if scales_by_hand(flow, scaler) or not only_here(flow, scaler, "unscale_"):
            return None

        def on(state: str, event: Event, say: Say) -> str:
            return _on(source, state, event, say, scaler)

        return _UNKNOWN, on

    for _, _, node, _ in judged(source, follow):
        yield source.find(RULE, node)


def _on(source: Source, state: str, event: Event, say: Say, scaler: str) -> str:
    if event.kind == "backward":
        return _SCALED if event.scaler == scaler else _UNKNOWN
    if event.kind == "unscale" and event.scaler == scaler:
        return _UNSCALED
    if event.kind in ("scaler_step", "zero_grad", "optimizer_step"):
        return _UNKNOWN
    if hides(source, event, scaler):
        return _UNKNOWN
    node = _cleaned(source, event)
    if node is not None:
        if state == _SCALED:
            say.bad(node)
        elif state == _UNSCALED:
            say.good(node)
    return state


def _cleaned(source: Source, event: Event) -> Node | None:
    """The call or the item that an event is, if it puts numbers in the place of a gradient's infinities and NaN."""
    node = event.node
    if event.kind == "call" and isinstance(node, cst.Call):
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        origin = source.origin(node.func)
        if origin is not None:
            name = origin.removeprefix("torch.")
        if name == "masked_fill_" and node.args:
            is_grad = origin is None and _is_or_holds_grad(source, _owner(node))
            return node if is_grad and _asks(source, node.args[0]) else None
        if name not in _CLEANS:
            return None
        tensor = node.args[0].value if origin is not None and node.args else _owner(node)
        if name.endswith("_"):
            return node if _is_or_holds_grad(source, tensor) else None
        return node if _is_grad(tensor) and _is_written(source, node) else None
    if event.kind == "assign" and _is_grad(node) and _chooses(source, event.value):
        return event.value
    if event.kind == "assign" and isinstance(node, cst.Subscript):
        return node if _is_or_holds_grad(source, node.value) and _asks(source, node) else None
    return None


def _is_or_holds_grad(source: Source, node: Node | None) -> bool:
    """Whether it is a gradient, or a name that stands for one alone and changes it in place: `grad = p.grad`."""
    binding = source.names.only_binding(node)
    is_held = binding is not None and binding.kind == "assign"
    return _is_grad(node) or (is_held and binding is not None and _is_grad(binding.value))


def _chooses(source: Source, value: Node | None) -> bool:
    """`torch.where(torch.isfinite(p.grad), p.grad, 0.0)`."""
    if not isinstance(value, cst.Call) or source.origin(value.func) != "torch.where":
        return False
    return bool(value.args) and any(
        isinstance(n, cst.Name) and n.value in _ASKS for n in walk(value.args[0].value)
    )


def _owner(call: cst.Call) -> Node | None:
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def _is_written(source: Source, call: cst.Call) -> bool:
    """Whether the gradient itself is changed, by what is assigned to it or by `out=`."""
    statement = source.parents[call]
    targets = statement.targets if isinstance(statement, cst.Assign) else ()
    return any(_is_grad(target.target) for target in targets) or any(
        arg.keyword is not None and arg.keyword.value == "out" for arg in call.args
    )


def _is_grad(node: Node | None) -> bool:
    """`p.grad`, `p.grad.data`."""
    if isinstance(node, cst.Attribute) and node.attr.value == "data":
        node = node.value
    return isinstance(node, cst.Attribute) and node.attr.value == "grad"


def _asks(source: Source, mask: Node) -> bool:
    """Whether an item or a mask, or the one value of a name in it, asks a gradient for numbers that are not finite."""
    names = [n for n in walk(mask) if isinstance(n, cst.Name)]
    if any(n.value in _ASKS for n in names):
        return True
    bindings = (source.names.only_binding(name) for name in names)
    masks = [b.value for b in bindings if b is not None and b.kind == "assign" and b.value]
    return any(_asks_grad(source, mask) for mask in masks)


def _asks_grad(source: Source, mask: Node) -> bool:
    """`~torch.isfinite(p.grad)`."""
    inner = list(walk(mask))
    is_asked = any(isinstance(n, cst.Name) and n.value in _ASKS for n in inner)
    return is_asked and any(_is_or_holds_grad(source, n) for n in inner)


VALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            for p in model.parameters():
                torch.nan_to_num_(p.grad)
            scaler.step(optimizer)
            scaler.update()
        """,
        note="The scaler has looked, and skips the step anyway.",
    ),
    Case("""
        import torch

        for batch in batches:
            model(batch).backward()
            for p in model.parameters():
                p.grad.nan_to_num_(0.0)
            optimizer.step()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            loss = torch.nan_to_num(model(batch))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            largest = torch.nan_to_num(model.weight.grad).max()
            scaler.step(optimizer)
            scaler.update()
        """,
        note="The gradient stays as it is.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            model.weight.grad[frozen] = 0.0
            if torch.isnan(model.weight.grad).any():
                print("the scaler skips this one")
            scaler.step(optimizer)
            scaler.update()
        """,
    ),
    Case("""
        import torch

        def step(model, optimizer, loss, scaler, mask):
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad = torch.where(mask, p.grad, torch.zeros_like(p.grad))
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad = torch.where(torch.isfinite(p.grad), p.grad, torch.zeros_like(p.grad))
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                mask = ~torch.isfinite(p.grad)
                p.grad[mask] = 0.0

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
    ),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                finite = torch.isfinite(p.grad)
                p.grad.masked_fill_(~finite, 0.0)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
    ),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                grad = p.grad
                grad.masked_fill_(p.frozen, 0.0)
                copy = p.grad.clone()
                copy[~torch.isfinite(copy)] = 0.0
                print(copy.masked_fill(torch.isnan(copy), 0.0).norm())

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
        note="A copy is cleaned, and weights that are frozen get nothing.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            optimizer.zero_grad()
            scaler.scale(model(batch)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Scaler:
            def __init__(self):
                self._scaler = torch.cuda.amp.GradScaler()

            def __call__(self, loss, optimizer, parameters):
                self._scaler.scale(loss).backward()
                for p in parameters:
                    p.grad[torch.isnan(p.grad)] = 0.0
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                self._scaler.step(optimizer)
                self._scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                for p in model.parameters():
                    p.grad = torch.nan_to_num(p.grad)
                    p.grad.data[~p.grad.isfinite()] = 0
                scaler.step(optimizer)
                scaler.update()
        """,
        count=2,
    ),
    Case("""
        import torch

        def step(model, optimizer, loss, scaler):
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad.data = torch.where(torch.isfinite(p.grad), p.grad, torch.zeros_like(p.grad))
            scaler.step(optimizer)
            scaler.update()
    """),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                mask = ~torch.isfinite(p.grad)
                p.grad[mask] = 0.0

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                finite = torch.isfinite(p.grad)
                p.grad.masked_fill_(~finite, 0.0)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def clean(parameters):
            for p in parameters:
                if p.grad is None:
                    continue
                grad = p.grad
                broken = ~torch.isfinite(grad)
                grad[broken] = 0.0

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                clean(model.parameters())
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP217",
    name="overflow-hidden",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="the scaler cannot see this overflow any more: it steps, and never lowers the scale",
    what=(
        "`nan_to_num` of gradients, or an assignment to those that are not finite, between a scaled backward and "
        "`unscale_` or the step."
    ),
    why=(
        "Infinity and NaN in scaled gradients are how the scaler learns that the scale is too high. With numbers in "
        "their place it steps with what is left of the gradients and goes on doubling the scale, until most of them "
        "have overflowed. The scaler skips such steps by itself."
    ),
    fine="The scale is constant, and known to be low enough.",
    words=(
        "scale( .grad nan_to_num",
        "scale( .grad isnan",
        "scale( .grad isinf",
        "scale( .grad isfinite",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
