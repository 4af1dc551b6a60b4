"""The policies in the key of the compiler's cache on disk, so that policies do not share compiled code.

Invariants:

- the key contains the policies in force in the compiling thread, and the installed ones. (A graph with a region inside
  names the policy itself; a graph within a region does not.)
- while only PyTorch's policy has been in force, the key is the same as without precast;
- the user's own tag stays part of the key.
"""

from __future__ import annotations

from precast._internal.version import __version__
from precast.engine.thread_state import installed, regions
from precast.policy.policy import DEVICE_TYPES

__all__ = ["key_text"]


def key_text() -> str:
    """Return the policies other than PyTorch's that are in force in this thread, or installed; empty without any."""
    policies = set(regions.guard_id.policies)
    own_devices = {device for device, _ in policies}
    for device in DEVICE_TYPES:
        bound = installed(device).bound_policy
        if (
            bound is not None
            and bound.distinct_fingerprint is not None
            and device not in own_devices
        ):
            policies.add((device, bound.distinct_fingerprint))
    return "".join(f";precast {__version__} {of} {policy}" for of, policy in sorted(policies))
