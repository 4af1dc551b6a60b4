"""Held weights: lower-precision copies of the parameters of attached models, which outlive regions.

Invariants:

- there is one copy of a parameter for each 16-bit dtype, and for each way of scaling in 8 bits, whoever attached it and
  whichever thread uses it. It is made at the first use, and from then on written in place, or into new memory while
  somebody reads the old;
- it is used only while the parameter has the version, the memory and the geometry that were copied. A copy that is out
  of date is renewed by itself on the CPU, elsewhere with all others of its device and dtype in one fused operation;
- the copies carry no gradient: `held_gradients` makes a cast that does, for one region;
- parameters are held weakly, and no module has the copies: no state dict, pickle or deepcopy contains them;
- on a device with streams, a stream that uses a copy which another stream wrote waits for that write;
- a CUDA graph is replayed without any of this. A capture therefore uses the copies of frozen parameters only, and a
  parameter whose optimizer's step is captured is no longer held.
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
    counts_versions,
    fused_copy,
    is_captured,
    is_plain,
    leave_process_groups,
    stream_of,
    version_of,
    without_torch_function,
)
from precast.errors import StaleWeightError
from precast.weights.held_copy import Copy, CopyHandle, lock, unless_python_ends
from precast.weights.held_float8 import QuantisedCopy
from precast.weights.held_gradients import free_temporaries
from precast.weights.held_parameter import (
    CopyKey,
    HeldParameter,
    MemoryRange,
    compared_in_turn,
    held_in_memory_of,
    held_parameters,
)
from precast.weights.native_copies import native
from precast.weights.possible_writes import may_have_been_written, note_circumstances

__all__ = [
    "MIN_ELEMENTS_FOR_NODE",
    "Copy",
    "CopyHandle",
    "CopyKey",
    "HeldParameter",
    "attached",
    "before_next_region",
    "compared_in_turn",
    "handle_of",
    "held_parameters",
    "hold",
    "leave_to_cuda_graphs",
    "lend",
    "lock",
    "note_unversioned_writes",
    "parameter_freed_hooks",
    "reason_not_held",
    "release",
    "renew",
    "stale_message",
    "stepped",
    "suspend",
]

MIN_ELEMENTS_FOR_NODE: Final = 16384
"""From how many numbers on a cast is dearer than a node of its own in the graph: 128x128 (2-core CPU, torch 2.13)."""


attached: Final[list[Any]] = []
"""The attachments that hold weights; while there are some, each entry of a region checks for writes."""

parameter_freed_hooks: Final[list[Callable[[], None]]] = []
"""Who is told that a held parameter is gone while its model lives, which may have another in its place."""

before_next_region: Final[dict[int, Callable[[], None]]] = {}
"""What has to be done before copies are used again, by the `id` of who asked for it."""


def reason_not_held(parameter: Tensor) -> str | None:
    """Why a parameter cannot be held; None where it can."""
    if isinstance(parameter, UninitializedParameter):
        return None  # a lazy module's: it gets its numbers in place
    if not is_plain(type(parameter)):
        return f"it is a {type(parameter).__name__}, which casts itself"
    if parameter.dtype is not torch.float32:
        return f"it is {parameter.dtype}: only what is cast from torch.float32 is held"
    if parameter.layout is not torch.strided:
        return f"its layout is {parameter.layout}"
    if not counts_versions(parameter):
        return "it was made in inference mode, where no writes are counted"
    if parameter.device.type == "meta":
        return "it has no numbers yet (meta device)"
    if _in_graphs.get(id(parameter)) is parameter:
        return "a CUDA graph writes it, unseen"
    return None


_in_graphs: Final[weakref.WeakValueDictionary[int, Tensor]] = weakref.WeakValueDictionary()


def leave_to_cuda_graphs(parameters: Iterable[Tensor]) -> None:
    """Ends the holding of these parameters, because a CUDA graph writes them."""
    _in_graphs.update((id(parameter), parameter) for parameter in parameters)


def hold(name: str, parameter: Parameter) -> HeldParameter:
    """Holds a parameter, once more if it is held already."""
    with lock:
        held_parameter = held_parameters.get(id(parameter))
        if held_parameter is None:
            held_parameter = HeldParameter(name, parameter, _forget)
            held_parameters[id(parameter)] = held_parameter
            _tell_kernels(held_parameter, is_held=True)
        held_parameter.attachments += 1
        return held_parameter


def release(held_parameter: HeldParameter) -> None:
    """Ends one hold; the last one ends the copies."""
    with lock:
        held_parameter.attachments -= 1
        if held_parameter.attachments:
            return
        parameter = held_parameter.parameter()
        if parameter is not None and held_parameters.get(id(parameter)) is held_parameter:
            del held_parameters[id(parameter)]
        _end(held_parameter)


def handle_of(parameter: Tensor, key: CopyKey) -> CopyHandle | None:
    """The copy of a parameter in 16 or 8 bits, up to date; None where it is not held.

    Raises:
        StaleWeightError: the parameter was written, and its version counter did not move.
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
            and copy.is_fresh_for(parameter)
            and may_have_been_written(held_parameter, copy, parameter)
        ):
            copy.invalidate()
        current = copy is not None and copy.is_fresh_for(parameter)
        if current and held_parameter.stale:
            leave_process_groups()
            raise StaleWeightError(stale_message(held_parameter.name, key))
        if is_captured(parameter):
            return _captured(copy) if copy and current and not parameter.requires_grad else None
        if copy is None or not current:
            return _renewed(held_parameter, parameter, key).new_handle()
        copy.join(stream_of(parameter.device))
        return copy.new_handle()


