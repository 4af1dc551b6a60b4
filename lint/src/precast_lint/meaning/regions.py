"""The autocast regions that a file writes down: `with` statements and decorators.

Invariants: a region is listed only if what makes it resolves to an autocast class, or is `autocast` of a trainer of
Accelerate's or Lightning's; device, dtype and enabled are None if the code does not determine them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from precast_lint.meaning.assignments import by_default, the_value, values_seen
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted, methods_named, string_value, walk

__all__ = [
    "AUTOCASTS",
    "DEFAULT_DTYPE",
    "NEW_AUTOCASTS",
    "TRAINERS",
    "Region",
    "arguments_of",
    "is_trainer",
    "region_in_force",
    "region_of_call",
    "regions",
    "regions_around",
]

NEW_AUTOCASTS = ("torch.amp.autocast", "precast.autocast")
"""The classes that take the device type as their first argument."""

AUTOCASTS = (*NEW_AUTOCASTS, "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
"""All classes that open a region. The last two are deprecated and have their device in their name."""


DEFAULT_DTYPE = {"cuda": "torch.float16", "cpu": "torch.bfloat16"}
"""The default dtype of a region, by device type."""

_DEEP = 4
_FLOAT16 = ("torch.float16", "torch.half")
TRAINERS = (
    "accelerate.Accelerator",
    "accelerate.accelerator.Accelerator",
    "lightning.Fabric",
    "lightning.fabric.Fabric",
    "lightning_fabric.Fabric",
)
"""The classes of Accelerate and Lightning Fabric whose objects make regions, and know the device."""

_TRAINER_NAMES = ("accelerator", "fabric", "self.accelerator", "self.fabric")


@dataclass(frozen=True, eq=False)
class Region:
    """A region in the text.

    Attributes:
        node: the `with` statement or the decorated function.
        call: the call that makes the region.
        device: "cuda", "cpu", ...; None: not known.
        dtype: "torch.float16", ...; the device's default one if none is given; None: not known.
        enabled: whether it is on; None: not known.
        is_trainers: whether a trainer makes it, which casts a model's outputs back to float32.
    """

    node: Node
    call: cst.Call
    device: str | None
    dtype: str | None
    enabled: bool | None
    is_trainers: bool = False

    @property
    def body(self) -> Node:
        """The code inside the region."""
        assert isinstance(self.node, (cst.With, cst.FunctionDef))
        return self.node.body


@once
def regions(source: Source) -> list[Region]:
    """All regions of a file, but for those of trainers."""
    return [region for region in _regions(source) if not region.is_trainers]


def regions_around(source: Source, node: Node, trainers: bool = False) -> Iterator[Region]:
    """Yield the regions around a node within its function, the innermost first.

    Args:
        source: the file.
        node: what runs.
        trainers: True to include the regions of trainers.
    """
    by_body = _by_body(source, trainers)
    for outer in source.around(node):
        yield from reversed(by_body.get(outer, []))
        parent = source.parents.get(outer)
        if isinstance(parent, (cst.FunctionDef, cst.Lambda)) and outer is parent.body:
            return


@once
def _by_body(source: Source, trainers: bool) -> dict[Node, list[Region]]:
    table: dict[Node, list[Region]] = {}
    for region in _regions(source) if trainers else regions(source):
        table.setdefault(region.body, []).append(region)
    return table


def region_in_force(source: Source, node: Node, trainers: bool = False) -> Region | None:
    """Return the innermost region around a node, unless it is disabled."""
    region = next(regions_around(source, node, trainers), None)
    return region if region is not None and region.enabled is not False else None


def region_of_call(source: Source, node: Node, call: cst.Call) -> Region | None:
    """The region that a call makes; None if it makes none."""
    origin = source.origin(call.func)
    arguments = arguments_of(source, call)
    if origin not in AUTOCASTS:
        return None
    if arguments.starred:
        return Region(node, call, None, None, None)
    old = origin.startswith(("torch.cuda.", "torch.cpu."))
    if old:
        device: str | None = origin.split(".")[1]
    else:
        device = _device(source, arguments.get("device_type", 0))
    enabled = _flag(source, arguments.get("enabled", 0 if old else 2))
    return Region(node, call, device, _dtype(source, arguments.get("dtype", 1), device), enabled)


def arguments_of(source: Source, call: cst.Call) -> Arguments:
    """The arguments of a call, with those of a table that is written in the file: `torch.autocast(**options)`."""
    arguments = Arguments.of(call)
    starred = [arg for arg in call.args if arg.star]
    table = (
        the_value(source, starred[0].value)
        if len(starred) == 1 and starred[0].star == "**"
        else None
    )
    if isinstance(table, cst.Call) and source.names.builtin(table.func) == "dict":
        more = Arguments.of(table)
        resolved, is_whole = more.keywords, not more.starred and not more.positional
    elif isinstance(table, cst.Dict):
        entries = [e for e in table.elements if isinstance(e, cst.DictElement)]
        resolved = {name: e.value for e in entries if (name := string_value(e.key)) is not None}
        is_whole = len(resolved) == len(table.elements)
    else:
        return arguments
    return replace(arguments, keywords=arguments.keywords | resolved, starred=not is_whole)


def _is_trainers(source: Source, func: Node) -> bool:
    """Return True for `accelerator.autocast`, whose dtype is set where the trainer is created."""
    if not isinstance(func, cst.Attribute) or func.attr.value != "autocast":
        return False
    return is_trainer(source, func.value)


def is_trainer(source: Source, node: Node) -> bool:
    """Return True if something is an `Accelerator` or a `Fabric`: by what makes it, or else by its name."""
    definition = source.instance(node)
    return definition in TRAINERS if definition is not None else dotted(node) in _TRAINER_NAMES


@once
def _regions(source: Source) -> list[Region]:
    return [*_regions_of_statements(source), *_regions_of_decorators(source)]


def _regions_of_statements(source: Source) -> Iterator[Region]:
    for statement in source.all(cst.With):
        for item in statement.items:
            result = _entered(source, statement, item.item)
            if result is not None:
                yield result
            elif item.asname is not None and isinstance(item.asname.name, cst.Name):
                yield from _on_stack(source, statement, item.asname.name)


def _regions_of_decorators(source: Source) -> Iterator[Region]:
    for function in source.all(cst.FunctionDef):
        for decorator in function.decorators:
            inner = decorator.decorator
            if isinstance(inner, cst.Call) and (result := region_of_call(source, function, inner)):
                yield result


def _on_stack(source: Source, statement: cst.With, stack: cst.Name) -> Iterator[Region]:
    """Yield the regions that `stack.enter_context(...)` enters first in `with ExitStack() as stack:`."""
    body = statement.body.body if isinstance(statement.body, cst.IndentedBlock) else ()
    for line in body:
        is_sure = isinstance(line, cst.SimpleStatementLine)
        calls = list(_contexts(line, stack.value))
        if not calls:
            return
        for call in calls:
            result = _entered(source, statement, call.args[0].value)
            if result is not None:
                yield (
                    result
                    if is_sure
                    else replace(result, enabled=None if result.enabled else result.enabled)
                )


def _contexts(line: Node, stack: str) -> Iterator[cst.Call]:
    """The calls of a stack's `enter_context` in a statement that does nothing else, or in a test with such ones."""
    if (
        isinstance(line, cst.If)
        and line.orelse is None
        and isinstance(line.body, cst.IndentedBlock)
    ):
        for inner in line.body.body:
            yield from _contexts(inner, stack)
    elif isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        call = line.body[0].value if isinstance(line.body[0], cst.Expr) else None
        if isinstance(call, cst.Call) and dotted(call.func) == f"{stack}.enter_context":
            yield from [call] if len(call.args) == 1 else []


