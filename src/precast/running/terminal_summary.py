"""The summary of a run for a terminal: a document in a few lines, as wide as the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from precast._internal.display import plural, terminal_width, wrapped
from precast.report.evidence import lost
from precast.report.run_summary import (
    beyond_scale,
    code_mistakes,
    lint_warnings,
    rules_without_effect,
    summary_of,
    untraced,
)
from precast.report.words import count, duration

if TYPE_CHECKING:
    from precast.report.schema import RunDocument

__all__ = ["said", "summary"]

_MARK: Final = "precast: "
_ENDED: Final = {
    "ended": "ended",
    "exit": "exited",
    "exception": "failed",
    "interrupted": "interrupted",
}
_MOST_POLICY_LINES: Final = 6  # a longer policy file is shown in the report alone


def summary(document: RunDocument, where: list[str]) -> str:
    """Return the summary of a run; the sentences in `where` come last."""
    sentences = (*_run(document), *_skips(document), *map(_plain, rules_without_effect(document)))
    return said(*sentences, *_summary(document)) + _first_step(document) + said(*where)


def said(*sentences: str) -> str:
    """Return the sentences, each on lines that begin with precast's name; long paths are not broken."""
    width, indent = terminal_width(sys.__stderr__) - 1, " " * len(_MARK)
    lines = [line for each in sentences for line in wrapped(each, width, _MARK, indent)]
    return "".join(f"{line}\n" for line in lines)


def _run(document: RunDocument) -> Iterator[str]:
    run = document.run
    steps, elapsed = plural(run.steps, "step"), duration(run.seconds)
    who = "" if run.rank is None else f"rank {run.rank} "
    yield f"{who}{_ENDED[run.ended]} after {steps} in {elapsed}, policy {run.policy.name}"
    if not run.devices:
        yield "the program did not import PyTorch, so there is nothing to report on"
    elif run.traced is None:
        yield _plain(untraced(document))


def _skips(document: RunDocument) -> Iterator[str]:
    first = next((step for step in document.steps if step.skipped), None)
    if first is None:
        return
    names = first.names
    others = f" and {count(len(names) - 1)} more" if len(names) > 1 else ""
    cause = f": gradients of {names[0]}{others} were not finite" if names else ""
    skipped = "step was skipped" if lost(document) == 1 else "steps were skipped"
    yield f"{count(lost(document))} {skipped}, the first was step {first.step}{cause}"
    yield from beyond_scale(document)


def _summary(document: RunDocument) -> Iterator[str]:
    """Yield the sentences of the report's first screen, without the end of the run."""
    headline = ""
    if document.run.steps:
        summary = summary_of(document)
        if document.run.ended != "exception":
            headline = summary.headline
            yield _plain(headline)
        yield from map(_plain, summary.precision[1:2] or summary.precision[:1])
    yield from (_plain(each) for each in code_mistakes(document) if each != headline)
    yield from map(_plain, lint_warnings(document))


def _first_step(document: RunDocument) -> str:
    """Return the text on what to do first, with the policy file for it if that is short."""
    first = None if document.run.steps == 0 else summary_of(document).first
    if first is None:
        return ""
    lines = first.policy.splitlines() if first.policy else []
    if len(lines) > _MOST_POLICY_LINES:
        return said(f"to do first: {_plain(first.text)} The report has the policy file.")
    file = "".join(f"{' ' * len(_MARK)}    {line}".rstrip() + "\n" for line in lines)
    return said(f"to do first: {_plain(first.text)}{' Policy file:' if file else ''}") + file


def _plain(text: str) -> str:
    return text.replace("`", "")
