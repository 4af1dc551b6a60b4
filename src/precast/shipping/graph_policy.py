"""The treatment of one operation of an exported graph by a policy, with the kernels that run it in a region.

Invariants:

- the rules are those of `engine/reference_kernels.py`: the same functions run here, on fake tensors, with operations
  that are written into a graph instead of computed;
- the flags of the thread are not read: the state of the regions is an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.autocast_mode.region import autocast
from precast.engine import reference_kernels, registration
from precast.engine.operation import Operation
from precast.engine.thread_state import Kernel
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule, derived_values, expanded_rules

__all__ = [
    "Precisions",
    "RegionState",
    "acting_region",
    "in_regions",
    "treatment",
    "written_operation",
]

Run = Callable[[OpOverload, Any, dict[str, Any]], Any]
"""Writes one operation into the graph: ``run(overload, args, kwargs)`` returns its fake result."""


@dataclass(frozen=True)
class RegionState:
    """The state of the region for one device type at one place of a graph."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    policy: Policy


Precisions = Mapping[str, RegionState]
"""The state of the regions at one place of a graph, by device type."""


@dataclass(frozen=True, eq=False)
class _WrittenOperation(Operation):
    """An operation with calls that are written into a graph, under the dtype of a region."""

    run: Run
    dtype: torch.dtype

    def call(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write the operation."""
        return self.run(self.overload, args, kwargs)

    def lower_dtype(self) -> torch.dtype:
        """Return the lower precision of the region."""
        return self.dtype


class Treatment(NamedTuple):
    """The treatment of an operation by a policy.

    Attributes:
        kernel: writes the operation according to the rule; None for an operation without a kernel at its autocast key,
            which runs unchanged, while the policy acts on the operations that it calls.
        retries: True if an operation that raises on mixed floating dtypes is repeated in the widest of them.
        rule: the rule of `kernel`.
    """

    kernel: Kernel | None
    retries: bool
    rule: Rule = Rule.FALLTHROUGH

    def mixes(self, here: RegionState, values: Any) -> bool:
        """Return True if the operation has several floating dtypes to promote."""
        own = (t for t in tensors_in(values) if t.device.type == here.device_type)
        dtypes = {t.dtype for t in own if t.is_floating_point()}
        return len(reference_kernels.dtypes_to_promote(dtypes, self.rule, here.dtype)) > 1


def acting_region(precisions: Precisions, args: Any) -> RegionState | None:
    """Return the region that acts on an operation with these arguments; None if autocast is off for their devices.

    PyTorch calls the autocast kernels of accelerators before that of the CPU.
    """
    devices = {tensor.device.type for tensor in tensors_in(args)}
    acting = (precisions.get(device) for device in _BY_PRIORITY if device in devices)
    return next((each for each in acting if each is not None and each.enabled), None)


_BY_PRIORITY: Final = tuple(sorted(DEVICE_TYPES, key=lambda device: device == "cpu"))


@contextlib.contextmanager
def in_regions(precisions: Precisions) -> Iterator[None]:
    """Enter the regions at one place of a graph, with their caches off."""
    with contextlib.ExitStack() as regions:
        for device, here in precisions.items():
            settings = {"enabled": here.enabled, "cache_enabled": False, "policy": here.policy}
            regions.enter_context(autocast(device, here.dtype, **settings))  # type: ignore[arg-type]
        yield


def treatment(here: RegionState, overload: OpOverload, run: Run) -> Treatment:
    """Return the treatment of an operation by the policy in force; `run` writes an operation into the graph."""
    name = overload.name()
    entry = _table(here.policy, here.device_type).get(name)
    native = registration.torch_kernel(name, here.device_type)
    rule = Rule.KEEP if entry is None else entry.rule
    if native is None or rule is Rule.FALLTHROUGH or (entry is None and not native.compiled):
        return Treatment(None, retries=False)
    retries = registration.promotes(here.policy, native, rule)
    if retries and rule is Rule.PROMOTE and not native.compiled:
        return Treatment(None, retries=True)
    if rule is Rule.FP32_IF_REFUSED:
        return Treatment(None, True, rule)
    op = written_operation(here, overload, run)
    return Treatment(reference_kernels.kernel_for(rule, op), retries, rule)


def written_operation(here: RegionState, overload: OpOverload, run: Run) -> Operation:
    """Return an operation that calls `run` where it would be computed."""
    return _WrittenOperation(overload.name(), here.device_type, overload, run, here.dtype)


def _table(policy: Policy, device_type: str) -> dict[str, Entry]:
    key = "exported table", device_type
    table: dict[str, Entry] | None = derived_values(policy).get(key)
    if table is None:
        table = derived_values(policy)[key] = expanded_rules(policy, device_type)[0]
    return table
