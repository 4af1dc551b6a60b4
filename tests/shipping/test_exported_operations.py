"""Single operations that once were exported otherwise than they run in a region, and those that no graph can say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import Policy
from precast.errors import ExportError
from precast.shipping.exported_file import differences

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
LIKE_CUDA = Policy.load("default").retarget("cpu", like="cuda")
LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def exported_and_eager(
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    policy: Policy | str,
    strict: bool = False,
) -> list[str]:
    """How the exported program differs from the function in a region."""
    model = _Calls(function)
    program = precast.export(model, args, policy=policy, dtype=LOW, strict=strict, check=False)
    with torch.no_grad(), precast.autocast("cpu", LOW, policy=policy):
        expected = model(*args)
    with torch.no_grad():
        return list(differences(expected, program.module()(*args)))


def numbers(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(4, 4).to(dtype) for dtype in dtypes)


@pytest.mark.parametrize("policy", ["torch", "default"])
def test_a_composite_operation_on_dtypes_that_are_equal_only_after_casts(policy: str) -> None:
    args = numbers(torch.float32, torch.bfloat16, torch.float16)
    assert not exported_and_eager(
        lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), args, policy
    )


@pytest.mark.parametrize(
    "policy", ["torch", "default", LIKE_CUDA], ids=["torch", "default", "cuda"]
)
def test_an_operation_that_is_made_of_others_and_has_a_derivative_of_its_own(policy: Any) -> None:
    weight, bias = torch.randn(3, 4, 4), torch.randn(3)
    assert not exported_and_eager(
        lambda a, b: torch.nn.functional.bilinear(a, b, weight, bias),
        numbers(torch.float32, torch.float32),
        policy,
    )


def test_an_operation_whose_numbers_decide_which_rules_act_is_refused_by_name() -> None:
    args = numbers(torch.float32)
    with pytest.raises(ExportError, match=r'linalg_matrix_exp calls operations .*"fp32"'):
        exported_and_eager(torch.matrix_exp, args, LIKE_CUDA)
    ruled = LIKE_CUDA.replace(ops={"linalg_matrix_exp": "fp32"})
    assert not exported_and_eager(torch.matrix_exp, args, ruled)
    assert not exported_and_eager(torch.matrix_exp, numbers(torch.float64), LIKE_CUDA)


@pytest.mark.parametrize("function", [torch.mm, torch.cdist, torch.nn.functional.linear])
def test_dtypes_that_the_program_asks_for_are_those_that_it_has(function: Any) -> None:
    def asks(a: Tensor, b: Tensor) -> Tensor:
        promoted = function(a, b)
        return torch.zeros(4, 4, dtype=promoted.dtype) + 1

    args = numbers(torch.float64, torch.float32)
    with precast.autocast("cpu", LOW):
        assert asks(*args).dtype is torch.float64
    assert not exported_and_eager(asks, args, "default")


@pytest.mark.parametrize("strict", [False, True])
def test_a_result_has_the_dtype_that_tensors_with_numbers_have(strict: bool) -> None:
    """PyTorch's version of it without numbers says float64, and what comes next was written for that."""

    def loses(a: Tensor, b: Tensor) -> Any:
        loss = torch.nn.functional.huber_loss(a + 0, b, delta=2.0)
        return loss.expand(4) @ b.float(), torch.zeros(1, dtype=loss.dtype)

    args = numbers(torch.float32, torch.float64)
    with precast.autocast("cpu", LOW, policy="lean"):
        assert loses(*args)[1].dtype is torch.float32
    assert not exported_and_eager(loses, args, "lean", strict)


def test_what_a_program_returns_may_be_a_weight_in_another_dtype() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Any:
            return self.weight.bfloat16(), x @ self.weight, self.weight.bfloat16()

    model, x = Returns(), torch.randn(4, 4)
    program = precast.export(model, (x,), dtype=torch.float16)
    low, product, again = program.module()(x)
    assert torch.equal(low, model.weight.bfloat16())
    assert torch.equal(again, low)
    assert product.dtype is torch.float16
    assert {t.dtype for t in program.state_dict.values()} == {torch.bfloat16, torch.float16}


