"""Custom operations: of a C++ extension, and of torch.library with formulas and autocast rules of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from tests.conformance.compare import Make, assert_same, in_both_dtypes, refused, used
from tests.conformance.systems import System, on_all_systems

SOURCE = Path(__file__).with_name("operations.cpp")


@pytest.fixture(scope="module")
def extension(request: pytest.FixtureRequest) -> Any:
    """The operations of `SOURCE`, compiled once for each version of it and of PyTorch."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler, and this machine has none")
    text = SOURCE.read_bytes() + torch.__version__.encode() + compiler.encode()
    place = request.config.cache.mkdir("conformance_cpp")  # type: ignore[union-attr]
    built = place / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        _compile(compiler, built)
    torch.ops.load_library(built)
    return torch.ops.precast_conformance_cpp


def _compile(compiler: str, target: Path) -> None:
    package = Path(torch.__file__).parent
    partial = target.with_suffix(f".{os.getpid()}")  # several processes may do this at once
    options = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-isystem{package / 'include'}"]
    libraries = [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = [compiler, *options, SOURCE, "-o", partial, *libraries]
    subprocess.run(command, check=True)
    partial.replace(target)


@in_both_dtypes
@pytest.mark.parametrize("name", ["attention", "product", "below"])
@on_all_systems
def test_operations_of_an_extension(
    extension: Any, system: System, name: str, dtype: torch.dtype
) -> None:
    assert_same(system, used, _EXTENSION[name], dtype)


def _attention() -> Any:
    """Made of PyTorch's operations, which a region casts inside of it."""
    weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
    x = torch.randn(2, 3, 4)
    call = torch.ops.precast_conformance_cpp.attention
    return weights, lambda: (call(x, *weights), call(call(x, *weights), *weights))


def _product() -> Any:
    """With an autocast kernel of its own, which takes the copy of a weight from PyTorch's cache."""
    weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
    x = torch.randn(3, 4)
    call = torch.ops.precast_conformance_cpp.product

    def step() -> Any:
        a, b = weights
        y = call(x, a)
        return y, call(y, a), call(F.linear(x, b), a), call(x.double(), a.double())

    return weights, step


def _below() -> Any:
    """With a kernel for the CPU alone, which refuses what a region mixes."""
    weights = nn.ParameterList([torch.randn(4, 4)])
    x = torch.randn(3, 4)
    call = torch.ops.precast_conformance_cpp.below

    def step() -> Any:
        [w] = weights
        y = F.linear(x, w)
        return y, call(x, w.detach()), refused(lambda: call(y.detach(), w.detach()))

    return weights, step


_EXTENSION: dict[str, Make] = {"attention": _attention, "product": _product, "below": _below}


def test_a_weight_that_an_extension_and_pytorch_use(extension: Any) -> None:
    """PyTorch has one copy for both, and adds its gradients in 16 bits; with precast each has its own, added in 32."""

    def gradient(region: Any) -> Tensor:
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(64, 16)
        with region:
            results = [extension.product(x, weight), F.linear(x, weight)]
        sum(r.float().tanh().sum() for r in results).backward()  # type: ignore[union-attr]
        assert weight.grad is not None
        return weight.grad

    theirs = gradient(torch.autocast("cpu"))
    ours = gradient(precast.autocast("cpu", policy="torch"))
    exact = gradient(torch.autocast("cpu", cache_enabled=False))
    assert torch.equal(ours, exact)
    assert not torch.equal(theirs, exact)


@torch.library.custom_op("precast_conformance::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return (x @ weight) * scale


@scaled.register_fake
def _(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = (tensor.to(gradient.dtype) for tensor in ctx.saved_tensors)
    return gradient @ weight.mT * ctx.scale, x.mT @ gradient * ctx.scale, None


scaled.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("precast_conformance::lowered", mutates_args=())
def lowered(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """With the autocast rule that it registers for itself: always this dtype, whatever the region's is."""
    return (x @ weight) * scale


lowered.register_autograd(_backward, setup_context=_setup)
torch.library.register_autocast("precast_conformance::lowered", "cpu", torch.bfloat16)


@torch.library.custom_op("precast_conformance::add_product_", mutates_args={"into"})
def add_product_(into: Tensor, x: Tensor) -> None:
    into += x @ x.mT


_library = torch.library.Library("precast_conformance", "FRAGMENT")
_library.define("composed(Tensor x, Tensor weight) -> Tensor")
_library.define("own(Tensor x, Tensor weight) -> Tensor")


@torch.library.impl(_library, "composed", "CompositeImplicitAutograd")
def _composed(x: Tensor, weight: Tensor) -> Tensor:
    return F.softmax(F.linear(x, weight), -1) @ weight


@torch.library.impl(_library, "own", "CompositeImplicitAutograd")
def _own(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight)


@torch.library.impl(_library, "own", "AutocastCPU")
def _own_autocast(x: Tensor, weight: Tensor) -> Tensor:
    """An autocast rule written in Python: float32, whatever comes."""
    with torch.autocast("cpu", enabled=False):
        return torch.ops.precast_conformance.own(x.float(), weight.float())  # type: ignore[no-any-return]


def _of(call: Any, *more: Any) -> Make:
    def make() -> Any:
        weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
        x = torch.randn(3, 4)

        def step() -> Any:
            a, b = weights
            y = F.linear(x, b)
            mixed = refused(lambda: call(y, a, *more))
            return call(x, a, *more), mixed, call(y, b.to(y.dtype), *more)

        return weights, step

    return make


def _written() -> Any:
    weights = nn.ParameterList([torch.randn(4, 3)])

    def step() -> Any:
        [w] = weights
        into, other = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.bfloat16)
        add_product_(into, w.detach())
        y = w @ w.mT
        return y, into, refused(lambda: add_product_(other, y.detach())), other

    return weights, step


OPERATIONS: dict[str, Make] = {
    "without a rule": _of(scaled, 2.0),
    "with a rule": _of(lowered, 2.0),
    "composed": _of(torch.ops.precast_conformance.composed),
    "with a kernel at the key": _of(torch.ops.precast_conformance.own),
    "that writes": _written,
}


@in_both_dtypes
@pytest.mark.parametrize("name", OPERATIONS)
@on_all_systems
def test_operations_of_torch_library(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, OPERATIONS[name], dtype)
