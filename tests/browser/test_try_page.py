"""The page of `precast try` in a real browser: it loads in silence, draws the losses, and fits a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precast.running.trial.answer import answer_of
from tests.browser.conftest import go, leave, resize
from tests.running.trial.test_comparison import bfloat16, outcome, result_of


@pytest.mark.parametrize("width", [1280, 390])
def test_it_loads_in_silence_draws_the_losses_and_fits(
    browser: Any, tmp_path: Path, width: int
) -> None:
    result = result_of(bfloat16(outcome(0.05, 1.001)))
    path = tmp_path / "try.html"
    path.write_text(answer_of(result).page(["train.py"]), encoding="utf-8")
    leave(browser)
    resize(browser, width)
    go(browser, path)
    assert browser.get_log("browser") == []
    sample = "return document.querySelectorAll('[role=img] .scatterlayer .trace').length"
    assert browser.execute_script(sample) == 2
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
