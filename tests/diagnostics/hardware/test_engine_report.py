"""What doctor says of the engine: which one, why it is the slower one, what that costs, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from precast.diagnostics.hardware.engine_report import EngineReport, engine_here
from precast.engine import registration
from precast.weights.native import library
from precast.weights.native.library import Library, Unavailable

LIBRARY = Library(Path("there.so"), None, None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reference is chosen, there is a library, and what is asked of either engine is written down."""
    asked: list[str] = []

    @contextmanager
    def use(name: str) -> Iterator[None]:
        asked.append(name)
        yield

    monkeypatch.setattr(registration, "engine", lambda: "reference")
    monkeypatch.setattr(registration, "ENGINES", library.ENGINES)
    monkeypatch.setattr(registration, "use_engine", use)
    monkeypatch.setattr(library, "load", lambda: LIBRARY)
    monkeypatch.delenv("PRECAST_ENGINE", raising=False)
    return asked


def test_where_the_native_engine_runs_there_is_nothing_to_mend(
    monkeypatch: pytest.MonkeyPatch, engines: list[str]
) -> None:
    monkeypatch.setattr(registration, "engine", lambda: "native")
    assert engine_here() == EngineReport("native")
    assert engines == []


def test_where_there_is_no_library_the_reason_and_the_command_are_said_and_no_figure(
    monkeypatch: pytest.MonkeyPatch, engines: list[str]
) -> None:
    monkeypatch.setattr(library, "load", lambda: Unavailable("there is none"))
    assert engine_here() == EngineReport("reference", "there is none", "precast build")
    assert engines == []


def test_where_both_can_be_had_both_are_measured_in_turns(
    monkeypatch: pytest.MonkeyPatch, engines: list[str]
) -> None:
    monkeypatch.setenv("PRECAST_ENGINE", "reference")
    found = engine_here()
    assert (found.name, found.reason) == ("reference", "PRECAST_ENGINE is 'reference'")
    assert found.remedy == "unset PRECAST_ENGINE"
    assert found.cost is not None
    assert 0 < found.cost.native < 1e-3
    assert 0 < found.cost.reference < 1e-3
    assert engines[:4] == ["reference", "native", "native", "reference"]