def test_complex_results_are_compared() -> None:
    program = precast.export(_Calls(lambda x: torch.fft.fft(x).conj()), numbers(torch.float32))
    assert program is not None


RESIZED = [
    *[("nearest", sides) for sides in (1, 2, 3)],
    *[("nearest-exact", sides) for sides in (1, 2, 3)],
    *[("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)],
]


@pytest.mark.parametrize(("mode", "sides"), RESIZED)
@pytest.mark.parametrize("by", [{"scale_factor": 2}, {"scale_factor": 1.7}, {"size": 7}], ids=str)
def test_an_operation_that_python_takes_apart_otherwise_than_a_region_sees_it(
    mode: str, sides: int, by: dict[str, Any]
) -> None:
    def larger(x: Tensor) -> Tensor:
        image = x[0].expand(2, 1, *[4] * sides)
        return torch.nn.functional.interpolate(image, mode=mode, **by)

    for dtype in (torch.bfloat16, torch.float32):
        assert not exported_and_eager(larger, numbers(dtype)[:1], LIKE_CUDA)


def _mask(a: Tensor) -> Tensor:
    return torch.tensor([True, False, True, False], device=a.device)


def _set_by_mask(a: Tensor, b: Tensor) -> Tensor:
    a, mask = a.clone(), _mask(a)
    a[mask] = b[mask]
    return a


def _set_from_a_fixed_number_of_rows(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[_mask(a)] = b[:2]
    return a


def _set_columns_by_mask(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    a[:, _mask(a)] = b[:, :2]
    return a


def _set_elements_by_mask(a: Tensor, b: Tensor) -> Tensor:
    a, mask = a.clone(), _mask(a).expand(4, 4)
    a[mask] += b[mask]
    return a


def _add_by_index(a: Tensor, b: Tensor) -> Tensor:
    return torch.index_put(a, (torch.tensor([0, 2, 2, 1]),), b, accumulate=True)


_INDEX = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
_MIXED: list[Callable[[Tensor, Tensor], Tensor]] = [
    _set_by_mask,
    _set_from_a_fixed_number_of_rows,
    _set_columns_by_mask,
    _set_elements_by_mask,
    _add_by_index,
    lambda a, b: a.masked_scatter(_mask(a), b),
    lambda a, b: a.clone().masked_scatter_(_mask(a), b),
    lambda a, b: a.masked_fill(_mask(a), b[0, 0]),
    lambda a, b: a.scatter(0, _INDEX, b),
    lambda a, b: a.clone().scatter_add_(0, _INDEX, b),
    lambda a, b: a.scatter_reduce(0, _INDEX, b, "amax"),
    lambda a, b: a.index_add(0, _INDEX[0], b),
    lambda a, b: a.clone().index_copy_(0, _INDEX[0], b),
    lambda a, b: torch.put(a, _INDEX, b[:2]),
    lambda a, b: torch.where(_mask(a), a, b),
    lambda a, b: a.clone().copy_(b),
    lambda a, b: a.clone().lerp_(b, 0.5),
    lambda a, b: a.clone().addcmul_(b, b),
    lambda a, b: a.clone().addmm_(b, b),
    lambda a, b: torch.add(a, b, out=torch.empty(4, 4)),
    lambda a, b: torch.mm(a, b, out=torch.empty(4, 4)),
    lambda a, b: torch.slice_scatter(a, b[:2], 0, 1, 3),
]


@pytest.mark.parametrize("function", _MIXED, ids=[str(i) for i in range(len(_MIXED))])
@pytest.mark.parametrize("dtypes", [(torch.float32, LOW), (LOW, torch.float32)])
def test_a_write_of_another_dtype_is_exported_as_it_runs(function: Any, dtypes: Any) -> None:
    """The number of elements that a mask selects is compared before dtypes are, so that zeros do not do for a mask."""
    assert not exported_and_eager(function, numbers(*dtypes), "default")
