"""The plan of a policy on a model: the rule for each module, and the state inside it.

Invariants:

- a plan reads only names and types of modules; the model is neither changed nor stored;
- names are those of `module_names.py`, without the components that PyTorch's wrappers add;
- a rule that cannot be applied raises an error here, before the model is changed;
- a rule has effect when its module is called. A list of modules is never called, so the modules in it get its rule.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from precast._internal import cures
from precast.errors import PolicyError
from precast.policy.module_names import modules_by_name, names_in
from precast.policy.module_rules import MODEL_CONTEXT, ModuleContext, ModuleRule, Precision, decide
from precast.policy.patterns import PatternIndex
from precast.policy.policy import Policy, operations_with_product_rules, pattern_index
from precast.policy.values import nearest, shown

__all__ = [
    "Plan",
    "PlannedModule",
    "attached_models",
    "attachments",
    "is_called",
    "names_of",
    "outwards",
    "plan",
]

_UNCALLED_CLASS: Final = "NonDynamicallyQuantizableLinear"
"""The class of the projection in `nn.MultiheadAttention`."""
_MAX_LISTED: Final = 10
"""The number of patterns without a match for which complaints suggest similar names."""
_16_BITS: Final = (Precision.FLOAT16, Precision.BFLOAT16)


@dataclass(frozen=True)
class PlannedModule:
    """One module of a model, under one of its names.

    Attributes:
        name: the dotted name; "" is the model itself.
        kind: the name of its class.
        rule: the policy's rule for it; None if none matches.
        pattern: the pattern of that rule; None if none matches.
        inside: the state inside it, from its rule and the rules for modules that contain it.
        applied_rule: the rule to apply when it is called; None for none.
    """

    name: str
    kind: str
    rule: ModuleRule | None
    pattern: str | None
    inside: ModuleContext
    applied_rule: ModuleRule | None


@dataclass(frozen=True)
class Plan:
    """The effect of a policy's module rules on one model.

    Attributes:
        policy: the policy.
        modules: every module, each before the modules in it. A module with two names appears twice.
        matches: pattern -> the names of the modules that it matches. A module's name in the rules counts as a pattern.
    """

    policy: Policy
    modules: tuple[PlannedModule, ...]
    matches: Mapping[str, tuple[str, ...]]

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The patterns that match no module."""
        return tuple(pattern for pattern, names in self.matches.items() if not names)

    @property
    def rules(self) -> list[tuple[str, str]]:
        """The name of each module with a rule, and the rule as text: "fp32, by head.*"."""
        return [
            (m.name or "the model", f"{m.rule}, by {m.pattern}") for m in self.modules if m.rule
        ]

    def inside(self, name: str) -> ModuleContext:
        """Return the state inside the module of that name."""
        return self._by_name[name].inside

    @functools.cached_property
    def _by_name(self) -> dict[str, PlannedModule]:
        return {module.name: module for module in self.modules}

    def complaints(self) -> list[str]:
        """Return one sentence for each rule without effect."""
        return [
            *self._unmatched_rules(),
            *self._disabled_rules(),
            *(
                f"[modules] {module.pattern!r} does nothing for {module.name!r}: nn.MultiheadAttention reads its "
                f"weight and never calls it. {cures.WHOLE_ATTENTION.text}"
                for module in self.modules
                if module.kind == _UNCALLED_CLASS and module.applied_rule is not None
                if module.inside.state != self.inside(next(outwards(module.name))).state
            ),
        ]

    def _disabled_rules(self) -> list[str]:
        return [
            f"[modules] {module.pattern!r} does nothing for {module.name!r}: autocast is off there, by the rule for a "
            f"module that contains it. {cures.LOWER_AGAIN(rule=module.rule.product_rule)}"
            for module in self.modules
            if module.rule is not None and module.rule.product_rule and not module.inside.enabled
        ]

    def _unmatched_rules(self) -> list[str]:
        names = [module.name for module in self.modules]
        complaints = [
            f"[modules] {shown(pattern)} matches no module of the model{_suggestion(pattern, names)}"
            for pattern in self.unmatched[:_MAX_LISTED]
        ]
        remaining = self.unmatched[_MAX_LISTED:]
        if remaining:  # to suggest names for each would take longer than the rest of the plan
            listed = ", ".join(map(shown, remaining[:_MAX_LISTED]))
            dots = ", ..." if remaining[_MAX_LISTED:] else ""
            complaints.append(
                f"[modules] {len(remaining)} more patterns match no module of the model: {listed}{dots}."
            )
        return complaints


def _suggestion(pattern: str, names: list[str]) -> str:
    """Return the end of the complaint about a pattern without a match, with a similar pattern or name."""
    nested = f"*.{pattern}"
    index = PatternIndex([nested])
    if matches := [name for name in names if pattern and index.matching(name)]:
        remaining = f" and {len(matches) - 1} more" if len(matches) > 1 else ""
        return f"; did you mean {shown(nested)}, which matches {shown(matches[0])}{remaining}?"
    similar = nearest(pattern, names)
    last_parts = {name.rpartition(".")[2] for name in names}
    return nearest(pattern.rpartition(".")[2], last_parts) if similar == "." else similar


