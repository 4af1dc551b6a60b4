"""Tensor subclasses and modes: classes that hear of functions or of operations, parameters of own classes, tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.conformance.compare import assert_same, differentiate, in_both_dtypes, refused
from tests.conformance.systems import MakeRegion, System, on_all_systems

READS = ("__get__", "is_floating_point")
"""The attributes that precast's kernels read; hiding the reads from modes would cost every call."""

heard: list[str] = []


class Named(nn.Parameter):
    """A parameter of a class of its own."""


class Hearing(Tensor):
    """Hears of every function that it is given to, and stays itself in results."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        heard.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """Holds a tensor, and notes every operation that reaches it, with its dtypes."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            dtype=held.dtype,
            strides=held.stride(),
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda t: t.held, (args, kwargs or {}))
        dtypes = [str(t.dtype) for t in args if isinstance(t, Tensor)]
        heard.append(f"{func}({', '.join(dtypes)})")
        return tree_map_only(Tensor, Wrapped, func(*args, **kwargs))

    def __tensor_flatten__(self) -> Any:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Tensor:
        return Wrapped(inner["held"])


def _hearing(t: Tensor) -> Tensor:
    return t.as_subclass(Hearing).detach().requires_grad_()  # type: ignore[no-any-return]


def _wrapped(t: Tensor) -> Tensor:
    return Wrapped(t).requires_grad_()


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a parameter of its own class": Named,
    "hears of functions": _hearing,
    "hears of functions, a parameter": lambda t: nn.Parameter(t.as_subclass(Hearing)),
    "hears of operations": _wrapped,
    "hears of operations, a parameter": lambda t: nn.Parameter(Wrapped(t)),
    "holds two": lambda t: TwoTensor(t, t * 2).requires_grad_(),
    "a view": lambda t: t.requires_grad_()[:, :],
    "a buffer": nn.Buffer,
}


def _plain(tensor: Any) -> Any:
    """Return the values of a tensor, with the name of its class."""
    if isinstance(tensor, Wrapped):
        return "Wrapped", tensor.held
    if isinstance(tensor, TwoTensor):
        return "TwoTensor", tensor.a, tensor.b
    if isinstance(tensor, Tensor):
        return type(tensor).__name__, tensor.as_subclass(Tensor)
    return tensor


@in_both_dtypes
@pytest.mark.parametrize("name", WEIGHTS)
@on_all_systems
def test_weights(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, _weights, name, dtype)


def _weights(region: MakeRegion, name: str, dtype: torch.dtype) -> Any:
    """Used twice, with plain tensors and with each other, in each grad mode; and all that they heard."""
    weight = WEIGHTS[name](torch.randn(3, 3))
    leaf = weight if weight.is_leaf else weight._base
    assert leaf is not None
    x = torch.randn(2, 3)
    heard.clear()
    with region("cpu", dtype=dtype):
        results = [F.linear(x, weight), F.linear(x * 2, weight), torch.mm(weight, weight.t())]
        with torch.no_grad():
            quiet = [F.linear(x, weight), F.softmax(F.linear(x, weight), -1)]
        functions = [function for function in heard if function not in READS]
        with torch.inference_mode():
            quiet.append(refused(lambda: F.linear(x, weight)))
    heard.clear()
    if leaf.requires_grad:
        sum(r.float().sum() * i for i, r in enumerate(results, 1)).backward()  # type: ignore[union-attr]
    functions += heard
    return [*map(_plain, [*results, *quiet, leaf.grad])], functions


class Counting(TorchDispatchMode):
    """Notes what reaches the kernels, with its dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [str(t.dtype) for t in args if isinstance(t, Tensor)]
        self.counted.append(f"{func}({', '.join(dtypes)})")
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    """Notes the functions that the program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in READS:
            self.counted.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["around the region", "in it"])
@pytest.mark.parametrize("mode", [Counting, Listening])
@on_all_systems
def test_modes_see_what_they_see_in_pytorchs_region(system: System, mode: Any, where: str) -> None:
    assert_same(system, _seen, mode, where)


def _seen(region: MakeRegion, mode: Any, where: str) -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 4), nn.Identity())
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x, listener = torch.randn(2, 3, 4), mode()

    def step() -> Any:
        y, _ = module(x)
        y, _ = attention(y, y, y)
        return torch.einsum("bij,bkj->bik", y, y), y

    first, second = (
        (listener, region("cpu")) if where == "around the region" else (region("cpu"), listener)
    )
    with first, second:
        results = [step(), step()]
        gradients = differentiate(results, [*module.parameters(), *attention.parameters()])
    return results, gradients, listener.counted


@on_all_systems
def test_fake_tensors(system: System) -> None:
    """Shapes and dtypes are found without numbers; the numbers of after are right."""

    def program(region: MakeRegion) -> Any:
        with FakeTensorMode() as fake:
            module, x = nn.Linear(3, 3), torch.randn(2, 3)
            with region("cpu"):
                y = module(x)
            y.float().sum().backward()
            assert module.weight.grad is not None
            assert fake is not None
        return y.dtype, y.shape, module.weight.grad.dtype

    assert_same(system, program)


@on_all_systems
def test_tensors_without_memory(system: System) -> None:
    def program(region: MakeRegion) -> Any:
        module, x = nn.Linear(3, 3, device="meta"), torch.randn(2, 3)
        with region("cpu"):
            return module(x.to("meta")).dtype, torch.mm(x, x.t())

    assert_same(system, program)
