"""Process groups of `torch.distributed`."""

from __future__ import annotations

import torch

__all__ = ["abort_process_groups", "is_distributed"]


def is_distributed() -> bool:
    """Return True if this process is in a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def abort_process_groups() -> None:
    """Make collectives in other processes raise an error instead of waiting for this process, which is about to fail.

    No public function does so (2.13): the others wait for all processes or, as `ProcessGroup.abort` of gloo, do not
    close the connections.
    """
    distributed = torch.distributed
    if is_distributed() and distributed.get_world_size() > 1:
        distributed.distributed_c10d._abort_process_group()
