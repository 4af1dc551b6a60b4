"""A file's bytes as text and back, exactly: encodings, byte order marks, line ends, rows and columns.

Invariants: `encode(decode(data)) == data`, or `decode` raises; spans are offsets in the UTF-8 bytes of
the text without its byte order mark; rows and columns count from 1, columns in characters.
"""

from __future__ import annotations

import bisect
import codecs
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Text", "decode"]


@dataclass(frozen=True)
class Text:
    """The text of a file, and how it was written down."""

    data: bytes  # UTF-8, without a byte order mark
    encoding: str = "utf-8"
    mark: bytes = b""

    @cached_property
    def string(self) -> str:
        """The text as Python sees it."""
        return self.data.decode("utf-8")

    @cached_property
    def newline(self) -> str:
        """The line ending of the first line."""
        end = self.data.find(b"\n")
        return "\r\n" if end > 0 and self.data[end - 1 : end] == b"\r" else "\n"

    @cached_property
    def starts(self) -> list[int]:
        """The start of each line."""
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def position(self, offset: int) -> tuple[int, int]:
        """Row and column of a byte."""
        row = bisect.bisect_right(self.starts, offset) - 1
        row = min(row, max(0, len(self.starts) - 1))
        column = len(self.data[self.starts[row] : offset].decode("utf-8", "replace"))
        return row + 1, column + 1

    def line(self, row: int) -> str:
        """A line without its end; empty beyond the last."""
        if row >= len(self.starts):
            return ""
        return self.data[self.starts[row - 1] : self.starts[row]].decode("utf-8").rstrip("\r\n")

    def line_start(self, offset: int) -> int:
        """Return the start of the line that contains a byte."""
        return self.starts[bisect.bisect_right(self.starts, offset) - 1]

    def replaced(self, data: bytes) -> Text:
        """The same file with another text."""
        return Text(data, self.encoding, self.mark)

    def encode(self) -> bytes:
        """The file's bytes."""
        if self.encoding == "utf-8":
            return self.mark + self.data
        return self.mark + self.string.encode(self.encoding)


def decode(data: bytes) -> Text:
    """Decode the bytes of a Python file as Python does.

    Raises:
        ValueError: they are not text in the encoding that they say they are in.
    """
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    body = data[len(mark) :]
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    if encoding in ("utf-8", "utf-8-sig"):
        body.decode("utf-8")
        return Text(body, "utf-8", mark)
    try:
        text = Text(body.decode(encoding).encode("utf-8"), encoding, mark)
    except LookupError as error:  # rot13 is an encoding, but not one of texts
        raise ValueError(str(error)) from error
    if text.encode() != data:
        raise ValueError(f"it cannot be written back in its encoding, {encoding}")
    return text
