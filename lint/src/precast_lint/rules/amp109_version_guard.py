"""AMP109: a test of PyTorch's version that is wrong for some version."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from precast_lint.meaning.guards import is_version_test
from precast_lint.meaning.versions import PARSERS, minor_kind, text_cut, value_given, version_kind
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity, version
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, strings, walk
from precast_lint.torch_versions import MINORS

__all__ = ["RULE"]

_RELEASES = tuple(f"{minor}.0" for minor in MINORS)
_SINCE = {
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
_MENTIONED = re.compile(
    r"torch\.(cuda\.|cpu\.)?amp\.\w+|torch\.autocast|torch\.[gs]et_autocast_dtype"
)
_AS_TEXT = "this compares versions as texts: it is wrong for PyTorch {found}"
_TOO_EARLY = "`{name}` is there from PyTorch {since}; this lets {found} through"
_GAP = "this holds otherwise for PyTorch {found} than for {first}, which is older: compare whole versions"
_Operator = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class _Test:
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


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each test under which AMP is used and that is wrong for some release."""
    releases = [
        r for r in _RELEASES if source.min_torch is None or version(r) >= version(source.min_torch)
    ]
    statements: list[cst.If | cst.IfExp] = [*source.all(cst.If), *source.all(cst.IfExp)]
    for statement in statements:
        test = _test(source, statement.test)
        if test is None:
            message = _gap(source, statement, releases)
            if message is not None and any(_mentions(source, statement)):
                yield source.find(RULE, statement.test, message)
            continue
        wrong = [r for r in releases if test.holds(r) != test.right(r)]
        if wrong:
            if any(_mentions(source, statement)):
                message = _AS_TEXT.format(found=_listed(wrong))
                yield source.find(RULE, statement.test, message)
        else:
            yield from _too_early(source, statement, test, releases)


def _gap(source: Source, statement: cst.If | cst.IfExp, releases: list[str]) -> str | None:
    """What is wrong with a test of several parts that holds for some release, and not for a newer one."""
    if any(_is_about_version(source, outer) for outer in source.around(statement)):
        return None
    test = value_given(source, statement.test)
    found = [(release, _holds(source, test, release)) for release in releases]
    if None in (holds for _, holds in found):
        return None
    older = _holds(source, test, "0.0.0")  # whether it asks for older versions
    first = next((release for release, holds in found if holds is not older), None)
    after = [] if first is None else found[releases.index(first) :]
    wrong = [release for release, holds in after if holds is older]
    return _GAP.format(found=_listed(wrong), first=_listed([first])) if wrong and first else None


def _is_about_version(source: Source, outer: Node) -> bool:
    """Whether a test around another one looks at PyTorch's version, too."""
    if not isinstance(outer, (cst.If, cst.IfExp)):
        return False
    return any(
        version_kind(source, n.left) is not None or minor_kind(source, n.left) is not None
        for n in walk(outer.test)
        if isinstance(n, cst.Comparison)
    )


def _holds(source: Source, node: Node, release: str) -> bool | None:
    """Whether a test lets a release through; None where that is not known."""
    if isinstance(node, cst.BooleanOperation):
        parts = [_holds(source, side, release) for side in (node.left, node.right)]
        if isinstance(node.operator, cst.Or):
            return None if None in parts else any(parts)
        unknown = [side for side in (node.left, node.right) if not _compares(side)]
        known = [
            part
            for side, part in zip((node.left, node.right), parts, strict=True)
            if not (part is None and side in unknown)
        ]
        return None if not known or None in known else all(known)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        inner = _holds(source, node.expression, release)
        return None if inner is None else not inner
    if not isinstance(node, cst.Comparison):
        return None
    test = _test(source, node)
    return test.holds(release) if test is not None else _minor_holds(source, node, release)


def _compares(node: Node) -> bool:
    """Whether a test compares anything: what does not has nothing to do with versions."""
    return any(isinstance(n, (cst.Comparison, cst.Subscript)) for n in walk(node))


def _minor_holds(source: Source, node: cst.Comparison, release: str) -> bool | None:
    """`minor >= 6`, as a number or as a text."""
    kind = minor_kind(source, node.left)
    compare = _operator(node.comparisons[0].operator)
    wanted = value_given(source, node.comparisons[0].comparator)
    if kind is None or compare is None or len(node.comparisons) != 1:
        return None
    minor = release.split(".")[1]
    if kind == "number" and isinstance(wanted, cst.Integer):
        return compare(int(minor), int(wanted.value))
    text = strings(wanted) if kind == "text" else None
    return compare(minor, text) if text is not None else None


def _too_early(
    source: Source, statement: cst.If | cst.IfExp, test: _Test, releases: list[str]
) -> Iterator[Finding]:
    branches = ((statement.body, True), (statement.orelse, False))
    used = [(n, taken) for part, taken in branches if part for n in _names(source, statement, part)]
    late = {(name, taken) for name, taken in used if name in _SINCE}
    for name, taken in sorted(late, key=lambda pair: version(_SINCE[pair[0]]), reverse=True):
        since = version(_SINCE[name])
        wrong = [r for r in releases if test.holds(r) is taken and version(r) < since]
        if not wrong:
            continue
        fix = _fix(source, test, taken, _SINCE[name])
        message = _TOO_EARLY.format(name=name, since=_SINCE[name], found=_listed(wrong))
        yield source.find(RULE, statement.test, message, fix)
        return


