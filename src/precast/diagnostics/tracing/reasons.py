"""The reason for the rule of an operation, or for the lack of one, as a sentence."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from precast.attachment import module_calls
from precast.diagnostics.tracing.call_sites import is_enabled
from precast.engine.thread_state import inherited_policy, installed, thread_state
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name
from precast.policy.module_plan import attached_models
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, expanded_rules
from precast.policy.rows import short, split

__all__ = [
    "ModuleRuleTexts",
    "RuleDecision",
    "decide",
    "has_policy_of_precast",
    "is_lowered",
    "policy_here",
    "rows_of",
    "torchs_policy",
    "why_alone",
    "why_in_backward",
]


class RuleDecision(NamedTuple):
    """The rule of an operation, and its reason."""

    op: str
    rule: str | None
    reason: str


def policy_here(device_type: str) -> Policy:
    """Return the current policy: "torch" in a region of PyTorch's without an installation."""
    bound = (
        thread_state(device_type).state.bound_policy
        or installed(device_type).bound_policy
        or inherited_policy(device_type)
    )
    return torchs_policy() if bound is None else bound.policy


@functools.cache
def torchs_policy() -> Policy:
    """Return the policy "torch", without a search for its file."""
    return Policy.load("torch")


def has_policy_of_precast(device_type: str) -> bool:
    """Return True if a region or an installation set the policy; otherwise PyTorch's own autocast runs."""
    own = thread_state(device_type).state.bound_policy or installed(device_type).bound_policy
    return own is not None


@functools.lru_cache(maxsize=4096)
def decide(policy: Policy, name: str, device: str) -> RuleDecision:
    """Return the decision of a policy on an operation, such as "aten::linear", that reached its autocast kernel."""
    op = name.removeprefix("aten::")
    resolution = policy.resolve(name if "." in name else f"{name}.default", device)
    if name not in rows_of(policy, device):
        return RuleDecision(op, None, resolution.reason.replace(f"{op}.default", op))
    return RuleDecision(op, str(resolution.rule), f"policy {policy.name!r}: {resolution.reason}")


def why_alone(
    policy: Policy, op: str, device: str, region: str | None, module_rule: str | None
) -> RuleDecision:
    """Return the reason why no rule was applied to an operation."""
    if is_enabled(device):
        reason = _why_none(policy, op, device)
    elif module_rule is not None:
        reason = f"autocast is off here ([modules] {module_rule})"
    else:
        reason = (
            "not in a region" if region is None else f"autocast is off in the region at {region}"
        )
    return RuleDecision(op, None, reason)


def why_in_backward(op: str | None, node: Any) -> str:
    """Return a sentence on the forward operation of a graph node."""
    if op is not None:
        return f"backward of {op}"
    name = node.name().rpartition("::")[2]
    if name == "AccumulateGrad":
        return "adds a gradient to a parameter's"
    return f"backward ({name}) of an operation that was not traced"


class ModuleRuleTexts:
    """The rules for modules, as text. A new module causes a new search of the attached models."""

    def __init__(self) -> None:
        self._by_module: dict[int, str] = {}

    def here(self) -> str | None:
        """Return the rule of the innermost module that has one."""
        module = module_calls.innermost()
        if module is None:
            return None
        if id(module) not in self._by_module:
            self._by_module = _rules_by_module()
        return self._by_module.get(id(module))


def _rules_by_module() -> dict[int, str]:
    rules = {}
    for model, plan in attached_models():
        if plan is not None:
            modules = modules_by_name(model)
            for planned in plan.modules:
                if planned.rule is not None:
                    rules[id(modules[planned.name])] = f"{planned.pattern} = {planned.rule}"
    return rules


@functools.lru_cache(maxsize=64)
def rows_of(policy: Policy, device: str) -> frozenset[str]:
    """Return the operations that have a rule."""
    return frozenset(expanded_rules(policy, device)[0])


def is_lowered(op: str) -> bool:
    """Return True if "default" runs an operation in 16 bits on some device type."""
    return op.partition(".")[0] in _lowered()


@functools.cache
def _lowered() -> frozenset[str]:
    tables = (expanded_rules(Policy.load("default"), device)[0] for device in DEVICE_TYPES)
    return frozenset(
        short(split(name)[0])
        for table in tables
        for name, entry in table.items()
        if entry.rule is Rule.LOWER
    )


@functools.lru_cache(maxsize=4096)
def _why_none(policy: Policy, op: str, device: str) -> str:
    try:
        decision = decide(policy, op if "::" in op else f"aten::{op}", device)
    except PolicyError:
        return f"no row for {op} on {device} in the policy {policy.name!r}"
    if decision.rule is None:
        return decision.reason
    return f"ran where autocast does not reach, as under torch.func; elsewhere it has {decision.rule!r}"
