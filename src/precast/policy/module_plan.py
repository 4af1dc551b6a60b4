"""The plan of a policy's rules for modules on a model: the modules with rules, and the state inside each module.

Invariants:

- a plan needs names and types only; nothing of the model is changed or stored;
- names are those of `module_names.py`, without the components that PyTorch's wrappers add;
- a rule that cannot be applied raises an error here, before the model is changed;
- a rule acts when its module is called. A list of modules is never called, so its rule passes to the modules in it.
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

_NEVER_CALLED: Final = "NonDynamicallyQuantizableLinear"
"""The projection in `nn.MultiheadAttention`."""
_LISTED: Final = 10
"""Number of patterns without a match for which complaints suggest similar names."""
_NAMED: Final = (Precision.FLOAT16, Precision.BFLOAT16)


@dataclass(frozen=True)
class PlannedModule:
    """One module of a model, under one of its names.

    Attributes:
        name: the dotted name; "" is the model itself.
        kind: the name of its class.
        rule: the policy's rule for it; None if none matches.
        pattern: the pattern of that rule; None if none matches.
        inside: the state inside it, from its rule and those of the modules that contain it.
        carried_out: the rule to apply when it is called; None for none.
    """

    name: str
    kind: str
    rule: ModuleRule | None
    pattern: str | None
    inside: ModuleContext
    carried_out: ModuleRule | None


@dataclass(frozen=True)
class Plan:
    """The effect of a policy's module rules on one model.

    Attributes:
        policy: the policy.
        modules: every module, each before those in it; one with two names appears twice.
        matches: the names of the modules that each pattern matches, including modules with an exact name in the rules.
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
        """Return one sentence for each rule without effect: no module matches, or PyTorch does not call it."""
        return (
            self._unmatched_ones()
            + self._disabled_ones()
            + [
                f"[modules] {module.pattern!r} does nothing for {module.name!r}: nn.MultiheadAttention reads its "
                f"weight and never calls it. {cures.WHOLE_ATTENTION.text}"
                for module in self.modules
                if module.kind == _NEVER_CALLED and module.carried_out is not None
                if module.inside.state != self.inside(next(outwards(module.name))).state
            ]
        )

    def _disabled_ones(self) -> list[str]:
        return [
            f"[modules] {module.pattern!r} does nothing for {module.name!r}: the rule for a module that contains it "
            f"switches autocast off. {cures.LOWER_AGAIN(rule=module.rule.product_rule)}"
            for module in self.modules
            if module.rule is not None and module.rule.product_rule and not module.inside.enabled
        ]

    def _unmatched_ones(self) -> list[str]:
        names = [module.name for module in self.modules]
        complaints = [
            f"[modules] {shown(pattern)} matches no module of the model{_suggestion(pattern, names)}"
            for pattern in self.unmatched[:_LISTED]
        ]
        more = self.unmatched[_LISTED:]
        if more:  # finding similar names for each would take longer than the rest of the plan
            complaints.append(
                f"[modules] {len(more)} more patterns match no module of the model: "
                f"{', '.join(map(shown, more[:_LISTED]))}{', ...' if more[_LISTED:] else ''}."
            )
        return complaints


def _suggestion(pattern: str, names: list[str]) -> str:
    """Return the end of a sentence on a pattern without a match: a similar pattern or similar names."""
    deeper = f"*.{pattern}"
    index = PatternIndex([deeper])
    if hits := [name for name in names if pattern and index.matching(name)]:
        more = f" and {len(hits) - 1} more" if len(hits) > 1 else ""
        return f"; did you mean {shown(deeper)}, which matches {shown(hits[0])}{more}?"
    whole = nearest(pattern, names)
    last = {name.rpartition(".")[2] for name in names}
    return nearest(pattern.rpartition(".")[2], last) if whole == "." else whole


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
    decided = _agreed(modules, own)
    planned: dict[str, PlannedModule] = {}
    passed_on: dict[str, ModuleRule | None] = {}
    for name, module in modules.items():
        parent = _parent(name, planned) if name else ""
        outside = planned[parent].inside if name else MODEL_CONTEXT
        pattern, rule = decided[name] or (None, None)
        acting = outside.with_products(rule, operations_with_product_rules(policy))
        inside = outside.then(acting, name, pattern or "")
        carried = _combined(passed_on.get(parent), None if inside is outside else acting)
        if _is_part_of_scripted(name, modules, inside.state == outside.state):
            carried = None
        can_call = is_called(module)
        passed_on[name] = None if can_call else carried
        kind = type(module).__name__
        carried = carried if can_call else None
        planned[name] = PlannedModule(name, kind, rule, pattern, inside, carried)
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
"""Attachment that has not ended -> its model, and its plan if it has a policy."""


