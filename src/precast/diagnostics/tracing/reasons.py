"""Why an operation has the rule that it has, or none: in sentences, each found once."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

from precast.attachment import module_calls
from precast.attachment.attachment import attached_models
from precast.diagnostics.tracing.call_sites import is_enabled
from precast.engine.operation import Operation
from precast.engine.thread_state import inherited_policy, installed, thread_state
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name
from precast.policy.policy import Policy

__all__ = ["Decided", "Reasons"]

_MOST: Final = 50_000


class Decided(NamedTuple):
    """What holds for an operation."""

    op: str
    rule: str | None
    reason: str


class Reasons:
    """The reasons of one trace."""

    def __init__(self) -> None:
        self._torchs = Policy.load("torch")
        self._known: dict[tuple[Any, ...], tuple[object, Decided]] = {}
        self._module_rules: dict[int, str] = {}

    def policy_here(self, device_type: str) -> Policy:
        """The policy in force; in a region of PyTorch's with nothing installed that is "torch"."""
        bound = (
            thread_state(device_type).state.bound_policy
            or installed(device_type).bound_policy
            or inherited_policy(device_type)
        )
        return self._torchs if bound is None else bound.policy

    def is_pytorchs_own(self, device_type: str) -> bool:
        """Whether no policy is in force: what runs there is PyTorch's alone."""
        return not (
            thread_state(device_type).state.bound_policy or installed(device_type).bound_policy
        )

    def decided(self, policy: Policy, op: Operation) -> Decided:
        """What a policy says of an operation that reached its autocast kernel."""
        key = id(policy), op.name, op.device_type
        known = self._known.get(key)
        if known is None:
            known = self._keep(key, policy, _decided(policy, op.name, op.device_type))
        return known[1]

    def alone(self, policy: Policy, op: str, device: str, region: str | None) -> Decided:
        """Why no rule was carried out for an operation that ran."""
        off = None if is_enabled(device) else _why_off(region, self.module_rule())
        key = id(policy), op, device, off
        known = self._known.get(key)
        if known is None:
            reason = _why_none(policy, op, device) if off is None else off
            known = self._keep(key, policy, Decided(op, None, reason))
        return known[1]

    def backward(self, op: str | None, node: Any) -> str:
        """Of what an operation is the backward."""
        if op is not None:
            return f"backward of {op}"
        name = node.name().rpartition("::")[2]
        if name == "AccumulateGrad":
            return "adds a gradient to a parameter's"
        return f"backward ({name}) of what was not traced"

    def module_rule(self) -> str | None:
        """The rule for modules that holds here."""
        module = module_calls.innermost()
        if module is None:
            return None
        if id(module) not in self._module_rules:
            self._module_rules = _module_rules()
        return self._module_rules.get(id(module))

    def _keep(
        self, key: tuple[Any, ...], policy: Policy, decided: Decided
    ) -> tuple[object, Decided]:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = policy, decided  # with the policy: an id is given out again
        return self._known[key]


def _module_rules() -> dict[int, str]:
    found = {}
    for model, plan in attached_models():
        if plan is not None:
            modules = modules_by_name(model)
            for planned in plan.modules:
                if planned.rule is not None:
                    found[id(modules[planned.name])] = f"{planned.pattern} = {planned.rule}"
    return found


@functools.lru_cache(maxsize=4096)
def _decided(policy: Policy, name: str, device: str) -> Decided:
    op = name.removeprefix("aten::")
    found = policy.resolve(name if "." in name else f"{name}.default", device)
    if name not in _rows(policy, device):
        return Decided(op, None, found.reason.replace(f"{op}.default", op))
    return Decided(op, str(found.rule), f"policy {policy.name!r}: {found.reason}")


@functools.lru_cache(maxsize=64)
def _rows(policy: Policy, device: str) -> frozenset[str]:
    return frozenset(policy.expand(device)[0])


def _why_off(region: str | None, module_rule: str | None) -> str:
    if module_rule is not None:
        return f"autocast is off here ([modules] {module_rule})"
    return "not in a region" if region is None else f"autocast is off in the region at {region}"


def _why_none(policy: Policy, op: str, device: str) -> str:
    try:
        found = _decided(policy, op if "::" in op else f"aten::{op}", device)
    except PolicyError:
        return f"no row for {op} on {device} in the policy {policy.name!r}"
    if found.rule is None:
        return found.reason
    return (
        f"ran where autocast does not reach, as under torch.func; elsewhere it has {found.rule!r}"
    )