def _captured(copy: Copy) -> CopyHandle:
    copy.is_in_graphs = True
    return copy.new_handle()


def renew(copies: Iterable[Copy]) -> None:
    """Writes all parameters into their copies, whatever their versions say; one fused copy for each dtype."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[tuple[Copy, Tensor]]] = {}
    with lock:
        for copy in copies:
            parameter = copy.parameter
            if parameter is not None and copy.fits(parameter):
                key = copy.tensor.dtype, copy.tensor.device
                by_dtype.setdefault(key, []).append((copy, parameter))
        for pairs in by_dtype.values():
            _write(pairs, in_use=False)


def stepped(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Invalidates the copies of what an optimizer has written, whatever version counters say."""
    steps = _steps_of(optimizer)
    with lock:
        for parameter in parameters:
            for held_parameter in _sharing_memory_with(parameter):
                held_parameter.optimizer = steps
                held_parameter.stepped()


def _steps_of(optimizer: torch.optim.Optimizer) -> weakref.ref[torch.optim.Optimizer]:
    """What parameters know their optimizer by; when it is gone, kernels ask for the copies again."""
    known = _optimizers.get(id(optimizer))
    if known is None or known() is not optimizer:
        key = id(optimizer)
        known = weakref.ref(optimizer, unless_python_ends(lambda gone: _optimizer_gone(key, gone)))
        _optimizers[key] = known
    return known


_optimizers: Final[dict[int, weakref.ref[torch.optim.Optimizer]]] = {}


def _optimizer_gone(key: int, gone: weakref.ref[torch.optim.Optimizer]) -> None:
    if _optimizers.get(key) is gone:
        del _optimizers[key]
    for held_parameter in list(held_parameters.values()):
        if held_parameter.optimizer is gone:
            held_parameter.take_back()


def lend(handle: CopyHandle, parameter: Tensor) -> None:
    """Lets kernels renew the copy of a weight that is trained by themselves, where they know all that it takes.

    They know it if an observed optimizer steps the weight, and no other tensor shares its memory. Whoever changes one
    of these takes the copy back.
    """
    with lock:
        held_parameter, copy = held_parameters.get(id(parameter)), handle.copy
        copy.take_back()  # another thread may have lent it to its own kernels meanwhile
        if (
            held_parameter is not None
            and parameter.is_cpu
            and handle.is_current()
            and handle.writes == copy.writes
            and list(held_parameter.copies.values()) == [copy]
            and copy.circumstances is not None
            and copy.circumstances.trains
            and not (held_parameter.overlapping or held_parameter.suspended or held_parameter.stale)
            and held_parameter.is_stepped()
        ):
            copy.lend(parameter)


def note_unversioned_writes(tensors: Iterable[Tensor]) -> None:
    """Invalidates the copies of all parameters in the memory of these tensors, which were written."""
    with lock:
        for tensor in tensors:
            for held_parameter in held_in_memory_of(tensor):
                held_parameter.invalidate(at_once=True)


