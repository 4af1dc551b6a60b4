"""Evaluation of an expression that contains PyTorch's version, for one release.

Invariants: strings, numbers, tuples and lists are Python's, so versions that are compared as strings give the same
wrong result here; `torch.__version__` and the result of a version parser compare as versions; any other expression is
unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from precast_lint.model import version
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings, walk

__all__ = ["SINCE", "evaluate_test", "names_releases", "value_given"]

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
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    cst.GreaterThanEqual: operator.ge,
    cst.GreaterThan: operator.gt,
    cst.LessThan: operator.lt,
    cst.LessThanEqual: operator.le,
    cst.Equal: operator.eq,
    cst.NotEqual: operator.ne,
    cst.Is: operator.is_,
    cst.IsNot: operator.is_not,
    cst.In: lambda one, other: one in other,
    cst.NotIn: lambda one, other: one not in other,
}
_CONSTANTS = {"True": True, "False": False, "None": None}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "tuple": tuple,
    "list": list,
    "int": int,
    "float": float,
    "str": lambda value: str.__str__(value) if isinstance(value, _Version) else str(value),
    "len": len,
}
_OF_TEXTS = {
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "startswith",
    "replace",
    "strip",
    "isdigit",
    "isnumeric",
}


class _Unknown(Exception):  # noqa: N818 - not an error
    """The value of an expression is not known."""


class _Version(str):
    """A string that compares as a version with other strings and with tuples of numbers."""

    __slots__ = ()

    def _compared(self, compare: Callable[[Any, Any], bool], other: object) -> bool:
        """Compare both as tuples of numbers of one length."""
        try:
            expected = version(other) if isinstance(other, str) else tuple(other)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise _Unknown from None
        if not all(isinstance(part, int) for part in expected):
            raise _Unknown
        own = version(self)
        width = max(len(own), len(expected))
        return compare(own + (0,) * (width - len(own)), expected + (0,) * (width - len(expected)))

    def __ge__(self, other: object) -> bool:
        return self._compared(operator.ge, other)

    def __gt__(self, other: object) -> bool:
        return self._compared(operator.gt, other)

    def __le__(self, other: object) -> bool:
        return self._compared(operator.le, other)

    def __lt__(self, other: object) -> bool:
        return self._compared(operator.lt, other)

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other)

    __hash__ = str.__hash__


def evaluate_test(source: Source, node: Node, release: str) -> bool | None:
    """Return the result of a test for a release; None if it is unknown.

    Operands of `and` without a comparison (`torch.cuda.is_available()`) are ignored.
    """
    if isinstance(node, cst.BooleanOperation):
        sides = (node.left, node.right)
        parts = [evaluate_test(source, side, release) for side in sides]
        if isinstance(node.operator, cst.Or):
            return None if None in parts else any(parts)
        entries = [
            part
            for side, part in zip(sides, parts, strict=True)
            if part is not None or _compares(side)
        ]
        return None if not entries or None in entries else all(entries)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        inner = evaluate_test(source, node.expression, release)
        return None if inner is None else not inner
    try:
        value = _VersionReader(source, release).value(node)
    except (_Unknown, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        return None
    return bool(value) if value is None or isinstance(value, bool) else None


def names_releases(source: Source, node: Node) -> bool:
    """Return True if a test names single releases, so that its result for newer ones may differ on purpose."""
    exact = (cst.Equal, cst.NotEqual, cst.In, cst.NotIn)
    inner = list(walk(node))
    values = [value_given(source, n) for n in inner if isinstance(n, (cst.Name, cst.Attribute))]
    return any(
        isinstance(n, exact) or (isinstance(n, cst.Name) and n.value == "startswith")
        for part in (inner, *(walk(value) for value in values))
        for n in part
    )


def _compares(side: Node) -> bool:
    """Return True if a test contains a comparison or an index."""
    return any(isinstance(n, (cst.Comparison, cst.Subscript)) for n in walk(side))


class _VersionReader:
    """Computes expressions for one release."""

    def __init__(self, source: Source, release: str) -> None:
        self.source = source
        self.release = release
        self.depth = 0

    def value(self, node: Node, local: Mapping[str, Any] | None = None) -> Any:
        """Return the value of an expression; `local` are the variables of the comprehensions around it.

        Raises:
            _Unknown: the value is unknown.
        """
        self.depth += 1
        try:
            if self.depth > _DEEPEST:
                raise _Unknown
            return self._value(node, local or {})
        finally:
            self.depth -= 1

    def _value(self, node: Node, local: Mapping[str, Any]) -> Any:
        if isinstance(node, cst.Name) and node.value in local:
            return local[node.value]
        origin = self.source.origin(node)
        if origin == "torch.__version__":
            return self._own()
        if origin == "torch.version.__version__":
            return self.release
        if isinstance(node, cst.Name) and node.value in _CONSTANTS:
            return _CONSTANTS[node.value]
        if (value := value_given(self.source, node)) is not node:
            return self.value(value, local)
        if (part := _unpacked(self.source, node)) is not None:
            return tuple(self.value(part[0], local))[part[1]]
        return self._computed(node, local)

    def _own(self) -> str:
        """Return `torch.__version__`, which is a plain string up to PyTorch 1.9."""
        is_plain = self.source.min_torch is not None and version(self.release) < (1, 10)
        return self.release if is_plain else _Version(self.release)

    def _computed(self, node: Node, local: Mapping[str, Any]) -> Any:
        if isinstance(node, cst.Integer):
            return int(node.value)
        if isinstance(node, cst.Float):
            return float(node.value)
        if (text := strings(node)) is not None:
            return text
        if isinstance(node, (cst.Tuple, cst.List)):
            parts = [self.value(element.value, local) for element in node.elements]
            return tuple(parts) if isinstance(node, cst.Tuple) else parts
        if isinstance(node, cst.Subscript):
            return self.value(node.value, local)[self._index(node)]
        if isinstance(node, cst.Comparison):
            return self._comparison(node, local)
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self._comprehension(node, local)
        if isinstance(node, cst.Attribute):
            return self._attribute(node, local)
        if isinstance(node, cst.Call):
            return self._call(node, local)
        raise _Unknown

    def _index(self, node: cst.Subscript) -> int | slice:
        if len(node.slice) != 1:
            raise _Unknown
        part = node.slice[0].slice
        if isinstance(part, cst.Index):
            return self._number(part.value)
        if not isinstance(part, cst.Slice):
            raise _Unknown
        lower, upper, step = (
            None if end is None else self._number(end)
            for end in (part.lower, part.upper, part.step)
        )
        return slice(lower, upper, step)

    def _number(self, node: Node) -> int:
        if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
            return -self._number(node.expression)
        if not isinstance(node, cst.Integer):
            raise _Unknown
        return int(node.value)

    def _comparison(self, node: cst.Comparison, local: Mapping[str, Any]) -> bool:
        one, result = self.value(node.left, local), True
        for target in node.comparisons:
            compare = _COMPARE.get(type(target.operator))
            # a name that is compared with None may be a module
            is_unsure = (
                compare in (operator.is_, operator.is_not) and type(node.left) is not cst.Call
            )
            if compare is None or is_unsure:
                raise _Unknown
            other = self.value(target.comparator, local)
            result, one = result and compare(one, other), other
        return result

    def _comprehension(
        self, node: cst.ListComp | cst.GeneratorExp, local: Mapping[str, Any]
    ) -> list[Any]:
        part = node.for_in
        if not isinstance(part.target, cst.Name) or part.inner_for_in is not None:
            raise _Unknown
        results = []
        for item in self.value(part.iter, local):
            inner = {**local, part.target.value: item}
            if all(self.value(test.test, inner) for test in part.ifs):
                results.append(self.value(node.elt, inner))
        return results

    def _attribute(self, node: cst.Attribute, local: Mapping[str, Any]) -> Any:
        """`Version(...).release` and its parts."""
        owner = self.value(node.value, local)
        numbers = version(owner) if isinstance(owner, _Version) else ()
        places = {"major": 0, "minor": 1, "micro": 2}
        if node.attr.value in ("release", "version") and numbers:
            return numbers
        if node.attr.value in ("base_version", "public") and numbers:
            return str.__str__(owner)
        if node.attr.value not in places or not numbers:
            raise _Unknown
        return (*numbers, 0, 0)[places[node.attr.value]]

    def _call(self, node: cst.Call, local: Mapping[str, Any]) -> Any:
        if (since := _since_of_name(self.source, node)) is not None:
            is_there = version(self.release) >= version(since)
            return is_there if len(node.args) == 2 else is_there or None
        if any(arg.star or arg.keyword for arg in node.args):
            raise _Unknown
        name = self.source.names.builtin(node.func)
        if name == "map" and len(node.args) == 2:
            convert = _BUILTINS.get(self.source.names.builtin(node.args[0].value) or "")
            if convert is None:
                raise _Unknown
            return [convert(item) for item in self.value(node.args[1].value, local)]
        if name is not None and name not in _BUILTINS:
            raise _Unknown
        returned = self.source.values.returned(node)
        if len(returned) == 1 and not node.args:
            return self.value(returned[0], local)
        arguments = [self.value(arg.value, local) for arg in node.args]
        if name is not None:
            return _BUILTINS[name](*arguments)
        if _PARSERS.fullmatch(self.source.origin(node.func) or ""):
            text = arguments[0] if len(arguments) == 1 else None
            if not isinstance(text, str):
                raise _Unknown
            return _Version(text)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in _OF_TEXTS:
            owner = self.value(node.func.value, local)
            if isinstance(owner, str):
                return getattr(str.__str__(owner), node.func.attr.value)(*arguments)
        raise _Unknown


def _since_of_name(source: Source, call: cst.Call) -> str | None:
    """Return the version that introduced the name in `hasattr` or `getattr(..., None)`."""
    arguments = {"hasattr": 2, "getattr": 3}.get(source.names.builtin(call.func) or "")
    if len(call.args) != arguments or not all(is_none(arg.value) for arg in call.args[2:]):
        return None
    path = f"{source.names.path(call.args[0].value)}.{strings(call.args[1].value)}"
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


def value_given(source: Source, node: Node) -> Node:
    """Return the only value of a name or an attribute of self, or the expression itself."""
    result = source.values.sources(node)
    if len(result) != 1 or source.origin(node) is not None:
        return node
    return result[0][0] if result[0][0] is not None else node
