"""One decision in all processes: reduces found_inf, gathers the names of bad gradients, and compares settings.

A gradient scaler takes a `Reduction` as `reduce_found_inf`, or chooses one by the parameters. `DTensor` parameters
(FSDP2's `fully_shard`, tensor parallelism) name the processes that share them. Plain parameters do not: under
`DistributedDataParallel` all processes have the same gradients and decide alike; for pipeline stages, and tensor
parallelism by hand, the user passes a `Reduction`.

Invariants:
- the choice of a reduction depends on parameters, which all processes have, and not on gradients;
- a collective runs only where all processes of the group run it: found_inf is reduced where an optimizer's gradients
  are checked, names are gathered only in iterations that all of them skip;
- only `torch.distributed` is needed; one process without a process group does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from precast._torch import is_distributed, is_dtensor
from precast.errors import ScalerError
from precast.optim.partial_steps import parameters_of
from precast.policy.policy import Policy

__all__ = ["Reduction", "check_same", "chosen_for"]


class Reduction:
    """Combines results over the processes of one or more groups; a scaler's `reduce_found_inf`.

    Args:
        places: Process groups and device meshes; a mesh means the groups of all its dimensions. None, or no argument,
            is the group of all processes. Several are reduced one after the other.

    Raises:
        ScalerError: There is no process group yet, or an argument has another type.

    A pipeline stage, whose optimizer has only the parameters of the stage, passes the group of all stages:

        scaler = precast.GradScaler("cuda", reduce_found_inf=precast.Reduction())
    """

    def __init__(self, *places: Any) -> None:
        _require_process_group("Reduction")
        self._groups = [group for place in places or (None,) for group in _groups_of(place)]

    def __call__(self, found_inf: list[Tensor]) -> None:
        """Replace each value by the maximum over all processes; the list must not be empty."""
        total = found_inf[0].clone()
        for number in found_inf[1:]:
            torch.maximum(total, number.to(total.device), out=total)
        for group in self._groups:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        for number in found_inf:
            number.copy_(total)

    def __deepcopy__(self, memo: Any) -> Reduction:
        """Return itself: process groups cannot be copied."""
        return self

    def gather(self, names: Iterable[str], loss_finite: bool) -> tuple[list[str], bool]:
        """Return the names of bad tensors in all processes, with ranks; and True if the losses of all were finite.

        Every process of the groups has to call it.
        """
        ranked = {(dist.get_rank(), name) for name in names}
        finite = loss_finite
        for group in self._groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, (ranked, finite), group=group)
            ranked = set().union(*(part[0] for part in parts))
            finite = all(part[1] for part in parts)
        return [f"rank {rank}: {name}" for rank, name in sorted(ranked)], finite


def chosen_for(optimizer: Optimizer) -> Reduction | None:
    """Return the reduction for an optimizer's parameters; None if they are in one process."""
    if not is_distributed():
        return None
    parameters: list[Any] = parameters_of(optimizer)
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_dtensor(p))
    return Reduction(*meshes) if meshes else None


def check_same(scaler: Any = None, *, group: Any = None, **others: Any) -> None:
    """Compare settings over all processes of `group`: different ones could skip different steps, or deadlock.

    Args:
        scaler: A `precast.GradScaler`: its state is compared, including limits and scale.
        group: The processes; None for all.
        others: Other values to compare: a `precast.Policy`, a dtype, a number. Policies are compared by their contents,
            everything else by its ``repr``.

    Raises:
        ScalerError: A process differs from the first; every process gets it, with rank and values. Or there is no
            process group yet.
    """
    _require_process_group("check_same")
    settings = {name: _describe(value) for name, value in others.items()}
    if scaler is not None:
        settings |= {f"scaler {key}": repr(value) for key, value in scaler.state_dict().items()}
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, settings, group=group)
    differences = [
        f"{key} is {settings_of_rank.get(key)} on rank {dist.get_global_rank(group, rank) if group else rank}"
        f" and {parts[0].get(key)} on the first"
        for rank, settings_of_rank in enumerate(parts)
        for key in sorted({*settings_of_rank, *parts[0]})
        if settings_of_rank.get(key) != parts[0].get(key)
    ]
    if differences:
        raise ScalerError(
            "processes do not agree: " + "; ".join(differences) + ". Give all of them the same "
            "settings, and load the same checkpoint everywhere."
        )


def _require_process_group(call: str) -> None:
    if not is_distributed():
        raise ScalerError(
            f"{call}() needs a process group: call torch.distributed.init_process_group() first, "
            "and start the program with torchrun."
        )


def _groups_of(place: Any) -> list[Any]:
    """Return the process groups of a place, in the same order in all processes."""
    if place is None or isinstance(place, dist.ProcessGroup):
        return [place]
    if isinstance(place, dist.device_mesh.DeviceMesh):
        return [place.get_group(dimension) for dimension in range(place.ndim)]
    raise ScalerError(
        f"Reduction() got a {type(place).__name__}: pass process groups, device meshes, or None "
        "for all processes."
    )


def _describe(value: Any) -> str:
    if isinstance(value, Policy):
        modules = f", modules {dict(value.modules)}" if value.modules else ""
        return f"Policy {value.name} ({value.fingerprint}{modules})"
    return repr(value)
