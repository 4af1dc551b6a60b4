"""The summary of a run of one or several processes: common sentences, and the differences between ranks.

Invariants: a sentence of all ranks occurs once, and a sentence of some ranks with their numbers; a rank without a
document is named.
"""

from __future__ import annotations

from precast.report.evidence import in_16_bits, lost, on_casts, rows_of
from precast.report.numbers import offender
from precast.report.run_summary import summary_of
from precast.report.schema import RunDocument, RunSummary
from precast.report.words import joined, share

__all__ = ["summary_of_ranks", "worst"]

_LEVELS = ("good", "neutral", "warning", "bad")


def worst(documents: list[RunDocument]) -> int:
    """Return the place of the document with the worst problems; of several the one that had them first."""

    def trouble(place: int) -> tuple[int, int, int]:
        document = documents[place]
        first = offender(document)
        level = _LEVELS.index(summary_of(document).level)
        return -level, first.step if first else document.run.steps, -lost(document)

    return min(range(len(documents)), key=trouble)


def summary_of_ranks(documents: list[RunDocument]) -> RunSummary:
    """Return the summary of all documents of a run."""
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
        # These sentences contain numbers of a single rank, so only those of one rank are used.
        precision=[
            *_gathered([[]] * chosen + [each[chosen].precision], numbers),
            *_spread(documents),
        ],
        problems=[*missing, *_gathered([one.problems for one in each], numbers)],
        first=each[chosen].first,
        notes=_gathered([one.notes for one in each], numbers),
    )


def _gathered(sentences_by_rank: list[list[str]], numbers: list[int]) -> list[str]:
    """Return each sentence once, with its ranks unless all ranks have it."""
    ranks: dict[str, list[int]] = {}
    for number, sentences in zip(numbers, sentences_by_rank, strict=False):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(number)
    return [
        sentence if len(who) == len(numbers) else f"{_ranks(who)}: {sentence}"
        for sentence, who in ranks.items()
    ]


def _ranks(numbers: list[int]) -> str:
    return f"Rank{'' if len(numbers) == 1 else 's'} {joined(map(str, numbers))}"


def _missing(documents: list[RunDocument]) -> list[str]:
    size = documents[0].run.world_size
    missing = sorted(set(range(size)) - {document.run.rank or 0 for document in documents})
    if not missing:
        return []
    has = "has" if len(missing) == 1 else "have"
    return [
        f"{_ranks(missing)} of {size} {has} no document here; a process that is killed writes none."
    ]


def _spread(documents: list[RunDocument]) -> list[str]:
    """Return sentences on clear differences between ranks."""
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
