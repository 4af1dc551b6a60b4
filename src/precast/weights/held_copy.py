"""A held copy: a parameter in a lower precision, with its users and its last write.

Invariants:

- a copy has the parameter's shape, and its strides if these have no gaps or overlaps;
- evicting a copy invalidates the cache entries of all threads: Python entries compare its epoch at each use, entries
  of compiled kernels are removed;
- each user gets a separate tensor on the copy's memory, so the use count of the storage tells whether it is in use;
- memory in use is never overwritten: the new values go to new memory, and the old memory is freed by its last user.
  The exception is a copy that a CUDA graph reads: it is always written in place.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._internal.locks import make_fork_safe
from precast._torch import (
    StreamMark,
    impl_address,
    is_shared,
    outside_inference_mode,
    version_of,
    without_torch_function,
)
from precast.weights.freshness import has_same_layout, is_valid
from precast.weights.native.api import NativeHeldCopy, native_engine
from precast.weights.native.boundary import Eviction, HeldRecord, Owner
from precast.weights.samples import WeightSamples

__all__ = ["Copy", "CopyHandle", "lock", "unless_finalizing"]

lock: Final = make_fork_safe(threading.RLock())
"""Held while copies are created, dropped, handed out or written; not needed to use an entry of a thread's cache."""


class CopyHandle(NamedTuple):
    """A copy as handed to one user: a tensor, and the state of its parameter when it was written."""

    copy: Copy
    tensor: Tensor
    """A separate tensor on the copy's memory."""
    version: int
    pointer: int
    writes: int
    """`Copy.writes` at that time."""
    epoch: int
    """`Copy.epoch` at that time."""
    scales: tuple[Tensor, Tensor] | None = None
    """For 8 bits: the scale that the parameter was multiplied by, and the inverse for the copy's values."""

    def is_current(self) -> bool:
        """Return True if the copy has not been evicted since."""
        return self.epoch == self.copy.epoch


