"""AMP112: one region object that is entered while it is active."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import called_method
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.regions import PYTORCHS_AUTOCASTS, regions
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_RECURSIVE = "this calls the function again inside its own region, whose one object is active: autocast stays on"

_THROUGH = "this enters the region's one object again, which is active here: autocast stays on"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each second entry and each recursive call."""
    for region in regions(source):
        if source.origin(region.call.func) not in PYTORCHS_AUTOCASTS:
            continue
        if isinstance(region.node, cst.FunctionDef):
            for call in _own_calls(source, region.node):
                yield source.find(RULE, call, _RECURSIVE)
    for statement in source.all(cst.With):
        for item in statement.items:
            if is_tried(source, statement):
                continue
            if _is_active(source, statement, item):
                yield source.find(RULE, item.item)
            elif _is_shared(source, item):
                yield from _entered_again(source, statement, item)


def _is_shared(source: Source, item: cst.WithItem) -> bool:
    """Whether an item enters a region that functions share: one of the module's names, or an attribute of self."""
    node = item.item
    if isinstance(node, cst.Attribute):
        return key(source, node.value) == "self" and _is_region(source, node)
    if not isinstance(node, cst.Name) or not _is_region(source, node):
        return False
    return source.scopes.scope_of[node].home(node.value) is source.scopes.module


def _entered_again(source: Source, statement: cst.With, item: cst.WithItem) -> Iterator[Finding]:
    """The calls inside, of functions of this file that enter the very object."""
    name = key(source, item.item)
    for call in walk(statement.body):
        called = _called(source, call) if isinstance(call, cst.Call) else None
        if called is None or source.function(call) is not source.function(statement):
            continue
        entered = [n for n in walk(called.body) if isinstance(n, cst.With)]
        own = [inner for inner in entered if source.function(inner) is called]
        if any(key(source, other.item) == name for inner in own for other in inner.items):
            yield source.find(RULE, call, _THROUGH)


def _called(source: Source, call: cst.Call) -> cst.FunctionDef | None:
    """The function or method of this file that a call runs, if there is just one."""
    method = called_method(source, call)
    if method is not None:
        return method
    binding = source.names.only_binding(call.func)
    node = binding.node if binding is not None else None
    return node if isinstance(node, cst.FunctionDef) and not node.decorators else None


def _own_calls(source: Source, function: cst.FunctionDef) -> Iterator[cst.Call]:
    """The calls of a function in itself: by its name, or through `self`."""
    for node in walk(function.body):
        if not isinstance(node, cst.Call) or not _is_itself(source, node.func, function):
            continue
        if source.function(node) is function:
            yield node


def _is_itself(source: Source, func: Node, function: cst.FunctionDef) -> bool:
    if isinstance(func, cst.Name):
        binding = source.names.only_binding(func)
        return binding is not None and binding.node is function
    home = source.parents.get(source.parents.get(function))  # type: ignore[arg-type]
    return (
        isinstance(home, cst.ClassDef)
        and isinstance(func, cst.Attribute)
        and isinstance(func.value, cst.Name)
        and func.value.value in ("self", "cls")
        and func.attr.value == function.name.value
        and sum(_defines(node, function.name.value) for node in home.body.body) == 1
    )


def _defines(node: Node, name: str) -> bool:
    return isinstance(node, cst.FunctionDef) and node.name.value == name


def _is_active(source: Source, statement: cst.With, item: cst.WithItem) -> bool:
    """Whether the object of a `with` item has been entered by a `with` around it, or before it."""
    if not isinstance(item.item, (cst.Name, cst.Attribute)) or not _is_region(source, item.item):
        return False
    text = key(source, item.item)
    before = [other for other in statement.items if other is not item]
    before = before[: list(statement.items).index(item)]
    inner: Node = statement
    for outer in source.around(statement):
        if isinstance(outer, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            break
        if isinstance(outer, cst.With) and inner is outer.body:
            before += outer.items
        inner = outer
    return any(key(source, other.item) == text for other in before)


def _is_region(source: Source, node: Node) -> bool:
    made = source.values.constructed(node)
    return isinstance(made, cst.Call) and source.origin(made.func) in PYTORCHS_AUTOCASTS


VALID = (
    Case(
        """
        import torch

        region = torch.autocast("cuda")
        for batch in batches:
            with region:
                model(batch)
        with region:
            pass
        """,
        note="One after the other is fine.",
    ),
    Case("""
        import torch

        region = torch.autocast("cuda")
        island = torch.autocast("cuda", enabled=False)
        with region:
            with island, torch.autocast("cuda"):
                pass
    """),
    Case(
        """
        import torch

        class Net(torch.nn.Module):
            @torch.autocast("cuda")
            def forward(self, x):
                return super().forward(self.child.forward(x))

            @torch.autocast("cuda")
            def predict(self, x):
                return self(x)
        """,
        note="Another object's method, or another method.",
    ),
    Case(
        """
        import precast

        region = precast.autocast("cuda")
        with region, region:
            pass
        """,
        note="A region of precast can be entered as often as one likes.",
    ),
    Case("""
        import torch

        region = torch.autocast("cuda")
        with region:
            def inner():
                with region:
                    pass
    """),
    Case(
        """
        import torch

        region = torch.autocast("cuda")

        def first(x):
            with region:
                x = model(x)
            return second(x)

        def second(x):
            with region:
                return model(x)
        """,
    ),
)

INVALID = (
    Case("""
        import torch

        region = torch.autocast("cuda")
        with region:
            for x in xs:
                with region:
                    model(x)
    """),
    Case("""
        import torch

        @torch.autocast("cuda", enabled=False)
        def depth(node):
            return 1 + max(depth(child) for child in node.children)
    """),
    Case("""
        from torch.cuda.amp import autocast

        class Tree:
            @autocast()
            def forward(self, x):
                return self.forward(x[0]) if len(x) else x

            def __init__(self):
                self.region = autocast()

            def run(self):
                with self.region, self.region:
                    pass
    """),
    Case(
        """
        import torch

        region = torch.autocast("cuda")

        def inner(x):
            with region:
                return model(x)

        def outer(x):
            with region:
                return inner(x)
        """,
    ),
    Case(
        """
        import torch

        class Runner:
            def __init__(self):
                self.region = torch.autocast("cuda")

            def outer(self, x):
                with self.region:
                    return self.inner(x)

            def inner(self, x):
                with self.region:
                    return x
        """,
    ),
)

RULE = Rule(
    code="AMP112",
    name="region-entered-twice",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this region is active already; entered again it forgets what to restore, and autocast stays on",
    what=(
        "A `with` on a region object that a `with` around it has entered, and a function with a region as its "
        "decorator that calls itself."
    ),
    why=(
        "PyTorch's region keeps what was there before it in itself. The second entry overwrites that with its own "
        "state, so after the last exit autocast is what the region made it, for all code that comes after. A "
        "decorator is one object for all calls of its function."
    ),
    fine="The recursive call can't happen. Regions of precast can be entered again.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