def _entered(source: Source, statement: Node, item: Node, depth: int = _DEEP) -> Region | None:
    """The region that a `with` item enters: a call, a name for one, or one side of `autocast() if amp else other`."""
    definitions = _made_by(source, item)
    if (inner := _around_yield(source, item)) is not None and depth:
        results = [_entered(source, at, one.item, depth - 1) for at, one in inner]
        entries = [replace(region, node=statement) for region in results if region is not None]
        return entries[0] if len(entries) == 1 else None
    if len(definitions) > 1 and depth:
        sides = [_entered(source, statement, side, depth - 1) for side in definitions]
        entries = [side for side in sides if side is not None]
        if len(entries) != 1:
            return None
        return replace(entries[0], enabled=None if entries[0].enabled else entries[0].enabled)
    call = definitions[0] if definitions else None
    if not isinstance(call, cst.Call):
        return None
    if _is_trainers(source, call.func):
        return Region(statement, call, None, None, None, is_trainers=True)
    return region_of_call(source, statement, call)


def _around_yield(source: Source, item: Node) -> list[tuple[cst.With, cst.WithItem]] | None:
    """The `with` items around the one `yield` of a context manager of this file that a `with` item calls."""
    function = _generator(source, item) if isinstance(item, cst.Call) else None
    if function is None:
        return None
    yields = [node for node in walk(function.body) if isinstance(node, cst.Yield)]
    if len(yields) != 1:
        return None
    results: list[tuple[cst.With, cst.WithItem]] = []
    for outer in source.around(yields[0]):
        if outer is function:
            return results
        if isinstance(outer, (cst.If, cst.Lambda, cst.FunctionDef)):
            return None
        if isinstance(outer, cst.With):
            results += [(outer, one) for one in outer.items]
    return None