def attached_models() -> list[tuple[nn.Module, Plan | None]]:
    """Return every attached model with the plan of its attachment."""
    pairs = [(model(), planned) for model, planned in list(attachments.values())]
    return [(model, planned) for model, planned in pairs if model is not None]


def names_of(parameters: Iterable[Tensor]) -> dict[int, str]:
    """Return ``id`` -> name in its model for each of `parameters` that belongs to an attached model."""
    parameters, names = list(parameters), dict[int, str]()
    for model, _ in attached_models():
        names |= names_in(model, parameters)
    return names


def _agreed(modules: dict[str, nn.Module], decisions: _Decisions) -> _Decisions:
    """Return one decision for each module with several names, from the name that has a rule."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        decision = decisions[name]
        if decision is None:
            continue
        other = first.setdefault(id(module), name)
        theirs = decisions[other]
        assert theirs is not None
        if not decision[1].agrees_with(theirs[1]):
            raise PolicyError(
                f"[modules]: {other!r} and {name!r} are one module, for which {theirs[0]!r} says {theirs[1]} and "
                f"{decision[0]!r} says {decision[1]}. {cures.ONE_RULE.text}"
            )
    return {name: decisions[first.get(id(module), name)] for name, module in modules.items()}


def _parent(name: str, names: Iterable[str]) -> str:
    """Return the nearest module in `names` that contains the named one; names of wrappers may be missing."""
    return next(outer for outer in outwards(name) if outer in names)


def outwards(name: str) -> Iterator[str]:
    """Yield the names of all modules that contain the named one, innermost first; the model, "", is last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _combined(outer: ModuleRule | None, inner: ModuleRule | None) -> ModuleRule | None:
    """Combine the rule of a list of modules, which is never called itself, with the rule of a module in it."""
    if outer is None or inner is None:
        return inner or outer
    keeps = inner.dtype is None or (inner.dtype is Precision.LOWER and outer.dtype in _NAMED)
    dtype = outer.dtype if keeps else inner.dtype
    return ModuleRule(dtype, {**outer.ops, **inner.ops}, inner.reason, inner.origin)


def is_called(module: nn.Module) -> bool:
    """Return True if a module can be called; a list of modules cannot."""
    own = getattr(type(module), "forward", None) is not nn.Module.forward
    return own or "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)


def _is_part_of_scripted(name: str, modules: dict[str, nn.Module], changes_nothing: bool) -> bool:
    """Return True if TorchScript calls the module as a part of another, so that its hooks do not run."""
    outer = (n for n in outwards(name) if isinstance(modules.get(n), torch.jit.ScriptModule))
    scripted = next(outer, None)
    if scripted is None or changes_nothing:
        return scripted is not None
    raise PolicyError(
        f"[modules]: the module {name!r} is scripted as a part of {scripted!r}: TorchScript calls it, so no rule can "
        f"act on it alone. {cures.WHOLE_SCRIPTED(name=repr(scripted))}"
    )


def _check_shared(modules: dict[str, nn.Module], planned: dict[str, PlannedModule]) -> None:
    """Raise an error for a module that gets different rules from two lists of modules."""
    first: dict[int, PlannedModule] = {}
    for name, module in modules.items():
        current = planned[name]
        if current.carried_out is None:
            continue
        other = first.setdefault(id(module), current)
        assert other.carried_out is not None
        if not other.carried_out.agrees_with(current.carried_out):
            raise PolicyError(
                f"[modules]: {other.name!r} and {name!r} are one module, which is to follow {other.carried_out} in "
                f"one place and {current.carried_out} in the other. Write rules that say the same for both."
            )
