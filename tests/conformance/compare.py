"""Runs a program on PyTorch's autocast and on a system of precast's, and compares all that it gives, bit for bit.

Invariants:

- a program is a function of what makes regions, and gives the same each time: it makes its own tensors, from a seed
  that is set before each run;
- what it gives is compared in any nesting of containers: tensors by dtype, layout, strides, `requires_grad` and bits,
  all else by equality. NaN is a failure even where PyTorch has it too: it would hide what differs;
- a program that gives the same with autocast off fails: it would compare nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast._internal.pytree import map_tensors
from tests.conformance.systems import TORCH, MakeRegion, System
from tests.support.outcomes import same_bits

__all__ = [
    "Make",
    "Program",
    "amp",
    "assert_same",
    "difference",
    "differentiate",
    "in_both_dtypes",
    "refused",
    "tensors_in",
    "used",
]

Program = Callable[..., Any]
"""Called with what makes regions, and then with whatever arguments it has."""
Make = Callable[[], tuple[nn.Module, Callable[[], Any]]]
"""Makes a module, and a step that uses it."""

in_both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)


def assert_same(system: System, program: Program, *args: Any) -> None:
    """Asserts that ``program(region, *args)`` gives on `system` what it gives on PyTorch alone.

    What is asked of PyTorch more than once, by the same program and arguments, it is asked once.
    """
    result = difference(_run(system, program, args), _expected(program, args), "result")
    assert not result, result


def amp(region: MakeRegion) -> Any:
    """Return the module with `GradScaler`, `custom_fwd` and `custom_bwd` for the program that gets `region`."""
    return torch.amp if region in (torch.autocast, _off) else precast


def used(region: MakeRegion, make: Make, dtype: torch.dtype) -> dict[str, Any]:
    """The program that uses what `make` makes in every way: in training, in evaluation, in each grad mode.

    Each time the step runs twice in one region, so that its weights are found cast the second time.
    """

    def cached() -> AbstractContextManager[Any]:
        return region("cpu", dtype=dtype)

    def uncached() -> AbstractContextManager[Any]:
        return region("cpu", dtype=dtype, cache_enabled=False)

    after = _trained(make, cached, nullcontext)
    assert isinstance(after[1], list), after
    return {
        "backward after": after,
        "backward inside": _trained(make, nullcontext, cached),
        "no cache": _trained(make, uncached, nullcontext),
        "no_grad": _evaluated(make, cached, torch.no_grad),
        "inference_mode": _evaluated(make, cached, torch.inference_mode),
    }


def differentiate(results: Any, leaves: Iterable[Tensor]) -> list[Tensor | None]:
    """Backward from every result that has a graph; the gradients of `leaves`."""
    leaves = list(leaves)
    roots = [t for t in tensors_in(results) if t.requires_grad]
    if not roots:
        return []
    # Weighed by place: a mere sum would not see what went where, nor in which precision equal gradients are added.
    weighed = [
        (_real(t) * torch.linspace(0.5, 1.1 + i / 3, t.numel()).reshape(t.shape)).sum()
        for i, t in enumerate(roots)
    ]
    torch.autograd.backward(weighed)
    return [leaf.grad for leaf in leaves]


def refused(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or the type of its error."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    result: list[Tensor] = []
    map_tensors(value, lambda t: result.append(t) or t)  # type: ignore[func-returns-value]
    return result


def difference(ours: Any, theirs: Any, where: str) -> str:
    """In words, the first difference; empty where there is none."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _between_tensors(ours.detach(), theirs.detach(), where) or (
            "" if ours.requires_grad == theirs.requires_grad else f"{where}: requires_grad differs"
        )
    if type(ours) is not type(theirs):
        return f"{where}: {ours!r} against {theirs!r}"
    if isinstance(ours, Mapping):
        ours, theirs = list(ours.items()), list(theirs.items())
    if not isinstance(ours, list | tuple):
        return "" if ours == theirs else f"{where}: {ours!r} against {theirs!r}"
    if len(ours) != len(theirs):
        return f"{where}: {len(ours)} against {len(theirs)} items"
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)), "")


Context = Callable[[], AbstractContextManager[Any]]


def _trained(make: Make, around_forward: Context, around_all: Context) -> Any:
    torch.default_generator.manual_seed(3)  # for all devices it takes longer than the step
    module, step = make()
    with around_all():
        with around_forward():
            results = [step(), step()]
        gradients = refused(lambda: differentiate(results, module.parameters()))
    return results, gradients


def _evaluated(make: Make, region: Context, mode: Context) -> Any:
    torch.default_generator.manual_seed(3)  # for all devices it takes longer than the step
    module, step = make()
    module.eval()
    with region(), mode():
        return refused(lambda: (step(), step()))


def _off(*args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast(*args, **{**kwargs, "enabled": False})


_OFF = System("autocast off", _off)


@functools.cache
def _expected(program: Program, args: tuple[Any, ...]) -> Any:
    theirs = _run(TORCH, program, args)
    assert difference(_run(_OFF, program, args), theirs, ""), "autocast has no part in this"
    return theirs


def _run(system: System, program: Program, args: tuple[Any, ...]) -> Any:
    torch.default_generator.manual_seed(0)
    with system() as region:
        try:
            return program(region, *args)
        except RuntimeError:
            if system is _OFF:
                return None
            raise


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor.float()


@torch.no_grad()
def _between_tensors(ours: Tensor, theirs: Tensor, where: str) -> str:
    for name in ("dtype", "layout", "shape"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{where}: {name} is {mine} against {other}"
    if ours.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    elif ours.stride() != theirs.stride():
        return f"{where}: stride is {ours.stride()} against {theirs.stride()}"
    if ours.isnan().any() or theirs.isnan().any():
        return f"{where}: has NaN"
    return "" if same_bits(ours, theirs) else f"{where}: {ours} against {theirs}"
