"""One held copy: a parameter in a lower precision, and who uses it.

Invariants:

- it has the parameter's shape, and its strides where these leave neither gaps nor overlaps;
- what stands for it in the caches of all threads ends when it does, whichever thread ends it: Python's entries ask
  for its epoch at each use, those of compiled kernels are dropped;
- each user gets a tensor of its own on the copy's memory, so the use count of the storage says how many there are;
- memory that somebody can still read is never written: the copy is then written into new memory, and the old memory
  lives as long as its readers. Only what a CUDA graph reads is always written in place.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._internal.locks import survives_fork
from precast._torch import impl_address, is_shared, version_of, without_torch_function
from precast.weights.freshness import has_geometry_of, is_fresh
from precast.weights.held_gradients import GradientMemory
from precast.weights.held_record import Circumstances, HeldRecord, Owner
from precast.weights.native_copies import Evicted, Use, native

__all__ = ["Copy", "CopyHandle", "lock", "unless_python_ends"]

_numbers: Final = itertools.count(1)
lock: Final = survives_fork(threading.RLock())
"""Taken to create, end, hand out or write copies; an entry in a thread's cache is used without it."""


class CopyHandle(NamedTuple):
    """What one user gets of a copy: a tensor, and what its parameter was like when it was copied."""

    copy: Copy
    tensor: Tensor
    """A tensor of its own on the copy's memory."""
    version: int
    pointer: int
    writes: int
    """How often the copy had been written."""
    epoch: int
    """How often it had been taken out of all caches."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of a copy in 8 bits: by what the parameter was multiplied, and by what these numbers are."""

    def is_current(self) -> bool:
        """Whether the copy has not been taken out of all caches since."""
        return self.epoch == self.copy.epoch


def unless_python_ends(act: Callable[[Any], None]) -> Callable[[Any], None]:
    """`act` as a callback of a weak reference, which is called late in the end of a process, too.

    What modules define is None by then: this knows the one function that it needs.
    """
    ends = sys.is_finalizing

    def called(reference: Any) -> None:
        if not ends():
            act(reference)

    return called


