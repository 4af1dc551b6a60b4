"""Carries out an installed policy's rules for modules on each model that the program calls, from its first call on.

Invariants:

- a model is a module that has parameters and is called from outside of all modules. Its names leave out the wrappers
  around it. If a part of it was called before the whole, both are one model from then on;
- what cannot be carried out is kept as a sentence, and the program goes on; an attachment of the program's own has
  priority;
- no weight is held, and no model is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal.locks import ForkSafeLock, synchronized
from precast.attachment.attachment import Attachment, attached_models
from precast.errors import PolicyError
from precast.policy.module_names import unwrapped
from precast.policy.module_plan import Plan, plan
from precast.policy.policy import Policy

__all__ = ["FoundModels", "Rules"]

_MOST = 16
"""How many classes of models, and how many refusals, are remembered."""
_OWN = "the program attached a policy of its own to it"


@dataclass(frozen=True)
class Rules:
    """What became of a policy's rules for modules.

    Attributes:
        models: the class of each model that was found -> on how many of its modules a rule acts.
        problems: what does not act, one sentence each.
    """

    models: dict[str, int]
    problems: tuple[str, ...]


class FoundModels:
    """Finds models until it is closed, and makes the rules of `policy` act on them.

    Args:
        policy: a policy with rules for modules.
        refused: called with each new sentence about rules that cannot act on a model.
    """

    def __init__(self, policy: Policy, refused: Callable[[str], None] = lambda _: None) -> None:
        self._policy = policy
        self._tell = refused
        self.mutex = ForkSafeLock()
        self._is_open = True
        self._known = WeakIdKeyDictionary()
        """The modules that were called, as keys."""
        self._attached = WeakIdKeyDictionary()
        """Model -> its attachment."""
        self._models: dict[str, int] = {}
        self._unmatched = set(policy.modules)
        self._complaints: dict[str, tuple[str, ...]] = {}
        self._refusals: list[str] = []
        self._stop = _torch.on_module_call(self._called)

    @synchronized
    def close(self) -> None:
        """Ends the rules on all models that were found, and finds no more."""
        self._is_open = False
        self._stop()
        for attachment in list(self._attached.values()):
            attachment.detach()
        self._attached.clear()
        self._known.clear()

    @synchronized
    def rules(self) -> Rules:
        """What became of the rules so far."""
        return Rules(dict(self._models), tuple(self._problems()))

    def _problems(self) -> Iterator[str]:
        yield from self._refusals
        said = [text for texts in self._complaints.values() for text in texts]
        if self._models:
            for pattern in sorted(self._unmatched):
                yield self._unmatched_says(pattern, said)
            yield from dict.fromkeys(text for text in said if " does nothing for " in text)
        elif not self._refusals:
            yield (
                "the rules in [modules] acted on nothing: no model with parameters was called. One that is called only "
                "in functions that torch.compile compiles is not found: precast.attach(model, policy) does it there"
            )

    def _unmatched_says(self, pattern: str, said: list[str]) -> str:
        """Says that a pattern matches nothing; names the nearest module if only one model was called."""
        of_it = [text for text in said if text.startswith(f"[modules] {pattern!r} matches no ")]
        if len(of_it) == 1:
            return of_it[0]
        kinds = ", ".join(self._models)
        return f"[modules] {pattern!r} matches no module of the models that were called: {kinds}"

    def _called(self, module: nn.Module, run: Callable[[], object]) -> object:
        if module not in self._known:
            self._find(module)
        return run()

    @synchronized
    def _find(self, module: nn.Module) -> None:
        # What is put on a module while it is traced would be in the trace.
        if _torch.is_tracing() or not self._is_open or module in self._known:
            return
        model = unwrapped(module)
        if next(model.parameters(), None) is not None and not self._is_part(model):
            self._attach(model)
        self._known[module] = (
            None  # last, so that a thread that calls it meanwhile waits for its rules
        )

    def _is_part(self, model: nn.Module) -> bool:
        """Whether a model was found before, alone or as a part of another."""
        return any(model is inner for known in list(self._attached) for inner in known.modules())

    def _attach(self, model: nn.Module) -> None:
        for inner in list(model.modules()):
            self._detach(inner)
        kind, reference = type(model).__name__, weakref.ref(model)
        own = _rules_of_its_own(model)
        if own is not None and _alike(own.policy, self._policy):
            self._note(kind, own)
        elif own is not None:
            self._refuse(f"do not act on a {kind}: {_OWN}")
        else:
            try:
                planned = plan(model, self._policy)
                self._attached[model] = Attachment(
                    model, planned, give_way=lambda: self._gave_way(reference)
                )
            except PolicyError as error:
                self._refuse(f"do not act on a {kind}: {error}")
            else:
                self._note(kind, planned)

    def _detach(self, model: nn.Module | None) -> None:
        attachment = self._attached.pop(model, None)
        if attachment is not None:
            attachment.detach()

    def _note(self, kind: str, planned: Plan) -> None:
        """Notes that rules act on a model of this class, and what in them does not."""
        self._unmatched &= set(planned.unmatched)
        if kind in self._models or len(self._models) < _MOST:
            acting = sum(module.carried_out is not None for module in planned.modules)
            self._models[kind] = max(acting, self._models.get(kind, 0))
            self._complaints[kind] = tuple(planned.complaints())

    @synchronized
    def _gave_way(self, reference: weakref.ref[nn.Module]) -> None:
        model = reference()
        self._detach(model)
        self._refuse(f"no longer act on a {type(model).__name__}: {_OWN}")

    def _refuse(self, what: str) -> None:
        sentence = f"the rules in [modules] {what}"
        if sentence not in self._refusals and len(self._refusals) < _MOST:
            self._refusals.append(sentence)
            self._tell(sentence)


def _rules_of_its_own(model: nn.Module) -> Plan | None:
    """The plan that the program attached to a model, to a part of it, or to a model that it is a part of."""
    for other, planned in attached_models():
        near = any(each is other for each in model.modules()) or any(
            each is model for each in other.modules()
        )
        if planned is not None and near:
            return planned
    return None


def _alike(one: Policy, other: Policy) -> bool:
    """Whether two policies say the same, also for modules, which a fingerprint leaves out."""
    return one.fingerprint == other.fingerprint and dict(one.modules) == dict(other.modules)
