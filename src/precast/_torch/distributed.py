"""Process groups of `torch.distributed`."""

from __future__ import annotations

import torch

__all__ = [
    "leave_process_groups",
]


def leave_process_groups() -> None:
    """Make collectives in other processes raise an error instead of waiting for this process, which is about to fail.

    Public functions either wait for the other processes, or, as `ProcessGroup.abort` of gloo, leave open the
    connections for which the others wait (2.13).
    """
    distributed = torch.distributed
    is_one_of_several = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    if is_one_of_several:
        distributed.distributed_c10d._abort_process_group()
