"""Custom autograd functions: custom_fwd and custom_bwd in the uses that PyTorch documents, and undecorated ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.conformance.compare import amp, assert_same, differentiate, refused, tensors_in
from tests.conformance.systems import MakeRegion, System, on_all_systems

# PyTorch says it where a copy of an input, made by a cast, is written.
pytestmark = pytest.mark.filterwarnings("ignore:ctx.mark_dirty.. received a tensor:UserWarning")


def product(amp: Any, **options: Any) -> Any:
    """Several inputs, and operations that autocast casts: forward and backward must agree on its state."""

    class Product(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            ctx.save_for_backward(a, b)
            ctx.scale = scale
            return torch.mm(a, b) * scale

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return gradient.mm(b.t()) * ctx.scale, a.t().mm(gradient) * ctx.scale, None

    return Product.apply


def particular(amp: Any, **options: Any) -> Any:
    """Needs one dtype, as a kernel for float32 alone does; it refuses all others, in forward and in backward."""

    class Particular(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32, **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            if {a.dtype, b.dtype} != {torch.float32} or torch.is_autocast_enabled("cpu"):
                raise RuntimeError("for float32 alone")
            ctx.save_for_backward(a, b)
            return torch.mm(a, b)

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = ctx.saved_tensors
            if gradient.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
                raise RuntimeError("for float32 alone")
            return gradient.mm(b.t()), a.t().mm(gradient)

    return Particular.apply


def several_outputs(amp: Any, **options: Any) -> Any:
    """Two results and the places of the largest, which have no gradient; gradients that are not there stay None."""

    class SeveralOutputs(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
            ctx.set_materialize_grads(False)
            y = F.linear(a, b)
            ctx.save_for_backward(a, b, y)
            places = y.argmax(-1)
            ctx.mark_non_differentiable(places)
            return y, y.tanh(), places

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        @once_differentiable
        def backward(ctx: Any, first: Tensor | None, second: Tensor | None, _: None) -> Any:
            a, b, y = ctx.saved_tensors
            total = 0 if first is None else first
            if second is not None:
                total = total + second * (1 - y.tanh() ** 2)
            of_a = torch.mm(total, b) if ctx.needs_input_grad[0] else None
            return of_a, torch.mm(total.t(), a) if ctx.needs_input_grad[1] else None

    return SeveralOutputs.apply


def in_place(amp: Any, **options: Any) -> Any:
    """Writes to its first input."""

    class InPlace(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            ctx.mark_dirty(a)
            ctx.save_for_backward(b)
            ctx.product = torch.mm(a, b)
            return a

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            [b] = ctx.saved_tensors
            return torch.mm(gradient, b) + ctx.product, torch.mm(gradient.t(), ctx.product)

    return lambda a, b: InPlace.apply(a * 1, b)


def nested(amp: Any, **options: Any) -> Any:
    """Calls another decorated function in its forward, and runs it again in its backward, as a checkpoint does."""
    inner = product(amp)

    class Nested(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
            ctx.save_for_backward(a, b)
            return inner(inner(a, b), b)

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad():
                y = inner(inner(a, b), b)
            return torch.autograd.grad(y, (a, b), gradient)

    return Nested.apply


def undecorated(amp: Any, **options: Any) -> Any:
    """PyTorch gives its backward a 16-bit gradient and float32 tensors, with autocast off; that fails there too."""

    class Undecorated(Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return gradient @ b.mT, a.mT @ gradient

    return Undecorated.apply


def of_containers(amp: Any, **options: Any) -> Any:
    """Tensors in lists, tuples and dictionaries are cast as well."""

    class OfContainers(Function):
        @staticmethod
        @amp.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, others: list[Tensor], named: dict[str, Any]) -> Tensor:
            ctx.others, ctx.bias = others, named["bias"]
            return torch.mm(a, others[0]) + torch.mm(a, named["more"][1]) + named["bias"]

        @staticmethod
        @amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return torch.mm(gradient, ctx.others[0].t()) + ctx.bias, None, None

    def call(a: Tensor, b: Tensor) -> Any:
        others = [b.detach(), b.detach() * 2]
        return OfContainers.apply(a, others, {"more": ("text", b), "bias": others[1][0], "n": 3})

    return call


FUNCTIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    "several inputs": product,
    "several outputs": several_outputs,
    "one of several outputs": lambda *a, **o: lambda *given: several_outputs(*a, **o)(*given)[0],
    "writes in place": in_place,
    "calls another": nested,
    "inputs in containers": of_containers,
    "undecorated": undecorated,
}
REGIONS: dict[str, Callable[[MakeRegion], AbstractContextManager[Any]]] = {
    "none": lambda region: nullcontext(),
    "bfloat16": lambda region: region("cpu"),
    "float16": lambda region: region("cpu", dtype=torch.float16),
    "off": lambda region: region("cpu", enabled=False),
    "no cache": lambda region: region("cpu", cache_enabled=False),
}
CASTS = [None, torch.float32, torch.float16, torch.bfloat16]


class Before:
    """The decorators of code that was imported before `install`."""

    custom_fwd = staticmethod(torch.amp.custom_fwd)
    custom_bwd = staticmethod(torch.amp.custom_bwd)


@pytest.mark.parametrize("cast_inputs", CASTS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@on_all_systems
def test_functions(system: System, name: str, cast_inputs: torch.dtype | None) -> None:
    assert_same(system, _everywhere, FUNCTIONS[name], cast_inputs, None)


@pytest.mark.parametrize("cast_inputs", [None, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@on_all_systems
def test_functions_that_pytorch_decorated(
    system: System, name: str, cast_inputs: torch.dtype | None
) -> None:
    assert_same(system, _everywhere, FUNCTIONS[name], cast_inputs, Before)


def _everywhere(region: MakeRegion, function: Any, cast_inputs: Any, decorators: Any) -> Any:
    """Called in every kind of region, with backward after it, in it, in another one, in another thread, and twice."""
    options = {} if cast_inputs is None else {"cast_inputs": cast_inputs}
    call = function(decorators or amp(region), **options)
    return {
        (name, where): _called(region, call, REGIONS[name], where)
        for name in REGIONS
        for where in ("after", "inside", "elsewhere", "in a thread", "twice")
    }


def _called(region: MakeRegion, call: Any, around: Any, where: str) -> Any:
    torch.default_generator.manual_seed(1)
    a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    gradients: list[Any] = []

    def backward() -> None:
        gradients.append(refused(lambda: differentiate(results, [a, b])))

    with around(region):
        first = refused(lambda: call(a, b))
        results = (
            first if isinstance(first, type) else [first, refused(lambda: call(a, b.bfloat16()))]
        )
        if where == "inside":
            backward()
    if where == "after":
        backward()
    if where == "elsewhere":
        with region("cpu", dtype=torch.float16):
            backward()
    if where == "twice":
        gradients.append(refused(lambda: _second_derivatives(results, a, b)))
    if where == "in a thread":
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    return results, gradients


def _second_derivatives(results: Any, a: Tensor, b: Tensor) -> Any:
    roots = [t for t in tensors_in(results) if t.requires_grad]
    total = sum(t.float().square().sum() for t in roots)
    first = torch.autograd.grad(total, (a, b), create_graph=True)  # type: ignore[arg-type]
    return first, differentiate(first, [a, b])


@on_all_systems
def test_functions_for_one_dtype(system: System) -> None:
    """Inputs of any dtype but float64, which is not cast, and refused."""
    assert_same(system, _particular, (torch.float32, torch.bfloat16, torch.float16, torch.float64))


def _particular(region: MakeRegion, dtypes: tuple[torch.dtype, ...]) -> Any:
    call, result = particular(amp(region)), []
    for dtype in dtypes:
        a, b = (torch.randn(3, 3).to(dtype).requires_grad_() for _ in range(2))
        with region("cpu"):
            y = refused(lambda: torch.mm(call(torch.mm(a, b), a), b))  # noqa: B023
            z = refused(lambda: call(a, b))  # noqa: B023
        result.append((y, z, refused(lambda: differentiate([y, z], [a, b]))))  # noqa: B023
    return result