def plan(model: nn.Module, policy: Policy) -> Plan:
    """Return the plan of `policy.modules` for `model`.

    Examples:
        >>> model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        >>> planned = plan(model, Policy.load("torch").replace(modules={"head": "fp32", "tail": "fp32"}))
        >>> planned.inside("head").precision, planned.unmatched
        ('fp32', ('tail',))
    """
    modules = modules_by_name(model)
    matching = {name: pattern_index(policy).matching(name) for name in modules}
    own = {name: decide(patterns, policy.modules, name) for name, patterns in matching.items()}
    decisions = _share_decisions(modules, own)
    planned: dict[str, PlannedModule] = {}
    list_rules: dict[str, ModuleRule | None] = {}
    for name, module in modules.items():
        parent = _parent(name, planned) if name else ""
        outside = planned[parent].inside if name else MODEL_CONTEXT
        pattern, rule = decisions[name] or (None, None)
        effective = outside.with_products(rule, operations_with_product_rules(policy))
        inside = outside.then(effective, name, pattern or "")
        applied = _with_list_rule(list_rules.get(parent), None if inside is outside else effective)
        if _is_part_of_scripted(name, modules, inside.state == outside.state):
            applied = None
        can_call = is_called(module)
        list_rules[name] = None if can_call else applied
        kind = type(module).__name__
        applied = applied if can_call else None
        planned[name] = PlannedModule(name, kind, rule, pattern, inside, applied)
    _check_shared(modules, planned)
    matches: dict[str, list[str]] = {pattern: [] for pattern in policy.modules}
    for name, patterns in matching.items():
        for pattern in patterns:
            matches[pattern].append(name)
    return Plan(policy, tuple(planned.values()), {p: tuple(n) for p, n in matches.items()})


_Decisions = dict[str, tuple[str, ModuleRule] | None]


attachments: Final[
    weakref.WeakKeyDictionary[object, tuple[weakref.ref[nn.Module], Plan | None]]
] = weakref.WeakKeyDictionary()
"""Maps each attachment that has not ended to its model, and to its plan if it has a policy."""


def attached_models() -> list[tuple[nn.Module, Plan | None]]:
    """Return every attached model with the plan of its attachment."""
    pairs = [(model(), planned) for model, planned in list(attachments.values())]
    return [(model, planned) for model, planned in pairs if model is not None]


def names_of(parameters: Iterable[Tensor]) -> dict[int, str]:
    """Map the ``id`` of each parameter that belongs to an attached model to its name in the model."""
    parameters, names = list(parameters), dict[int, str]()
    for model, _ in attached_models():
        names |= names_in(model, parameters)
    return names


def _share_decisions(modules: dict[str, nn.Module], decisions: _Decisions) -> _Decisions:
    """Give all names of a module the decision of the first one that has a rule."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        decision = decisions[name]
        if decision is None:
            continue
        other = first.setdefault(id(module), name)
        first_decision = decisions[other]
        assert first_decision is not None
        if not decision[1].agrees_with(first_decision[1]):
            raise PolicyError(
                f"[modules]: {other!r} and {name!r} are one module, with the rule {first_decision[1]} from "
                f"{first_decision[0]!r} and {decision[1]} from {decision[0]!r}. {cures.ONE_RULE.text}"
            )
    return {name: decisions[first.get(id(module), name)] for name, module in modules.items()}


def _parent(name: str, names: Iterable[str]) -> str:
    """Return the name of the innermost module that contains the named one. `names` may lack wrappers."""
    return next(outer for outer in outwards(name) if outer in names)


def outwards(name: str) -> Iterator[str]:
    """Yield the names of all modules that contain the named one, from the innermost to the model, ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _with_list_rule(outer: ModuleRule | None, inner: ModuleRule | None) -> ModuleRule | None:
    """Combine the rule for a list of modules, which is never called, with the rule for a module in it."""
    if outer is None or inner is None:
        return inner or outer
    keeps = inner.dtype is None or (inner.dtype is Precision.LOWER and outer.dtype in _16_BITS)
    dtype = outer.dtype if keeps else inner.dtype
    return ModuleRule(dtype, {**outer.ops, **inner.ops}, inner.reason, inner.origin)


def is_called(module: nn.Module) -> bool:
    """Return True for a module with a forward, which a list of modules lacks."""
    overrides = getattr(type(module), "forward", None) is not nn.Module.forward
    return overrides or "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)


def _is_part_of_scripted(name: str, modules: dict[str, nn.Module], changes_nothing: bool) -> bool:
    """Return True if TorchScript calls the module as a part of another one, without its hooks.

    Raises:
        PolicyError: a rule would change the state inside it.
    """
    outer = (n for n in outwards(name) if isinstance(modules.get(n), torch.jit.ScriptModule))
    scripted = next(outer, None)
    if scripted is None or changes_nothing:
        return scripted is not None
    raise PolicyError(
        f"[modules]: the module {name!r} is scripted as a part of {scripted!r}: TorchScript calls it, so it "
        f"cannot have a separate rule. {cures.WHOLE_SCRIPTED(name=repr(scripted))}"
    )


def _check_shared(modules: dict[str, nn.Module], planned: dict[str, PlannedModule]) -> None:
    """Raise an error if a module in two lists of modules gets different rules from them."""
    first: dict[int, PlannedModule] = {}
    for name, module in modules.items():
        current = planned[name]
        if current.applied_rule is None:
            continue
        other = first.setdefault(id(module), current)
        assert other.applied_rule is not None
        if not other.applied_rule.agrees_with(current.applied_rule):
            raise PolicyError(
                f"[modules]: {other.name!r} and {name!r} are one module, with the rule {other.applied_rule} in one "
                f"place and {current.applied_rule} in the other. Write the same rule for both."
            )
