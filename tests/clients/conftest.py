"""Settings of the tests of clients: nothing is downloaded, and the comparisons are written as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

_rows: list[dict[str, Any]] = []


@pytest.fixture
def one_accelerator() -> Iterator[None]:
    """Accelerate keeps one state for the process: none is left by other tests, nor to them."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def pytest_configure(config: pytest.Config) -> None:
    """Lightning advises where there are more than two cores, or a GPU that is not asked for: tests pass there too."""
    for advice in ("The '.*' does not have many workers", "GPU available but not used"):
        config.addinivalue_line("filterwarnings", f"ignore:{advice}:UserWarning")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-json", type=Path, help="where to write what was compared")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _rows.extend(value for name, value in report.user_properties if name == "client")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--clients-json")
    if path is not None and not hasattr(
        session.config, "workerinput"
    ):  # the rows are the first process's
        _write(path, sorted(_rows, key=lambda row: [str(value) for value in row.values()]))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows, versions and the date; a file that says the same already keeps its date."""
    result = {"torch": version("torch"), "clients": rows}
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if {name: kept.get(name) for name in result} != result:
        text = json.dumps({"date": f"{datetime.now(UTC):%Y-%m-%d}", **result}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")