def _sharing_memory_with(parameter: Tensor) -> Iterable[HeldParameter]:
    held_parameter = held_parameters.get(id(parameter))
    if held_parameter is None:
        return held_in_memory_of(parameter)
    place = held_parameter.memory_range
    if place is not None and place.start == parameter.data_ptr():
        return (held_parameter,)  # it knows the others
    if held_parameter.is_alone(parameter):
        return (held_parameter,)
    others = tuple(held_in_memory_of(parameter))
    if not others:
        held_parameter.note_alone(parameter)
    return (held_parameter, *others)


def suspend(some: Iterable[HeldParameter], change: int) -> None:
    """Opens (1) or closes (-1) a block that may write these parameters; inside no copy of them is used."""
    with lock:
        for held_parameter in some:
            held_parameter.suspended += change
            held_parameter.take_back()
            for copy in held_parameter.copies.values():
                copy.evict()


def stale_message(name: str, key: CopyKey) -> str:
    """The error message for a parameter that was written without a new version."""
    return (
        f"The parameter {name!r} was written in a way that PyTorch does not count (through .data, or by "
        f"a library that does), so its held copy in {key} is out of date. Write it under "
        "torch.no_grad() instead, or inside `with attachment.writing():`, or call "
        "attachment.refresh() after the write; or attach with hold=False."
    )


def _renewed(held_parameter: HeldParameter, parameter: Tensor, key: CopyKey) -> Copy:
    copy = held_parameter.copies.get(key)
    if copy is None or not copy.fits(parameter):
        copy = held_parameter.new_copy(parameter, key)
        if held_parameter not in compared_in_turn:
            compared_in_turn.append(held_parameter)
        _write([(copy, parameter)], in_use=True)
    elif not copy.is_fresh_for(parameter):
        # On the CPU a copy is best made just before it is used: then it is still in the processor's cache.
        one = parameter.device.type == "cpu"
        pairs = [(copy, parameter)] if one else list(_out_of_date(key, parameter.device))
        _write(pairs, in_use=True)
    return copy


def _out_of_date(key: CopyKey, device: torch.device) -> Iterator[tuple[Copy, Tensor]]:
    here = stream_of(device)
    for held_parameter in list(held_parameters.values()):
        copy, parameter = held_parameter.copies.get(key), held_parameter.parameter()
        if copy is None or parameter is None or held_parameter.suspended or copy.stream != here:
            continue  # of another stream this one knows neither what it writes nor what it reads
        if (
            copy.tensor.device == device
            and copy.fits(parameter)
            and not copy.is_fresh_for(parameter)
        ):
            yield copy, parameter


def _write(pairs: list[tuple[Copy, Tensor]], *, in_use: bool) -> None:
    # Versions first: what is written meanwhile by another thread is then found out of date at the next use.
    seen = [(version_of(parameter), parameter.data_ptr()) for _, parameter in pairs]
    stream = stream_of(pairs[0][0].tensor.device)
    for copy, parameter in pairs:
        copy.join(stream)
        copy.make_room(parameter)
    with without_torch_function(), torch.inference_mode(False), torch.no_grad():
        casts = []
        for copy, parameter in pairs:
            if isinstance(copy, QuantisedCopy):
                copy.quantise(parameter.detach())
            else:
                casts.append((copy.tensor, parameter.detach()))
        if casts:
            fused_copy([target for target, _ in casts], [source for _, source in casts])
    for (copy, parameter), what in zip(pairs, seen, strict=True):
        moved = copy.pointer != what[1]
        copy.written(parameter, *what, stream)
        held_parameter = held_parameters.get(id(parameter))
        if held_parameter is not None:
            held_parameter.stale = False
            held_parameter.leave_to_regions(False)
            if moved:
                held_parameter.set_memory_range(MemoryRange.of(parameter))
            note_circumstances(held_parameter, copy, parameter, in_use=in_use)


def _tell_kernels(held_parameter: HeldParameter, *, is_held: bool) -> None:
    if native.copies is not None and held_parameter.source:
        native.copies.hold(held_parameter.source, is_held)
    if not is_held:
        held_parameter.source = 0  # another parameter may have that address from now on


def _end(held_parameter: HeldParameter) -> None:
    _tell_kernels(held_parameter, is_held=False)
    held_parameter.drop()
    held_parameter.set_memory_range(None)
    if held_parameter in compared_in_turn:
        compared_in_turn.remove(held_parameter)
    if not held_parameters:
        free_temporaries()


def _forget(key: int) -> None:
    held_parameter = held_parameters.pop(key, None)
    if held_parameter is not None:
        _end(held_parameter)
        for tell in parameter_freed_hooks:
            tell()
