"""Tests of slow files that a run of CI draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.draw import SLOW_FILES, is_drawn

ROOT = Path(__file__).parents[2]


def test_the_slow_files_exist() -> None:
    assert [name for name in sorted(SLOW_FILES) if not (ROOT / name).is_file()] == []


def test_each_test_is_drawn_by_some_of_few_seeds() -> None:
    tests = [f"{name}::test_{i}[a]" for name in SLOW_FILES for i in range(30)]
    counts = [sum(is_drawn(test, seed, 4) for seed in range(60)) for test in tests]
    assert min(counts) >= 1
    assert 13 < sum(counts) / len(counts) < 17
    assert all(is_drawn(test, 7, 1) for test in tests)


def test_a_run_says_what_it_leaves_out() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/report/test_true.py"]
    outputs = []
    for share in ("1", "4"):
        environment = {**os.environ, "PRECAST_DRAW": share, "PRECAST_PROGRAMS_SEED": "5"}
        environment.pop("PYTEST_ADDOPTS", None)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout)
    lines = [[line for line in output.splitlines() if "::" in line] for output in outputs]
    assert 0 < len(lines[1]) < len(lines[0]) / 2
    assert "deselected" not in outputs[0]
    assert f"{len(lines[1])}/{len(lines[0])} tests collected" in outputs[1]
    assert "deselected" in outputs[1]
