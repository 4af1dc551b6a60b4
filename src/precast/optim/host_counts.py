"""The single values of an optimizer's states, such as step counts, while a compiled step reads them.

Invariants:

- reading a value on a device waits once; afterwards only if another function has replaced or written the tensor;
- the tensors of the states stay the same objects, and have the values after the step when it is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast._torch import fused_fill, version_if_counted
from precast.optim.partial_steps import is_large

__all__ = ["HostCounts"]


class HostCounts:
    """The values of single-element tensors on a device, as they were after the latest step."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()
        """Maps tensors to their version and their value."""

    @contextmanager
    def in_states(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Give the states of parameters tensors on the host for single values on a device, and write those back."""
        on_device = [
            (states, name, value)
            for states in (optimizer.state[p] for p in parameters)
            for name, value in states.items()
            if isinstance(value, Tensor) and not is_large(value) and not value.is_cpu
        ]
        values = self._read([tensor for _, _, tensor in on_device])
        for (states, name, tensor), value in zip(on_device, values, strict=True):
            states[name] = torch.tensor(value, dtype=tensor.dtype).reshape(tensor.shape)
        try:
            yield
        finally:
            self._write(on_device, values)

    def _read(self, tensors: list[Tensor]) -> list[float]:
        unknown = [t for t in tensors if self._values.get(t, (None,))[0] != version_if_counted(t)]
        if unknown:
            numbers = torch.stack([tensor.detach().double().reshape(()) for tensor in unknown])
            self._remember(zip(unknown, numbers.tolist(), strict=True))
        return [self._values[tensor][1] for tensor in tensors]

    def _write(
        self, on_device: list[tuple[dict[str, Any], str, Tensor]], before: list[float]
    ) -> None:
        """Put the tensors of the device back, with the values that those on the host have now."""
        changed: dict[tuple[float, torch.dtype, torch.device], list[Tensor]] = {}
        for (states, name, tensor), value in zip(on_device, before, strict=True):
            new = float(states[name])
            states[name] = tensor
            if new != value:
                changed.setdefault((new, tensor.dtype, tensor.device), []).append(tensor)
        for (new, _, _), tensors in changed.items():
            with torch.no_grad():
                fused_fill(tensors, new)
            self._remember((tensor, new) for tensor in tensors)

    def _remember(self, values: Iterable[tuple[Tensor, float]]) -> None:
        for tensor, value in values:
            self._values[tensor] = version_if_counted(tensor), value
