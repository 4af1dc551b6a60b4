"""What doctor says of the float8 rules: what the rules do, measured with what they run, and in words that follow."""

from __future__ import annotations

import pytest
import torch

from precast.diagnostics.hardware import float8
from precast.diagnostics.hardware.float8 import RULES, Float8Report, float8_on
from precast.weights.float8.support import ProductMethod, Support, override_support, support_of
from tests.support.processor import has_bfloat16

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def here() -> Float8Report:
    return float8_on(CPU)


def test_a_cpu_is_measured_and_said_to_emulate(here: Float8Report) -> None:
    support = support_of(CPU)
    assert (here.device, here.method, here.reason) == ("cpu", support.method.value, support.reason)
    assert [speed.dtype for speed in here.speeds] == list(RULES)
    assert all(speed.ratio is not None and speed.ratio > 0 for speed in here.speeds)
    assert "emulates float8" in here.diagnosis
    assert "save no time" in here.diagnosis
    assert support.reason in here.diagnosis


def test_an_emulation_is_slower_than_bfloat16(here: Float8Report) -> None:
    """It does what bfloat16 does in a wider dtype, and quantises beside it."""
    # Without bfloat16 instructions, bfloat16 is emulated too, and can be the slower one.
    assert all(s.ratio is not None and (s.ratio < 1 or not has_bfloat16()) for s in here.speeds)


def test_measuring_leaves_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    float8_on(CPU)
    assert torch.get_num_threads() == before


def test_what_is_measured_is_what_the_rules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = set()
    plain = float8.linear

    def watched(
        x: torch.Tensor, w: torch.Tensor, recipe: object, way: ProductMethod
    ) -> torch.Tensor:
        ways.add(way)
        return plain(x, w, recipe, way)  # type: ignore[arg-type]

    monkeypatch.setattr(float8, "linear", watched)
    float8_on(CPU)
    assert ways == {ProductMethod.EMULATED}
    with override_support(Support(ProductMethod.KERNEL, "a kernel")):
        found = float8_on(CPU)
    assert ways == {ProductMethod.EMULATED, ProductMethod.KERNEL}
    assert found.method == "kernel"


def test_a_kernel_that_is_refused_is_no_kernel_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat a line")

    monkeypatch.setattr(float8, "linear", refused)
    with override_support(Support(ProductMethod.KERNEL, "compute capability 9.9")):
        found = float8_on(CPU)
    assert [speed.error for speed in found.speeds] == ["no such kernel"] * len(RULES)
    assert found.diagnosis.startswith("PyTorch refuses the rule float8 on cpu")
    assert found.diagnosis.endswith("no such kernel.")


def test_what_has_no_float8_numbers_is_not_measured() -> None:
    found = float8_on(torch.device("mps"))
    assert (found.method, found.speeds) == ("none", ())
    assert "cannot run the float8 rules" in found.diagnosis


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_too() -> None:
    found = float8_on(torch.device("cuda", 0))
    assert all(speed.ratio is not None for speed in found.speeds), found.diagnosis
