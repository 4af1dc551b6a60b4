"""Held weights: low-precision copies of the parameters of attached models, which outlive regions.

Invariants:

- a parameter has one copy per 16-bit dtype and per way of scaling in 8 bits, shared by all attachments and threads. It
  is made at the first use and later updated in place, or in new memory while the old values are in use;
- a copy is used only while the parameter has the version, memory, layout and sampled values that were recorded. On the
  CPU a stale copy is updated alone; on other devices with all stale copies of its device and dtype, in one fused
  operation;
- copies carry no gradient: the native engine makes a cast with one, for one region (`native/held.cpp`);
- parameters are referenced weakly, and no module owns the copies: they are in no state dict, pickle or deepcopy;
- on a device with streams, a stream that uses a copy waits for the write by another stream;
- a CUDA graph is replayed without this code. A capture therefore uses the copies of frozen parameters only, and a
  parameter is no longer held once its optimizer's step is captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, UninitializedParameter

from precast._torch import (
    StreamMark,
    abort_process_groups,
    counts_versions,
    fused_copy,
    is_captured,
    is_plain,
    stream_of,
    version_of,
    without_torch_function,
)
from precast.errors import StaleWeightError
from precast.weights.held_copy import Copy, CopyHandle, lock, unless_finalizing
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.held_parameter import (
    CopyKey,
    HeldParameter,
    MemoryRange,
    comparison_queue,
    held_parameters,
    held_parameters_overlapping,
)
from precast.weights.native.api import native_engine
from precast.weights.possible_writes import needs_recast, record_usage

__all__ = [
    "Copy",
    "CopyHandle",
    "CopyKey",
    "HeldParameter",
    "attached",
    "before_next_region",
    "comparison_queue",
    "handle_of",
    "held_parameters",
    "hold",
    "invalidate_after_step",
    "invalidate_all",
    "is_held_in_training",
    "leave_to_cuda_graphs",
    "lend",
    "lock",
    "parameter_freed_hooks",
    "reason_not_held",
    "record_unversioned_writes",
    "release",
    "renew",
    "stale_message",
    "suspend",
]

_MIN_ELEMENTS_FOR_NODE: Final = 16384
"""From this number of elements on, a cast costs more than a graph node: 128x128 (2-core CPU, torch 2.13)."""


def is_held_in_training(parameter: Tensor) -> bool:
    """Return True if the copy of a weight is worth holding where gradients are recorded for it.

    On a GPU a cast is one launch, and holding took longer than all casts of a step: a decoder of width 512 with one
    token took 1.35 times as long attached (H100, torch 2.11). The reference engine casts each weight once per region,
    too.
    """
    return (
        native_engine.is_used and parameter.is_cpu and parameter.numel() >= _MIN_ELEMENTS_FOR_NODE
    )


attached: Final[list[Any]] = []
"""The attachments that hold weights. While there are any, region entries search for unversioned writes."""

parameter_freed_hooks: Final[list[Callable[[], None]]] = []
"""Called when a held parameter is freed while its model lives: the model may have a new one in its place."""

before_next_region: Final[dict[int, Callable[[], None]]] = {}
"""Work to do before copies are used again, by the `id` of the object that requested it."""


def reason_not_held(parameter: Tensor) -> str | None:
    """Return the reason why a parameter cannot be held; None if it can."""
    if isinstance(parameter, UninitializedParameter):
        return None  # of a lazy module: it is filled in place later
    if not is_plain(type(parameter)):
        return f"it is a {type(parameter).__name__}, which casts itself"
    if parameter.dtype is not torch.float32:
        return f"it is {parameter.dtype}: only torch.float32 parameters are held"
    if parameter.layout is not torch.strided:
        return f"its layout is {parameter.layout}"
    if parameter.is_nested:
        return "it is a nested tensor, which has no shape"
    if not counts_versions(parameter):
        return "it was made in inference mode, so its writes are not counted"
    if parameter.device.type == "meta":
        return "it has no data yet (meta device)"
    if _in_graphs.get(id(parameter)) is parameter:
        return "a CUDA graph writes it without moving its version counter"
    return None


_in_graphs: Final[weakref.WeakValueDictionary[int, Tensor]] = weakref.WeakValueDictionary()


def leave_to_cuda_graphs(parameters: Iterable[Tensor]) -> None:
    """Stop holding these parameters, because a CUDA graph writes them."""
    _in_graphs.update((id(parameter), parameter) for parameter in parameters)


def hold(name: str, parameter: Parameter) -> HeldParameter:
    """Hold a parameter. Calls are counted; each needs one `release`."""
    with lock:
        held_parameter = held_parameters.get(id(parameter))
        if held_parameter is None:
            held_parameter = HeldParameter(name, parameter, _forget)
            held_parameters[id(parameter)] = held_parameter
            _inform_kernels(held_parameter, is_held=True)
        held_parameter.attachments += 1
        return held_parameter


def release(held_parameter: HeldParameter) -> None:
    """End one hold. The last one drops the copies."""
    with lock:
        held_parameter.attachments -= 1
        if held_parameter.attachments:
            return
        parameter = held_parameter.parameter()
        if parameter is not None and held_parameters.get(id(parameter)) is held_parameter:
            del held_parameters[id(parameter)]
        _end(held_parameter)


def handle_of(parameter: Tensor, key: CopyKey) -> CopyHandle | None:
    """Return the up-to-date copy of a parameter in 16 or 8 bits; None if it is not held.

    Raises:
        StaleWeightError: the parameter was written without moving its version counter.
    """
    with lock:
        held_parameter = held_parameters.get(id(parameter))
        if (
            held_parameter is None
            or held_parameter.suspended
            or held_parameter.parameter() is not parameter
        ):
            return None
        held_parameter.threads.add(threading.get_ident())
        copy = held_parameter.copies.get(key)
        if copy is not None:
            copy.take_back()
        if (
            copy is not None
            and copy.is_valid_for(parameter)
            and (
                needs_recast(held_parameter, copy, parameter)
                or not copy.has_sampled_values(parameter)
            )
        ):
            copy.invalidate()
        current = copy is not None and copy.is_valid_for(parameter)
        if current and held_parameter.stale:
            abort_process_groups()
            raise StaleWeightError(stale_message(held_parameter.name, key))
        if is_captured(parameter):
            return _captured(copy) if copy and current and not parameter.requires_grad else None
        if copy is None or not current:
            return _renewed(held_parameter, parameter, key).new_handle()
        copy.wait_for_write(stream_of(parameter.device))
        return copy.new_handle()


def _captured(copy: Copy) -> CopyHandle:
    copy.is_in_graphs = True
    return copy.new_handle()


def renew(copies: Iterable[Copy]) -> None:
    """Write all parameters into their copies regardless of versions, with one fused copy per dtype and device."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[tuple[Copy, Tensor]]] = {}
    with lock:
        for copy in copies:
            parameter = copy.parameter
            if parameter is not None and copy.is_compatible(parameter):
                key = copy.tensor.dtype, copy.tensor.device
                by_dtype.setdefault(key, []).append((copy, parameter))
        for pairs in by_dtype.values():
            _write(pairs, in_use=False)


