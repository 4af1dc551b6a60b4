"""The measurements of programs, packages and the start of a process: what is in a row, and what the page says of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import networks, packages, starting
from benchmarks.shipping_page import shipped
from benchmarks.tables import about, print_rows
from benchmarks.targets import NOT_JUDGED, TARGETS, judged
from precast.engine.native.build import find_compiler
from precast.errors import ExportError

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="AOTInductor needs a C++ compiler"
)


def _no_compiler(*_: object) -> None:
    raise ExportError("no compiler here")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in place of 32, which take a minute to compile."""
    cases = dict.fromkeys(packages.CASES, partial(networks.mlp, layers=2))
    monkeypatch.setattr(packages, "CASES", cases)


@needs_compiler
def test_a_package_is_compared_with_the_package_of_by_hand() -> None:
    rows = {row["kind"]: row for row in packages.run(rounds=1, only=("MLP",))}
    assert list(rows) == ["exported", "AOTInductor", "exported + lean", "AOTInductor + lean"]
    assert rows["exported"]["against"] == "exported, by hand"
    assert rows["AOTInductor"]["against"] == "AOTInductor, by hand"
    assert [row["skipped"] for row in rows.values() if "skipped" in row] == []
    assert all(row["by_hand"] > 0 for row in rows.values())
    assert 0.5 < rows["AOTInductor"]["file"] < 1.5
    assert 0.5 < rows["AOTInductor"]["file_same_islands"] < 1.5
    assert "file" not in rows["exported"]
    found = {(row["work"], row["case"]): row["value"] for row in judged(about(), rows.values())}
    assert found["a package of AOTInductor", "MLP"] == rows["AOTInductor"]["same_islands"]


def test_without_a_compiler_programs_are_measured_and_packages_say_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "write_package", _no_compiler)
    rows = list(packages.run(rounds=1, only=("MLP",)))
    measured = [row["kind"] for row in rows if "by_hand" in row]
    assert measured == ["exported", "exported + lean"]
    [verdict] = judged(about(), rows)
    assert (verdict["verdict"], verdict["reason"]) == (NOT_JUDGED, "no compiler here")
    print_rows(about(), rows)
    assert "| MLP | AOTInductor | skipped: no compiler here | | | | |" in list(
        shipped([], rows, [])
    )


def test_a_process_starts_with_every_file_but_a_package_that_there_is_none_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "write_package", _no_compiler)
    rows = {row["kind"]: row for row in starting.run(rounds=1)}
    assert list(rows) == list(starting.KINDS)
    assert rows[starting.IN_REGION]["ratio"] == 1.0
    assert rows["exported"]["median_s"] > 0 < rows["exported"]["peak_mib"]
    assert rows["precast.load"]["ratio"] > 0
    packages = [row for kind, row in rows.items() if "AOTInductor" in kind]
    assert [row["skipped"] for row in packages] == ["no compiler here"] * 2
    print_rows(about(), list(rows.values()))


def test_a_process_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "KINDS", {"broken": "raise ValueError('no model')"})
    with pytest.raises(RuntimeError, match=r"failed: (?s:.*)no model"):
        starting._start("broken", str(tmp_path), {})


def test_the_page_says_what_the_rows_say() -> None:
    measured: dict[str, Any] = {"median_ms": 1.5, "by_hand": 1.04, "by_hand_iqr": 0.02}
    measured |= {"same_islands": 1.01, "same_islands_iqr": 0.03}
    converted = {"case": "MLP", "kind": "converted", "islands": ["a.weight", "..."]}
    converted |= measured | {"weights": 1.04, "weights_same_islands": 1.0, "peak": 1.1}
    converted["peak_of_call"] = 1.05
    package = {"case": "MLP", "kind": "AOTInductor + lean", "same_as": "default", "file": 1.03}
    package["file_same_islands"] = 1.0
    started = {"case": "MLP", "kind": "AOTInductor", "median_s": 2.0, "peak_mib": 300.0}
    started |= {"ratio": 0.5, "ratio_iqr": 0.01}
    lines = list(shipped([converted], [package | measured], [started]))
    for line in (
        "| MLP | converted | 1.50 | 1.040 (0.020) | 1.010 (0.030) | 1.040 | 1.000 | 1.10 | 1.05 | `a.weight`, ... |",
        "| MLP | AOTInductor + lean (the program of default) | 1.50 | 1.040 (0.020) | 1.010 (0.030) | 1.030 | 1.000 |",
        "| AOTInductor | 2.00 | 0.500 (0.010) | 300 |",
    ):
        assert line in lines
    assert list(shipped([], [], [])) == []


def test_every_network_has_a_target() -> None:
    cases = [t.row["case"] for t in TARGETS if t.row["benchmark"] == "packages"]
    assert cases == list(packages.CASES)
