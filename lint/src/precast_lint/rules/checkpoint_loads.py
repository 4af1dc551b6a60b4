"""Where a file loads the optimizer's state of a checkpoint, and can load the scaler's behind it.

Invariant: the scaler is known there by its name, and made before, on every path; where that is not certain, nothing is
loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.lines import block_of, insert_after, line_of
from precast_lint.meaning.assignments import values_seen
from precast_lint.model import Edit
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.scopes import Binding, Scope
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import key

__all__ = ["SCALER_NAME", "key_loaded", "loads"]

SCALER_NAME = re.compile(r"scal|\bamp\b", re.IGNORECASE)
"""What the names of scalers, and of what has one, look like."""


def loads(source: Source, made: cst.Call, name: str, keys: set[str]) -> list[Edit]:
    """The statements that load a scaler's state, behind those that load an optimizer's.

    Args:
        source: the file.
        made: the call that makes the scaler.
        name: what the scaler is called where it is saved.
        keys: what the optimizers' states are called in the checkpoint.
    """
    calls = list(source.methods("load_state_dict"))
    if any(
        source.instance(owner) in SCALERS or SCALER_NAME.search(key(source, owner) or "")
        for _, owner, _ in calls
    ):
        return []
    last: dict[tuple[Node, str], tuple[Node, str]] = {}
    for call, _, arguments in calls:
        line = line_of(source, call)
        state = _state(source, arguments, keys)
        if line is None or state is None or not _is_whole(line, call):
            continue
        known = _known_as(source, call, line, made, name)
        if known is not None:
            last[source.parents[line], state] = line, known
    return [_edit(source, line, state, known, made) for (_, state), (line, known) in last.items()]


def key_loaded(source: Source) -> str:
    """What the state of a scaler is called where the file loads it: "amp" of `state["amp"]`; else "scaler"."""
    found: set[str] = set()
    for _, owner, arguments in source.methods("load_state_dict"):
        named = SCALER_NAME.search(key(source, owner) or "")
        given = arguments.positional[0] if len(arguments.positional) == 1 else None
        if given is None or (source.instance(owner) not in SCALERS and not named):
            continue
        seen = values_seen(source, given) if isinstance(given, cst.Name) else []
        if len(seen) == 1 and seen[0].kind == "assign" and seen[0].value is not None:
            given = seen[0].value  # `state = checkpoint.get("amp")`
        text = _key_of(given)
        if text:
            found.add(text)
    return found.pop() if len(found) == 1 else "scaler"


def _key_of(item: Node) -> str | None:
    """The text in `state["amp"]`, `state.get("amp")` and `state.pop("amp")`."""
    if isinstance(item, cst.Subscript):
        index = item.slice[0].slice
        return strings(index.value) if isinstance(index, cst.Index) else None
    func = item.func if isinstance(item, cst.Call) else None
    if not isinstance(func, cst.Attribute) or func.attr.value not in ("get", "pop"):
        return None
    args = item.args if isinstance(item, cst.Call) else ()
    return strings(args[0].value) if args else None


def _edit(source: Source, line: Node, state: str, name: str, made: cst.Call) -> Edit:
    """Older checkpoints have no state of a scaler, and a scaler that was off has an empty one, which none can load."""
    module = source.module
    assert isinstance(module, cst.Module)
    start = source.span(line).start
    indent = source.text.data[source.text.line_start(start) : start].decode()
    entry = f"{source.quote}scaler{source.quote}"
    test = f"{entry} in {state}" if _is_on(made) else f"{state}.get({entry})"
    load = f"{indent}{module.default_indent}{name}.load_state_dict({state}[{entry}])"
    return insert_after(source, line, f"if {test}:{source.text.newline}{load}")


def _is_on(made: cst.Call) -> bool:
    """Whether nothing but True is said of whether a scaler is on."""
    arguments = Arguments.of(made)
    enabled = arguments.get("enabled")
    is_true = enabled is None or (isinstance(enabled, cst.Name) and enabled.value == "True")
    return is_true and not arguments.starred and len(arguments.positional) < 2


def _is_whole(line: cst.SimpleStatementLine, call: cst.Call) -> bool:
    """Whether a call is all that a statement is."""
    statement = line.body[0]
    return isinstance(statement, cst.Expr) and statement.value is call


def _state(source: Source, arguments: Arguments, keys: set[str]) -> str | None:
    """The name of the checkpoint, read from a file, of which an optimizer's state is loaded: `state["optimizer"]`."""
    item = arguments.positional[0] if len(arguments.positional) == 1 else None
    if not isinstance(item, cst.Subscript) or not isinstance(item.value, cst.Name):
        return None
    index = item.slice[0].slice
    if not isinstance(index, cst.Index) or strings(index.value) not in keys:
        return None
    seen = values_seen(source, item.value)
    read = seen[0].value if len(seen) == 1 and seen[0].kind == "assign" else None
    is_read = isinstance(read, cst.Call) and source.origin(read.func) == "torch.load"
    return item.value.value if is_read else None


