"""Which parameters FSDP manages, and which of them the optimizer's step may be taken for in one pass.

Invariants:

- nothing here imports FSDP: where the program has not, it manages nothing;
- under FSDP2 an optimizer has `DTensor`s, also while a module has the gathered weights in their place.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._torch import is_dtensor
from precast.weights.partial_steps import parameters_of

__all__ = ["managed_by_fsdp", "stepped_without_copies"]


def managed_by_fsdp(model: nn.Module) -> dict[int, str]:
    """``id`` of each parameter whose memory FSDP allocates and frees -> why it is not held."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
    return {
        id(parameter): "FSDP manages its memory, and writes it unseen"
        for module in model.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters()
    }


def stepped_without_copies(
    model: nn.Module, optimizer: Optimizer, before: set[int]
) -> list[Tensor]:
    """The float32 parameters of an optimizer that are sharded, or that FSDP2 leaves as they are, and belong to a model.

    Args:
        model: in which FSDP2 may have put gathered weights in the place of sharded ones.
        optimizer: what trains the parameters.
        before: ``id`` of those that were found before.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    beside: set[int] = set()
    if fsdp is not None:
        modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
        beside = {id(parameter) for module in modules for parameter in module.parameters()}
    sharded = {id(parameter) for parameter in model.parameters() if is_dtensor(parameter)}
    found = beside | sharded | before
    return [p for p in parameters_of(optimizer) if p.dtype is torch.float32 and id(p) in found]
