"""What the page says that a product in 8 bits loses is what it loses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import float8_errors

PAGE = Path(__file__).parents[2] / "docs" / "float8.md"


def numbers(table: str) -> list[list[float]]:
    return [
        [float(cell.strip().rstrip("%")) for cell in line.split("|")[2:-1]]
        for line in table.splitlines()[2:]
    ]


@pytest.mark.parametrize("measured", [float8_errors.by_length, float8_errors.by_size_of_a_row])
def test_the_tables_of_the_page_are_those_of_the_tool(measured: object) -> None:
    assert callable(measured)
    table = measured()
    head = table.splitlines()[0]
    page = PAGE.read_text(encoding="utf-8")
    committed = page[page.index(head) :].partition("\n\n")[0]
    for ours, theirs in zip(numbers(table), numbers(committed), strict=True):
        # The last digit depends on the order in which a processor adds.
        assert ours == pytest.approx(theirs, abs=0.11), "run: python -m tools.float8_errors"


def test_the_error_does_not_grow_with_the_length_of_the_sums() -> None:
    for _, *in_8_bits in numbers(float8_errors.by_length()):
        assert all(3.5 <= each <= 4.0 for each in in_8_bits)


def test_a_scale_a_row_keeps_small_rows() -> None:
    *_, (bf16, by_tensor, _, by_row) = numbers(float8_errors.by_size_of_a_row())
    assert bf16 < 1
    assert by_tensor > 99
    assert by_row < 5
