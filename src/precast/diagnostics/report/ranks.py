"""The verdict on a whole run: one process as it is, of several what they share and where they differ.

Invariants: what all ranks say is said once; what some say is said with their numbers; a rank without a
document is named.
"""

from __future__ import annotations

from precast.diagnostics.report.evidence import in_16_bits, lost, on_casts, was_traced
from precast.diagnostics.report.numbers import offender
from precast.diagnostics.report.run_summary import summary_of
from precast.diagnostics.report.words import joined, share
from precast.diagnostics.schema import Document, RunSummary

__all__ = ["summary_of_ranks", "worst"]

_LEVELS = ("good", "neutral", "warning", "bad")


def worst(documents: list[Document]) -> int:
    """Which document to look at first: the one in most trouble, or that was in trouble first."""

    def trouble(place: int) -> tuple[int, int, int]:
        document = documents[place]
        first = offender(document)
        return (
            -_LEVELS.index(summary_of(document).level),
            first.step if first else document.run.steps,
            -lost(document),
        )

    return min(range(len(documents)), key=trouble)


def summary_of_ranks(documents: list[Document]) -> RunSummary:
    """The verdict on all documents of a run, by rank."""
    each = [summary_of(document) for document in documents]
    if len(each) == 1:
        return each[0]
    chosen = worst(documents)
    number = documents[chosen].run.rank
    missing, same = _missing(documents), all(one.headline == each[0].headline for one in each)
    who = ("The others" if missing else f"All {len(each)} ranks") if same else f"Rank {number}"
    return RunSummary(
        level="bad" if missing else each[chosen].level,
        headline=" ".join([*missing[:1], f"{who}: {each[chosen].headline}"]),
        precision=[*_gathered(documents, each, "precision", chosen), *_spread(documents)],
        problems=[*missing, *_gathered(documents, each, "problems", None)],
        first=each[chosen].first,
        notes=_gathered(documents, each, "notes", None),
    )


def _gathered(
    documents: list[Document], each: list[RunSummary], key: str, only: int | None
) -> list[str]:
    """Sentences with the ranks that say them; `only`: those of one, where each rank has its own numbers."""
    said: dict[str, list[int]] = {}
    for place, (document, one) in enumerate(zip(documents, each, strict=True)):
        for sentence in getattr(one, key) if only in (None, place) else ():
            said.setdefault(sentence, []).append(document.run.rank or 0)
    return [f"{_who(ranks, len(documents))}{sentence}" for sentence, ranks in said.items()]


def _who(ranks: list[int], count: int) -> str:
    if len(ranks) == count:
        return ""
    return f"Rank{'' if len(ranks) == 1 else 's'} {joined(map(str, ranks))}: "


def _missing(documents: list[Document]) -> list[str]:
    size = documents[0].run.world_size
    gone = sorted(set(range(size)) - {document.run.rank or 0 for document in documents})
    if not gone:
        return []
    which = f"Rank{'' if len(gone) == 1 else 's'} {joined(map(str, gone))}"
    there = "has" if len(gone) == 1 else "have"
    return [f"{which} of {size} {there} no document here; a process that is killed leaves none."]


def _spread(documents: list[Document]) -> list[str]:
    """Where ranks differ by more than a little."""
    sentences = []
    for what, measure in (("spent in 16 bits", in_16_bits), ("spent on casts", on_casts)):
        values = {d.run.rank or 0: measure(d) for d in documents if was_traced(d)}
        if len(values) < 2:
            continue
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        if values[high] - values[low] > 0.02:
            sentences.append(
                f"The part of the traced time {what} is between {share(values[low])} (rank {low}) and "
                f"{share(values[high])} (rank {high})."
            )
    return sentences
