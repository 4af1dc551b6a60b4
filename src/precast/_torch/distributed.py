"""Several processes: what `torch.distributed` and `DistributedDataParallel` are doing.

Invariants:

- nothing here imports `torch.distributed`'s parts: where the program has not, the answer is "no".
"""

from __future__ import annotations

import sys

import torch

__all__ = [
    "in_ddp",
    "leave_process_groups",
]


def in_ddp() -> bool:
    """Whether a `DistributedDataParallel` runs its module: it takes gradients of the parameters' dtype alone (2.13)."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return ddp is not None and ddp.DistributedDataParallel._active_ddp_module is not None


def leave_process_groups() -> None:
    """Has other processes' collectives raise, which would wait for this one, as it is about to raise an error itself.

    What is public leaves one group in a friendly way, which waits for the others, or does not close what they wait for:
    `ProcessGroup.abort` of gloo (2.13).
    """
    distributed = torch.distributed
    is_one_of_several = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    if is_one_of_several:
        distributed.distributed_c10d._abort_process_group()
