"""Evaluation of a test of PyTorch's version, for many releases.

A test is written as one Python expression, in which `own` is `torch.__version__` and names have been replaced by their
values. Python then computes that expression for each release.

Invariants: the expression contains nothing but literals, comparisons, indexes, comprehensions, and the functions,
methods and attributes that this file lists; a test that needs anything else is unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from precast_lint.model import version
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, string_value, walk

__all__ = ["SINCE", "evaluate_test", "names_releases", "single_value"]

SINCE = {
    "torch.autocast": "1.10",
    "torch.amp.autocast": "1.12",
    "torch.amp.GradScaler": "2.3",
    "torch.amp.custom_fwd": "2.4",
    "torch.amp.custom_bwd": "2.4",
    "torch.amp.is_autocast_available": "2.4",
    "torch.get_autocast_dtype": "2.4",
    "torch.set_autocast_dtype": "2.4",
    "torch.cpu.amp.autocast": "1.10",
    "torch.cpu.amp.GradScaler": "2.3",
}
# Older names.
_OLDER = {
    "torch.cuda.amp": "1.6",
    "torch.cuda.amp.autocast": "1.6",
    "torch.cuda.amp.GradScaler": "1.6",
    "torch.amp": "1.12",
}
_PARSERS = re.compile(r"(packaging\.version\.(parse|Version)|.*\.(parse_version|LooseVersion))")
_DEEPEST = 20  # the limit of nested expressions
_BUILTINS = {kind.__name__: kind for kind in (tuple, list, int, float, str, len, map)}
_METHODS = re.compile(r"r?split|r?partition|startswith|replace|strip|isdigit|isnumeric")
_ATTRIBUTES = re.compile(r"release|version|base_version|public|major|minor|micro")


class _Unknown(Exception):  # noqa: N818 - not an error
    """The value of an expression is not known."""


def _comparing(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a comparison of a version with a string or a tuple, as tuples of numbers of one length."""

    def compared(one: str, other: object) -> bool:
        expected = version(other) if isinstance(other, str) else tuple(other)  # type: ignore[arg-type]
        if not all(isinstance(part, int) for part in expected):
            raise TypeError
        own = version(one)
        width = max(len(own), len(expected))
        return compare(own + (0,) * (width - len(own)), expected + (0,) * (width - len(expected)))

    return compared


class _Version(str):
    """A string that compares as a version with other strings and with tuples of numbers."""

    __slots__ = ()
    __ge__, __gt__ = _comparing(operator.ge), _comparing(operator.gt)
    __le__, __lt__ = _comparing(operator.le), _comparing(operator.lt)
    __eq__, __ne__ = _comparing(operator.eq), _comparing(operator.ne)
    __hash__ = str.__hash__

    def __getattr__(self, name: str) -> Any:
        if name in ("release", "version"):
            return version(self)
        if name in ("base_version", "public"):
            return str(self)
        return (*version(self), 0, 0)[("major", "minor", "micro").index(name)]


def evaluate_test(source: Source, node: Node, releases: Iterable[str]) -> dict[str, bool] | None:
    """Return the result of a test for each release; None if one is unknown."""
    try:
        code = compile(_written(source, node, _DEEPEST), "test", "eval")
    except (_Unknown, RecursionError):
        return None
    results: dict[str, bool] = {}
    for release in releases:
        try:
            value = eval(code, _variables(source, release))  # no names but those
        except (TypeError, ValueError, LookupError, AttributeError, NameError):
            return None
        if value is not None and not isinstance(value, bool):
            return None
        results[release] = bool(value)
    return results


def _variables(source: Source, release: str) -> dict[str, Any]:
    """Return the names of an expression. `torch.__version__` is a plain string up to PyTorch 1.9."""
    number = version(release)
    is_plain = source.min_torch is not None and number < (1, 10)
    return {
        "__builtins__": _BUILTINS,
        "own": release if is_plain else _Version(release),
        "plain": release,
        "Version": _Version,
        "has": lambda since: number >= version(since),
    }


def names_releases(source: Source, node: Node) -> bool:
    """Return True if a test names single releases, so that its result for newer ones may differ on purpose."""
    exact = (cst.Equal, cst.NotEqual, cst.In, cst.NotIn)
    inner = list(walk(node))
    values = [single_value(source, n) for n in inner if isinstance(n, (cst.Name, cst.Attribute))]
    return any(
        isinstance(n, exact) or (isinstance(n, cst.Name) and n.value == "startswith")
        for part in (inner, *(walk(value) for value in values))
        for n in part
    )


