"""Every fault of docs/reliability.md leaves the parameters intact under precast, and the page says what happens."""

from __future__ import annotations

import pytest
import torch

from tools import faults
from tools.faults import FAULTS, RANKS, SCALERS, Seen


@pytest.mark.parametrize("title", FAULTS)
def test_parameters_survive(title: str) -> None:
    assert FAULTS[title](SCALERS["precast"]).intact


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page is written with PyTorch 2.13"
)
def test_the_page_says_what_happens() -> None:
    written = faults.PAGE.read_text(encoding="utf-8").splitlines()
    made = faults.page(faults.table(ranks=False)).splitlines()
    missing = [line for line in made if line not in written]
    assert not missing, "run: python -m tools.faults"
    for title in RANKS:
        [row] = [line for line in written if line.startswith(f"| {title} |")]
        assert row.endswith("| yes |")


def test_what_is_not_intact_is_said() -> None:
    rows = [("a fault", Seen("NaN", False), Seen("skipped", True))]
    assert "| a fault | NaN | **no** | skipped | yes |" in faults.page(rows)
