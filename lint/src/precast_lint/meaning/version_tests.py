"""What one comparison asks about PyTorch's version, for which releases it holds, and for which it should.

Invariants: a test that is not understood is None, and so is whether it holds; a release is a text with three numbers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from precast_lint.meaning.versions import PARSERS, text_cut, value_given, version_kind
from precast_lint.model import version
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings

__all__ = ["SINCE", "VersionTest", "since_of_name", "version_test"]

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
# Names that are older than those in question.
_OLDER = {
    "torch.cuda.amp": "1.6",
    "torch.cuda.amp.autocast": "1.6",
    "torch.cuda.amp.GradScaler": "1.6",
    "torch.amp": "1.12",
}
_TEXT_BEFORE = {"text": None, "parsed": "0", "own": "1.10"}
_Operator = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class VersionTest:
    """`torch.__version__ >= "1.10"`: how it compares, with what, and up to which release as texts.

    Attributes:
        compare: the operator.
        bound: where the version stands that it compares with; None where nothing can be changed.
        wanted: that version.
        text_before: the first release that is compared as a version; None: none is.
        parts: how many numbers of the version are looked at.
        as_number: whether "1.10" is read as the number 1.1.
        characters: of the text that are looked at; None: all.
    """

    compare: _Operator
    bound: Node | None
    wanted: str
    text_before: str | None = "0"
    parts: int = 3
    as_number: bool = False
    characters: int | None = None

    def holds(self, release: str) -> bool:
        """Whether it lets a release through."""
        if self.as_number:
            return self.compare(float(".".join(release.split(".")[:2])), float(self.wanted))
        if self.text_before is None or version(release) < version(self.text_before):
            return self.compare(release[: self.characters], self.wanted)
        return self.right(release)

    def right(self, release: str) -> bool:
        """Whether it should."""
        one, other = version(release)[: self.parts], version(self.wanted)
        width = max(len(one), len(other))
        return self.compare(one + (0,) * (width - len(one)), other + (0,) * (width - len(other)))


def version_test(source: Source, node: Node) -> VersionTest | None:
    """What an expression, or the one that a name is given, asks about PyTorch's version."""
    node = value_given(source, node)
    if isinstance(node, cst.Call):
        return _asks_for_name(source, node)
    if not isinstance(node, cst.Comparison) or len(node.comparisons) != 1:
        return None
    target = node.comparisons[0]
    if isinstance(target.operator, cst.IsNot) and is_none(target.comparator):
        return _asks_for_name(source, node.left) if isinstance(node.left, cst.Call) else None
    compare = _operator(target.operator)
    kind = version_kind(source, node.left)
    bound: Node = target.comparator
    cut = text_cut(source, node.left) if kind is None else None
    kind = "text" if cut is not None else kind
    if compare is None or kind is None:
        return None
    if kind == "numbers":
        numbers = _numbers(value_given(source, bound))
        named = isinstance(bound, cst.Name)  # others may compare with it
        return VersionTest(compare, None if named else bound, numbers) if numbers else None
    if kind in ("number", "major"):
        bound = value_given(source, bound)
        if not isinstance(bound, (cst.Float, cst.Integer)):
            return None
        if kind == "number":
            return VersionTest(compare, None, bound.value, as_number=True)
        return (
            VersionTest(compare, None, bound.value, parts=1)
            if isinstance(bound, cst.Integer)
            else None
        )
    inner = _bound(source, bound)
    wanted = strings(inner) if inner is not None else None
    if not re.fullmatch(r"\d+(\.\d+){0,2}", wanted or ""):
        return None
    named = inner is None or bound not in (inner, *source.around(inner))
    place = None if named else inner
    return VersionTest(compare, place, wanted or "", _TEXT_BEFORE[kind], characters=cut)


def _asks_for_name(source: Source, call: cst.Call) -> VersionTest | None:
    """`hasattr(torch, "autocast")`, which holds from the version that introduced the name, and `getattr(..., None)`."""
    since = since_of_name(source, call)
    return VersionTest(operator.ge, None, since) if since is not None else None


def since_of_name(source: Source, call: cst.Call) -> str | None:
    """The version that introduced the name that `hasattr` or `getattr(..., None)` asks for."""
    arguments = {"hasattr": 2, "getattr": 3}.get(source.names.builtin(call.func) or "")
    if len(call.args) != arguments or not all(is_none(arg.value) for arg in call.args[2:]):
        return None
    path = f"{source.names.path(call.args[0].value)}.{strings(call.args[1].value)}"
    return _OLDER.get(path) or SINCE.get(path)


def _numbers(node: Node) -> str | None:
    """`(1, 10)` as "1.10"."""
    if not isinstance(node, cst.Tuple):
        return None
    parts = [element.value for element in node.elements]
    if not parts or not all(isinstance(part, cst.Integer) for part in parts):
        return None
    return ".".join(part.value for part in parts if isinstance(part, cst.Integer))


def _operator(node: Node) -> _Operator | None:
    found: dict[type, _Operator] = {
        cst.GreaterThanEqual: operator.ge,
        cst.GreaterThan: operator.gt,
        cst.LessThan: operator.lt,
        cst.LessThanEqual: operator.le,
    }
    return found.get(type(node))


def _bound(source: Source, node: Node) -> Node | None:
    """The text of a version, as it is or in `version.parse("1.10")`, or what a name is given."""
    node = value_given(source, node)
    if isinstance(node, cst.Call) and PARSERS.fullmatch(source.origin(node.func) or ""):
        node = value_given(source, node.args[0].value) if len(node.args) == 1 else node
    return node if isinstance(node, cst.SimpleString) and strings(node) else None