def unless_finalizing(callback: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a callback of a weak reference so that it does nothing while the interpreter shuts down.

    Module globals may be None by then, so the wrapper keeps the one function that it needs.
    """
    is_finalizing = sys.is_finalizing

    def wrapper(reference: Any) -> None:
        if not is_finalizing():
            callback(reference)

    return wrapper


class Copy:
    """A parameter in one lower precision.

    Attributes:
        tensor: the values, without gradient; of the parameter's shape and layout.
        shape: the parameter's shape, fixed for this copy.
        stride: the parameter's strides, fixed for this copy.
        epoch: incremented by each eviction.
        stream: the stream of the last write; None if the device has none.
        written: the mark in that stream after the last write; None if any stream may read the copy.
        is_in_graphs: True if a CUDA graph may read the copy by its address.
        trains: True if the last write was for a use where gradients are recorded for the parameter.
        other_versions: the version counters of the other parameters in its memory, at the last write.
    """

    __slots__ = (
        "__weakref__",
        "_native",
        "_parameter",
        "_read_elsewhere",
        "_record",
        "_samples",
        "_storage",
        "epoch",
        "is_in_graphs",
        "other_versions",
        "shape",
        "stream",
        "stride",
        "tensor",
        "trains",
        "written",
    )

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self._parameter = weakref.ref(parameter)
        self._storage: weakref.ref[Any] | None = None
        self.epoch = 0
        api = native_engine.api
        self._native = None if api is None else NativeHeldCopy(api, parameter, dtype)
        self._samples = self._native or WeightSamples()
        self._record = HeldRecord() if self._native is None else None
        self.stream: Any = None
        self.written: StreamMark | None = None
        self._read_elsewhere = False
        self.trains = False
        self.other_versions: tuple[int, ...] = ()
        self.is_in_graphs = False
        self.shape, self.stride = parameter.shape, parameter.stride()
        self.tensor = _memory_for(parameter, dtype)

    @property
    def parameter(self) -> Tensor | None:
        """The parameter, or None if it has been freed."""
        return self._parameter()

    @property
    def record(self) -> HeldRecord:
        """The fields that Python shares with compiled kernels."""
        if self._record is not None:
            return self._record
        assert self._native is not None
        return self._native.record

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """For 8 bits: the scale of the parameter, and its inverse."""
        return None

    @property
    def version(self) -> int:
        """The parameter's version counter at the last write; -1 if the copy must be rewritten."""
        return self.record.version

    @property
    def pointer(self) -> int:
        """The parameter's data pointer at the last write."""
        return self.record.pointer

    @property
    def writes(self) -> int:
        """The number of writes."""
        return self.record.writes

    def with_gradient(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return the tensor of a handle as a cast of the parameter, to which its gradient flows in float32.

        Only with the native engine: without it, nothing is held where gradients are recorded.
        """
        assert self._native is not None
        with outside_inference_mode(), without_torch_function():
            return self._native.cast_of(parameter, tensor)

    def lend(self, parameter: Tensor) -> None:
        """Let this thread's kernels use and update the copy without Python. Needs the lock."""
        if self._native is not None:
            addresses = impl_address(parameter), impl_address(self.tensor)
            self._native.api.lend(self._native, *addresses)

    def take_back(self) -> bool:
        """End `lend`, as before each change by Python; return True if the copy was lent."""
        record = self.record
        if record.owner == Owner.PYTHON or self._native is None:
            return False
        while not self._native.api.take_back(self._native):
            time.sleep(0)  # a kernel of another thread is using it
        return True

    def is_valid_for(self, parameter: Tensor) -> bool:
        """Return True if the parameter has the version, memory and layout that were copied."""
        return is_valid(self, parameter)

    def record_samples(self, parameter: Tensor) -> None:
        """Record some values of the parameter. Needs the lock; the copy is evicted and not yet written."""
        self._samples.record_samples(parameter)

    def has_sampled_values(self, parameter: Tensor, *, compares_all: bool = False) -> bool:
        """Return False if recorded values of the parameter have changed: the next ones, or any of them.

        The copy must be valid for the parameter.
        """
        return self._samples.match_samples(parameter, compares_all=compares_all)

    def new_handle(self) -> CopyHandle:
        """Return a handle for one more user. Needs the lock."""
        with without_torch_function():
            tensor = self.tensor.detach()
        snapshot = self.version, self.pointer, self.writes, self.epoch
        return CopyHandle(self, tensor, *snapshot, self.scales)

    def count_gradient(self) -> None:
        """Count a gradient of the parameter that was computed through this copy."""
        self.record.received += 1

    def invalidate(self, *, at_once: bool = False) -> None:
        """Make the next use rewrite the copy, regardless of version counters.

        Regions that have already used it may continue to use their casts, as in PyTorch, unless `at_once`.
        """
        with lock:
            self.take_back()
            self.record.version = -1
            if at_once:
                self.evict()
            else:
                self._drop(Eviction.PERSISTENT)

    def invalidate_after_step(self) -> None:
        """Make the next use rewrite the copy, because its optimizer has stepped the parameter.

        If the copy is lent to kernels, they rewrite it.
        """
        with lock:
            native = self._native
            is_lent = native is not None and native.record.owner != Owner.PYTHON
            if native is not None and is_lent and native.api.step_held(native):
                self.epoch += 1
            else:
                self.invalidate(at_once=True)

    def prepare_memory(self, parameter: Tensor) -> None:
        """Provide memory for the next write that has no users. Needs the lock.

        The copy is evicted first, so no user can be added after the users have been counted.
        """
        self.take_back()
        self._drop(Eviction.PERSISTENT_AND_OLDER, version_of(parameter))
        if self.is_in_graphs or not (self._read_elsewhere or self._is_read()):
            return
        self._read_elsewhere = False
        self.tensor = _memory_for(parameter, self.tensor.dtype)

    def record_write(self, parameter: Tensor, version: int, pointer: int) -> None:
        """Record a write, with the parameter's version and data pointer before it."""
        record = self.record
        if pointer != record.pointer:
            # After the storage is freed, its address may be reused: forget it then.
            forget_address = _forgetting_address(weakref.ref(self))
            self._storage = weakref.ref(parameter.untyped_storage(), forget_address)
        record.version, record.pointer = version, pointer
        record.writes += 1

    def is_written(self) -> bool:
        """Return True if the last write has finished, so that any stream may read the copy."""
        if self.written is not None and self.written.is_reached():
            self.written = None
        return self.written is None

    def wait_for_write(self, stream: Any) -> None:
        """Make a stream wait for the last write, and the memory's reuse wait for the stream."""
        if self.stream is None or self.stream == stream:
            return
        if not self.is_written():
            assert self.written is not None
            self.written.hold_back(stream)
        self.tensor.record_stream(stream)
        self._read_elsewhere = True  # the stream may read it after the user has released it

    def is_compatible(self, parameter: Tensor) -> bool:
        """Return True if the parameter can be copied into this memory in its present state."""
        return (
            parameter.dtype is torch.float32
            and parameter.device == self.tensor.device
            and has_same_layout(self, parameter)
        )

    def keep_for_kernels(
        self, source: Tensor, cast: Tensor, handle: CopyHandle, *, has_gradient: bool
    ) -> None:
        """Put a cast of a handle into the table of this thread's kernels, unless it is out of date."""
        with lock:
            is_old = (handle.version, handle.writes) != (self.version, self.writes)
            native = self._native
            if native is not None and handle.is_current() and (has_gradient or not is_old):
                snapshot = handle.version, handle.pointer
                addresses = impl_address(source), impl_address(cast)
                native.api.keep(native, *addresses, has_gradient, *snapshot)

    def evict(self) -> None:
        """Remove the copy from all caches."""
        with lock:
            self.take_back()
            self.epoch += 1
            self._drop(Eviction.ALL)

    def _is_read(self) -> bool:
        api = native_engine.api
        return (
            is_shared(self.tensor)
            if api is None
            else bool(api.is_shared(impl_address(self.tensor)))
        )

    def _drop(self, which: Eviction, version: int = 0) -> None:
        if self._native is not None:
            self._native.api.evict(self._native, which, version)


def _memory_for(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), without_torch_function():
        return torch.empty_like(parameter.detach(), dtype=dtype)


def _forgetting_address(copy: weakref.ref[Copy]) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        target = copy()
        if target is not None:
            target.record.pointer = -1

    return forget
