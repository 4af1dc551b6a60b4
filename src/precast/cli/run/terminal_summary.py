"""Says in a few lines what a document says of a run, for a terminal that is 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from precast.diagnostics.report.evidence import lost
from precast.diagnostics.report.run_summary import beyond_scale, rules_without_effect, summary_of
from precast.diagnostics.report.words import count, duration, plural

if TYPE_CHECKING:
    from precast.diagnostics.schema import Document

__all__ = ["said", "summary"]

_MARK = "precast: "
_ENDED = {"ended": "ended", "exit": "exited", "exception": "failed", "interrupted": "interrupted"}


def summary(document: Document, where: list[str]) -> str:
    """What a person reads first about the run of `document`; `where` are sentences on the files that were written."""
    told = (*_run(document), *_skips(document), *map(_plain, rules_without_effect(document)))
    return said(*told, *_verdict(document), *where)


def said(*sentences: str) -> str:
    """Sentences, each on lines of its own that begin with precast's name; long paths are not broken."""
    wrap = textwrap.TextWrapper(
        width=79,
        initial_indent=_MARK,
        subsequent_indent=" " * len(_MARK),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"{wrap.fill(sentence)}\n" for sentence in sentences)


def _run(document: Document) -> Iterator[str]:
    run = document.run
    steps, after = plural(run.steps, "step"), duration(run.seconds)
    who = "" if run.rank is None else f"rank {run.rank} "
    yield f"{who}{_ENDED[run.ended]} after {steps} in {after}, policy {run.policy.name}"
    if run.steps == 0:
        yield "no optimizer stepped in this process, and no module was called"


def _skips(document: Document) -> Iterator[str]:
    first = next((step for step in document.steps if step.skipped), None)
    if first is None:
        return
    names = first.names
    others = f" and {count(len(names) - 1)} more" if len(names) > 1 else ""
    what = f": gradients of {names[0]}{others} were not finite" if names else ""
    skipped = "step was skipped" if lost(document) == 1 else "steps were skipped"
    yield f"{count(lost(document))} {skipped}, the first was step {first.step}{what}"
    yield from beyond_scale(document)


def _verdict(document: Document) -> Iterator[str]:
    """What the report says on its first screen, without how the run ended, which has been said."""
    if document.run.steps == 0:
        return
    found = summary_of(document)
    if document.run.ended != "exception":
        yield _plain(found.headline)
    yield from map(_plain, found.precision[1:2] or found.precision[:1])
    if found.first is not None:
        file = " The policy file for it is in the report." if found.first.policy else ""
        yield f"to do first: {_plain(found.first.text)}{file}"


def _plain(text: str) -> str:
    return text.replace("`", "")