def _fix(source: Source, test: _Test, taken: bool, since: str) -> Fix | None:
    """The version that has the name, in the place of the one that is asked for."""
    is_bound = test.compare in (operator.ge, operator.lt) and (test.compare is operator.ge) is taken
    if test.bound is None or not is_bound:
        return None
    if isinstance(test.bound, cst.Tuple):
        text = f"({', '.join(since.split('.'))})"
        edit = source.replace(test.bound, text if not test.bound.lpar else text[1:-1])
    else:
        edit = source.replace(
            test.bound, re.sub(r"\d[\w.+]*", since, source.code(test.bound), count=1)
        )
    return source.fix(f"Ask for PyTorch {since}", edit, unsafe=True)


def _listed(releases: list[str]) -> str:
    short = [release.removesuffix(".0") for release in releases]
    return short[0] if len(short) == 1 else f"{short[0]} to {short[-1]}"


# --- the test ---


def _test(source: Source, node: Node) -> _Test | None:
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
        return _Test(compare, None if named else bound, numbers) if numbers else None
    if kind in ("number", "major"):
        bound = value_given(source, bound)
        if not isinstance(bound, (cst.Float, cst.Integer)):
            return None
        if kind == "number":
            return _Test(compare, None, bound.value, as_number=True)
        return (
            _Test(compare, None, bound.value, parts=1) if isinstance(bound, cst.Integer) else None
        )
    inner = _bound(source, bound)
    wanted = strings(inner) if inner is not None else None
    if not re.fullmatch(r"\d+(\.\d+){0,2}", wanted or ""):
        return None
    named = inner is None or bound not in (inner, *source.around(inner))
    place = None if named else inner
    return _Test(compare, place, wanted or "", _TEXT_BEFORE[kind], characters=cut)


def _asks_for_name(source: Source, call: cst.Call) -> _Test | None:
    """`hasattr(torch, "autocast")`, which holds from the version that introduced the name, and `getattr(..., None)`."""
    arguments = {"hasattr": 2, "getattr": 3}.get(source.names.builtin(call.func) or "")
    if len(call.args) != arguments or not all(is_none(arg.value) for arg in call.args[2:]):
        return None
    path = f"{source.names.path(call.args[0].value)}.{strings(call.args[1].value)}"
    since = _OLDER.get(path) or _SINCE.get(path)
    return _Test(operator.ge, None, since) if since is not None else None


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


# --- what is under it ---


def _names(source: Source, statement: Node, part: Node) -> Iterator[str]:
    """The names of AMP in a branch that no other test of what PyTorch has is around."""
    for node in walk(part):
        name = None
        if isinstance(node, (cst.Name, cst.Attribute)):
            name = source.names.path(node)
        elif isinstance(node, cst.ImportAlias):
            outer = source.parents.get(node)
            module = dotted(outer.module) if isinstance(outer, cst.ImportFrom) else None
            name = f"{module}.{dotted(node.name)}" if module else None
        if (
            name is not None
            and _MENTIONED.fullmatch(name)
            and not _is_guarded_within(source, node, statement)
        ):
            yield name


def _mentions(source: Source, statement: cst.If | cst.IfExp) -> Iterator[bool]:
    for part in (statement.body, statement.orelse):
        if part is not None:
            yield any(True for _ in _names(source, statement, part))


def _is_guarded_within(source: Source, node: Node, statement: Node) -> bool:
    for outer in source.around(node):
        if outer is statement:
            return False
        if isinstance(outer, cst.Try):
            return True
        if isinstance(outer, (cst.If, cst.IfExp)) and is_version_test(source, outer.test):
            return True
    return False


