"""AMP112: one region object that is entered while it is active."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import called_function, methods_of
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.regions import PYTORCHS_AUTOCASTS
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_RECURSIVE = "this calls the function again inside its own region, whose one object is active: autocast stays on"

_THROUGH = "this enters the region's one object again, which is active here: autocast stays on"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each second entry and each call that leads to one."""
    if not any(source.origin(call.func) in PYTORCHS_AUTOCASTS for call in source.all(cst.Call)):
        return
    entered = {f: _entered(source, f) for f in source.all(cst.FunctionDef)}
    for function in source.all(cst.FunctionDef):
        for region in _decorating(source, function):
            yield from _entered_again(source, function.body, function, region, entered)
    for statement in source.all(cst.With):
        for item in statement.items:
            if is_tried(source, statement):
                continue
            if _is_active(source, statement, item):
                yield source.find(RULE, item.item)
            elif _is_shared(source, item):
                made = _made(source, item.item)
                assert made is not None
                where = source.function(statement)
                yield from _entered_again(source, statement.body, where, made, entered)


def _is_shared(source: Source, item: cst.WithItem) -> bool:
    """Whether an item enters a region that functions share: one of the module's names, or an attribute of self."""
    node = item.item
    if isinstance(node, cst.Attribute):
        return key(source, node.value) == "self" and _is_region(source, node)
    if not isinstance(node, cst.Name) or not _is_region(source, node):
        return False
    return source.scopes.scope_of[node].home(node.value) is source.scopes.module


def _entered(source: Source, function: cst.FunctionDef) -> set[Node]:
    """The calls that made the regions which a function enters: as decorators, and in its own `with` statements."""
    found = set(_decorating(source, function))
    for statement in walk(function.body):
        if isinstance(statement, cst.With) and source.function(statement) is function:
            shared = [item for item in statement.items if _is_shared(source, item)]
            found |= {made for i in shared if (made := _made(source, i.item))}
    return found


def _decorating(source: Source, function: cst.FunctionDef) -> Iterator[Node]:
    """The calls that made the regions among a function's decorators, each one object for all its calls."""
    for decorator in function.decorators:
        inner = decorator.decorator
        if isinstance(inner, cst.Call) and source.origin(inner.func) in PYTORCHS_AUTOCASTS:
            yield inner
        elif isinstance(inner, (cst.Name, cst.Attribute)) and _is_region(source, inner):
            made = _made(source, inner)
            assert made is not None
            yield made


def _entered_again(
    source: Source,
    body: Node,
    where: Node | None,
    region: Node,
    entered: dict[cst.FunctionDef, set[Node]],
) -> Iterator[Finding]:
    """The calls inside that lead to functions of this file which enter the very object."""
    for call in walk(body):
        if not isinstance(call, cst.Call) or source.function(call) is not where:
            continue
        called = _called(source, call)
        if called is None:
            continue
        if called is where and region in _decorating(source, called):
            yield source.find(RULE, call, _RECURSIVE)
        elif any(region in entered[f] for f in _reached(source, called)):
            yield source.find(RULE, call, _THROUGH)


def _reached(source: Source, function: cst.FunctionDef) -> Iterator[cst.FunctionDef]:
    """A function, and those of this file that it calls."""
    seen, waiting = {function}, [function]
    while waiting:
        one = waiting.pop()
        yield one
        for call in walk(one.body):
            if isinstance(call, cst.Call) and source.function(call) is one:
                called = _called(source, call)
                if called is not None and called not in seen:
                    seen.add(called)
                    waiting.append(called)


def _called(source: Source, call: cst.Call) -> cst.FunctionDef | None:
    """The function of this file that a call runs, by its name, or the method of the same class that is the only one."""
    function = called_function(source, call)
    if function is not None:
        return function
    func, home = call.func, source.values.enclosing_class(call)
    if not isinstance(func, cst.Attribute) or not isinstance(home, cst.ClassDef):
        return None
    if not isinstance(func.value, cst.Name) or func.value.value not in ("self", "cls"):
        return None
    method = methods_of(source, home).get(func.attr.value)
    return method.node if method is not None and not _is_generator(method.node) else None


def _is_generator(function: cst.FunctionDef) -> bool:
    return any(isinstance(node, cst.Yield) for node in walk(function.body))


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


def _made(source: Source, node: Node) -> Node | None:
    """The call that made a region: the one value of a name, or one side of `nullcontext() if cpu else autocast()`."""
    call = source.values.constructed(node)
    if isinstance(call, cst.Call):
        return call
    values = [value for value, _ in source.values.sources(node)]
    if len(values) != 1 or not isinstance(values[0], cst.IfExp):
        return None
    sides = (values[0].body, values[0].orelse)
    calls = [side for side in sides if isinstance(side, cst.Call)]
    regions = [call for call in calls if source.origin(call.func) in PYTORCHS_AUTOCASTS]
    return regions[0] if len(regions) == 1 else None


def _is_region(source: Source, node: Node) -> bool:
    made = _made(source, node)
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
    Case(
        """
        import torch

        region = torch.autocast("cuda")

        @torch.autocast("cuda")
        def encode(x):
            return x @ x

        @torch.autocast("cuda")
        def train(x):
            return encode(x)

        def evaluate(x):
            with region:
                return x @ x

        def run(x):
            with region:
                y = train(x)
            return evaluate(y)
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
    Case(
        """
        import contextlib
        import torch

        region = contextlib.nullcontext() if cpu else torch.autocast("cuda")

        def evaluate(model, x):
            with region:
                return model(x)

        def report(model, x):
            print(evaluate(model, x))

        def train(model, x):
            with region:
                loss = model(x)
                report(model, x)
        """,
        count=1,
        note="Through a call of a call; the other side of the choice may be entered again.",
    ),
    Case(
        """
        import torch

        float32 = torch.autocast("cuda", enabled=False)

        @float32
        def norm(x):
            return x / x.norm()

        @float32
        def loss(x):
            return norm(x).sum()
        """,
        count=1,
        note="One object decorates both.",
    ),
    Case(
        """
        import torch

        @torch.autocast("cuda")
        def even(node):
            return node.value if node.is_leaf else odd(node.child)

        def odd(node):
            return even(node.child)
        """,
        count=1,
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
