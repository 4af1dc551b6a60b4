"""TorchScript of what is shipped: traces of converted models and exported programs, kept with the policy's casts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import PrecastWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()


def _saved_trace(traced: nn.Module, x: Tensor, path: Path) -> Any:
    with torch.no_grad():
        torch.jit.trace(traced, x).save(str(path))
    return torch.jit.load(str(path))


def test_a_trace_of_a_converted_model_has_its_casts_and_weights(
    model: nn.Module, tmp_path: Path
) -> None:
    x, other = torch.randn(3, 4), torch.randn(5, 4)
    converted = precast.convert(model, example=x)
    loaded = _saved_trace(converted, x, tmp_path / "traced.pt")
    with torch.no_grad():
        for given in (x, other):
            assert torch.equal(loaded(given), converted(given))
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16, torch.float32}


def test_a_trace_of_an_exported_program_has_its_casts(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    program = precast.export(model, (x,), dtype=torch.bfloat16)
    loaded = _saved_trace(program.module(), x, tmp_path / "traced.pt")
    with torch.no_grad(), precast.autocast("cpu", torch.bfloat16):
        expected = model(x)
    assert torch.equal(loaded(x), expected)
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_converted_or_exported_cannot_be_scripted(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    converted = precast.convert(model, example=x)
    for refused in converted, nn.Sequential(converted):
        with pytest.raises(
            precast.errors.ConversionError, match=r"converted Sequential.*torch\.jit\.trace"
        ):
            torch.jit.script(refused)
    with pytest.raises(RuntimeError):
        torch.jit.script(precast.export(model, (x,)).module())


def test_a_region_of_another_policy_around_a_converted_model_is_told_once(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    converted = precast.convert(model, example=x)
    expected = converted(x)
    other = precast.Policy.load("default").replace(name="other", ops={"linear": "fp32"})
    with precast.autocast("cpu", torch.bfloat16, policy=other):
        with pytest.warns(PrecastWarning, match="the policy 'other'.* keeps .*'default'") as told:
            first = converted(x)
        second = converted(x)
    assert len(told) == 1
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
