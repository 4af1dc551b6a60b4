"""The page of a search in a real browser: it loads in silence, draws its charts in both themes, and fits a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precast.tuning.training import TrainingTask
from tests.browser.conftest import go, leave, prefers, resize
from tests.tuning.test_tuner import tune


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingTask, "steps", (8, 12))
        tune().save(folder / "tuned.toml")
    return folder / "tuned.html"


def opened(browser: Any, page: Path, width: int) -> Any:
    leave(browser)
    resize(browser, width)
    go(browser, page)
    return browser


@pytest.mark.parametrize("width", [1280, 390])
def test_it_loads_in_silence_and_fits(browser: Any, page: Path, width: int) -> None:
    opened(browser, page, width)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    requests = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert requests == []


def test_charts_tree_and_table_are_drawn(browser: Any, page: Path) -> None:
    opened(browser, page, 1280)
    sample = "return document.querySelectorAll(arguments[0]).length"
    assert browser.execute_script(sample, "[data-chart=tried] .scatterlayer .point") >= 2
    assert browser.execute_script(sample, "[data-chart=losses] .scatterlayer .trace") >= 2
    shown = browser.execute_script("return document.querySelector('.tree').textContent")
    for word in ("body", "head", "Linear", "Error", "%"):
        assert word in shown
    assert browser.execute_script(sample, "[data-table=sites] tbody tr") >= 3
    assert browser.execute_script(sample, ".empty:not([hidden])") == 0


def test_it_is_light_and_dark(browser: Any, page: Path) -> None:
    opened(browser, page, 1280)
    ground = "return getComputedStyle(document.body).backgroundColor"
    result = []
    for scheme in ("light", "dark"):
        prefers(browser, scheme)
        result.append(browser.execute_script(ground))
    assert result == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
    prefers(browser, "light")
