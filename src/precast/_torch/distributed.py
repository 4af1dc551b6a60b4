"""Process groups of `torch.distributed`."""

from __future__ import annotations

import torch

__all__ = [
    "is_distributed",
    "leave_process_groups",
]


def is_distributed() -> bool:
    """Return True if this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_process_groups() -> None:
    """Make collectives in other processes raise an error instead of waiting for this process, which is about to fail.

    Public functions either wait for the other processes, or, as `ProcessGroup.abort` of gloo, leave open the
    connections for which the others wait (2.13).
    """
    distributed = torch.distributed
    if is_distributed() and distributed.get_world_size() > 1:
        distributed.distributed_c10d._abort_process_group()
