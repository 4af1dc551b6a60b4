"""What doctor says of the float8 rules: what the rules do, measured with what they run."""

from __future__ import annotations

import pytest
import torch

from precast.diagnostics.hardware import float8
from precast.diagnostics.hardware.float8 import RULES, measure_rules
from precast.weights.float8.support import ProductMethod, Support, override_support, support_of

CPU = torch.device("cpu")


def test_a_cpu_is_measured_with_what_the_rules_run_and_said_to_emulate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = set()
    plain = float8.linear  # type: ignore[attr-defined]

    def watched(
        x: torch.Tensor, w: torch.Tensor, recipe: object, method: ProductMethod
    ) -> torch.Tensor:
        methods.add(method)
        return plain(x, w, recipe, method)

    monkeypatch.setattr(float8, "linear", watched)
    before = torch.get_num_threads()
    text, reports = measure_rules(CPU)
    assert torch.get_num_threads() == before
    assert text.startswith(f"cpu emulates float8, as {support_of(CPU).reason}: ")
    assert [(each.device, each.dtype) for each in reports] == [("cpu", rule) for rule in RULES]
    assert all(each.ratio is not None and each.ratio > 0 for each in reports)
    assert {each.diagnosis for each in reports} == {"emulated"}
    assert methods == {ProductMethod.EMULATED}
    with override_support(Support(ProductMethod.KERNEL, "a kernel")):
        text, _ = measure_rules(CPU)
    assert text == "cpu has a float8 kernel (a kernel)."
    assert ProductMethod.KERNEL in methods


def test_a_kernel_that_is_refused_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat a line")

    monkeypatch.setattr(float8, "linear", refused)
    with override_support(Support(ProductMethod.KERNEL, "compute capability 9.9")):
        _, reports = measure_rules(CPU)
    assert [each.error for each in reports] == ["no such kernel"] * len(RULES)
    assert {each.diagnosis for each in reports} == {"unsupported"}


def test_what_has_no_float8_numbers_is_not_measured() -> None:
    text, reports = measure_rules(torch.device("mps"))
    assert reports == []
    assert "cannot run the float8 rules" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_too() -> None:
    text, reports = measure_rules(torch.device("cuda", 0))
    assert all(each.ratio is not None for each in reports), text
