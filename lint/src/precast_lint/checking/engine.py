"""The check of one text: rules report findings on its syntax tree, and their fixes are applied.

Invariants:
    - A text without the words of any selected rule is never parsed.
    - `fix` is idempotent: it ends with a pass that changes nothing, and its result can be parsed.
    - An error in a rule is a defect of precast-lint: it is raised again with the rule and the file.
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

_MAX_PASSES = 20  # ends a loop of rules that undo each other's fixes; nested fixes need far fewer


@dataclass(frozen=True)
class Checked:
    """A text with its findings, in the order of their positions, and the codes of the applied fixes."""

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
            return _check_source(text, Source(text, filename, settings.min_torch, codes), codes)
    except (cst.ParserSyntaxError, RecursionError) as error:
        return Checked(text, tuple(_syntax_error(text, error) if "AMP900" in codes else ()))


def _check_source(text: Text, source: Source, codes: frozenset[str]) -> Checked:
    suppressions = Suppressions(text)

    def is_reported(finding: LintFinding) -> bool:
        return not suppressions.silences(finding.code, text.position(finding.span.start)[0])

    findings = list(_unique(_run(source, codes)))
    remaining = list(filter(is_reported, findings))
    withheld = _fixes_to_withhold(findings, remaining)
    results = [_without_withheld_fix(finding, withheld) for finding in remaining]
    if "AMP901" in codes:
        results += filter(is_reported, _unused(text, suppressions, codes))
    return Checked(text, tuple(sorted(results, key=lambda f: (f.span, f.code))))


def _unique(findings: Iterable[LintFinding]) -> Iterator[LintFinding]:
    """Yield each finding once. Two functions may call the code of a finding, and both report it."""
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
    for _ in range(_MAX_PASSES):
        fixes = compatible(
            f.fix for f in checked.findings if f.fix and _is_allowed(f.fix, settings)
        )
        data, applied = apply_parsing(checked.text.data, fixes)
        if data == checked.text.data:
            break
        fixed += [f.code for f in checked.findings if f.fix in applied]
        checked = check(checked.text.replaced(data), filename, settings)
    return Checked(checked.text, checked.findings, tuple(fixed))


def _is_allowed(fix: Fix, settings: LintSettings) -> bool:
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
        except BaseException as error:  # errors in LibCST's parser are no `Exception`
            raise CheckError(f"{code} failed on {source.filename}: {error!r}") from error
        yield from results


def _fixes_to_withhold(findings: list[LintFinding], remaining: list[LintFinding]) -> frozenset[Fix]:
    """Return the fixes of suppressed findings. Applied for another finding, they would change suppressed lines."""
    return frozenset(f.fix for f in findings if f.fix) & frozenset(
        f.fix for f in findings if f.fix and f not in remaining
    )


def _without_withheld_fix(finding: LintFinding, withheld: frozenset[Fix]) -> LintFinding:
    if finding.fix not in withheld:
        return finding
    return LintFinding(finding.code, finding.name, finding.severity, finding.message, finding.span)


def _syntax_error(text: Text, error: Exception) -> Iterator[LintFinding]:
    row = getattr(error, "raw_line", 1)
    start = text.starts[min(max(row, 1), len(text.starts)) - 1]
    reason = str(getattr(error, "message", error)).partition("\n")[0]
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    message = f"this file cannot be parsed as Python: {reason}"
    severity = Severity.ERROR
    if compiles(text.string):
        message = f"this file was not checked: Python can parse it, but the parser of precast-lint cannot: {reason}"
        severity = Severity.INFORMATION
    yield LintFinding("AMP900", ENGINE["AMP900"], severity, message, Span(start, start))


def _unused(text: Text, suppressions: Suppressions, codes: frozenset[str]) -> Iterator[LintFinding]:
    """Yield a finding for each suppression of a selected or unknown rule that suppresses nothing."""
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