VALID = (
    Case("""
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
    """),
    Case(
        """
        import torch

        if torch.__version__ >= "1.10":
            region = torch.autocast("cuda")
        if torch.__version__ < "1.12":
            from torch.cuda.amp import autocast
        """,
        note="`torch.__version__` is a text that compares as versions do.",
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        if Version(torch.__version__) >= Version("2.0"):
            scaler = torch.amp.GradScaler("cuda")
        if torch.__version__.split("+")[0] >= "2.0":
            model = torch.compile(model)
        """,
        min_torch="2.3",
        note="The project needs PyTorch 2.3 anyway; and what has nothing to do with AMP is not looked at.",
    ),
    Case("""
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.0"):
            try:
                scaler = torch.amp.GradScaler("cuda")
            except AttributeError:
                scaler = torch.cuda.amp.GradScaler()
    """),
    Case("""
        import torch
        from mine import at_least

        if at_least(torch.__version__, "2.0") or torch.__version__ >= minimum:
            scaler = torch.amp.GradScaler("cuda")
    """),
    Case(
        """
        import torch

        if hasattr(torch, "GradScaler"):
            scaler = torch.amp.GradScaler("cuda")
        elif hasattr(torch.amp, "autocast"):
            region = torch.amp.autocast("cuda")
        """,
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        release = Version(torch.__version__).release
        major, minor = release[:2]
        NEWEST = (2, 3)
        if release >= NEWEST and minor > 2:
            scaler = torch.amp.GradScaler("cuda")
        if getattr(torch.amp, "GradScaler", None) is not None:
            scaler = torch.amp.GradScaler("cuda")
        if int(torch.__version__.split(".")[0]) >= 3:
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case("""
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if major > 1 or (major == 1 and minor >= 6):
            from torch.cuda.amp import autocast
        if major >= 2:
            autocast = torch.amp.autocast
        elif minor >= 10:
            autocast = torch.cuda.amp.autocast
        if torch.cuda.is_available() and not (major < 2 and minor < 10):
            autocast = torch.autocast
    """),
    Case(
        """
        import torch

        if torch.__version__[:3] >= "2.0" and int(torch.__version__.split(".")[1]) >= 3:
            scaler = torch.amp.GradScaler("cuda")
        """,
        min_torch="2.0",
        note="All that the project allows have one digit more.",
    ),
)

INVALID = (
    Case(
        """
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.0.0"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        """
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        OLD = torch.__version__ < "1.6"
        if OLD:
            autocast = None
        else:
            from torch.amp import custom_fwd, autocast
        """,
        """
        import torch

        OLD = torch.__version__ < "2.4"
        if OLD:
            autocast = None
        else:
            from torch.amp import custom_fwd, autocast
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if torch.__version__.split("+")[0] >= "1.6":
            from torch.cuda.amp import autocast
        if str(torch.__version__) < "2.4":
            from torch.cuda.amp import custom_fwd
        """,
        count=2,
        note='As texts "1.10" comes before "1.6", and "2.10" before "2.4".',
    ),
    Case(
        """
        import torch

        TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if TORCH >= (1, 10):
            scaler = torch.amp.GradScaler("cuda")
        """,
        """
        import torch

        TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if TORCH >= (2, 3):
            scaler = torch.amp.GradScaler("cuda")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch
        from packaging import version

        TORCH = version.parse(torch.__version__)
        if TORCH >= version.parse("2.0"):
            scaler = torch.amp.GradScaler("cuda")
        """,
        """
        import torch
        from packaging import version

        TORCH = version.parse(torch.__version__)
        if TORCH >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if hasattr(torch, "autocast"):
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case(
        """
        import torch

        if torch.__version__ >= "1.10":
            region = torch.autocast("cuda")
        """,
        min_torch="1.8",
        note="Before 1.10 the version was plain text.",
    ),
    Case(
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) >= (2, 0):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) >= (2, 3):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if float(torch.__version__[:3]) >= 1.6:
            from torch.cuda.amp import autocast
        else:
            autocast = None
        """,
        note="As a number, 1.10 is 1.1.",
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        OLDEST = Version("1.13")

        class Trainer:
            MODERN = Version(torch.__version__) >= OLDEST

            def __init__(self):
                if self.MODERN:
                    self.scaler = torch.amp.GradScaler("cuda")
                else:
                    self.scaler = torch.cuda.amp.GradScaler()
        """,
        note="The test is an attribute of the class.",
    ),
    Case(
        """
        import torch

        if getattr(torch.cuda, "amp", None) is not None:
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case(
        """
        import torch

        if int(torch.__version__.split(".")[0]) >= 2:
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
    ),
    Case(
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if major >= 1 and minor >= 6:
            from torch.cuda.amp import autocast
        """,
        note="PyTorch 2.0 is newer than 1.6.",
    ),
    Case(
        """
        import torch

        parts = torch.__version__.split(".")
        if int(parts[1]) < 6:
            autocast = None
        else:
            from torch.cuda.amp import autocast
        if parts[1] >= "6":
            from torch.cuda.amp import GradScaler
        """,
        count=2,
    ),
    Case(
        """
        import torch

        if torch.__version__[:3] >= "1.6":
            from torch.cuda.amp import autocast
        if torch.__version__.partition("+")[0] >= "1.9":
            from torch.cuda.amp import GradScaler
        """,
        count=2,
        note='The first three characters of "1.10" are "1.1".',
    ),
)

RULE = Rule(
    code="AMP109",
    name="version-guard",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this test of the version is wrong for some version of PyTorch",
    what=(
        "A test of PyTorch's version that compares texts, or lets versions through that do not have the AMP name under "
        "it."
    ),
    why=(
        "`torch.autocast` is there from PyTorch 1.10, `torch.amp.autocast` from 1.12, `torch.amp.GradScaler` from 2.3, "
        '`torch.amp.custom_fwd` and `torch.get_autocast_dtype` from 2.4. As a text, "2.10" is less than "2.4".'
    ),
    fine="The versions for which it is wrong are never used: say so with `min-torch`.",
    words=(
        "__version__ autocast",
        "__version__ GradScaler",
        "__version__ torch.amp",
        "hasattr(torch",
        "getattr(torch GradScaler",
        "getattr(torch autocast",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