def _known_as(source: Source, call: Node, line: Node, made: cst.Call, name: str) -> str | None:
    """What a scaler that is made before in any case is called at a place."""
    if name.startswith("self."):
        return name if _is_of_object(source, line, made, name.partition(".")[2]) else None
    scope: Scope | None = source.scope(call)
    found: list[str] = []
    while scope is not None:
        found += _names(source, scope, call, line, made)
        scope = scope.parent
    if name in found:
        return name
    return found[0] if len(found) == 1 else None


def _names(source: Source, scope: Scope, call: Node, line: Node, made: cst.Call) -> Iterator[str]:
    """The names of a scope that stand for a scaler at a place."""
    for name, bindings in scope.bindings.items():
        if len(bindings) != 1 or source.scope(call).home(name) is not scope:
            continue
        if _is_handed(source, bindings[0], made) or _is_made(source, bindings[0], line, made):
            yield name


def _is_handed(source: Source, binding: Binding, made: cst.Call) -> bool:
    """Whether a parameter gets a scaler from each call."""
    given = source.values.handed.whatever_to(binding) if binding.value is None else []
    return bool(given) and all(source.values.constructed(value) is made for value in given)


def _is_made(source: Source, binding: Binding, line: Node, made: cst.Call) -> bool:
    """Whether a name is given a scaler in a statement that comes before a line in any case."""
    if binding.kind not in ("assign", "annotated") or not isinstance(binding.value, cst.Call):
        return False
    is_it = source.values.constructed(binding.value) is made
    return is_it and _precedes(source, source.statement(binding.node), line)


def _precedes(source: Source, first: Node, line: Node) -> bool:
    """Whether a statement, or one around it in the same block, comes behind another one of that block."""
    block = block_of(source, first)
    around = {line, *source.around(line)}
    places = [place for place, statement in enumerate(block) if statement in around]
    return bool(places) and block.index(first) < places[0]


def _is_of_object(source: Source, line: Node, made: cst.Call, attribute: str) -> bool:
    """Whether a method's object has a scaler when a line of it runs: `__init__` makes it, and runs no method before."""
    function, home = source.function(line), source.values.enclosing_class(line)
    if function is None or not isinstance(home, cst.ClassDef):
        return False
    first = function.params.params[:1]
    is_method = source.parents[source.parents[function]] is home
    if not is_method or not first or first[0].name.value != "self":
        return False
    store = _store(source, home, made, attribute)
    if store is None:
        return False
    init = source.function(store)
    if function is init:
        return _precedes(source, store, line)
    before = block_of(source, store)
    before = before[: before.index(store)]
    return not any(_runs_method(source, home, node) for part in before for node in walk(part))


def _store(source: Source, home: cst.ClassDef, made: cst.Call, attribute: str) -> Node | None:
    """The statement of `__init__`, under no test, that gives an attribute its one value, a scaler."""
    stored = source.values.attributes(home).get(attribute, [])
    value = stored[0][0] if len(stored) == 1 else None
    related = source.values.family.related(home)
    if value is None or any(attribute in source.values.attributes(other) for other in related):
        return None
    if not isinstance(value, cst.Call) or source.values.constructed(value) is not made:
        return None
    line = source.statement(value)
    init = source.function(value)
    is_init = init is not None and init.name.value == "__init__"
    is_own = is_init and source.parents[line] is init.body  # type: ignore[union-attr]
    return line if is_own and source.parents[source.parents[init]] is home else None  # type: ignore[index]


def _runs_method(source: Source, home: cst.ClassDef, node: Node) -> bool:
    """Whether a node runs a method of the object that a class of this file gives it: `self.resume(path)`."""
    func = node.func if isinstance(node, cst.Call) else None
    if not isinstance(func, cst.Attribute) or key(source, func.value) not in ("self", "super()"):
        return False
    family = source.values.family
    return any(
        isinstance(line, cst.FunctionDef) and line.name.value == func.attr.value
        for one in (home, *family.bases(home), *family.related(home))
        for line in one.body.body
    )
