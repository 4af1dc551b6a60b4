"""The end of every installation, for tests that do not have the handles."""

from __future__ import annotations

from precast.integrations.torch_amp import installation

__all__ = ["uninstall_all"]


def uninstall_all() -> None:
    """End every installation, and unregister precast's kernels as the end of the last one does."""
    for each in tuple(installation._installations):
        each.uninstall()
    installation._put_in_force()
