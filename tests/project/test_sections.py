"""A measurement writes between its marks in a page, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import importing, instructions, page, scaler, trials
from benchmarks.sections import put


def test_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end -->\nafter\n<!-- end -->\n")
    for _ in range(2):
        put(page, "<!-- a -->\n", "<!-- end -->", "new \\1\n")
        assert (
            page.read_text() == "before\n<!-- a -->\nnew \\1\n<!-- end -->\nafter\n<!-- end -->\n"
        )


@pytest.mark.parametrize("text", ["no mark\n", "<!-- end --> <!-- a -->\n"])
def test_a_page_without_its_marks_stays(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="put both marks there"):
        put(page, "<!-- a -->", "<!-- end -->", "new")
    assert page.read_text() == text


@pytest.mark.parametrize("tool", [importing, instructions, page, scaler, trials])
def test_a_page_has_one_place_for_its_figures(tool: ModuleType) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text.count(tool.BEGIN) == text.count(tool.END) == 1
