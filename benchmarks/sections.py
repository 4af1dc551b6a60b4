"""Writes what was measured into a page, between two marks that stand in it; the rest of the page stays."""

from __future__ import annotations

from pathlib import Path

from precast._internal.atomic_write import replace

__all__ = ["put"]


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Puts `text` between the first `begin` in `page` and the next `end`, all of it or nothing.

    Raises:
        ValueError: a mark is not there.
    """
    before, begin_mark, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (begin_mark and ended):
        raise ValueError(
            f"{page} has no {(end if begin_mark else begin).strip()!r}: put both marks there"
        )
    replace(page, f"{before}{begin}{text}{end}{after}".encode())
