"""The file of a recording: a header, then for each part of a run its rows as JSON and their measurements as bytes.

Invariants:

- the file grows at its end only, by whole parts, so that after a crash everything before the last part is readable;
- rows have consecutive numbers in the file, and a row refers to rows with lower numbers only;
- no tensor of the program is written: `sketches.py` says what a measurement holds.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._internal import atomic_write
from precast._internal.version import __version__
from precast.comparison.sketches import NUMBERS
from precast.errors import ComparisonError, OutputError

__all__ = ["Header", "Part", "RecordingReader", "RecordingWriter", "Row", "RowInput"]

FORMAT: Final = 1
_BYTES: Final = NUMBERS * 8


class RowInput(NamedTuple):
    """One tensor that an operation reads.

    Attributes:
        rows: the numbers of the rows that wrote its memory.
        views: the views between these rows and the operation, such as "transpose(0, 1)"; "" for none.
    """

    rows: tuple[int, ...]
    views: str = ""


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


class Header(NamedTuple):
    """The first line of a recording.

    Attributes:
        format: the version of the file's format.
        precast: the version of precast.
        torch: the version of PyTorch.
        level: "operations" or "modules".
        rank: the rank of the process.
        world_size: the number of processes.
        split: the number of parts of each batch that are measured.
    """

    format: int
    precast: str
    torch: str
    level: str
    rank: int
    world_size: int
    split: int


class Part(NamedTuple):
    """Consecutive rows of one step.

    Attributes:
        step: the number of the step.
        first: the number of the first row.
        rows: the rows.
        measurements: a matrix of float64 numbers, to which the rows refer.
        notes: sentences on what was not recorded.
        tokens: for the number of a row of logits, the likeliest tokens, and the logarithms of probabilities.
        setting: the policy, dtype and device of the region around the model, if it is the first that was seen.
    """

    step: int
    first: int
    rows: list[Row]
    measurements: Tensor
    notes: list[str]
    tokens: dict[int, list[list[float]]]
    setting: dict[str, str] | None


class RecordingWriter:
    """Writes a recording, part by part.

    Raises:
        OutputError: the file cannot be written, or exists and was not written by precast.
    """

    def __init__(self, path: Path, **more: Any) -> None:
        self.path = path
        self._process = os.getpid()
        header = {"schema": FORMAT, "precast": __version__, "torch": torch.__version__}
        atomic_write.replace_own(path, _line({**header, **more, "kind": "recording"}))
        self._file: IO[bytes] | None = open(path, "ab")  # noqa: SIM115 -- closed by `close`

    def write(
        self,
        step: int,
        rows: Sequence[Row],
        measurements: Tensor,
        notes: Sequence[str],
        **more: Any,
    ) -> None:
        """Append a part, and hand it to the operating system.

        Raises:
            OutputError: it could not be written.
        """
        if self._file is None or self._process != os.getpid():
            return  # a forked process is not recorded
        host = measurements.cpu().contiguous()
        content = ctypes.string_at(host.data_ptr(), host.numel() * 8)  # NumPy may be missing
        part = {
            "step": step,
            "rows": rows,
            "notes": notes,
            "measurements": len(measurements),
        } | more
        try:
            self._file.write(_line(part) + content)
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
    """Reads a recording, part by part.

    Attributes:
        header: the first line.
        parts_read: the number of parts that were read.
        is_cut: True after the last part, if the file ends in the middle of a part or has no end.

    Raises:
        ComparisonError: the file cannot be read or is no recording.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts_read = 0
        self.is_cut = False
        try:
            self._file = open(path, "rb")  # noqa: SIM115 -- closed by `close`
            line = self._file.readline(1 << 16)
        except OSError as error:
            raise ComparisonError(f"cannot read {path}: {error.strerror or error}") from error
        self.header = self._header(line)

    def _header(self, line: bytes) -> Header:
        try:
            plain = json.loads(line)
            if plain["kind"] != "recording":
                raise KeyError("kind")
            header = Header(
                int(plain["schema"]), plain["precast"], plain["torch"], plain["level"],
                int(plain["rank"]), int(plain["world_size"]), int(plain["split"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise ComparisonError(
                f"{self.path} is no recording. Expected a file of `precast run --record` or of precast.record(...)"
            ) from error
        if header.format > FORMAT:
            self._file.close()
            raise ComparisonError(
                f"{self.path} was written by precast {header.precast} in format {header.format}, and this version "
                f"reads formats up to {FORMAT}. Compare with that version of precast, or a later one"
            )
        return header

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def parts(self) -> Iterator[Part]:
        """Yield the parts. The file may end anywhere: the rows of an incomplete part that have data are yielded."""
        number = 0
        while line := self._file.readline():
            try:
                plain = json.loads(line)
                if plain.get("end"):
                    return
                rows = [_row(each) for each in plain["rows"]]
                step, notes, count = int(plain["step"]), plain["notes"], int(plain["measurements"])
                tokens = {int(key): value for key, value in plain.get("tokens", {}).items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                break  # an incomplete line, or damage: nothing after it can be read
            content = self._file.read(count * _BYTES)
            present = len(content) // _BYTES
            if present < count:
                cut = (i for i, row in enumerate(rows) if row.measurement + row.parts >= present)
                rows = rows[: next(cut, len(rows))]
            if rows:
                self.parts_read += 1
                numbers = torch.frombuffer(
                    bytearray(content), dtype=torch.float64, count=present * NUMBERS
                )
                matrix = numbers.view(present, NUMBERS)
                yield Part(step, number, rows, matrix, notes, tokens, plain.get("setting"))
            if present < count:
                break
            number += len(rows)
        self.is_cut = True


def _row(plain: list[Any]) -> Row:
    *head, shape, arguments, rule, traits, result, inputs, measurement, parts = plain
    read = tuple([RowInput(tuple(rows), views) for rows, views in inputs])
    values: Any = (*head, tuple(shape), arguments, rule, traits, result, read, measurement, parts)
    return Row(*values)
