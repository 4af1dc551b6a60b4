"""AMP109: a test of PyTorch's version that is wrong for some version."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.guards import is_version_test
from precast_lint.meaning.version_values import SINCE, evaluate_test, names_releases, single_value
from precast_lint.model import Applicability, LintFinding, LintRule, Severity, version
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.torch_versions import MINORS

__all__ = ["RULE"]

_RELEASES = (
    "0.0.0",
    *(f"1.{minor}.0" for minor in range(14)),
    *(f"{m}.0" for m in MINORS if m[0] != "1"),
)
_AMP_NAME = re.compile(
    r"torch\.(cuda\.|cpu\.)?amp\.\w+|torch\.autocast|torch\.[gs]et_autocast_dtype"
)
_WRONG = "this test is wrong for PyTorch {releases}: compare whole versions, not strings or parts of them"
_TOO_EARLY = "`{name}` exists from PyTorch {since}; this test is true for {releases} too"
_Results = dict[str, bool]
_If = cst.If | cst.IfExp


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each test that is wrong for a release and has AMP's names in one of its branches."""
    statements: list[_If] = [*source.all(cst.If), *source.all(cst.IfExp)]
    for statement in statements:
        test = single_value(source, statement.test)
        results = _results(source, test)
        if results is None or any(_tests_version(source, o) for o in source.around(statement)):
            continue
        wrong = _wrong_releases(source, results)
        if not wrong or names_releases(source, test):
            yield from _names_too_new(source, statement, results)
        elif any(_amp_names(source, statement, p) for p in (statement.body, statement.orelse)):
            yield source.find(RULE, statement.test, _WRONG.format(releases=_range(wrong)))


def _results(source: Source, test: Node) -> _Results | None:
    """Return the result of a test for each release; None if one is unknown, or all are equal."""
    results = evaluate_test(source, test, _RELEASES)
    return results if results is not None and len(set(results.values())) == 2 else None


def _supported(source: Source) -> list[str]:
    oldest = version(source.min_torch or MINORS[0])
    return [release for release in _RELEASES if version(release) >= oldest]


def _wrong_releases(source: Source, results: _Results) -> list[str]:
    """Return the supported releases that get the result of the oldest one, although a release before them does not."""
    first = next(release for release in _RELEASES if results[release] is not results[_RELEASES[0]])
    newer = _RELEASES[_RELEASES.index(first) :]
    supported = _supported(source)
    return [r for r in newer if results[r] is results[_RELEASES[0]] and r in supported]


def _tests_version(source: Source, outer: Node) -> bool:
    return isinstance(outer, (cst.If, cst.IfExp)) and any(
        _results(source, node) is not None
        for node in walk(outer.test)
        if isinstance(node, cst.Comparison)
    )


def _names_too_new(source: Source, statement: _If, results: _Results) -> Iterator[LintFinding]:
    """Yield a finding if a branch runs in releases without a name that it uses: for the newest of these names."""
    branches = ((statement.body, True), (statement.orelse, False))
    used = {(name, in_body) for p, in_body in branches for name in _amp_names(source, statement, p)}
    late = [(name, in_body) for name, in_body in used if name in SINCE]
    for name, in_body in sorted(late, key=lambda pair: version(SINCE[pair[0]]), reverse=True):
        since = version(SINCE[name])
        wrong = [r for r in _supported(source) if results[r] is in_body and version(r) < since]
        if wrong:
            message = _TOO_EARLY.format(name=name, since=SINCE[name], releases=_range(wrong))
            yield source.find(RULE, statement.test, message)
            return


def _range(releases: list[str]) -> str:
    short = [release.removesuffix(".0") for release in releases]
    return short[0] if len(short) == 1 else f"{short[0]} to {short[-1]}"


def _amp_names(source: Source, statement: Node, part: Node | None) -> list[str]:
    """Return AMP's names in a branch, except those under another test of the version and those in a `try`."""
    results = []
    for node in walk(part) if part is not None else ():
        name = None
        if isinstance(node, (cst.Name, cst.Attribute)):
            is_polyfill = isinstance(source.parents[node], cst.AssignTarget)
            name = None if is_polyfill else source.names.path(node)
        elif isinstance(node, cst.ImportAlias):
            outer = source.parents.get(node)
            module = dotted(outer.module) if isinstance(outer, cst.ImportFrom) else None
            name = f"{module}.{dotted(node.name)}" if module else None
        is_amp = name is not None and _AMP_NAME.fullmatch(name)
        if name and is_amp and not _is_guarded_within(source, node, statement):
            results.append(name)
    return results


def _is_guarded_within(source: Source, node: Node, statement: Node) -> bool:
    for outer in source.around(node):
        if outer is statement:
            return False
        if isinstance(outer, cst.Try):
            return True
        if isinstance(outer, (cst.If, cst.IfExp)) and is_version_test(source, outer.test):
            return True
    return False


RULE = LintRule(
    code="AMP109",
    name="version-guard",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this test of the version is wrong for some version of PyTorch",
    what=(
        "A test of PyTorch's version that compares strings, or is true for versions that do not have the AMP name that "
        'it guards. Since PyTorch 1.10 `torch.__version__ >= "2.4"` compares versions, which is right. But '
        "`str(torch.__version__)`, slices of `torch.__version__` and results of its methods are plain strings. "
        "Versions from `importlib.metadata` are not checked."
    ),
    why=(
        "PyTorch has `torch.autocast` from 1.10, `torch.amp.autocast` from 1.12, `torch.amp.GradScaler` from 2.3, "
        '`torch.amp.custom_fwd` and `torch.get_autocast_dtype` from 2.4. As a string, "2.10" is less than "2.4".'
    ),
    fine="The project does not support the versions for which the test is wrong: set `min-torch`.",
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
