"""An operation of the dispatcher on one device type, with everything that a kernel needs to run it.

Invariants:

- rules cast *eligible* tensors only: floating-point, on the region's device, not float64;
- the inner call runs with this device's autocast key excluded, as in PyTorch, so that operations inside it are not cast
  again;
- an argument that the operation writes is never replaced: the result is copied back into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import map_tensors
from precast._torch import OpOverload

__all__ = ["Convert", "Operation", "is_eligible"]

Convert = Callable[[Tensor], Tensor]
_F64: Final = torch.float64


@dataclass(frozen=True, eq=False)
class Operation:
    """One overload on one device type, with everything that its kernels need, computed once."""

    name: str
    device_type: str
    overload: OpOverload
    mutated: frozenset[str] = field(init=False)
    """The names of the arguments that the operation writes."""
    argument_names: tuple[str, ...] = field(init=False)
    takes_several: bool = field(init=False)
    """True if there can be several tensors, and so mixed dtypes."""
    _off: Callable[[], Any] = field(init=False, repr=False)
    _dispatch: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        arguments = _torch.schema_of(self.overload).arguments
        mutated = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        object.__setattr__(self, "mutated", frozenset(mutated))
        object.__setattr__(self, "argument_names", tuple(a.name for a in arguments))
        kinds = [str(a.type) for a in arguments]
        tensors = [kind for kind in kinds if "Tensor" in kind]
        several = len(tensors) > 1 or any("List[" in kind for kind in tensors)
        object.__setattr__(self, "takes_several", several)
        object.__setattr__(self, "_off", _torch.AutocastOff(self.device_type))
        object.__setattr__(self, "_dispatch", _torch.full_dispatch(self.overload))

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation as outside of all regions on this device."""
        with self._off():
            return self._dispatch(*args, **kwargs)

    def without_autocast(self) -> Any:
        """Open a block in which no operation on this device is cast."""
        return self._off()

    def call_cast(self, convert: Convert, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation on converted tensors; copy the result back into arguments that it writes."""
        if self.mutated:
            return self._call_in_place(convert, args, kwargs)
        # From last to first, as PyTorch's compiled kernels do: the gradients of a tensor that is used as several
        # arguments are added in that order, which affects the last bit.
        kwargs = {name: map_tensors(kwargs[name], convert) for name in reversed(kwargs)}
        last_first = [map_tensors(value, convert) for value in reversed(args)]
        return self.call(last_first[::-1], kwargs)

    def eligible(self, value: object) -> bool:
        """Return True if a rule casts this argument."""
        return isinstance(value, Tensor) and is_eligible(value, self.device_type)

    def lower_dtype(self) -> torch.dtype:
        """Return the lower precision of the innermost region."""
        return torch.get_autocast_dtype(self.device_type)

    def _call_in_place(self, convert: Convert, args: Any, kwargs: dict[str, Any]) -> Any:
        destinations: dict[
            Tensor, Tensor
        ] = {}  # temporary -> argument in whose place it is written

        def replace(name: str, value: Any) -> Any:
            new = map_tensors(value, convert)
            if name in self.mutated and new is not value and isinstance(value, Tensor):
                destinations[new] = value
            return new

        args = [replace(name, a) for name, a in zip(self.argument_names, args, strict=False)]
        kwargs = {name: replace(name, v) for name, v in kwargs.items()}
        result = self.call(args, kwargs)
        for temporary, destination in destinations.items():
            destination.copy_(temporary)
        return map_tensors(result, lambda t: destinations.get(t, t))


def is_eligible(tensor: Tensor, device_type: str) -> bool:
    """Return True if autocast on `device_type` casts a tensor: floating-point, on that device, not float64."""
    return (
        tensor.is_floating_point()
        and tensor.dtype is not _F64
        and tensor.device.type == device_type
    )
