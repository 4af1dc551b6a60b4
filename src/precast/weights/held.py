"""Held weights: lower-precision copies of the parameters of attached models, which outlive regions.

Invariants:

- there is one copy of a parameter and dtype, whoever attached it and whichever thread uses it; it is made at the
  first use in that dtype, and written in place from then on, or into new memory while somebody reads the old;
- it is used only while the parameter has the version, the memory and the geometry that were copied; one that is out of
  date is renewed by itself on the CPU, elsewhere with all of the same device and dtype in one fused copy;
- the copies carry no gradient: `held_gradients` makes one that does, for one region;
- parameters are held weakly, and the copies are in no module: no state dict, pickle or deepcopy has them;
- where a device has streams, one that uses a copy which another wrote waits for that write;
- a CUDA graph plays back without any of this: what is captured uses copies of frozen parameters alone, and a parameter
  whose optimizer's step is captured is held no longer.
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
from precast.weights.doubts import are_in_doubt, written
from precast.weights.held_copy import Copy, Loan, lock
from precast.weights.held_gradients import forget_moments
from precast.weights.held_parameter import Holding, Place, guarded, holdings, lying_in

__all__ = [
    "WORTH_A_NODE",
    "Copy",
    "Holding",
    "Loan",
    "attached",
    "before_next_region",
    "guarded",
    "hold",
    "holdings",
    "leave_to_graphs",
    "loan_of",
    "lock",
    "parameter_freed_hooks",
    "reason_not_held",
    "release",
    "renew",
    "stale",
    "stepped",
    "suspend",
    "written_unseen",
]

WORTH_A_NODE: Final = 16384
"""From how many numbers on a cast is dearer than a node of its own in the graph: 128x128 (2-core CPU, torch 2.13)."""


attached: Final[list[Any]] = []
"""The attachments that hold; while there are some, a region looks after them when it is entered."""

parameter_freed_hooks: Final[list[Callable[[], None]]] = []
"""Who is told that a held parameter is gone while its model lives, which may have another in its place."""

before_next_region: Final[dict[int, Callable[[], None]]] = {}
"""What has to be done before copies are used again, by whoever asked for it."""


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


def leave_to_graphs(parameters: Iterable[Tensor]) -> None:
    """Has these parameters not be held from now on: a CUDA graph writes them."""
    _in_graphs.update((id(parameter), parameter) for parameter in parameters)


def hold(name: str, parameter: Parameter) -> Holding:
    """Holds a parameter, once more if it is held already."""
    with lock:
        holding = holdings.get(id(parameter))
        if holding is None:
            holding = holdings[id(parameter)] = Holding(name, parameter, _forget)
        holding.attachments += 1
        return holding


def release(holding: Holding) -> None:
    """Ends one hold; the last one ends the copies."""
    with lock:
        holding.attachments -= 1
        if holding.attachments:
            return
        parameter = holding.parameter()
        if parameter is not None and holdings.get(id(parameter)) is holding:
            del holdings[id(parameter)]
        _end(holding)


def loan_of(parameter: Tensor, dtype: torch.dtype) -> Loan | None:
    """The copy of a parameter, up to date; None where it is not held.

    Raises:
        StaleWeightError: the parameter was written unseen.
    """
    with lock:
        holding = holdings.get(id(parameter))
        if holding is None or holding.suspended or holding.parameter() is not parameter:
            return None
        holding.threads.add(threading.get_ident())
        copy = holding.copies.get(dtype)
        if copy is not None and copy.is_of(parameter) and are_in_doubt(holding, copy, parameter):
            copy.doubt()
        current = copy is not None and copy.is_of(parameter)
        if current and holding.spoiled:
            leave_process_groups()
            raise StaleWeightError(stale(holding.name, dtype))
        if is_captured(parameter):
            return _captured(copy) if copy and current and not parameter.requires_grad else None
        if copy is None or not current:
            return _renewed(holding, parameter, dtype).lend()
        copy.join(stream_of(parameter.device))
        return copy.lend()


def _captured(copy: Copy) -> Loan:
    copy.is_in_graphs = True
    return copy.lend()


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
    """Has copies of what an optimizer has written, whatever version counters say, written before their next use."""
    steps = weakref.ref(optimizer)
    with lock:
        for parameter in parameters:
            for holding in _lying_with(parameter):
                holding.optimizer = steps
                holding.doubt(at_once=True)


def written_unseen(tensors: Iterable[Tensor]) -> None:
    """Has copies of what lies in the memory of these tensors written before their next use."""
    with lock:
        for tensor in tensors:
            for holding in lying_in(tensor):
                holding.doubt(at_once=True)


def _lying_with(parameter: Tensor) -> Iterable[Holding]:
    holding = holdings.get(id(parameter))
    place = None if holding is None else holding.place
    if holding is not None and place is not None and place.start == parameter.data_ptr():
        return (holding,)  # it knows the others
    others = lying_in(parameter)
    return others if holding is None else (holding, *others)


def suspend(some: Iterable[Holding], change: int) -> None:
    """Opens (1) or closes (-1) a time in which parameters are written unseen, and no copy of them is used."""
    with lock:
        for holding in some:
            holding.suspended += change
            for copy in holding.copies.values():
                copy.withdraw()


def stale(name: str, dtype: torch.dtype) -> str:
    """What is said of a parameter that was written unseen."""
    return (
        f"The parameter {name!r} was written in a way that PyTorch does not count (through .data, or by "
        f"a library that does), so its held copy in {dtype} is out of date. Write it under "
        "torch.no_grad() instead, or inside `with attachment.writing():`, or call "
        "attachment.refresh() after the write; or attach with hold=False."
    )


def _renewed(holding: Holding, parameter: Tensor, dtype: torch.dtype) -> Copy:
    copy = holding.copies.get(dtype)
    if copy is None or not copy.fits(parameter):
        copy = holding.new_copy(parameter, dtype)
        if holding not in guarded:
            guarded.append(holding)
        _write([(copy, parameter)], in_use=True)
    elif not copy.is_of(parameter):
        # On the CPU a copy is best made just before it is used: then it is still in the processor's cache.
        one = parameter.device.type == "cpu"
        pairs = [(copy, parameter)] if one else list(_out_of_date(dtype, parameter.device))
        _write(pairs, in_use=True)
    return copy


def _out_of_date(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Copy, Tensor]]:
    here = stream_of(device)
    for holding in list(holdings.values()):
        copy, parameter = holding.copies.get(dtype), holding.parameter()
        if copy is None or parameter is None or holding.suspended or copy.stream != here:
            continue  # of another stream this one knows neither what it writes nor what it reads
        if copy.tensor.device == device and copy.fits(parameter) and not copy.is_of(parameter):
            yield copy, parameter


def _write(pairs: list[tuple[Copy, Tensor]], *, in_use: bool) -> None:
    # Versions first: what is written meanwhile by another thread is then found out of date at the next use.
    seen = [(version_of(parameter), parameter.data_ptr()) for _, parameter in pairs]
    stream = stream_of(pairs[0][0].tensor.device)
    for copy, parameter in pairs:
        copy.join(stream)
        copy.make_room(parameter)
    with without_torch_function(), torch.inference_mode(False), torch.no_grad():
        fused_copy(
            [copy.tensor for copy, _ in pairs], [parameter.detach() for _, parameter in pairs]
        )
    for (copy, parameter), what in zip(pairs, seen, strict=True):
        moved = copy.pointer != what[1]
        copy.written(parameter, *what, stream)
        holding = holdings.get(id(parameter))
        if holding is not None:
            holding.spoiled = False
            if moved:
                holding.lies_in(Place.of(parameter))
            written(holding, copy, parameter, in_use=in_use)


def _end(holding: Holding) -> None:
    holding.drop()
    holding.lies_in(None)
    if holding in guarded:
        guarded.remove(holding)
    if not holdings:
        forget_moments()


def _forget(key: int) -> None:
    holding = holdings.pop(key, None)
    if holding is not None:
        _end(holding)
        for tell in parameter_freed_hooks:
            tell()
