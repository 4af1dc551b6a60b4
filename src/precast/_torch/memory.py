"""Memory of tensors by their storages, which count once each: results of operations, and what autograd saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from precast._internal.pytree import tensors_in
from precast._torch.modes import ObservingMode

__all__ = ["ResultMemory", "saved_for_backward", "storage_of", "storage_sizes"]


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None for a sparse tensor, which has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by the id of the storage."""
    storages = (storage_of(tensor) for tensor in tensors)
    return {id(storage): storage.nbytes() for storage in storages if storage is not None}


@contextmanager
def saved_for_backward(without: Iterable[Tensor]) -> Iterator[dict[int, Any]]:
    """Collect the storages that autograd saves for the backward pass, apart from those of some tensors."""
    saved: dict[int, Any] = {}
    excluded = storage_sizes(without)

    def pack(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage is not None and id(storage) not in excluded:
            saved[id(storage)] = storage  # so that its id is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class ResultMemory(ObservingMode):
    """Counts the bytes of the results of operations that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0
        self._current = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = storage_sizes(tensors_in((args, kwargs)))
        for storage in map(storage_of, tensors_in(out)):
            if storage is None or id(storage) in inputs or id(storage) in self._alive:
                continue
            key, size = id(storage), storage.nbytes()
            self._alive[key] = weakref.ref(storage, self._on_free(key, size))
            self._current += size
        self.most = max(self.most, self._current)
        return out

    def _on_free(self, key: int, size: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self._current -= size
            self._alive.pop(key, None)

        return free
