"""The engine that runs, why it is the slower one, and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from precast.diagnostics.hardware.engine_report import EngineReport, engine_here
from precast.engine import registration
from precast.weights.native import library
from precast.weights.native.library import Library, Unavailable

LIBRARY = Library(Path("there.so"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "found", "variable", "report"),
    [
        ("native", LIBRARY, None, EngineReport("native")),
        (
            "reference",
            Unavailable("there is none"),
            None,
            EngineReport("reference", "there is none", "precast build"),
        ),
        (
            "reference",
            LIBRARY,
            "reference",
            EngineReport("reference", "PRECAST_ENGINE is 'reference'", "unset PRECAST_ENGINE"),
        ),
        ("reference", LIBRARY, None, EngineReport("reference", "the program has chosen it")),
    ],
)
def test_the_slower_engine_has_a_reason_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    found: Library | Unavailable,
    variable: str | None,
    report: EngineReport,
) -> None:
    monkeypatch.setattr(registration, "engine", lambda: engine)
    monkeypatch.setattr(library, "load", lambda: found)
    monkeypatch.delenv("PRECAST_ENGINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("PRECAST_ENGINE", variable)
    assert engine_here() == report
