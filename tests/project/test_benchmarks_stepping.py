"""`python -m benchmarks steps`: that the rows are of what their names say, and that targets judge them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import precast
from benchmarks import stepping
from benchmarks.targets import NOT_JUDGED, TARGETS, judged
from precast.errors import PrecastWarning
from precast.weights import step_program


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:  # operations one by one, as compiling takes long
        patch.setattr(step_program, "_programs", {})
        patch.setattr(step_program.torch, "compile", lambda module, **_: module)
        found = list(stepping.run(rounds=2, millions=(1,), shapes=((1, 2),), width=160))
        assert step_program._programs  # one pass is one pass
    return found


def test_each_way_has_a_row_beside_the_fastest(rows: list[dict[str, Any]]) -> None:
    alone = [row for row in rows if "million" in row["case"]]
    assert {row["case"] for row in alone} == {stepping.case_of_step(1)}
    assert {row["kind"] for row in alone} == {
        stepping.ONE_PASS,
        "fused, with casts",
        "foreach, with casts",
    }
    [baseline] = {row["baseline"] for row in alone}
    medians = {row["kind"]: row["median_ms"] for row in alone}
    assert medians[baseline] == min(medians[k] for k in medians if k != stepping.ONE_PASS)
    json.dumps(rows)


def test_a_training_has_its_peak(rows: list[dict[str, Any]]) -> None:
    trained = {row["kind"]: row for row in rows if "decoder" in row["case"]}
    assert set(trained) == {stepping.ONE_PASS, stepping.AUTOCAST, "attached"}
    assert trained[stepping.AUTOCAST]["ratio"] == 1
    assert trained["attached"]["grown_bytes"] == 0
    assert all(row["peak_bytes"] > 2**20 for row in trained.values())


def test_every_target_finds_its_row(rows: list[dict[str, Any]]) -> None:
    mine = [target for target in TARGETS if target.row["benchmark"] == "steps"]
    alone = next(r for r in rows if r["kind"] == stepping.ONE_PASS and "million" in r["case"])
    trained = next(r for r in rows if r["kind"] == stepping.ONE_PASS and "decoder" in r["case"])
    measured = [
        {**(alone if "million" in target.row["case"] else trained), "case": target.row["case"]}
        for target in mine
    ]
    found = list(judged({"bfloat16_units": ["avx512_bf16"]}, measured))
    assert len(found) == len(mine) == 9
    assert all(row["value"] is not None for row in found)
    assert NOT_JUDGED not in {row["verdict"] for row in found}


def test_what_is_not_stepped_in_one_pass_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = precast.attach
    monkeypatch.setattr(precast, "attach", lambda *a, **k: attach(*a, **k).detach())
    with pytest.raises(RuntimeError, match="48 weights are not stepped in one pass"):
        stepping._one_pass(20)


def test_a_compiler_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(step_program, "_programs", {})
    monkeypatch.setattr(step_program.torch, "compile", lambda *_, **__: fails)
    with pytest.raises(PrecastWarning, match="no compiler"):
        stepping._one_pass(20)
