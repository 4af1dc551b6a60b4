"""The verdict on a whole run: one process as it is, of several what they share and where they differ.

Invariants: what all ranks say is said once; what some say is said with their numbers; a rank without a
document is named.
"""

from __future__ import annotations

from precast.diagnostics.report.evidence import in_16_bits, lost, on_casts, rows_of
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
        level = _LEVELS.index(summary_of(document).level)
        return -level, first.step if first else document.run.steps, -lost(document)

    return min(range(len(documents)), key=trouble)


def summary_of_ranks(documents: list[Document]) -> RunSummary:
    """The verdict on all documents of a run, by rank."""
    each = [summary_of(document) for document in documents]
    if len(each) == 1:
        return each[0]
    chosen = worst(documents)
    numbers = [document.run.rank or 0 for document in documents]
    missing, same = _missing(documents), all(one.headline == each[0].headline for one in each)
    all_of_them = "The others" if missing else f"All {len(each)} ranks"
    who = all_of_them if same else f"Rank {documents[chosen].run.rank}"
    return RunSummary(
        level="bad" if missing else each[chosen].level,
        headline=" ".join([*missing[:1], f"{who}: {each[chosen].headline}"]),
        # Each rank has its own numbers in these sentences, so they are said of one rank only.
        precision=[
            *_gathered([[]] * chosen + [each[chosen].precision], numbers),
            *_spread(documents),
        ],
        problems=[*missing, *_gathered([one.problems for one in each], numbers)],
        first=each[chosen].first,
        notes=_gathered([one.notes for one in each], numbers),
    )


def _gathered(said: list[list[str]], numbers: list[int]) -> list[str]:
    """The sentences of each rank, each sentence once, with the ranks that say it where not all do."""
    ranks: dict[str, list[int]] = {}
    for number, sentences in zip(numbers, said, strict=False):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(number)
    return [
        sentence if len(who) == len(numbers) else f"{_ranks(who)}: {sentence}"
        for sentence, who in ranks.items()
    ]


def _ranks(numbers: list[int]) -> str:
    return f"Rank{'' if len(numbers) == 1 else 's'} {joined(map(str, numbers))}"


def _missing(documents: list[Document]) -> list[str]:
    size = documents[0].run.world_size
    gone = sorted(set(range(size)) - {document.run.rank or 0 for document in documents})
    if not gone:
        return []
    there = f"{_ranks(gone)} of {size} {'has' if len(gone) == 1 else 'have'} no document here"
    return [f"{there}; a process that is killed leaves none."]


def _spread(documents: list[Document]) -> list[str]:
    """Where ranks differ by more than a little."""
    sentences = []
    for what, measure in (("spent in 16 bits", in_16_bits), ("spent on casts", on_casts)):
        values = {d.run.rank or 0: measure(d) for d in documents if rows_of(d)}
        if len(values) < 2:
            continue
        low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        if values[high] - values[low] > 0.02:
            sentences.append(
                f"The part of the traced time {what} is between {share(values[low])} (rank {low}) and "
                f"{share(values[high])} (rank {high})."
            )
    return sentences