def _written(source: Source, node: Node, depth: int) -> str:  # noqa: PLR0912 - a case for each kind
    """Return the text of an expression with the values of its names.

    Raises:
        _Unknown: the expression contains something else than versions.
    """
    if depth == 0:
        raise _Unknown

    def again(inner: Node) -> str:
        return _written(source, inner, depth - 1)

    origin = source.origin(node)
    if origin == "torch.__version__":
        return "own"
    if origin == "torch.version.__version__":
        return "plain"
    if (value := single_value(source, node)) is not node:
        return again(value)
    if (part := _unpacked(source, node)) is not None:
        return f"tuple({again(part[0])})[{part[1]}]"
    if isinstance(node, cst.Name):
        return _name(source, node)
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.value
    if (text := string_value(node)) is not None:
        return repr(text)
    if isinstance(node, (cst.Tuple, cst.List)):
        inside = "".join(f"{again(element.value)}, " for element in node.elements)
        return f"({inside})" if isinstance(node, cst.Tuple) else f"[{inside}]"
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        return f"{again(node.value)}[{_index(node.slice[0].slice, again)}]"
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, (cst.Not, cst.Minus)):
        return f"({_sign(node.operator)} {again(node.expression)})"
    if isinstance(node, cst.BooleanOperation):
        return _sides(node, again)
    if isinstance(node, cst.Comparison):
        return _comparison(node, again)
    if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
        return f"[{again(node.elt)} {_loop(node.for_in, again)}]"
    if isinstance(node, cst.Attribute) and _ATTRIBUTES.fullmatch(node.attr.value):
        return f"{again(node.value)}.{node.attr.value}"
    if isinstance(node, cst.Call):
        return _call(source, node, again)
    raise _Unknown


def _name(source: Source, node: cst.Name) -> str:
    """Return the name of a constant, of a builtin function, or of a variable of a comprehension."""
    if node.value in ("True", "False", "None") or source.names.builtin(node) in _BUILTINS:
        return node.value
    binding = source.names.only_binding(node)
    if binding is None or not isinstance(source.parents[binding.node], cst.CompFor):
        raise _Unknown
    return f"{node.value}_"


def _index(index: Node, again: Callable[[Node], str]) -> str:
    if isinstance(index, cst.Index):
        return again(index.value)
    assert isinstance(index, cst.Slice)
    parts = (index.lower, index.upper, index.step)
    return ":".join("" if part is None else again(part) for part in parts)


def _sign(operation: Node) -> str:
    return cst.Module(body=[]).code_for_node(operation).strip()


def _sides(node: cst.BooleanOperation, again: Callable[[Node], str]) -> str:
    """Return `and` and `or`; operands of `and` without a comparison (`torch.cuda.is_available()`) are ignored."""
    texts = []
    for side in (node.left, node.right):
        try:
            texts.append(again(side))
        except _Unknown:
            if isinstance(node.operator, cst.Or) or _compares(side):
                raise
    if not texts:
        raise _Unknown
    return f"({f' {_sign(node.operator)} '.join(texts)})"


def _compares(side: Node) -> bool:
    return any(isinstance(n, (cst.Comparison, cst.Subscript)) for n in walk(side))


def _comparison(node: cst.Comparison, again: Callable[[Node], str]) -> str:
    result = again(node.left)
    for target in node.comparisons:
        # a name that is compared with None may be a module
        if isinstance(target.operator, (cst.Is, cst.IsNot)) and type(node.left) is not cst.Call:
            raise _Unknown
        result += f" {_sign(target.operator)} {again(target.comparator)}"
    return f"({result})"


def _loop(loop: cst.CompFor, again: Callable[[Node], str]) -> str:
    if not isinstance(loop.target, cst.Name) or loop.inner_for_in is not None:
        raise _Unknown
    tests = "".join(f" if {again(part.test)}" for part in loop.ifs)
    return f"for {loop.target.value}_ in {again(loop.iter)}{tests}"


def _call(source: Source, node: cst.Call, again: Callable[[Node], str]) -> str:
    if (since := _since_of_name(source, node)) is not None:
        return f"has({since!r})" if len(node.args) == 2 else f"(has({since!r}) or None)"
    if any(arg.star or arg.keyword for arg in node.args):
        raise _Unknown
    returned = source.values.results(node)
    if len(returned) == 1 and not node.args:
        return again(returned[0])
    arguments = ", ".join(again(arg.value) for arg in node.args)
    if source.names.builtin(node.func) in _BUILTINS:
        return f"{again(node.func)}({arguments})"
    if _PARSERS.fullmatch(source.origin(node.func) or ""):
        return f"Version({arguments})"
    if isinstance(node.func, cst.Attribute) and _METHODS.fullmatch(node.func.attr.value):
        return f"str({again(node.func.value)}).{node.func.attr.value}({arguments})"
    raise _Unknown


def _since_of_name(source: Source, call: cst.Call) -> str | None:
    """Return the version that introduced the name in `hasattr` or `getattr(..., None)`."""
    arguments = {"hasattr": 2, "getattr": 3}.get(source.names.builtin(call.func) or "")
    if len(call.args) != arguments or not all(is_none(arg.value) for arg in call.args[2:]):
        return None
    path = f"{source.names.path(call.args[0].value)}.{string_value(call.args[1].value)}"
    return _OLDER.get(path) or SINCE.get(path)


def _unpacked(source: Source, node: Node) -> tuple[Node, int] | None:
    """Return the value that a name is unpacked from, and its position: `major, minor = ...`."""
    binding = source.names.only_binding(node)
    line = source.statement(binding.node) if binding is not None else None
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if binding is None or not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0].target
    if not isinstance(target, (cst.Tuple, cst.List)):
        return None
    places: list[Node] = [element.value for element in target.elements]
    return (statement.value, places.index(binding.node)) if binding.node in places else None


def single_value(source: Source, node: Node) -> Node:
    """Return the only value of a name or an attribute of self, or the expression itself."""
    result = source.values.sources(node)
    if len(result) != 1 or source.origin(node) is not None:
        return node
    return result[0][0] if result[0][0] is not None else node
