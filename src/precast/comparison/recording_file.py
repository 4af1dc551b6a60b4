"""The file of a recording: a header, then for each part of a run its rows as JSON and their measurements as bytes.

Invariants:

- the file grows at its end only, by whole parts, so that after a crash everything before the last part is readable;
- rows have consecutive numbers in the file, and a row refers to rows with lower numbers only;
- no tensor of the program is written: `sketches.py` says what a measurement holds.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._internal import atomic_write
from precast._internal.version import __version__
from precast.comparison.sketches import NUMBERS
from precast.errors import ComparisonError, OutputError

__all__ = [
    "RecordingReader",
    "RecordingWriter",
    "Row",
    "RowInput",
    "RunStep",
    "Tokens",
    "fingerprints",
]

FORMAT: Final = 1
_BYTES: Final = NUMBERS * 8

Tokens = tuple[list[float], list[float]]
"""The likeliest tokens and the logarithms of probabilities, at all positions of logits."""


class RowInput(NamedTuple):
    """One tensor that an operation reads: the numbers of the rows that wrote its memory."""

    rows: tuple[int, ...]
    views: str = ""
    """The view of that memory, if it is not read from the first to the last element."""


class Row(NamedTuple):
    """One tensor that a run computed or read.

    Attributes:
        kind: "operation" for a result; "weight", "buffer" or "input" for a tensor that no recorded operation computed;
            "output" for the result of a module; "gradient" or "update" for a parameter; "loss";
            "logits" for the square roots of probabilities.
        phase: "forward", "backward", "optimizer" or "other".
        module: the path of the module; "" for the model itself.
        name: the operation, or the name of the parameter or buffer.
        source: the line of the program, as "train.py:12 in step"; "" if there is none.
        dtype: the dtype of the tensor.
        shape: its sizes.
        arguments: the arguments that are no tensors, as text.
        rule: the rule of the policy that applied, as "linear: lower".
        traits: "random" for an operation that draws random numbers; "train" or "eval" for the mode of the module.
        result: the position among the results of the operation.
        inputs: the tensors that were read.
        measurement: the position of its measurement in the part; that of an earlier row if it is the same tensor.
        parts: the number of parts of the batch, whose measurements follow; 0 if they are not measured.
        bits: the fingerprint, in a row that was read; several for the parts of a batch.
    """

    kind: str
    phase: str
    module: str
    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    arguments: str
    rule: str
    traits: str
    result: int
    inputs: tuple[RowInput, ...]
    measurement: int
    parts: int = 0
    bits: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Header:
    schema: int
    precast: str
    torch: str
    level: str
    rank: int
    world_size: int
    split: int


class RunStep(NamedTuple):
    """One step of a recording: its number, and its rows by their numbers."""

    step: int
    rows: dict[int, Row]
    measurements: dict[int, Tensor]
    """Those of each row, and below it those of the parts of the batch."""
    tokens: Tokens
    """Empty lists without logits."""


class RecordingWriter:
    """Writes a recording, part by part.

    Raises:
        OutputError: the file cannot be written, or exists and was not written by precast.
    """

    def __init__(self, path: Path, **more: Any) -> None:
        self.path = path
        self._process = os.getpid()
        header = _Header(schema=FORMAT, precast=__version__, torch=torch.__version__, **more)
        atomic_write.replace_own(path, _line({**vars(header), "kind": "recording"}))
        self._file: IO[bytes] | None = open(path, "ab")  # noqa: SIM115 -- closed by `close`

    def write(self, rows: Sequence[Row], measurements: Tensor, **more: Any) -> None:
        """Append a part, and hand it to the operating system.

        Raises:
            OutputError: it could not be written.
        """
        if self._file is None or self._process != os.getpid():
            return  # a forked process is not recorded
        host = measurements.cpu().contiguous()
        content = ctypes.string_at(host.data_ptr(), host.numel() * 8)  # NumPy may be missing
        plain = {**more, "rows": [row[:-1] for row in rows], "measurements": len(measurements)}
        try:
            self._file.write(_line(plain) + content)
            self._file.flush()
        except OSError as error:
            self._file = None
            raise OutputError(error.errno, error.strerror or str(error), str(self.path)) from error

    def close(self) -> None:
        """End the file. A recording without this end is read up to its last part."""
        if self._file is not None and self._process == os.getpid():
            self._file.write(_line({"end": True}))
            self._file.close()
        self._file = None


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class RecordingReader:
    """Reads a recording, step by step.

    Attributes:
        notes: the sentences on what was not recorded, of the steps that were read.
        setting: policy, dtype and device of the region around the model; None while no step with one was read.
        is_cut: True after the last step, if the file ends in the middle of a part or has no end.

    Raises:
        ComparisonError: the file cannot be read or is no recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: dict[str, None] = {}
        self.setting: dict[str, str] | None = None
        self.has_rows = self.is_cut = False
        try:
            self._file = open(path, "rb")  # noqa: SIM115 -- closed by `close`
            line = self._file.readline(1 << 16)
        except OSError as error:
            raise ComparisonError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            plain = json.loads(line)
            self.header = _Header(**{each.name: plain[each.name] for each in fields(_Header)})
            is_later = self.header.schema > FORMAT
            if plain["kind"] != "recording":
                raise KeyError("kind")
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise ComparisonError(
                f"{path} is no recording. Expected a file of `precast run --record` or of precast.record(...)"
            ) from error
        if is_later:
            self.close()
            raise ComparisonError(
                f"{path} was written by precast {self.header.precast} in format {self.header.schema}, and this "
                f"version reads formats up to {FORMAT}. Compare with that version of precast, or a later one"
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def steps(self) -> Iterator[RunStep]:
        """Yield the steps. The file may end anywhere: the rows of an incomplete part that have data are yielded."""
        for number, parts in itertools.groupby(self._parts(), itemgetter(0)):
            step = RunStep(number, {}, {}, ([], []))
            for _, first, rows, matrix, tokens in parts:
                bits = fingerprints(matrix)
                for n, row in enumerate(rows, first):
                    step.rows[n] = row._replace(bits=(bits[row.measurement],))
                    step.measurements[n] = matrix[row.measurement : row.measurement + row.parts + 1]
                for likeliest, logs in tokens:
                    step.tokens[0].extend(likeliest)
                    step.tokens[1].extend(logs)
            yield step

    def _parts(self) -> Iterator[tuple[int, int, list[Row], Tensor, list[Tokens]]]:
        """Yield each part: the step, the number of the first row, the rows, their measurements, and the tokens."""
        first = 0
        while line := self._file.readline():
            try:
                plain = json.loads(line)
                if plain.get("end"):
                    return
                rows = [_row(each) for each in plain["rows"]]
                step, notes, count = int(plain["step"]), plain["notes"], int(plain["measurements"])
                tokens = [*plain.get("tokens", {}).values()]
            except (ValueError, KeyError, TypeError, AttributeError):
                break  # an incomplete line, or damage: nothing after it can be read
            self.notes.update(dict.fromkeys(notes))
            self.setting = self.setting or plain.get("setting")
            content = bytearray(self._file.read(count * _BYTES))
            present = len(content) // _BYTES
            if present < count:
                cut = (i for i, row in enumerate(rows) if row.measurement + row.parts >= present)
                rows = rows[: next(cut, len(rows))]
            if rows:
                self.has_rows = True
                numbers = torch.frombuffer(content, dtype=torch.float64, count=present * NUMBERS)
                yield step, first, rows, numbers.view(present, NUMBERS), tokens
            if present < count:
                break
            first += len(rows)
        self.is_cut = True


def fingerprints(measurements: Tensor) -> tuple[int, ...]:
    """Return the fingerprints in a matrix of measurements."""
    return tuple(measurements[:, 0].contiguous().view(torch.int64).tolist())


def _row(plain: list[Any]) -> Row:
    *head, shape, arguments, rule, traits, result, inputs, measurement, parts = plain
    read = tuple([RowInput(tuple(rows), views) for rows, views in inputs])
    values: Any = (*head, tuple(shape), arguments, rule, traits, result, read, measurement, parts)
    return Row(*values)
