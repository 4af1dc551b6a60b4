"""What users of PyTorch's autocast run into: each test shows PyTorch's failure, and beside it what precast does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import precast
from precast.engine import registration

B, H, S, D = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


def test_float16_beside_bfloat16_and_float64() -> None:
    """The rule "promote" of PyTorch knows two dtypes; `default` knows all."""
    parts = [torch.ones(2, dtype=dtype) for dtype in (H, B, D)]
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Unexpected floating"):
        torch.cat(parts)
    with precast.autocast("cpu"):
        assert torch.cat(parts[:2]).dtype is S
        assert torch.cat(parts).dtype is D
        assert torch.stack(parts[1:]).dtype is D


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm_": lambda to, a, b: to.addmm_(a, b),
    "addbmm_": lambda to, a, b: to.addbmm_(a[None], b[None]),
    "addmv_": lambda to, a, b: to[0].addmv_(a, b[0]),
    "baddbmm_": lambda to, a, b: to[None].baddbmm_(a[None], b[None]),
    "index_add_": lambda to, a, b: to.index_add_(0, torch.arange(3), a),
    "scatter_add_": lambda to, a, b: to.scatter_add_(0, torch.zeros(3, 3, dtype=torch.int64), a),
    "index_put_": lambda to, a, b: to.index_put_((torch.arange(3),), a, accumulate=True),
    "lerp_": lambda to, a, b: to.lerp_(a, 0.5),
    "mm.out": lambda to, a, b: torch.mm(a, b, out=to),
    "bmm.out": lambda to, a, b: torch.bmm(a[None], b[None], out=to[None]),
    "addmm.out": lambda to, a, b: torch.addmm(a, a, b, out=to),
    "baddbmm.out": lambda to, a, b: torch.baddbmm(a[None], a[None], b[None], out=to[None]),
    "matmul.out": lambda to, a, b: torch.matmul(a, b, out=to),
}


@pytest.mark.parametrize("dtypes", [(S, B, S), (B, S, B), (H, B, S), (D, B, S)], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_keeps_its_dtype_and_gets_the_result(
    name: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """PyTorch casts nothing for in-place and `out=` variants, and they refuse mixed dtypes."""
    values = torch.randn(3, 3, 3).bfloat16().half()
    expected = values.double()
    WRITES[name](*expected.unbind())

    def arguments() -> list[Tensor]:
        return [v.to(d, copy=True) for v, d in zip(values, dtypes, strict=True)]

    with torch.autocast("cpu"), pytest.raises(RuntimeError):
        WRITES[name](*arguments())
    ours = arguments()
    with precast.autocast("cpu"):
        result = WRITES[name](*ours)
    assert result.data_ptr() == ours[0].data_ptr()
    assert ours[0].dtype is dtypes[0]
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=2e-2, atol=2e-2)