def invalidate_after_step(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Invalidate the copies of the parameters that an optimizer has stepped, regardless of version counters."""
    reference = _reference_to(optimizer)
    with lock:
        for parameter in parameters:
            for held_parameter in _sharing_memory_with(parameter):
                held_parameter.optimizer = reference
                held_parameter.invalidate_after_step()


def _reference_to(optimizer: torch.optim.Optimizer) -> weakref.ref[torch.optim.Optimizer]:
    """Return a shared weak reference to an optimizer. When it dies, kernels no longer update the copies themselves."""
    key = id(optimizer)
    reference = _optimizers.get(key)
    if reference is None or reference() is not optimizer:
        on_freed = unless_finalizing(lambda dead: _on_optimizer_freed(key, dead))
        reference = _optimizers[key] = weakref.ref(optimizer, on_freed)
    return reference


_optimizers: Final[dict[int, weakref.ref[torch.optim.Optimizer]]] = {}


def _on_optimizer_freed(key: int, reference: weakref.ref[torch.optim.Optimizer]) -> None:
    if _optimizers.get(key) is reference:
        del _optimizers[key]
    for held_parameter in list(held_parameters.values()):
        if held_parameter.optimizer is reference:
            held_parameter.take_back()
            for copy in held_parameter.copies.values():
                copy.record.has_optimizer = False


def lend(handle: CopyHandle, parameter: Tensor) -> None:
    """Let compiled kernels update the copy of a trained weight after each optimizer step, without Python.

    That requires that an observed optimizer steps the weight, and that no other held parameter shares its memory. A
    change of either takes the copy back.
    """
    with lock:
        held_parameter, copy = held_parameters.get(id(parameter)), handle.copy
        copy.take_back()  # another thread may have lent it to its own kernels since
        if (
            held_parameter is not None
            and parameter.is_cpu
            and handle.is_current()
            and handle.writes == copy.writes
            and list(held_parameter.copies.values()) == [copy]
            and not (held_parameter.overlapping or held_parameter.suspended or held_parameter.stale)
            and held_parameter.has_observed_optimizer()
        ):
            copy.lend(parameter)


def invalidate_all() -> None:
    """Make the next use of each held weight rewrite its copies."""
    with lock:
        for held_parameter in list(held_parameters.values()):
            held_parameter.invalidate(at_once=True)


def record_unversioned_writes(tensors: Iterable[Tensor]) -> None:
    """Invalidate the copies of all parameters in the memory of these tensors, which were written."""
    with lock:
        for tensor in tensors:
            for held_parameter in held_parameters_overlapping(tensor):
                held_parameter.invalidate(at_once=True)


def _sharing_memory_with(parameter: Tensor) -> Iterable[HeldParameter]:
    held_parameter = held_parameters.get(id(parameter))
    if held_parameter is None:
        return held_parameters_overlapping(parameter)
    place = held_parameter.memory_range
    if place is not None and place.start == parameter.data_ptr():
        return (held_parameter,)  # its `overlapping` lists the others
    return {held_parameter, *held_parameters_overlapping(parameter)}


def suspend(parameters: Iterable[HeldParameter], change: int) -> None:
    """Open (1) or close (-1) a block that may write these parameters. Their copies are not used inside."""
    with lock:
        for held_parameter in parameters:
            held_parameter.suspended += change
            held_parameter.take_back()
            for copy in held_parameter.copies.values():
                copy.evict()


def stale_message(name: str, key: CopyKey) -> str:
    """Return the error message for a parameter that was written without moving its version counter."""
    return (
        f"The parameter {name!r} was written in a way that PyTorch does not count (through .data, or by "
        f"a library that does), so its held copy in {key} is out of date. Write it under "
        "torch.no_grad() instead, or inside `with attachment.writing():`, or call "
        "attachment.refresh() after the write; or attach with hold=False."
    )


def _renewed(held_parameter: HeldParameter, parameter: Tensor, key: CopyKey) -> Copy:
    copy = held_parameter.copies.get(key)
    if copy is None or not copy.is_compatible(parameter):
        copy = held_parameter.new_copy(parameter, key)
        if held_parameter not in comparison_queue:
            comparison_queue.append(held_parameter)
        _write([(copy, parameter)], in_use=True)
    elif not copy.is_valid_for(parameter):
        # On the CPU, make the copy just before its use, while it is still in the processor's cache.
        only_this = parameter.device.type == "cpu"
        pairs = [(copy, parameter)] if only_this else list(_out_of_date(key, parameter.device))
        _write(pairs, in_use=True)
    return copy


def _out_of_date(key: CopyKey, device: torch.device) -> Iterator[tuple[Copy, Tensor]]:
    stream = stream_of(device)
    for held_parameter in list(held_parameters.values()):
        copy, parameter = held_parameter.copies.get(key), held_parameter.parameter()
        if copy is None or parameter is None or held_parameter.suspended or copy.stream != stream:
            continue  # the pending reads and writes of another stream are unknown here
        if (
            copy.tensor.device == device
            and copy.is_compatible(parameter)
            and not copy.is_valid_for(parameter)
        ):
            yield copy, parameter


def _write(pairs: list[tuple[Copy, Tensor]], *, in_use: bool) -> None:
    # Versions first: a concurrent write by another thread then makes the copy stale at the next use.
    snapshots = [(version_of(parameter), parameter.data_ptr()) for _, parameter in pairs]
    first = pairs[0][0].tensor
    stream = stream_of(first.device)
    for copy, parameter in pairs:
        copy.wait_for_write(stream)
        copy.prepare_memory(parameter)
        copy.record_samples(parameter)
    with without_torch_function(), torch.inference_mode(False), torch.no_grad():
        casts = []
        for copy, parameter in pairs:
            if isinstance(copy, QuantisedCopy):
                copy.quantise(parameter.detach())
            else:
                casts.append((copy.tensor, parameter.detach()))
        if casts:
            fused_copy([target for target, _ in casts], [source for _, source in casts])
        has_mark = stream is not None and not is_captured(first)
        mark = StreamMark(first.device) if has_mark else None
    for (copy, parameter), (version, pointer) in zip(pairs, snapshots, strict=True):
        moved = copy.pointer != pointer
        copy.record_write(parameter, version, pointer)
        copy.stream, copy.written = stream, mark
        held_parameter = held_parameters.get(id(parameter))
        if held_parameter is not None:
            held_parameter.stale = False
            held_parameter.set_cast_per_region(False)
            if moved:
                held_parameter.set_memory_range(MemoryRange.of(parameter))
            record_usage(held_parameter, copy, parameter, in_use=in_use)


def _inform_kernels(held_parameter: HeldParameter, *, is_held: bool) -> None:
    if native_engine.api is not None and held_parameter.source:
        native_engine.api.hold(held_parameter.source, is_held)
    if not is_held:
        held_parameter.source = 0  # another parameter may get that address


def _end(held_parameter: HeldParameter) -> None:
    _inform_kernels(held_parameter, is_held=False)
    held_parameter.drop()
    held_parameter.set_memory_range(None)
    if held_parameter in comparison_queue:
        comparison_queue.remove(held_parameter)
    if not held_parameters and native_engine.api is not None:
        native_engine.api.free_temporaries()


def _forget(key: int) -> None:
    held_parameter = held_parameters.pop(key, None)
    if held_parameter is not None:
        _end(held_parameter)
        for hook in parameter_freed_hooks:
            hook()
