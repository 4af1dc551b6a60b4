"""Notebooks: the code of all cells as one text, and a changed text back into the same JSON.

Invariants: only the JSON strings of lines that changed are written anew; cells and lines that are not
Python (magics, other languages) are hidden from the checker and come back as they were; a cell that should be
Python and is not is hidden too, and is in `broken`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from precast_lint.parsing.depth import guard
from precast_lint.parsing.syntax import cst

__all__ = ["Broken", "Notebook", "is_notebook"]

_SEPARATOR = "#%%precast-cell-{}"
_OPENING = "if 1:"  # before the separator of an indented cell, which IPython dedents
_SPLIT = re.compile(r"^(?:if 1:)?#%%precast-cell-(\d+)\n", re.M)
_HIDDEN = "pass#precast-magic:"
_MAGIC = re.compile(r"^(\s*)([%!?].*|[\w., ]+=\s*[%!].*|.*\?)$")
# Magics and aliases that IPython also accepts without a percent sign, and its calls without brackets, if the line is
# no Python.
_AUTOMAGIC = re.compile(
    r"^(\s*)((?:alias|bookmark|cat|cd|conda|cp|dirs|env|less|load|load_ext|ls|ll|mamba|matplotlib|mkdir|more|mv|notebook|"
    r"pip|popd|prun|pushd|pwd|reset|rm|rmdir|run|set_env|time|timeit|uv|who|whos)(?: +[^\s=(.,].*)?|[,;/]\w.*)$"
)
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")


def is_notebook(filename: str) -> bool:
    """Return True if a file is one."""
    return filename.endswith(".ipynb")


@dataclass(frozen=True)
class _Cell:
    number: int  # from 1, all cells counted
    start: int  # of the JSON value of "source" in the file
    end: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Broken:
    """A cell that is not Python: its number, the row in it where that shows, the parser's reason."""

    row: int
    reason: str
    line: str
    cell: int = 0


class Notebook:
    """A notebook's file, and the Python in it.

    Raises:
        ValueError: it is not JSON, or not that of a notebook.
    """

    def __init__(self, data: bytes) -> None:
        self.json = data.decode("utf-8")
        self.cells: list[_Cell] = []
        self.broken: list[Broken] = []
        parts, texts = [], []
        for cell in _cells(self.json):
            texts.append("".join(cell.lines))
            shown = _shown(texts[-1])
            if isinstance(shown, Broken):
                self.broken.append(replace(shown, cell=cell.number))
            elif shown is not None:
                self.cells.append(cell)
                opening = _OPENING if _is_indented(shown) else ""
                parts += [opening, _SEPARATOR.format(cell.number) + "\n", _ended(shown)]
        self.code = "".join(parts)
        self.sources = "".join(texts)  # of all code cells, without their outputs

    def place(self, row: int) -> tuple[int, int]:
        """The number of the cell and the row in it, both from 1, of a row of `code`."""
        number, first = 1, 0
        for at, line in enumerate(self.code.split("\n")[:row], 1):
            if result := _SPLIT.fullmatch(line + "\n"):
                number, first = int(result[1]), at
        return number, max(1, row - first)

    def with_code(self, code: str) -> bytes:
        """The file with another text in the place of `code`."""
        pieces = _SPLIT.split(code)
        if pieces[0]:  # an import before the opening of an indented cell
            indent = pieces[2][: len(pieces[2]) - len(pieces[2].lstrip())].rpartition("\n")[2]
            pieces[2] = indent + pieces[0] + pieces[2]
        changed = dict(zip(map(int, pieces[1::2]), pieces[2::2], strict=True))
        text = self.json
        for cell in reversed(self.cells):
            before = "".join(cell.lines)
            after = changed[cell.number].replace(_HIDDEN, "")
            after = after if before.endswith("\n") else after.removesuffix("\n")
            if after != before:
                value = _written(text[cell.start : cell.end], cell.lines, after)
                text = text[: cell.start] + value + text[cell.end :]
        return text.encode("utf-8")


def _cells(text: str) -> Iterator[_Cell]:
    start = re.compile(r"[\s\ufeff]*").match(text).end()  # type: ignore[union-attr]
    top = dict(_members(text, start))
    if "cells" not in top:
        raise ValueError('a notebook has "cells"')
    if "metadata" in top and not _speaks_python(json.loads(text[slice(*top["metadata"])])):
        return
    for number, (at, _) in enumerate(_items(text, top["cells"][0]), 1):
        members = dict(_members(text, at))
        if "source" not in members or "cell_type" not in members:
            continue
        begin, end = members["source"]
        kind = json.loads(text[slice(*members["cell_type"])])
        source = json.loads(text[begin:end])
        lines = _lines(source) if isinstance(source, str) else source
        if kind == "code" and isinstance(lines, list) and all(isinstance(s, str) for s in lines):
            yield _Cell(number, begin, end, tuple(lines))


