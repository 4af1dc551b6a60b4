"""Sparse, nested, quantized and oneDNN tensors, complex numbers, memory formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.utils.mkldnn import to_mkldnn

import precast
from precast.engine import registration
from tests.conformance.compare import Make, assert_same, in_both_dtypes, refused, used
from tests.conformance.systems import MakeRegion, System, on_all_systems

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "BSR": lambda t: t.to_sparse_bsr((2, 2)),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "sparse.mm": lambda s, d, v: torch.sparse.mm(s, d),
    "mm": lambda s, d, v: torch.mm(s, d),
    "mm from the right": lambda s, d, v: torch.mm(d, s),
    "matmul": lambda s, d, v: s @ d,
    "matmul of a vector": lambda s, d, v: s @ v,
    "linear": lambda s, d, v: F.linear(d, s),
    "linear with bias": lambda s, d, v: F.linear(d, s, v),
    "addmm": lambda s, d, v: torch.addmm(d, s, d),
    "sparse.addmm": lambda s, d, v: torch.sparse.addmm(d, s, d, beta=0.5),
    "sampled": lambda s, d, v: torch.sparse.sampled_addmm(s, d, d),
    "of two": lambda s, d, v: torch.sparse.mm(s, s),
    "sum": lambda s, d, v: torch.sparse.sum(s, 0),
    "softmax": lambda s, d, v: torch.sparse.softmax(s, 1),
    "times": lambda s, d, v: s * 2,
    "plus": lambda s, d, v: s + s,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
@on_all_systems
def test_sparse(system: System, name: str, layout: str) -> None:
    assert_same(system, _sparse, name, layout)


def _sparse(region: MakeRegion, name: str, layout: str) -> Any:
    """Of a leaf that learns, of one that does not, and of one in 16 bits; results and gradients, or the error."""
    kinds = [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
    return [_one_sparse(region, PRODUCTS[name], LAYOUTS[layout], *kind) for kind in kinds]


def _one_sparse(
    region: MakeRegion, call: Any, convert: Any, dtype: torch.dtype, learns: bool
) -> Any:
    numbers = torch.randn(4, 4) * torch.tensor([0, 1, 0, 1])
    dense, vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    sparse = convert(numbers.to(dtype)).requires_grad_(learns)
    with region("cpu"):
        computed = dense @ torch.eye(4)
        results = [refused(lambda d=d: call(sparse, d, vector)) for d in (dense, dense, computed)]
    roots = [*(r.to_dense() for r in results if isinstance(r, Tensor)), computed]
    total = sum(root.float().square().sum() for root in roots)
    leaves = [sparse, dense, vector] if learns else [dense, vector]
    gradients = refused(lambda: torch.autograd.grad(total, leaves, allow_unused=True))  # type: ignore[arg-type]
    return results, computed, gradients


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("engine", registration.ENGINES)
def test_default_computes_what_float32_does(
    engine: str, name: str, layout: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Also products of layouts for which PyTorch has no kernel in 16 bits."""
    numbers, dense = torch.randn(4, 4) * torch.tensor([0, 1, 0, 1]), torch.randn(4, 4)
    sparse = LAYOUTS[layout](numbers.to(dtypes[0]))
    others = dense.to(dtypes[1]), dense[0].to(dtypes[1])
    expected = refused(lambda: PRODUCTS[name](sparse, *(t.float() for t in others)))
    if not isinstance(expected, Tensor):
        pytest.skip("PyTorch refuses float32")
    with registration.use_engine(engine), precast.autocast("cpu", torch.bfloat16):
        result = PRODUCTS[name](sparse, *others)
    torch.testing.assert_close(
        result.to_dense().float(), expected.to_dense().float(), rtol=0.02, atol=0.05
    )


def _jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:2], x[1:4]], layout=torch.jagged)


def _ragged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:2], x[1:4]])


NESTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "linear with bias": lambda n, w: F.linear(n, w, w[0]),
    "matmul": lambda n, w: n @ w,
    "softmax": lambda n, w: F.softmax(F.linear(n, w), -1),
    "layer_norm": lambda n, w: F.layer_norm(F.linear(n, w), (4,), w[0]),
    "gelu": lambda n, w: F.gelu(F.linear(n, w)),
    "attention": lambda n, w: F.scaled_dot_product_attention(
        *(F.linear(n, w * i).unflatten(-1, (2, 2)).transpose(1, 2) for i in (1, 2, 3))
    ),
    "padded": lambda n, w: torch.nested.to_padded_tensor(F.linear(n, w), 0.0),
    "cat": lambda n, w: torch.cat([F.linear(n, w), F.linear(n, w)], -1),
}


@pytest.mark.parametrize("kind", [_jagged, _ragged])
@pytest.mark.parametrize("name", NESTED)
@on_all_systems
def test_nested(system: System, name: str, kind: Any) -> None:
    assert_same(system, _nested, name, kind)


def _nested(region: MakeRegion, name: str, kind: Any) -> Any:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(5, 4)
    with region("cpu"):
        plain = F.linear(x, weight)
        results = [refused(lambda: NESTED[name](kind(x), weight)) for _ in range(2)]
    parts = [_parts(r) for r in results if isinstance(r, Tensor)]
    total = sum(t.float().square().sum() for part in parts for t in part) + plain.float().sum()
    total.backward()
    return plain, parts, [r for r in results if isinstance(r, type)], weight.grad


