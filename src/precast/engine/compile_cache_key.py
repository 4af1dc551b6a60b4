"""Keeps apart on disk what `torch.compile` makes under different policies, which the compiler's cache does not know.

Invariants:

- the key contains the policies that are in force in the thread that compiles, or installed. (A graph with a region
  inside names its policy itself; a graph with a region around it does not.)
- while no policy but PyTorch's has been in force, the key is what it is without precast;
- a tag that the user has set stays part of the key.
"""

from __future__ import annotations

from precast import _torch
from precast._internal.version import __version__
from precast.engine.thread_state import installed, regions
from precast.policy.policy import DEVICE_TYPES

__all__ = ["is_in_force", "put_on", "take_off"]


def put_on() -> None:
    """From now on keys say the policies."""
    _torch.set_compile_cache_tag(_in_force)


def take_off() -> None:
    """Leaves the keys to the user's own tag."""
    _torch.set_compile_cache_tag(None)


def is_in_force() -> bool:
    """Return True if a policy other than PyTorch's is in force in this thread, or installed."""
    return bool(_in_force())


def _in_force() -> str:
    policies = set(regions.guard_id.policies)
    here = {device for device, _ in policies}
    for device in DEVICE_TYPES:
        bound = installed(device).bound_policy
        if bound is not None and bound.meaning is not None and device not in here:
            policies.add((device, bound.meaning))
    return "".join(f";precast {__version__} {of} {policy}" for of, policy in sorted(policies))
