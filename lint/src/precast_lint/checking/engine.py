"""Checks and fixes one text: a cheap look, then rules over the tree, then fixes, until nothing changes.

Invariants:
    - A text that mentions nothing of what the selected rules look for is never parsed.
    - `fix` is idempotent: it stops when a pass finds nothing more to apply, and its result parses.
    - A rule that fails is a defect of ours: its error is raised with the rule and the file in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from precast_lint.checking.suppress import Comment, Suppressions
from precast_lint.editing.edits import apply_parsing, compatible, compiles
from precast_lint.errors import CheckError
from precast_lint.model import Applicability, Edit, Fix, LintFinding, Severity, Span
from precast_lint.parsing.depth import deeper
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst
from precast_lint.parsing.text import Text
from precast_lint.selecting.look import interesting, looks_at
from precast_lint.selecting.registry import ENGINE, index, load
from precast_lint.selecting.settings import LintSettings

__all__ = ["Checked", "check", "fix"]

_PASSES = 20  # far more than nested fixes need; a rule that undoes another's fix would never end


@dataclass(frozen=True)
class Checked:
    """A text with its findings, in the order of the text, and the codes of the applied fixes."""

    text: Text
    findings: tuple[LintFinding, ...]
    fixed: tuple[str, ...] = ()


def check(text: Text, filename: str, settings: LintSettings) -> Checked:
    """Return the findings of the selected rules in a text."""
    codes = settings.codes_for(filename)
    if not interesting(text.data, codes):
        return Checked(text, ())
    try:
        with deeper():
            return _checked(text, Source(text, filename, settings.min_torch, codes), codes)
    except (cst.ParserSyntaxError, RecursionError) as error:
        return Checked(text, tuple(_syntax_error(text, error) if "AMP900" in codes else ()))


def _checked(text: Text, source: Source, codes: frozenset[str]) -> Checked:
    suppressions = Suppressions(text)

    def is_reported(finding: LintFinding) -> bool:
        return not suppressions.silences(finding.code, text.position(finding.span.start)[0])

    raw = list(_once(_run(source, codes)))
    selection = list(filter(is_reported, raw))
    shared = _withheld(raw, selection)
    results = [_limited(finding, shared) for finding in selection]
    if "AMP901" in codes:
        results += filter(is_reported, _unused(text, suppressions, codes))
    return Checked(text, tuple(sorted(results, key=lambda f: (f.span, f.code))))


def _once(findings: Iterable[LintFinding]) -> Iterator[LintFinding]:
    """Yield each finding once: two functions may lead to the same place."""
    visited = set()
    for finding in findings:
        place = finding.code, finding.span
        if place not in visited:
            visited.add(place)
            yield finding


def fix(text: Text, filename: str, settings: LintSettings) -> Checked:
    """Apply all fixes that the settings allow until nothing changes, and report the remaining findings."""
    fixed: list[str] = []
    checked = check(text, filename, settings)
    for _ in range(_PASSES):
        fixes = compatible(f.fix for f in checked.findings if f.fix and _allowed(f.fix, settings))
        data, applied = apply_parsing(checked.text.data, fixes)
        if data == checked.text.data:
            break
        fixed += [f.code for f in checked.findings if f.fix in applied]
        checked = check(checked.text.replaced(data), filename, settings)
    return Checked(checked.text, checked.findings, tuple(fixed))


def _allowed(fix: Fix, settings: LintSettings) -> bool:
    if fix.applicability is Applicability.UNSAFE:
        return settings.unsafe_fixes
    return fix.applicability is Applicability.SAFE


def _run(source: Source, codes: frozenset[str]) -> Iterator[LintFinding]:
    for code in looks_at(source.text.data, codes):
        rule = load(code)
        assert rule is not None
        try:
            results = list(rule.check(source))
        except (KeyboardInterrupt, SystemExit, RecursionError):
            raise
        except BaseException as error:  # what fails inside LibCST's parser is no `Exception`
            raise CheckError(f"{code} failed on {source.filename}: {error!r}") from error
        yield from results


def _withheld(raw: list[LintFinding], selection: list[LintFinding]) -> frozenset[Fix]:
    """Return the fixes of suppressed findings: another finding with such a fix would change the suppressed place."""
    return frozenset(f.fix for f in raw if f.fix) & frozenset(
        f.fix for f in raw if f.fix and f not in selection
    )


def _limited(finding: LintFinding, withheld: frozenset[Fix]) -> LintFinding:
    """Return a finding without its fix if the fix would change a suppressed place."""
    if finding.fix not in withheld:
        return finding
    return LintFinding(finding.code, finding.name, finding.severity, finding.message, finding.span)


def _syntax_error(text: Text, error: Exception) -> Iterator[LintFinding]:
    row = getattr(error, "raw_line", 1)
    start = text.starts[min(max(row, 1), len(text.starts)) - 1]
    reason = str(getattr(error, "message", error)).partition("\n")[0]
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    message = f"this file is not Python that can be read: {reason}"
    severity = Severity.ERROR
    if compiles(text.string):
        message = f"this file was not checked: Python reads it, but LibCST, which precast-lint uses, does not: {reason}"
        severity = Severity.INFORMATION
    yield LintFinding("AMP900", ENGINE["AMP900"], severity, message, Span(start, start))


def _unused(text: Text, suppressions: Suppressions, codes: frozenset[str]) -> Iterator[LintFinding]:
    """Yield a finding for each suppression that silences nothing, unless its rule is not selected."""
    for comment, unused in suppressions.unused():
        remainder = [code for code in unused if code in codes or code not in index()]
        if remainder:
            rest = sorted((comment.codes or frozenset()) - set(remainder))
            fix = Fix((_without(text, comment, rest),), "Remove it")
            message = f"unused suppression: {', '.join(remainder)}"
            yield LintFinding(
                "AMP901", ENGINE["AMP901"], Severity.WARNING, message, comment.span, fix
            )


def _without(text: Text, comment: Comment, rest: list[str]) -> Edit:
    start, end = comment.span.start, comment.span.end
    if rest:
        kind = "# precast: noqa" if comment.whole_file else "# noqa"
        return Edit(start, end, f"{kind}: {', '.join(rest)}")
    before = text.data[text.line_start(start) : start]
    after = text.data[end : end + 2]
    if after[:1] in (b"\r", b"\n", b""):
        start -= len(before) - len(before.rstrip(b" \t")) if before.strip() else 0
    return Edit(start, end, "")
