"""Says what a policy does with one operation of an exported graph, by the kernels that run it in a region.

Invariants:

- the rules are those of `engine/reference_kernels.py`: the same functions run here, on tensors without numbers, with
  operations that are written into a graph instead of computed;
- nothing here looks at the flags of the thread: what is in force is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.autocast_mode.region import autocast
from precast.engine import reference_kernels, registration
from precast.engine.operation import Operation
from precast.engine.thread_state import Kernel
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule
from precast.policy.rows import FLOAT8_RULES

__all__ = [
    "InForce",
    "Precisions",
    "Treatment",
    "in_force_for",
    "in_regions",
    "treatment",
    "written_operation",
]

Run = Callable[[OpOverload, Any, dict[str, Any]], Any]
"""Writes one operation into the graph: ``run(overload, args, kwargs)`` returns its result, without numbers."""


@dataclass(frozen=True)
class InForce:
    """What is in force on one device type at one place of a graph."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    policy: Policy


Precisions = Mapping[str, InForce]
"""What is in force at one place of a graph, by device type."""


@dataclass(frozen=True, eq=False)
class _Written(Operation):
    """An operation whose calls are written into a graph, under the dtype of a region."""

    run: Run
    dtype: torch.dtype

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Writes the operation."""
        return self.run(self.overload, args, kwargs)

    def lower_dtype(self) -> torch.dtype:
        """The lower precision of the region that is written down."""
        return self.dtype


@dataclass(frozen=True)
class Treatment:
    """What a policy does with an operation.

    Attributes:
        kernel: writes the operation as the rule says; None for an operation at whose autocast key there is nothing, so
            that it runs as it is, and what it calls follows the policy.
        retries: whether an operation that raises on mixed floating dtypes runs once more in the widest of them.
        computes: whether the kernel computes by operations of its own, each of which is to be written.
    """

    kernel: Kernel | None
    retries: bool
    computes: bool = False


def in_force_for(precisions: Precisions, args: Any) -> InForce | None:
    """What acts on an operation with these arguments; None where autocast is off for their devices.

    PyTorch asks the autocast kernels of accelerators before that of the CPU.
    """
    devices = {tensor.device.type for tensor in tensors_in(args)}
    acting = (precisions.get(device) for device in _BY_PRIORITY if device in devices)
    return next((each for each in acting if each is not None and each.enabled), None)


_BY_PRIORITY: Final = tuple(sorted(DEVICE_TYPES, key=lambda device: device == "cpu"))


@contextlib.contextmanager
def in_regions(precisions: Precisions) -> Iterator[None]:
    """The regions that are in force at one place of a graph; their casts are not kept."""
    with contextlib.ExitStack() as regions:
        for device, here in precisions.items():
            regions.enter_context(
                autocast(
                    device,
                    here.dtype,
                    enabled=here.enabled,
                    cache_enabled=False,
                    policy=here.policy,
                )
            )
        yield


def treatment(here: InForce, overload: OpOverload, run: Run) -> Treatment:
    """What the policy in force does with an operation.

    Args:
        here: what is in force.
        overload: the operation.
        run: writes an operation into the graph.
    """
    name = overload.name()
    entry = _table(here.policy, here.device_type).get(name)
    native = registration.native_kernel(name, here.device_type)
    if native is None or (entry is None and not native.compiled):
        return Treatment(None, retries=False)
    rule = Rule.KEEP if entry is None else entry.rule
    if rule is Rule.FALLTHROUGH:
        return Treatment(None, retries=False)
    retries = registration.promotes(here.policy, native, rule)
    if retries and rule is Rule.PROMOTE and not native.compiled:
        return Treatment(None, retries=True)
    op = written_operation(here, overload, run)
    return Treatment(reference_kernels.kernel_for(rule, op), retries, rule in FLOAT8_RULES)


def written_operation(here: InForce, overload: OpOverload, run: Run) -> Operation:
    """The operation for which `run` is called where it would be computed."""
    return _Written(overload.name(), here.device_type, overload, run, here.dtype)


def _table(policy: Policy, device_type: str) -> dict[str, Entry]:
    key = "exported table", device_type
    known: dict[str, Entry] | None = policy.made_of.get(key)
    if known is None:
        known = policy.made_of[key] = policy.expand(device_type)[0]
    return known