def _generator(source: Source, call: cst.Call) -> cst.FunctionDef | None:
    """The function that `contextlib.contextmanager` decorates and a call runs."""
    function = source.values.call_arguments.called_function(call)
    func = call.func
    if function is None and isinstance(func, cst.Attribute):
        definition = source.values.object_class(func.value)
        named = methods_named(definition, func.attr.value) if definition is not None else []
        function = named[0] if len(named) == 1 else None
    decorators = function.decorators if function is not None else ()
    origins = [source.origin(decorator.decorator) for decorator in decorators]
    return function if origins == ["contextlib.contextmanager"] else None


def _made_by(source: Source, item: Node) -> list[Node]:
    """Return the expressions that create what a `with` item enters: one, or both sides of a conditional."""
    if isinstance(item, cst.Name):
        result = values_seen(source, item)  # one of several where the code is straight
        definition = result[0].value if len(result) == 1 and result[0].kind == "assign" else None
        if isinstance(definition, cst.IfExp) or (
            definition and len(source.names.bindings(item)) > 1
        ):
            item = definition
    elif isinstance(item, cst.Attribute):
        item = the_value(source, item) or item
    if isinstance(item, cst.IfExp):
        return [item.body, item.orelse]
    returned = source.values.results(item) if isinstance(item, cst.Call) else []
    if len(returned) > 1:
        return returned
    if len(returned) == 1 and isinstance(returned[0], cst.IfExp):
        return [returned[0].body, returned[0].orelse]
    call = source.values.constructor(item)
    return [call] if call is not None else []


def _device(source: Source, node: Node | None) -> str | None:
    """The device type of a text, or of a name that gets one text and nothing else.

    It is "cuda" of `"cuda" if torch.cuda.is_available() else "cpu"`: there the defaults of CUDA count.
    """
    node = the_value(source, node)
    if isinstance(node, cst.Call) and source.names.builtin(node.func) == "str" and node.args:
        node = node.args[0].value
    elif isinstance(node, cst.Attribute) and node.attr.value == "type":
        node = node.value
    definition = source.values.constructor(node)
    if isinstance(definition, cst.Call) and source.origin(definition.func) == "torch.device":
        node = the_value(source, definition.args[0].value) if definition.args else None
    if isinstance(node, cst.IfExp) and isinstance(node.test, cst.Call):
        is_there = source.origin(node.test.func) == "torch.cuda.is_available"
        node = node.body if is_there else node
    text = string_value(node) if node is not None else None
    return text.partition(":")[0] if text else None


def _flag(source: Source, node: Node | None) -> bool | None:
    if node is None:
        return True
    node = the_value(source, node)
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    return None


def _dtype(source: Source, node: Node | None, device: str | None) -> str | None:
    if node is None:
        return DEFAULT_DTYPE.get(device or "")
    result = source.origin(node) or source.origin(the_value(source, node)) or _named(source, node)
    if result is None and (value := by_default(source, node)) is not None:
        # float16 that nobody has to ask for is there; another dtype may not be the one that is used
        result = default if (default := source.origin(value)) in _FLOAT16 else None
    return "torch.float16" if result in _FLOAT16 else result


def _named(source: Source, node: Node) -> str | None:
    """`torch.float16` of `{"fp16": torch.float16}[precision]`, or of a function."""
    definition = the_value(source, node)
    if isinstance(definition, cst.Subscript):
        index = definition.slice[0].slice
        argument = by_default(source, index.value) if isinstance(index, cst.Index) else None
        table = the_value(source, definition.value)
        text = string_value(argument) if argument is not None else None
        entries = table.elements if text and isinstance(table, cst.Dict) else ()
        for entry in entries:
            if isinstance(entry, cst.DictElement) and string_value(entry.key) == text:
                result = source.origin(entry.value)
                return result if result in _FLOAT16 else None
        return None
    if not isinstance(definition, cst.Call):
        return None
    origins = {source.origin(value) for value in source.values.results(definition)}
    return origins.pop() if len(origins) == 1 else None
