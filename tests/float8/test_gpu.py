"""The float8 kernel of a GPU against the emulation on the same GPU, and the bits of the quantised numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import precast
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES
from precast.weights.float8.formats import E4M3, E5M2, Scaling
from precast.weights.float8.quantise import quantise
from precast.weights.float8.support import ProductMethod, Support, override_support, support_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:float8 is emulated")]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [None, -1, 0])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_quantised_numbers_are_those_of_the_cpu(
    dtype: torch.dtype, dim: int | None, powers_of_two: bool
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 96) * torch.randn(64, 1).exp()
    scaling = Scaling(dtype, dim, powers_of_two)
    here, there = quantise(matrix, scaling), quantise(matrix.cuda(), scaling)
    assert there.inverse.cpu().equal(here.inverse)
    assert there.data.cpu().view(torch.uint8).equal(here.data.view(torch.uint8))


@pytest.mark.parametrize("rule", FLOAT8_RULES)
@pytest.mark.parametrize("shape", [(32, 64, 48), (17, 72, 40), (1, 33, 7)])
def test_the_kernel_is_the_emulation_within_one_rounding(
    rule: str, shape: tuple[int, int, int]
) -> None:
    if support_of(torch.device("cuda")).method is not ProductMethod.KERNEL:
        pytest.skip("this GPU has no kernel for 8 bits")
    m, k, n = shape
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(n, k, device="cuda", requires_grad=True)
    above = torch.randn(m, n, device="cuda", dtype=BF16)
    policy = Policy.load("default").replace(ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))

    def computed() -> list[torch.Tensor]:
        with precast.autocast("cuda", BF16, policy=policy):
            result = functional.linear(x, w)
        return [result.detach(), *torch.autograd.grad(result, (x, w), above)]

    by_kernel = computed()
    with override_support(Support(ProductMethod.EMULATED, "a test")):
        emulated = computed()
    for one, other in zip(by_kernel, emulated, strict=True):
        # Room for a sum that is kept in fewer bits than float32 has, which grows with `k`.
        bound = 2.0**-7 * other.abs() + 2.0**-12 * k * other.abs().max()
        assert ((one - other).abs() <= bound).all()
