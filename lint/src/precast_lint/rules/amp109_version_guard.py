"""AMP109: a test of PyTorch's version that is wrong for some version."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator

from precast_lint.meaning.guards import is_version_test
from precast_lint.meaning.version_tests import SINCE, VersionTest, version_test
from precast_lint.meaning.version_values import holds, names_releases
from precast_lint.meaning.versions import minor_kind, value_given, version_kind
from precast_lint.model import Applicability, Finding, Fix, Rule, Severity, version
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.torch_versions import MINORS

__all__ = ["RULE"]

_RELEASES = tuple(f"{minor}.0" for minor in MINORS)
_MENTIONED = re.compile(
    r"torch\.(cuda\.|cpu\.)?amp\.\w+|torch\.autocast|torch\.[gs]et_autocast_dtype"
)
_AS_TEXT = "this compares versions as texts: it is wrong for PyTorch {found}"
_TOO_EARLY = "`{name}` is there from PyTorch {since}; this lets {found} through"
_GAP = "this holds otherwise for PyTorch {found} than for {first}, which is older: compare whole versions"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each test under which AMP is used and that is wrong for some release."""
    releases = [
        r for r in _RELEASES if source.min_torch is None or version(r) >= version(source.min_torch)
    ]
    statements: list[cst.If | cst.IfExp] = [*source.all(cst.If), *source.all(cst.IfExp)]
    for statement in statements:
        test = version_test(source, statement.test)
        if test is None:
            yield from _of_parts(source, statement, releases)
            continue
        wrong = [r for r in releases if test.holds(r) != test.right(r)]
        if not wrong:
            yield from _too_early(source, statement, test.holds, releases, test)
        elif any(_mentions(source, statement)):
            message = _AS_TEXT.format(found=_listed(wrong))
            yield source.find(RULE, statement.test, message)


def _of_parts(
    source: Source, statement: cst.If | cst.IfExp, releases: list[str]
) -> Iterator[Finding]:
    """What is wrong with a test that is computed for each release: it has several parts, or compares parts of texts."""
    if any(_is_about_version(source, outer) for outer in source.around(statement)):
        return
    test = value_given(source, statement.test)
    found: dict[str, bool] = {}
    for release in ("0.0.0", *releases):  # most tests are not about versions, which the first says
        is_through = holds(source, test, release)
        if is_through is None:
            return
        found[release] = is_through
    older = found.pop("0.0.0")  # whether it asks for older versions
    first = next((release for release in releases if found[release] is not older), None)
    if first is None:
        return
    wrong = [r for r in releases[releases.index(first) :] if found[r] is older]
    if not wrong or names_releases(source, test):
        yield from _too_early(source, statement, lambda release: found[release], releases)
    elif any(_mentions(source, statement)):
        message = _GAP.format(found=_listed(wrong), first=_listed([first]))
        yield source.find(RULE, statement.test, message)


def _is_about_version(source: Source, outer: Node) -> bool:
    """Whether a test around another one looks at PyTorch's version, too."""
    if not isinstance(outer, (cst.If, cst.IfExp)):
        return False
    return any(
        version_kind(source, n.left) is not None or minor_kind(source, n.left) is not None
        for n in walk(outer.test)
        if isinstance(n, cst.Comparison)
    )


def _too_early(
    source: Source,
    statement: cst.If | cst.IfExp,
    lets_through: Callable[[str], bool | None],
    releases: list[str],
    test: VersionTest | None = None,
) -> Iterator[Finding]:
    """A finding for the newest name that a branch uses in releases which do not have it."""
    branches = ((statement.body, True), (statement.orelse, False))
    used = [(n, taken) for part, taken in branches if part for n in _names(source, statement, part)]
    late = {(name, taken) for name, taken in used if name in SINCE}
    for name, taken in sorted(late, key=lambda pair: version(SINCE[pair[0]]), reverse=True):
        since = version(SINCE[name])
        wrong = [r for r in releases if lets_through(r) is taken and version(r) < since]
        if not wrong:
            continue
        fix = _fix(source, test, taken, SINCE[name]) if test is not None else None
        message = _TOO_EARLY.format(name=name, since=SINCE[name], found=_listed(wrong))
        yield source.find(RULE, statement.test, message, fix)
        return


def _fix(source: Source, test: VersionTest, taken: bool, since: str) -> Fix | None:
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


RULE = Rule(
    code="AMP109",
    name="version-guard",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this test of the version is wrong for some version of PyTorch",
    what=(
        "A test of PyTorch's version that compares texts, or lets versions through that do not have the AMP name under "
        'it. `torch.__version__` itself is no plain text since PyTorch 1.10: `torch.__version__ >= "2.4"` compares as '
        "versions do, and is right. What is made of it is plain text: `str(torch.__version__)`, slices, and what "
        "`split` and `partition` give. Versions that `importlib.metadata` tells are not looked at."
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
    example="""
 import torch

 TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
-if TORCH >= (1, 10):
+if TORCH >= (2, 3):
     scaler = torch.amp.GradScaler("cuda")
""",
)
