"""AMP217: infinities and NaN taken out of scaled gradients before the scaler has looked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.names import is_none
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    followed,
    hides,
    judged,
    only_here,
    scales_by_hand,
)

__all__ = ["RULE"]

_SCALED, _UNSCALED, _UNKNOWN = "scaled", "unscaled", "unknown"
_CLEANS = ("nan_to_num", "nan_to_num_")
_ASKS = ("isnan", "isinf", "isfinite")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each place that takes them out between a scaled backward and its step."""

    def follow(flow: Flow, scaler: str) -> tuple[str, Callable[[str, Event, Say], str]] | None:
        if all(_cleaned(source, event) is None for event in flow.events()):
            return None
        if scales_by_hand(flow, scaler) or not only_here(flow, scaler, "unscale_"):
            return None

        def on(state: str, event: Event, say: Say) -> str:
            return _on(source, state, event, say, scaler)

        return _UNKNOWN, on

    for _, _, node, _ in judged(source, follow):
        yield source.find(RULE, node)
    if "register_hook" in source.words and followed(source):
        yield from (source.find(RULE, node) for node in _hooks(source))


def _hooks(source: Source) -> Iterator[Node]:
    """The hooks of parameters that give other gradients on: `p.register_hook(torch.nan_to_num)`."""
    for call, owner, arguments in source.methods("register_hook"):
        hook = arguments.get("hook", 0)
        if hook is not None and _is_parameter(source, owner) and _is_cleaning(source, hook):
            yield call


def _is_parameter(source: Source, owner: Node) -> bool:
    """Whether a name is a loop's over the parameters of a model."""
    binding = source.names.only_binding(owner)
    loop: Node | None = binding.node if binding is not None else None
    while loop is not None and not isinstance(loop, (cst.For, cst.BaseStatement)):
        loop = source.parents.get(loop)
    func = loop.iter.func if isinstance(loop, cst.For) and isinstance(loop.iter, cst.Call) else None
    name = func.attr.value if isinstance(func, cst.Attribute) else ""
    return name in ("parameters", "named_parameters")


def _is_cleaning(source: Source, hook: Node) -> bool:
    """Whether what a hook returns is a gradient without its infinities and NaN."""
    if source.origin(hook) == "torch.nan_to_num":
        return True
    binding = source.names.only_binding(hook)
    function = binding.node if binding is not None else None
    values: list[Node] = [hook.body] if isinstance(hook, cst.Lambda) else []
    if isinstance(function, cst.FunctionDef):
        values = returned_by(function)
    return bool(values) and all(_is_clean(source, value) for value in values)


def _is_clean(source: Source, value: Node) -> bool:
    if not isinstance(value, cst.Call):
        return False
    origin = source.origin(value.func)
    if origin is None and isinstance(value.func, cst.Attribute):
        return value.func.attr.value in _CLEANS
    return origin == "torch.nan_to_num"


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
        if name in ("zero_", "fill_"):
            is_grad = _is_or_holds_grad(source, _owner(node))
            return node if is_grad and _is_for_bad(source, node) else None
        if name == "copy_" and node.args and _is_or_holds_grad(source, _owner(node)):
            return node if _is_clean(source, node.args[0].value) else None
        if name not in _CLEANS:
            return None
        tensor = node.args[0].value if origin is not None and node.args else _owner(node)
        if name.endswith("_"):
            return node if _is_or_holds_grad(source, tensor) else None
        return node if _is_grad(tensor) and _is_written(source, node) else None
    if event.kind == "assign" and _is_grad(node) and _chooses(source, event.value):
        return event.value
    if event.kind == "assign" and _is_grad(node) and _is_nothing(source, event.value):
        return node if _is_for_bad(source, node) else None
    if event.kind == "assign" and isinstance(node, cst.Subscript):
        return node if _is_or_holds_grad(source, node.value) and _asks(source, node) else None
    return None


def _is_or_holds_grad(source: Source, node: Node | None) -> bool:
    """Whether it is a gradient, or a name that stands for one alone and changes it in place: `grad = p.grad`."""
    if _is_grad(node):
        return True
    if isinstance(node, cst.Attribute) and node.attr.value == "data":
        node = node.value
    binding = source.names.only_binding(node)
    if binding is None or binding.kind != "assign":
        items = source.values.contents.of_loop(binding.node) if binding is not None else None
        return bool(items) and all(map(_is_grad, items or ()))
    return _is_grad(binding.value)


def _is_nothing(source: Source, value: Node | None) -> bool:
    """None, or `torch.zeros_like(p.grad)`."""
    called = source.origin(value.func) if isinstance(value, cst.Call) else None
    return is_none(value) or called == "torch.zeros_like"


def _is_for_bad(source: Source, node: Node) -> bool:
    """Whether something is done to a gradient alone that is not finite: the test around it asks that gradient."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.If) and inner is not outer.test and _asks_grad(source, outer.test):
            return True
        if isinstance(outer, (cst.FunctionDef, cst.For)):
            return False
        inner = outer
    return False


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
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                for name, p in model.named_parameters():
                    if name in frozen:
                        p.grad.zero_()
                    if p.grad.norm() == 0:
                        p.grad = None
                scaler.step(optimizer)
                scaler.update()

        def inspect(model, feature):
            feature.register_hook(lambda grad: torch.nan_to_num(grad))
            for p in model.parameters():
                p.register_hook(lambda grad: print(grad.isnan().any()))
        """,
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
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                for g in grads:
                    g[torch.isnan(g) | torch.isinf(g)] = 0
                for p in model.parameters():
                    if not torch.isfinite(p.grad).all():
                        p.grad.zero_()
                for p in model.parameters():
                    p.grad.copy_(torch.nan_to_num(p.grad))
                scaler.step(optimizer)
                scaler.update()

        def hooked(model, batches, optimizer):
            for p in model.parameters():
                p.register_hook(lambda grad: torch.nan_to_num(grad, nan=0.0))
        """,
        count=4,
        note="Lists of gradients, gradients that are emptied, and hooks, which come before all.",
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
        "scale( register_hook nan_to_num",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
