"""What programs call beside plain operations, under policies of precast's own.

Under PyTorch's policy, and with `install`, it is compared with PyTorch in tests/conformance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.engine import registration
from tests.conformance.compare import Make, difference, used
from tests.conformance.test_attention import MODULES
from tests.conformance.test_layouts import MAKERS
from tests.conformance.test_parametrizations import MAKERS as PARAMETRIZED
from tests.conformance.test_recurrent import CELLS, NETWORKS

PROGRAMS: dict[str, Make] = {
    **MODULES,
    **NETWORKS,
    **CELLS,
    **PARAMETRIZED,
    "channels last": MAKERS["channels last"],
}
"""In which PyTorch refuses nothing when it trains."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_default_policy_gives_pytorchs_bits_where_pytorch_raises_nothing(name: str) -> None:
    ours = used(precast.autocast, PROGRAMS[name], torch.bfloat16)
    theirs = used(torch.autocast, PROGRAMS[name], torch.bfloat16)
    for way, expected in theirs.items():
        if not isinstance(expected, type):
            assert difference(ours[way], expected, way) == ""


@torch.library.custom_op("precast_neighbours::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return (x @ weight) * scale


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient @ weight.mT * ctx.scale, x.mT @ gradient * ctx.scale, None


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


scaled_product.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize(
    ("rule", "dtype"), [("lower", torch.bfloat16), ("fp32", torch.float32), ("keep", None)]
)
def test_a_custom_operation_follows_its_rule(rule: str, dtype: torch.dtype | None) -> None:
    name = "precast_neighbours::scaled_product"
    policy = precast.Policy.load("torch").replace(name=rule, ops={name: rule})
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3).half()
    with precast.autocast("cpu", policy=policy):
        if dtype is None:
            with pytest.raises(RuntimeError, match="dtype"):
                scaled_product(x, weight, 2.0)
            return
        result = scaled_product(x, weight, 2.0)
        assert torch.equal(result, scaled_product(x, weight, 2.0))
    expected = (x.to(dtype) @ weight.detach().to(dtype)) * 2.0
    assert result.dtype is dtype
    assert torch.equal(result, expected)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (x.to(dtype).mT @ torch.ones(2, 3, dtype=dtype) * 2).float())


def test_a_model_copied_inside_a_region_is_a_model_of_its_own() -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with precast.autocast("cpu"), torch.no_grad():
        before = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), before)
        twin.weight.zero_()
        twin.bias.zero_()
        assert twin(x).abs().sum() == 0
        assert torch.equal(model(x), before)