def _parts(tensor: Tensor) -> Any:
    return list(tensor.unbind()) if tensor.is_nested else [tensor]


def _quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(1, 2, 4, 4), 0.1, 10, torch.quint8)


QUANTIZED: dict[str, Callable[[], Any]] = {
    "cat": lambda: torch.cat([_quantized(), _quantized()]),
    "stack": lambda: torch.stack([_quantized(), _quantized()]),
    "avg_pool2d": lambda: F.avg_pool2d(_quantized(), 2),
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(_quantized(), 2),
    "interpolate": lambda: F.interpolate(_quantized(), scale_factor=2, mode="bilinear"),
    "nearest": lambda: F.interpolate(_quantized(), scale_factor=2),
    "max_pool2d": lambda: F.max_pool2d(_quantized(), 2),
    "relu": lambda: F.relu(_quantized()),
    "dequantize": lambda: torch.mm(_quantized().dequantize()[0, 0], torch.randn(4, 4)),
    "fake_quantize": lambda: torch.fake_quantize_per_tensor_affine(
        torch.randn(2, 2) @ torch.randn(2, 2), 0.1, 0, 0, 255
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
@on_all_systems
def test_quantized(system: System, name: str) -> None:
    assert_same(system, _with_quantized, name)


def _with_quantized(region: MakeRegion, name: str) -> Any:
    with region("cpu"):
        result = refused(QUANTIZED[name])
        computed = torch.mm(torch.randn(2, 2), torch.randn(2, 2))
    if isinstance(result, Tensor) and result.is_quantized:
        result = (result.q_scale(), result.int_repr())
    return result, computed


@on_all_systems
def test_dynamically_quantized_modules(system: System) -> None:
    """The layer that is quantized takes float32 alone, and refuses what a region makes."""

    def program(region: MakeRegion) -> Any:
        first, second, recurrent = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        quantized = quantize_dynamic(nn.Sequential(second), {nn.Linear})
        recurrent = quantize_dynamic(nn.Sequential(recurrent), {nn.LSTM})
        x = torch.randn(3, 4)
        with region("cpu"), torch.no_grad():
            y = first(x)
            return y, [
                refused(lambda m=m, t=t: m(t)) for m in (quantized, recurrent) for t in (x, y)
            ]

    assert_same(system, program)


@on_all_systems
def test_onednn_tensors(system: System) -> None:
    def program(region: MakeRegion) -> Any:
        converted = to_mkldnn(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).eval())
        x = torch.randn(2, 2, 5, 5)
        with region("cpu"), torch.no_grad():
            return (
                torch.mm(x[0, 0], x[0, 0]),
                refused(lambda: converted(x.to_mkldnn()).to_dense()),
                refused(lambda: F.linear(x[0, 0].to_mkldnn(), torch.randn(3, 5)).to_dense()),
            )

    assert_same(system, program)


def _channels_last() -> Any:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, groups=2)
    ).to(memory_format=torch.channels_last)
    x = torch.randn(2, 2, 6, 6).to(memory_format=torch.channels_last)
    return module, lambda: module(x)


def _transposed() -> Any:
    """Weights whose memory is not in the order of their dimensions, and one with gaps."""
    weights = nn.ParameterList([torch.randn(4, 3).t(), torch.randn(4, 3, 2).permute(2, 0, 1)])
    weights.append(torch.randn(6, 8)[::2, ::2])
    x = torch.randn(2, 4)

    def step() -> Any:
        a, b, c = weights
        return F.linear(x, a), torch.einsum("ij,kjl->kil", x, b), F.linear(x, c), torch.bmm(b.mT, b)

    return weights, step


def _complex() -> Any:
    """A region casts no complex numbers, and a real part is a view."""
    weights = nn.ParameterList([torch.randn(3, 3, dtype=torch.complex64), torch.randn(3, 3)])

    def step() -> Any:
        a, b = weights
        mixed = refused(lambda: torch.mm(a, b.to(a.dtype)) + torch.mm(b, b))
        return torch.mm(a, a.conj().t()), torch.mm(b, a.real), torch.mm(a.imag.t(), b), mixed

    return weights, step


def _double() -> Any:
    """Nor float64, and integers."""
    weights = nn.ParameterList([torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3)])

    def step() -> Any:
        a, b = weights
        counts = torch.arange(9).reshape(3, 3)
        mixed = refused(lambda: torch.mm(a, b)), refused(lambda: torch.cat([a, b]))
        return torch.mm(a, a), torch.mm(b, b), torch.mm(counts, counts), mixed

    return weights, step


MAKERS: dict[str, Make] = {
    "channels last": _channels_last,
    "transposed weights": _transposed,
    "complex numbers": _complex,
    "float64 and integers": _double,
}


@in_both_dtypes
@pytest.mark.parametrize("name", MAKERS)
@on_all_systems
def test_memory_and_numbers(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, MAKERS[name], dtype)
