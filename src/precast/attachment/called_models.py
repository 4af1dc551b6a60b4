"""The rules for modules of an installed policy, which are applied to each model when it is first called.

Invariants:

- a model is a module with parameters that is called from outside of all modules. Names of modules do not include the
  wrappers around it. If a part of it was called before, the whole replaces the part as the model;
- if a rule cannot be applied, a sentence is recorded and the program continues. An attachment by the program has
  priority;
- no weights are held, and models are referenced weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.locks import ForkSafeLock, synchronized
from precast.attachment.attachment import Attachment
from precast.errors import PolicyError
from precast.policy.module_names import unwrapped
from precast.policy.module_plan import Plan, attached_models, plan
from precast.policy.policy import Policy
from precast.report.schema import ModuleRuleEffects

__all__ = ["CalledModels"]

_LIMIT = 16
"""The maximum number of recorded model classes, and of recorded refusals."""
_OWN_POLICY = "the program attached another policy to it"


class CalledModels:
    """The search for called models until `close`, and the rules of `policy` on them.

    `refused` is called with each new sentence about rules that cannot be applied to a model.
    """

    def __init__(self, policy: Policy, refused: Callable[[str], None] = lambda _: None) -> None:
        self._policy = policy
        self._on_refusal = refused
        self.mutex = ForkSafeLock()
        self._is_open = True
        self._called_modules = WeakIdKeyDictionary()
        """The called modules, as keys."""
        self._attached = WeakIdKeyDictionary()
        """Maps each model to its attachment."""
        self._models: dict[str, int] = {}
        self._unmatched = set(policy.modules)
        self._complaints: dict[str, tuple[str, ...]] = {}
        self._refusals: list[str] = []
        self._stop = _torch.on_module_call(self._on_call)

    @synchronized
    def close(self) -> None:
        """End the rules on all models, and the search for models."""
        self._is_open = False
        self._stop()
        for attachment in list(self._attached.values()):
            attachment.detach()
        self._attached.clear()
        self._called_modules.clear()

    @synchronized
    def rules(self) -> ModuleRuleEffects:
        """Return the number of rules in effect on each class of models, and the problems."""
        return ModuleRuleEffects(dict(self._models), list(self._problems()))

    def _problems(self) -> Iterator[str]:
        yield from self._refusals
        complaints = list(dict.fromkeys(t for texts in self._complaints.values() for t in texts))
        if self._models:
            for pattern in sorted(self._unmatched):
                yield self._unmatched_text(pattern, complaints)
            yield from (text for text in complaints if " does nothing for " in text)
        elif not self._refusals:
            yield (
                "the rules in [modules] had no effect: no model with parameters was called. A model that is called "
                "only in functions that torch.compile compiles is not found: use precast.attach(model, policy)"
            )

    def _unmatched_text(self, pattern: str, complaints: list[str]) -> str:
        """Return the sentence about a pattern without a match, with a suggestion if there is one model."""
        start = f"[modules] {pattern!r} matches no "
        of_pattern = [text for text in complaints if text.startswith(start)]
        if len(of_pattern) == 1:
            return of_pattern[0]
        kinds = ", ".join(self._models)
        return f"[modules] {pattern!r} matches no module of the models that were called: {kinds}"

    def _on_call(self, module: nn.Module, run: Callable[[], object]) -> object:
        if module not in self._called_modules:
            self._find(module)
        return run()

    @synchronized
    def _find(self, module: nn.Module) -> None:
        # A hook that is added to a module during torch.jit.trace would be traced.
        if _torch.is_tracing() or not self._is_open or module in self._called_modules:
            return
        model = unwrapped(module)
        if next(model.parameters(), None) is not None and not self._is_part(model):
            self._attach(model)
        # Last: another thread that calls the module before this waits for the lock, so that the rules apply to it.
        self._called_modules[module] = None

    def _is_part(self, model: nn.Module) -> bool:
        """Return True if a model was found before, alone or as a part of another."""
        return any(model is inner for other in list(self._attached) for inner in other.modules())

    def _attach(self, model: nn.Module) -> None:
        for inner in list(model.modules()):
            self._detach(inner)
        kind, reference = type(model).__name__, weakref.ref(model)
        attached = _attached_plan(model)
        if attached is not None and _equal_policies(attached.policy, self._policy):
            self._record(kind, attached)
        elif attached is not None:
            self._refuse(f"do not act on a {kind}: {_OWN_POLICY}")
        else:
            try:
                planned = plan(model, self._policy)
                self._attached[model] = Attachment(
                    model, planned, give_way=lambda: self._on_replaced(reference)
                )
            except PolicyError as error:
                self._refuse(f"do not act on a {kind}: {error}")
            else:
                self._record(kind, planned)

    def _detach(self, model: nn.Module | None) -> None:
        attachment = self._attached.pop(model, None)
        if attachment is not None:
            attachment.detach()

    def _record(self, kind: str, planned: Plan) -> None:
        self._unmatched &= set(planned.unmatched)
        if kind in self._models or len(self._models) < _LIMIT:
            acting = sum(module.applied_rule is not None for module in planned.modules)
            self._models[kind] = max(acting, self._models.get(kind, 0))
            self._complaints[kind] = tuple(planned.complaints())

    @synchronized
    def _on_replaced(self, reference: weakref.ref[nn.Module]) -> None:
        model = reference()
        self._detach(model)
        self._refuse(f"no longer act on a {type(model).__name__}: {_OWN_POLICY}")

    def _refuse(self, text: str) -> None:
        sentence = f"the rules in [modules] {text}"
        if sentence not in self._refusals and len(self._refusals) < _LIMIT:
            self._refusals.append(sentence)
            self._on_refusal(sentence)


def _attached_plan(model: nn.Module) -> Plan | None:
    """Return the plan of the program's attachment to a model, to a part of it, or to a model that contains it."""
    for other, planned in attached_models():
        is_related = any(each is other for each in model.modules()) or any(
            each is model for each in other.modules()
        )
        if planned is not None and is_related:
            return planned
    return None


def _equal_policies(one: Policy, other: Policy) -> bool:
    """Return True if two policies are equal, including the rules for modules, which are not in the fingerprint."""
    return one.fingerprint == other.fingerprint and dict(one.modules) == dict(other.modules)