def _lines(text: str) -> list[str]:
    """The lines of a text with their ends, as Jupyter sees them: a form feed ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _speaks_python(metadata: Any) -> bool:
    """Return True if a notebook's kernel runs Python; one that does not say is taken to."""
    described = metadata if isinstance(metadata, dict) else {}
    for part, key in (("language_info", "name"), ("kernelspec", "language")):
        inner = described.get(part)
        if isinstance(inner, dict) and isinstance(inner.get(key), str):
            return inner[key].lower() in ("python", "ipython")
    return True


_SPACE = re.compile(r"[\s,:]*")
_decoder = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _members(text: str, at: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The keys of the object at an index, with where their values stand."""
    if text[at : at + 1] != "{":
        raise ValueError("a notebook is a JSON object of objects")
    at = _skip(text, at + 1)
    while text[at : at + 1] == '"':
        name, at = _decoder.raw_decode(text, at)
        at = _skip(text, at)
        _, end = _decoder.raw_decode(text, at)
        yield name, (at, end)
        at = _skip(text, end)


def _items(text: str, at: int) -> Iterator[tuple[int, int]]:
    if text[at : at + 1] != "[":
        raise ValueError("the cells of a notebook are a list")
    at = _skip(text, at + 1)
    while text[at : at + 1] not in ("]", ""):
        _, end = _decoder.raw_decode(text, at)
        yield at, end
        at = _skip(text, end)


def _shown(source: str) -> str | Broken | None:
    """A cell as Python, magics hidden; None where it is in another language."""
    if _HIDDEN in source or _SPLIT.search(source) or "\r" in source:
        return None
    first = source.lstrip().partition("\n")[0].split(" ")[0]
    if first.startswith("%%") and first not in _PYTHON_CELLS:
        return None
    if _error(source) is None:
        return source
    for magic in (_MAGIC, _AUTOMAGIC):
        source = "\n".join(_without_magics(source.split("\n"), magic))
        if (error := _error(source)) is None:
            return source
    return error


def _is_indented(source: str) -> bool:
    lines = (line for line in source.split("\n") if line.strip() and line.lstrip()[0] != "#")
    return next(lines, "")[:1] in (" ", "\t")


def _without_magics(lines: list[str], magic: re.Pattern[str]) -> Iterator[str]:
    """Lines with magics and shell commands hidden, and the lines on which these go on behind a backslash."""
    indent: str | None = None  # of a magic that continues on the next line
    for line in lines:
        if indent is not None and line.startswith(indent):
            shown = f"{indent}{_HIDDEN}{line[len(indent) :]}"
        else:
            shown = magic.sub(rf"\g<1>{_HIDDEN}\g<2>", line)
            indent = line[: len(line) - len(line.lstrip())] if shown != line else None
        if not line.rstrip().endswith("\\"):
            indent = None
        yield shown


def _error(source: str) -> Broken | None:
    try:
        guard(source)
        cst.parse_module((_OPENING + "\n" if _is_indented(source) else "") + _ended(source))
    except (cst.ParserSyntaxError, RecursionError) as error:
        rows = source.split("\n")
        row = getattr(error, "raw_line", 1) - _is_indented(source)
        row = min(max(row, 1), len(rows))
        reason = str(getattr(error, "message", error)).partition("\n")[0]
        return Broken(row, reason, rows[row - 1])
    return None


def _ended(source: str) -> str:
    return source if source.endswith("\n") or not source else source + "\n"


def _written(value: str, lines: tuple[str, ...], after: str) -> str:
    """The JSON of a cell's new source in the style of its old one."""
    ascii_only = value.isascii()
    if value.startswith('"'):
        return json.dumps(after, ensure_ascii=ascii_only)
    spans = list(_items(value, 0))
    literals = {line: value[slice(*span)] for line, span in zip(lines, spans, strict=True)}
    opening, closing = value[: spans[0][0]], value[spans[-1][1] :]
    between = value[spans[0][1] : spans[1][0]] if len(spans) > 1 else "," + opening[1:]
    new = [
        literals.get(line) or json.dumps(line, ensure_ascii=ascii_only) for line in _lines(after)
    ]
    return opening + between.join(new) + closing
