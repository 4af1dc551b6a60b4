"""`python -m benchmarks.instructions`: what it says without valgrind, its table, and the place for the figures."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import instructions, variants

COUNTS = {
    (work, kind): 2e6 * (1 + number / 100)
    for work in instructions.WORKS
    for number, kind in enumerate(instructions.KINDS)
}


def test_without_valgrind_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda _: None)
    result = CliRunner().invoke(instructions.main)
    assert result.exit_code == 1
    assert "apt install valgrind" in result.output


def test_the_table_has_ratios_to_torch_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(work, kind, count) for (work, kind), count in COUNTS.items()]
    monkeypatch.setattr(instructions, "counted", lambda: iter(rows))
    text = CliRunner().invoke(instructions.main, catch_exceptions=False).output
    assert f"| {variants.INFERENCE} | 2.00 million | 1.010 | 1.020 | 1.030 |" in text
    assert f"| {variants.TRAINING} | 2.00 million |" in text


def test_what_valgrind_runs_says_what_it_has_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[str] = []
    monkeypatch.setattr(instructions, "_control", requests.append)
    CliRunner().invoke(instructions.main, ["--inside"], catch_exceptions=False)
    cases = len(instructions.WORKS) * len(instructions.KINDS)
    assert requests == ["--instr=on", "--dump", "--instr=off"] * cases