class Copy:
    """A parameter in one lower precision.

    Attributes:
        tensor: the copy, without gradient; of the parameter's shape and layout.
        shape: the parameter's shape, which never changes while this copy is used.
        stride: the parameter's strides, likewise.
        number: its own, for the caches of compiled kernels.
        epoch: how often it has been taken out of all caches.
        gradient: memory for the parameter's gradient.
        stream: the stream that wrote it last; None where the device has none.
        is_in_graphs: whether a CUDA graph may read it, which knows its address alone.
    """

    __slots__ = (
        "__weakref__",
        "_circumstances",
        "_dtype",
        "_event",
        "_native",
        "_parameter",
        "_read_elsewhere",
        "_source",
        "_storage",
        "epoch",
        "gradient",
        "is_in_graphs",
        "number",
        "shape",
        "stream",
        "stride",
        "tensor",
    )

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self._parameter = weakref.ref(parameter)
        self._storage: weakref.ref[Any] | None = None
        self._source, self._dtype = impl_address(parameter), dtype
        self.number = next(_numbers)
        self.epoch = 0
        self._native = None if native.copies is None else native.copies.new_held(self.number)
        self.gradient = GradientMemory(self._native)
        self.stream: Any = None
        self._event: Any = None
        self._read_elsewhere = False
        self._circumstances: Circumstances | None = None
        self.is_in_graphs = False
        self.shape, self.stride = parameter.shape, parameter.stride()
        self.tensor = _memory_for(parameter, dtype)

    @property
    def parameter(self) -> Tensor | None:
        """What it is a copy of, while that is alive."""
        return self._parameter()

    @property
    def record(self) -> HeldRecord:
        """What compiled kernels share of it."""
        return self.gradient.record

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Of a copy in 8 bits: by what the parameter was multiplied, and by what the copy's numbers are."""
        return None

    @property
    def version(self) -> int:
        """The parameter's version counter when it was copied; -1 where it has to be renewed."""
        return self.record.version

    @property
    def pointer(self) -> int:
        """The parameter's address when it was copied."""
        return self.record.pointer

    @property
    def writes(self) -> int:
        """How often it was written."""
        return self.record.writes

    @property
    def circumstances(self) -> Circumstances | None:
        """Those in which it was written; None before."""
        record = self.record
        if (
            record.is_kernels
        ):  # they write where a gradient is recorded, and nothing else lies in that memory
            return Circumstances(True, True, record.received_then, bool(record.had_gradient), ())
        return self._circumstances

    @circumstances.setter
    def circumstances(self, noted: Circumstances) -> None:
        self._circumstances, record = noted, self.record
        record.received_then, record.had_gradient = noted.received, noted.has_gradient
        record.is_kernels = False

    def lend(self, parameter: Tensor) -> None:
        """Lets this thread's kernels use the copy and renew it by themselves; the caller has the lock."""
        if self._native is not None:
            self._native.lend(parameter, self.tensor)

    def take_back(self) -> bool:
        """Ends that, as before each change by Python; whether it was lent."""
        record = self.record
        if record.owner == Owner.PYTHON or self._native is None:
            return False
        while not self._native.take_back():
            time.sleep(0)  # another thread's kernels use it at this moment
        return True

    def is_fresh_for(self, parameter: Tensor) -> bool:
        """Whether the contents are still what was copied, and lie in memory as they did."""
        return is_fresh(self, parameter)

    def new_handle(self) -> CopyHandle:
        """The copy for one more user; the caller has the lock."""
        with without_torch_function():
            tensor = self.tensor.detach()
        seen = self.version, self.pointer, self.writes, self.epoch
        return CopyHandle(self, tensor, *seen, self.scales)

    def count_gradient(self) -> None:
        """Notes that the parameter has got a gradient through this copy."""
        self.record.received += 1

    def invalidate(self, *, at_once: bool = False) -> None:
        """Has the copy written before its next use, whatever version counters say.

        Regions that have used it may use what they have, as PyTorch's do, unless it is to hold `at_once`.
        """
        with lock:
            self.take_back()
            self.record.version = -1
            if at_once:
                self.evict()
            else:
                self._drop(Evicted.PERSISTENT)

    def stepped(self) -> None:
        """Has the copy written before its next use, because its optimizer has stepped its parameter.

        Kernels that it is lent to may do that.
        """
        with lock:
            if self._native is not None and self._native.step():
                self.epoch += 1
            else:
                self.invalidate(at_once=True)

    def make_room(self, parameter: Tensor) -> None:
        """Has memory for the next write that nobody reads; the caller has the lock.

        No thread can begin to read an evicted copy, so no user comes after the users have been counted.
        """
        self.take_back()
        self._drop(Evicted.PERSISTENT_AND_OLDER, version_of(parameter))
        if self.is_in_graphs or not (self._read_elsewhere or self._is_read()):
            return
        self._read_elsewhere = False
        self.tensor = _memory_for(parameter, self.tensor.dtype)

    def written(self, parameter: Tensor, version: int, pointer: int, stream: Any) -> None:
        """Notes that a stream has been given a write to do: what the parameter was then."""
        record = self.record
        if pointer != record.pointer:
            # An address is given out again when its storage is freed.
            forget = _forgetting_address(weakref.ref(self))
            self._storage = weakref.ref(parameter.untyped_storage(), forget)
        record.version, record.pointer = version, pointer
        record.writes += 1
        self.stream = stream
        self._event = None if stream is None else stream.record_event()

    def has_run(self) -> bool:
        """Whether the last write is done, so that any stream may read the copy."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def join(self, stream: Any) -> None:
        """Has a stream wait for the last write, and the memory, once it is free, for the stream."""
        if self.stream is None or self.stream == stream:
            return
        if not self.has_run():
            stream.wait_event(self._event)
        self.tensor.record_stream(stream)
        self._read_elsewhere = True  # perhaps after whoever asked for it is gone

    def fits(self, parameter: Tensor) -> bool:
        """Whether the parameter, as it is now, can be copied into it."""
        return (
            parameter.dtype is torch.float32
            and parameter.device == self.tensor.device
            and has_geometry_of(self, parameter)
        )

    def keep_for_kernels(self, source: Tensor, cast: Tensor, handle: CopyHandle, use: Use) -> None:
        """Has compiled kernels of this thread use a cast that was made from a handle, unless that is out of date."""
        with lock:
            is_old = (handle.version, handle.writes) != (self.version, self.writes)
            if (
                native.copies is None
                or not handle.is_current()
                or (is_old and use is Use.PERSISTENT)
            ):
                return
            native.copies.keep(
                source,
                cast,
                use=use,
                held=self.number,
                version=handle.version,
                pointer=handle.pointer,
            )

    def evict(self) -> None:
        """Takes the copy out of all caches."""
        with lock:
            self.take_back()
            self.epoch += 1
            self._drop(Evicted.ALL)

    def _is_read(self) -> bool:
        return (
            is_shared(self.tensor) if self._native is None else self._native.is_shared(self.tensor)
        )

    def _drop(self, which: Evicted, version: int = 0) -> None:
        if native.copies is not None:
            native.copies.evict(self._source, self._dtype, self.number, which, version)


def _memory_for(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), without_torch_function():
        return torch.empty_like(parameter.detach(), dtype=dtype)


def _forgetting_address(copy: weakref.ref[Copy]) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        it = copy()
        if it is not None:
            it.record.pointer = -1

    return forget
