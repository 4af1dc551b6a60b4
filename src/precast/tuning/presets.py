"""The presets that are tried beside the policies of a search, so that its answer is never worse than one of them.

Invariant: a preset that gives the model's operations the same rules as the base policy, or as one before it, is left
out: it would do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from precast.policy.policy import Policy, Rule
from precast.tuning.sites import Program

__all__ = ["presets_beside", "says_as"]

_TRIED: Final = ("default", "lean", "torch")
"""`torch` computes what `torch.autocast` does, bit for bit."""


def presets_beside(base: Policy, program: Program) -> Iterator[Policy]:
    """The presets that do something else with a program than the base policy."""
    known = [_rules(base, program)]
    for name in _TRIED:
        preset = Policy.load(name)
        rules = _rules(preset, program)
        if rules not in known:
            known.append(rules)
            yield preset


def says_as(policy: Policy | None, other: Policy) -> bool:
    """Whether two policies have the same rules; reasons may differ."""
    return (
        policy is not None
        and policy.fingerprint == other.fingerprint
        and policy.modules.keys() == other.modules.keys()
        and all(rule.agrees_with(other.modules[name]) for name, rule in policy.modules.items())
    )


def _rules(policy: Policy, program: Program) -> object:
    """What a policy says of the operations of a program."""
    table, _ = policy.expand(program.device)
    called = {call.overload for site in program.sites for call in site.calls}
    rules = {(name, table[name].rule) for name in called if name in table}
    rows = {(name, rule) for name, rule in rules if rule is not Rule.KEEP}  # as good as no row
    modules = {pattern: repr(rule) for pattern, rule in policy.modules.items()}
    return policy.mixed, rows, modules
