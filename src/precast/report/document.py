"""The document of a run, as JSON: created, validated, loaded, saved, and merged from several ranks.

Invariants: `load` reads the files of `save`, which computes the summary anew. Both raise an error with the path of a
value that does not match `schema.py`. Unknown keys are preserved. A merged document contains the documents of all
ranks unchanged, the lowest rank first.
"""

from __future__ import annotations

import importlib.metadata
import json
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
from precast._internal.records import MismatchError, as_json, from_json
from precast.errors import ReportError
from precast.report.ranks import summary_of_ranks
from precast.report.schema import VERSION, MergedDocument, PolicyName, RunDocument, RunInfo
from precast.report.words import with_code

__all__ = ["DisplayedDocument", "blank", "checked", "load", "merge", "save", "validate"]


class DisplayedDocument(dict[str, Any]):
    """A valid document: a dict, for which a notebook displays the command and the summary."""

    def _repr_html_(self) -> str:
        documents = _read(self)
        summary = summary_of_ranks(documents)
        many = f", {len(documents):,} ranks" if len(documents) > 1 else ""
        sentences = [summary.headline, *summary.problems, *summary.precision]
        items = "".join(f"<li>{with_code(escape(sentence))}</li>" for sentence in sentences)
        command = escape(" ".join(documents[0].run.command))
        return f"<p><b>precast run {command}</b>{many}</p><ul>{items}</ul>"


def blank(command: list[str], policy: str) -> RunDocument:
    """Return the document of a run that has not started: command, versions and machine.

    This works also for a program that ends before it loads PyTorch. The caller adds the rest.
    """
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    run = RunInfo(
        command=command,
        torch=torch,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        policy=PolicyName(policy),
    )
    return RunDocument(VERSION, version.__version__, _now(), run, [], [], None, None, [])


def validate(document: object, name: str = "the document") -> dict[str, Any]:
    """Return the document if it matches the schema.

    Raises:
        ReportError: it does not. The message names the path, the expected type and the value.
    """
    return checked(document, name)[0]


def checked(
    document: object, name: str = "the document"
) -> tuple[dict[str, Any], list[RunDocument]]:
    """Return a document as plain values, and as a list with one `RunDocument` for each process.

    Raises:
        ReportError: as `validate`.
    """
    if is_dataclass(document):
        document = as_json(document)
    if not isinstance(document, dict) or "schema" not in document:
        raise ReportError(
            f'{name} is not a document of precast: it has no "schema". '
            "Write one with: precast run --json FILE script.py"
        )
    if document["schema"] != VERSION or isinstance(document["schema"], bool):
        raise ReportError(
            f"{name} has schema {document['schema']!r}, and precast {version.__version__} reads "
            f"schema {VERSION}. Install the version of precast that wrote it, or run the program again"
        )
    try:
        return document, _read(document)
    except MismatchError as wrong:
        raise ReportError(
            f"{name} is not as schema {VERSION} says, at {wrong}. See docs/report-data.md"
        ) from wrong


def save(document: RunDocument | MergedDocument | dict[str, Any], path: str | Path) -> None:
    """Write a document and its summary as JSON, completely or not at all.

    Raises:
        ReportError: the document does not match the schema.
        OutputError: the file could not be written. An existing file is not changed.
    """
    plain, ranks = checked(document)
    complete = {**plain, "summary": as_json(summary_of_ranks(ranks))}
    text = json.dumps(complete, allow_nan=False, separators=(",", ":"))
    atomic_write.replace_own(Path(path), text.encode() + b"\n")


def load(path: str | Path) -> DisplayedDocument:
    """Read a document.

    Raises:
        ReportError: the file cannot be read, is not complete, or does not match the schema.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ReportError(
            f"{path} is not a complete JSON file ({error}). It may be truncated, or it may be the page. "
            "Write it again with: precast run --json FILE script.py"
        ) from error
    validate(document, str(path))
    return DisplayedDocument(document)


def merge(parts: Sequence[RunDocument | MergedDocument | dict[str, Any]]) -> DisplayedDocument:
    """Merge the documents of the ranks of one run; a single document is returned unchanged.

    Ranks may be missing, for example those of killed processes.

    Raises:
        ReportError: a rank occurs twice or has no number, or the commands differ.
    """
    ranks = [each for part in map(validate, parts) for each in part.get("ranks", [part])]
    if not ranks:
        raise ReportError("merge: expected at least one document, got none")
    if len(ranks) == 1:
        return DisplayedDocument(ranks[0])
    _refuse_strangers(ranks)
    merged = {
        "schema": VERSION,
        "precast": version.__version__,
        "made": _now(),
        "ranks": sorted(ranks, key=lambda each: each["run"]["rank"] or 0),
    }
    validate(merged)
    return DisplayedDocument(merged)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _refuse_strangers(ranks: list[dict[str, Any]]) -> None:
    advice = "Merge one document for each rank of one run, and make a report for each run"
    for rank, times in Counter(each["run"]["rank"] for each in ranks).items():
        if rank is None:
            raise ReportError(f"merge: one of several documents has no rank. {advice}")
        if times > 1:
            raise ReportError(f"rank {rank} occurs {times} times. {advice}")
    for key in ("world_size", "command"):
        one = ranks[0]["run"][key]
        other = next((each["run"][key] for each in ranks if each["run"][key] != one), one)
        if other != one:
            raise ReportError(f"merge: the {key} differs: {one!r} and {other!r}. {advice}")


def _read(document: dict[str, Any]) -> list[RunDocument]:
    """Return the documents of all processes; raise a `MismatchError` for values of other types."""
    if "ranks" in document:
        return list(from_json(MergedDocument, document).ranks)
    return [from_json(RunDocument, document)]
