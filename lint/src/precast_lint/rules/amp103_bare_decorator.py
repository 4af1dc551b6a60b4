"""AMP103: an autocast class as a decorator without parentheses."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.kinds import the_device
from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.renaming import old_names

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each bare decorator."""
    for decorator in source.all(cst.Decorator):
        node = decorator.decorator
        if source.origin(node) in AUTOCASTS and not is_tried(source, decorator):
            yield source.find(RULE, node, fix=_fix(source, node))
    for call in source.all(cst.Call):
        if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
            continue
        given = call.args[0].value
        is_it = source.origin(call.func) in AUTOCASTS and _is_function(source, given)
        if is_it and not is_tried(source, call):
            yield source.find(RULE, call.func)


def _is_function(source: Source, node: Node) -> bool:
    """`autocast(step)` of a function of this file, and `autocast(model.forward)`."""
    if isinstance(node, (cst.Attribute, cst.Lambda)):
        return isinstance(node, cst.Lambda) or node.attr.value == "forward"
    binding = source.names.only_binding(node)
    return binding is not None and binding.kind == "def"


def _fix(source: Source, node: Node) -> Fix | None:
    origin = source.origin(node) or ""
    moved = next((use.fix for use in old_names.uses(source) if use.node is node), None)
    if moved is not None:
        return moved
    if origin in old_names.OLD:
        return source.fix("Call it", source.after(node, "()"), unsafe=True)
    device = the_device(source)
    if device is None:
        return None
    text = f"({source.quote}{device}{source.quote})"
    return source.fix("Call it with the device type", source.after(node, text), unsafe=True)


VALID = (
    Case("""
        import torch

        @torch.autocast("cuda")
        def f(x):
            return x

        @torch.cuda.amp.autocast()
        def g(x):
            return x
    """),
    Case(
        """
        def autocast(f):
            return f

        @autocast
        def f(x):
            return x
        """,
        note="Another function of the same name.",
    ),
    Case(
        """
        try:
            from torch.cuda.amp import autocast
        except ImportError:
            def autocast(f):
                return f

        @autocast
        def f(x):
            return x
        """,
        note="The name stands for two things: nothing is certain.",
    ),
    Case("""
        import torch

        @torch.no_grad
        def f(x):
            return x
    """),
    Case("""
        from mine.layers import autocast

        class Net:
            @autocast
            def forward(self, x):
                return x
    """),
)

INVALID = (
    Case(
        """
        import torch

        def step(x):
            return x

        fast = torch.autocast(step)
        model.forward = torch.amp.autocast(model.forward)
        """,
        count=2,
    ),
    Case(
        """
        import torch

        @torch.cuda.amp.autocast
        def f(x):
            return x
        """,
        """
        import torch

        @torch.amp.autocast("cuda")
        def f(x):
            return x
        """,
        unsafe=True,
    ),
    Case(
        """
        from torch.cuda.amp import autocast

        class Net:
            @autocast  # half
            def forward(self, x):
                return x
        """,
        """
        from torch.amp import autocast

        class Net:
            @autocast("cuda")  # half
            def forward(self, x):
                return x
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        from torch.cpu.amp import autocast

        @autocast
        def f(x):
            return x
        """,
        """
        from torch.cpu.amp import autocast

        @autocast()
        def f(x):
            return x
        """,
        min_torch="1.10",
        unsafe=True,
    ),
    Case(
        """
        import torch

        @torch.autocast
        def f(x):
            return x
        """,
        note="The device type is not known: there is no fix.",
    ),
    Case(
        """
        import torch

        @torch.no_grad()
        @torch.autocast
        def f(x):
            return x.to("xpu")
        """,
        """
        import torch

        @torch.no_grad()
        @torch.autocast("xpu")
        def f(x):
            return x.to("xpu")
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP103",
    name="bare-decorator",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this makes the function an argument of the region; call the decorator",
    what="`@torch.autocast`, `@torch.cuda.amp.autocast` and `@torch.cpu.amp.autocast` without parentheses.",
    why=(
        "The class is called with the function as its first argument. `@torch.autocast` takes it for the device type "
        "and raises ValueError. `@torch.cuda.amp.autocast` takes it for `enabled`: the name then stands for a region, "
        "and calling it raises TypeError, or decorates what was meant to be an argument."
    ),
    fine="Never.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
