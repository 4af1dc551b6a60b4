"""What a run leaves behind, as JSON: made, checked, loaded, saved whole or not at all, the ranks of one run merged.

Invariants: `load` reads what `save` writes, with the verdict made anew; both refuse what is not as `schema.py` says,
and say where. Keys that the schema does not name are kept. A merged document has those of the ranks as they were, the
lowest rank first.
"""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import is_dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from precast._internal import atomic_write, version
from precast.diagnostics.records import MismatchError, as_json, from_json
from precast.diagnostics.report.ranks import summary_of_ranks
from precast.diagnostics.report.words import with_code
from precast.diagnostics.schema import VERSION, Document, HealthModule, Merged, PolicyName, Run
from precast.errors import ReportError

__all__ = ["Shown", "blank", "checked", "load", "merge", "save", "validate"]

_PER_STEP = (
    *("zeros", "underflow_zeros", "subnormal", "overflow", "saturated", "nan"),
    *("maximum", "rms", "elements", "histogram.counts"),
)


class Shown(dict[str, Any]):
    """A document that is as the schema says. A notebook shows its command and its verdict; in all else it is a dict."""

    def _repr_html_(self) -> str:
        documents = _read(self)
        verdict = summary_of_ranks(documents)
        many = f", {len(documents):,} ranks" if len(documents) > 1 else ""
        said = [verdict.headline, *verdict.problems, *verdict.precision]
        items = "".join(f"<li>{with_code(escape(sentence))}</li>" for sentence in said)
        command = escape(" ".join(documents[0].run.command))
        return f"<p><b>precast run {command}</b>{many}</p><ul>{items}</ul>"


def blank(command: list[str], policy: str) -> Document:
    """The document of a run of which nothing was seen yet: what is run, by which versions, on which machine.

    It can always be made, also for a program that ended before it loaded PyTorch. The caller fills in the rest.
    """
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    run = Run(
        command=command,
        ended="ended",
        code=0,
        message=None,
        seconds=0.0,
        rank=None,
        world_size=1,
        torch=torch,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        devices=[],
        policy=PolicyName(policy),
        steps=0,
        skipped=0,
        traced=None,
    )
    return Document(VERSION, version.__version__, _now(), run, [], [], None, None, [])


def validate(document: object, name: str = "the document") -> dict[str, Any]:
    """The document, if it is as the schema says.

    Raises:
        ReportError: it is not; says where, what is wanted and what is there.
    """
    return checked(document, name)[0]


def checked(document: object, name: str = "the document") -> tuple[dict[str, Any], list[Document]]:
    """A document as plain values; and the documents of its processes, one or one for each rank, as `Document`.

    Raises:
        ReportError: as `validate`.
    """
    if is_dataclass(document):
        document = as_json(document)
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
    try:
        return document, _read(document)
    except MismatchError as wrong:
        raise ReportError(
            f"{name} is not as schema {VERSION} says, at {wrong}. See docs/report-data.md"
        ) from wrong


def save(document: Document | Merged | dict[str, Any], path: str | Path) -> None:
    """Writes a document as JSON, with the verdict on it, in one step.

    Raises:
        ReportError: it is not as the schema says.
        OutputError: the file could not be written; what was there still is.
    """
    plain, ranks = checked(document)
    told = {**plain, "verdict": as_json(summary_of_ranks(ranks))}
    text = json.dumps(told, allow_nan=False, separators=(",", ":"))
    atomic_write.replace_own(Path(path), text.encode() + b"\n")


def load(path: str | Path) -> Shown:
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
    return Shown(document)


def merge(parts: Sequence[Document | Merged | dict[str, Any]]) -> Shown:
    """The documents of the ranks of one run as one; a single one as it is.

    Ranks may be missing, as those of processes that were killed are.

    Raises:
        ReportError: a rank is there twice or has no number, or the commands differ.
    """
    ranks = [each for part in map(validate, parts) for each in part.get("ranks", [part])]
    if not ranks:
        raise ReportError("no document was given to merge: name at least one")
    if len(ranks) == 1:
        return Shown(ranks[0])
    _refuse_strangers(ranks)
    merged = {
        "schema": VERSION,
        "precast": version.__version__,
        "made": _now(),
        "ranks": sorted(ranks, key=lambda each: each["run"]["rank"] or 0),
    }
    validate(merged)
    return Shown(merged)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _refuse_strangers(ranks: list[dict[str, Any]]) -> None:
    """Refuses documents that do not belong to one run."""
    advice = "Merge the documents of one run, one a rank; make a report of each other one"
    numbers = Counter(each["run"]["rank"] for each in ranks)
    if None in numbers:
        raise ReportError(f"a document without a rank was given with others. {advice}")
    twice = [rank for rank, times in numbers.items() if times > 1]
    if twice:
        raise ReportError(f"rank {twice[0]} was given {numbers[twice[0]]} times. {advice}")
    for key in ("world_size", "command"):
        one = ranks[0]["run"][key]
        others = [each["run"][key] for each in ranks if each["run"][key] != one]
        if others:
            raise ReportError(f"the {key} differs: {one!r} and {others[0]!r}. {advice}")


def _read(document: dict[str, Any]) -> list[Document]:
    """The documents of the processes; a `MismatchError` says what is not as the schema says, or of uneven length."""
    is_merged = "ranks" in document
    ranks = from_json(Merged, document).ranks if is_merged else [from_json(Document, document)]
    for part in ranks:
        for number, module in enumerate(part.health.modules if part.health else ()):
            _refuse_uneven(module, f"health.modules[{number}]")
    return ranks


def _refuse_uneven(module: HealthModule, path: str) -> None:
    """Refuses lists that do not have one entry for each step that was counted."""
    steps = len(module.steps)
    for key in _PER_STEP:
        length = len(operator.attrgetter(key)(module))
        if length != steps:
            wrong = f"an entry for each of {steps} steps is wanted, and {length} are there"
            raise MismatchError(f"{path}.{key}: {wrong}")
