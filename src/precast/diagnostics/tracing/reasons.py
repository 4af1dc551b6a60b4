"""Why an operation has the rule that it has, or none, as a sentence."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from precast.attachment import module_calls
from precast.attachment.attachment import attached_models
from precast.diagnostics.tracing.call_sites import is_enabled
from precast.engine.thread_state import inherited_policy, installed, thread_state
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name
from precast.policy.policy import Policy

__all__ = [
    "Decided",
    "ModuleRules",
    "decided",
    "has_policy_of_precast",
    "policy_here",
    "rows_of",
    "torchs_policy",
    "why_alone",
    "why_in_backward",
]


class Decided(NamedTuple):
    """What holds for an operation."""

    op: str
    rule: str | None
    reason: str


def policy_here(device_type: str) -> Policy:
    """The policy in force; in a region of PyTorch's with nothing installed that is "torch"."""
    bound = (
        thread_state(device_type).state.bound_policy
        or installed(device_type).bound_policy
        or inherited_policy(device_type)
    )
    return torchs_policy() if bound is None else bound.policy


@functools.cache
def torchs_policy() -> Policy:
    """The policy "torch", without a search for its file."""
    return Policy.load("torch")


def has_policy_of_precast(device_type: str) -> bool:
    """Whether a region or an installation put a policy in force; else PyTorch's own autocast runs."""
    own = thread_state(device_type).state.bound_policy or installed(device_type).bound_policy
    return own is not None


@functools.lru_cache(maxsize=4096)
def decided(policy: Policy, name: str, device: str) -> Decided:
    """What a policy says of an operation, such as "aten::linear", that reached its autocast kernel."""
    op = name.removeprefix("aten::")
    found = policy.resolve(name if "." in name else f"{name}.default", device)
    if name not in rows_of(policy, device):
        return Decided(op, None, found.reason.replace(f"{op}.default", op))
    return Decided(op, str(found.rule), f"policy {policy.name!r}: {found.reason}")


def why_alone(
    policy: Policy, op: str, device: str, region: str | None, module_rule: str | None
) -> Decided:
    """Why no rule was carried out for an operation that ran."""
    if is_enabled(device):
        reason = _why_none(policy, op, device)
    elif module_rule is not None:
        reason = f"autocast is off here ([modules] {module_rule})"
    else:
        reason = (
            "not in a region" if region is None else f"autocast is off in the region at {region}"
        )
    return Decided(op, None, reason)


def why_in_backward(op: str | None, node: Any) -> str:
    """Which operation a graph node is the backward of."""
    if op is not None:
        return f"backward of {op}"
    name = node.name().rpartition("::")[2]
    if name == "AccumulateGrad":
        return "adds a gradient to a parameter's"
    return f"backward ({name}) of what was not traced"


class ModuleRules:
    """The rules for modules, as text; the models are searched again when a module is new."""

    def __init__(self) -> None:
        self._by_module: dict[int, str] = {}

    def here(self) -> str | None:
        """The rule of the innermost module that has one."""
        module = module_calls.innermost()
        if module is None:
            return None
        if id(module) not in self._by_module:
            self._by_module = _rules_by_module()
        return self._by_module.get(id(module))


def _rules_by_module() -> dict[int, str]:
    found = {}
    for model, plan in attached_models():
        if plan is not None:
            modules = modules_by_name(model)
            for planned in plan.modules:
                if planned.rule is not None:
                    found[id(modules[planned.name])] = f"{planned.pattern} = {planned.rule}"
    return found


@functools.lru_cache(maxsize=64)
def rows_of(policy: Policy, device: str) -> frozenset[str]:
    """The operations that have a rule."""
    return frozenset(policy.expand(device)[0])


@functools.lru_cache(maxsize=4096)
def _why_none(policy: Policy, op: str, device: str) -> str:
    try:
        found = decided(policy, op if "::" in op else f"aten::{op}", device)
    except PolicyError:
        return f"no row for {op} on {device} in the policy {policy.name!r}"
    if found.rule is None:
        return found.reason
    return (
        f"ran where autocast does not reach, as under torch.func; elsewhere it has {found.rule!r}"
    )
