"""The benchmark of float8 products on a GPU: its logic, with small shapes and planted times on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import float8
from benchmarks.float8 import RULES, Shape, run
from precast.weights.float8.support import ProductMethod

CPU = torch.device("cpu")
SMALL = (Shape(16, 32, 48), Shape(32, 64, 64))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="float8 is emulated")
        yield


def test_a_gpu_that_emulates_float8_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = SimpleNamespace(method=ProductMethod.EMULATED, reason="it is too old")
    monkeypatch.setattr(float8, "support_of", lambda _: emulated)
    with pytest.raises(RuntimeError, match="emulated, whose time tells nothing"):
        next(run(torch.device("cuda"), SMALL))


@pytest.mark.parametrize("compiled", [False, True])
def test_every_rule_has_a_row_for_every_shape(compiled: bool) -> None:
    shapes = SMALL[:1] if compiled else SMALL
    rows = [*run(CPU, shapes, rounds=3, compiles=(compiled,))]
    ours = [each for each in rows if each["kind"] in RULES]
    assert len(ours) == len(RULES) * len(shapes)
    # What there is no time for is smaller than what there was.
    assert [Shape(r["tokens"], r["inputs"], r["outputs"]) for r in ours[:: len(RULES)]] == [
        *shapes[::-1]
    ]
    for each in ours:
        assert each["compiled"] is compiled
        assert 0 < each["ratio_low"] <= each["ratio"] <= each["ratio_high"]


def test_what_cannot_run_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = float8._under

    def refused(shape: Shape, device: torch.device, rule: str, *, compiled: bool) -> Any:
        if rule == "float8":
            raise RuntimeError("no kernel\nat a line")
        return plain(shape, device, rule, compiled=compiled)

    monkeypatch.setattr(float8, "_under", refused)
    rows = [*run(CPU, SMALL[:1], rounds=3, compiles=(False,))]
    [broken] = [each for each in rows if each["kind"] == "float8"]
    assert broken["error"] == "no kernel"
    assert len([each for each in rows if "ratio" in each and each["kind"] in RULES]) == 2
