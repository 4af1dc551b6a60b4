"""Writes the Python kernel that runs at the autocast key of an operation that takes weights.

Invariants:

- what is written does one thing: where the thread's frame says `FROM_CACHE`, each tensor that the cache holds is
  replaced by its lower-precision copy, and PyTorch's compiled kernel does the rest;
- it is written out for each operation, one block a tensor, because a loop or a call for each tensor costs more
  than PyTorch's whole cache: on `F.linear` of 8x8 about 0.6 us of the 2.3 us that this kernel costs (2-core CPU,
  torch 2.13; `make bench` measures it).

`_ENTRY_POINT` is the kernel as a person reads it; `source` fills it in.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch, kernels
from precast._torch import Kernel
from precast.frames import Runner, active
from precast.operation import Operation
from precast.weights import WeightCache

__all__ = ["FROM_CACHE", "from_cache", "source"]


def _from_cache(_keyset: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise AssertionError("the kernel at the autocast key does this itself")


FROM_CACHE: Final[Runner] = _from_cache
"""LOWER by PyTorch's compiled kernel, after weights have been replaced by their cached copies.

Where the policy promotes mixed dtypes and that raises on them, once more in the widest.
"""

_ENTRY_POINT = """\
def entry_point({parameters}, *rest, **kwargs):
    frame = here.frame
    if frame is None:
        return kernel(keyset, {arguments}, *rest, **kwargs)
    runner = frame.runners.get(name)
    if runner is not FROM_CACHE:
        if runner is None:
            return kernel(keyset, {arguments}, *rest, **kwargs)
        return runner(keyset, ({arguments}, *rest), kwargs)
    if cache_enabled():
        dtype = lower_dtype(device_type)
        find = here.cache.leaves[dtype].get
{tensors}
    try:
        return kernel(keyset, {arguments}, *rest, **kwargs)
    except RuntimeError as error:
        if frame.policy.mixed == "raise":
            raise
        return retry_promoted(op, error, ({arguments}, *rest), kwargs)
"""

_TENSOR = """\
        entry = find(id({a}))
        if (
            entry is not None
            and entry.version == {a}._version
            and entry.pointer == {a}.data_ptr()
            and entry.requires_grad is {a}.requires_grad
        ):
            {a} = entry.cast
        elif {a} is not None and (
            type({a}) is not Tensor
            or ({a}.dtype is float32 and ({a}.requires_grad or {a}._base is not None))
        ):
            {a} = weight(here.cache, {a}, dtype, device_type)
"""


def from_cache(op: Operation, compiled: Kernel) -> Kernel:
    """The kernel for `op`, to be registered without a keyset: PyTorch's compiled autocast kernels take none."""
    namespace: dict[str, Any] = {
        "FROM_CACHE": FROM_CACHE,
        "Tensor": Tensor,
        "cache_enabled": torch.is_autocast_cache_enabled,
        "device_type": op.device_type,
        "float32": torch.float32,
        "here": active(op.device_type),
        "kernel": compiled,
        "keyset": _torch.keyset_of(op.device_type),
        "lower_dtype": torch.get_autocast_dtype,
        "name": op.name,
        "op": op,
        "retry_promoted": kernels.retry_promoted,
        "weight": _weight,
    }
    schema = _torch.schema_of(op.overload).arguments
    namespace |= {
        f"default{i}": a.default_value for i, a in enumerate(schema) if a.has_default_value()
    }
    code = compile(source(op), f"<precast: kernel of {op.name} on {op.device_type}>", "exec")
    exec(code, namespace)
    entry_point: Kernel = namespace["entry_point"]
    return entry_point


def source(op: Operation) -> str:
    """The Python source of the kernel for `op`: its arguments up to the last tensor have names, a0, a1 ..."""
    schema = _torch.schema_of(op.overload).arguments
    count = max(op.tensor_slots) + 1
    defaults = [f"=default{i}" if a.has_default_value() else "" for i, a in enumerate(schema)]
    return _ENTRY_POINT.format(
        parameters=", ".join(f"a{i}{defaults[i]}" for i in range(count)),
        arguments=", ".join(f"a{i}" for i in range(count)),
        tensors="".join(_TENSOR.format(a=f"a{i}") for i in op.tensor_slots),
    )


def _weight(cache: WeightCache, value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """The cached copy of a weight on the region's device; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_weight(cache, item, dtype, device_type) for item in value]
    if not isinstance(value, Tensor) or value.device.type != device_type:
        return value
    cast = cache.cast(value, dtype)
    return value if cast is None else cast
