"""What a run leaves behind, as JSON: checked, loaded, saved whole or not at all, the ranks of one run merged.

Invariants: what `save` writes `load` reads, with a verdict made anew; both refuse what is not as `schema.py` says, and
say where. A merged document holds those of the ranks as they were, the lowest rank first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from precast._internal import atomic_write, version
from precast.diagnostics.report.notebook import Shown
from precast.diagnostics.report.ranks import summary_of_ranks
from precast.diagnostics.report.schema import VERSION, Document, HealthModule, Merged
from precast.diagnostics.report.shapes import mismatch
from precast.errors import ReportError

__all__ = ["documents", "load", "merge", "save", "validate"]

_PER_STEP = (
    *("zeros", "underflow_zeros", "subnormal", "overflow", "saturated", "nan"),
    *("maximum", "rms", "elements"),
)


def validate(document: object, name: str = "the document") -> Document | Merged:
    """The document, if it is as the schema says.

    Raises:
        ReportError: it is not; says where, what is wanted and what is there.
    """
    if not isinstance(document, dict) or "schema" not in document:
        raise ReportError(
            f'{name} is no document of precast: it has no "schema". '
            "Write one with: precast run --json FILE script.py"
        )
    if document["schema"] != VERSION or isinstance(document["schema"], bool):
        raise ReportError(
            f"{name} has schema {document['schema']!r}, and precast {version.__version__} reads "
            f"schema {VERSION}. Install the precast that wrote it, or write it anew"
        )
    wrong = mismatch(document, Merged if "ranks" in document else Document) or _inside(document)
    if wrong:
        raise ReportError(f"{name} is not as schema {VERSION} says, at {wrong}. See docs/report.md")
    return cast("Document | Merged", document)


def documents(document: Document | Merged) -> list[Document]:
    """The documents of the processes: one, or one a rank."""
    return cast("Merged", document)["ranks"] if "ranks" in document else [document]


def save(document: Document | Merged | dict[str, Any], path: str | Path) -> None:
    """Writes a document as JSON, with the verdict on it, in one step.

    Raises:
        ReportError: it is not as the schema says.
        OutputError: the file could not be written; what was there still is.
    """
    checked = validate(document)
    told = {**checked, "verdict": summary_of_ranks(documents(checked))}
    text = json.dumps(told, allow_nan=False, separators=(",", ":"))
    atomic_write.replace_own(Path(path), text.encode() + b"\n")


def load(path: str | Path) -> Document | Merged:
    """Reads a document.

    Raises:
        ReportError: there is none, or it is not whole, or not as the schema says.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ReportError(
            f"{path} is not a whole JSON file ({error}). Was it cut off, or is it the page? "
            "Write it anew with: precast run --json FILE script.py"
        ) from error
    validate(document, str(path))
    return cast("Document", Shown(document))


def merge(parts: Sequence[Document | Merged | dict[str, Any]]) -> Document | Merged:
    """The documents of the ranks of one run as one; a single one as it is.

    Ranks may be missing, as those of processes that were killed are.

    Raises:
        ReportError: a rank is there twice or has no number, or the commands differ.
    """
    ranks = [each for part in parts for each in documents(validate(part))]
    if not ranks:
        raise ReportError("no document was given to merge: name at least one")
    if len(ranks) == 1:
        return cast("Document", Shown(ranks[0]))
    _refuse_strangers(ranks)
    merged = {
        "schema": VERSION,
        "precast": version.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ranks": sorted(ranks, key=lambda each: each["run"]["rank"] or 0),
    }
    validate(merged)
    return cast("Merged", Shown(merged))


def _refuse_strangers(ranks: list[Document]) -> None:
    """Only what belongs to one run is merged."""
    advice = "Merge the documents of one run, one a rank; make a report of each other one"
    numbers = Counter(each["run"]["rank"] for each in ranks)
    if None in numbers:
        raise ReportError(f"a document without a rank was given with others. {advice}")
    twice = [rank for rank, times in numbers.items() if times > 1]
    if twice:
        raise ReportError(f"rank {twice[0]} was given {numbers[twice[0]]} times. {advice}")
    for key in ("world_size", "command"):
        found = [cast("dict[str, Any]", each["run"])[key] for each in ranks]
        other = next((each for each in found if each != found[0]), None)
        if other is not None:
            raise ReportError(f"the {key} differs: {found[0]!r} and {other!r}. {advice}")


def _inside(document: dict[str, Any]) -> str | None:
    """What no type can say: lists that belong together are of one length."""
    for part in documents(cast("Document | Merged", document)):
        for number, module in enumerate((part["health"] or {"modules": []})["modules"]):
            short = _uneven(module)
            if short:
                return f"health.modules[{number}].{short}"
    return None


def _uneven(module: HealthModule) -> str | None:
    steps, values = len(module["steps"]), cast("dict[str, Any]", module)
    lengths = {key: len(values[key]) for key in _PER_STEP}
    lengths["histogram.counts"] = len(module["histogram"]["counts"])
    for key, length in lengths.items():
        if length != steps:
            return f"{key}: an entry for each of {steps} steps is wanted, and {length} are there"
    return None
