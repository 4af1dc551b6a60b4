"""Parameters that FSDP manages.

Invariant: FSDP is not imported here. A program that has not imported it has no such parameters.
"""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["managed_by_fsdp"]


def managed_by_fsdp(model: nn.Module) -> dict[int, str]:
    """Return the ``id`` of each parameter whose memory FSDP allocates and frees, with the reason for not holding it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    kinds = fsdp.FullyShardedDataParallel, fsdp.FSDPModule
    return {
        id(parameter): "FSDP allocates, frees and writes its memory"
        for module in model.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters()
    }
