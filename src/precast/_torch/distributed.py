"""Several processes: what `torch.distributed` and `DistributedDataParallel` are doing.

Invariants:

- nothing here imports parts of `torch.distributed`: where the program has not, the answer is "no".
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
    """Makes the collectives of other processes raise an error instead of waiting for this process, which is to fail.

    Public functions either leave a group only after the others have come, or, as `ProcessGroup.abort` of gloo, leave
    the connections open for which the others wait (2.13).
    """
    distributed = torch.distributed
    is_one_of_several = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    if is_one_of_several:
        distributed.distributed_c10d._abort_process_group()
