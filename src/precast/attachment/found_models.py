"""Carries out an installed policy's rules for modules: on each model that the program calls, when it first does.

Invariants:

- a model is what is called from outside of all modules and has parameters; names are those inside of it, without what
  wrappers put around it. A part that was called before the whole is one model with it from then on;
- what cannot be carried out is kept as a sentence, and the program goes on; an attachment of the program's own comes
  first;
- no weight is held, and a model lives no longer than without this.
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
"""Kinds of models, and sentences, that are remembered."""


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
    """Finds models while it is open, and has the rules of `policy` act on them.

    Args:
        policy: a policy with rules for modules.
        refused: called with a sentence, once each, where rules cannot act on a model.
    """

    def __init__(self, policy: Policy, refused: Callable[[str], None] = lambda _: None) -> None:
        self._policy = policy
        self._tell = refused
        self.mutex = ForkSafeLock()
        self._is_open = True
        self._known = WeakIdKeyDictionary()
        """Modules that were called -> None."""
        self._attached = WeakIdKeyDictionary()
        """Models -> their attachment."""
        self._models: dict[str, int] = {}
        self._unmatched = set(policy.modules)
        self._complaints: dict[str, tuple[str, ...]] = {}
        self._refusals: list[str] = []
        self._stop = _torch.on_module_call(self._called)

    @synchronized
    def close(self) -> None:
        """Finds no more, and lets go of those that were found."""
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
        """With the nearest name, if there was one model that might have had it."""
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
        if _torch.is_tracing() or not self._is_open:  # what is put on now would be in the trace
            return
        if module in self._known:
            return
        model = unwrapped(module)
        if next(model.parameters(), None) is not None and not self._is_part(model):
            self._attach(model)
        self._known[module] = None  # last: a thread that calls it meanwhile waits for its rules

    def _is_part(self, model: nn.Module) -> bool:
        """Whether a model is one that was found, or in one."""
        return any(model is inner for known in list(self._attached) for inner in known.modules())

    def _attach(self, model: nn.Module) -> None:
        for inner in list(model.modules()):
            earlier = self._attached.pop(inner, None)
            if earlier is not None:
                earlier.detach()
        kind, known = type(model).__name__, weakref.ref(model)
        own = _rules_of_its_own(model)
        if own is not None:
            if _alike(own.policy, self._policy):
                self._note(kind, own)
            else:
                self._refuse(
                    f"the rules in [modules] do not act on a {kind}: the program attached a policy of its own to it"
                )
            return
        try:
            planned = plan(model, self._policy)
            attachment = Attachment.of_installed(model, planned, lambda: self._gave_way(known))
        except PolicyError as error:
            self._refuse(f"the rules in [modules] do not act on a {kind}: {error}")
            return
        self._attached[model] = attachment
        self._note(kind, planned)

    def _note(self, kind: str, planned: Plan) -> None:
        """Rules act on a model."""
        self._unmatched &= set(planned.unmatched)
        if kind in self._models or len(self._models) < _MOST:
            acting = sum(module.carried_out is not None for module in planned.modules)
            self._models[kind] = max(acting, self._models.get(kind, 0))
            self._complaints[kind] = tuple(planned.complaints())

    @synchronized
    def _gave_way(self, known: weakref.ref[nn.Module]) -> None:
        model = known()
        attachment = self._attached.pop(model, None)
        if attachment is not None:
            attachment.detach()
        self._refuse(
            f"the rules in [modules] no longer act on a {type(model).__name__}: the program attached a policy of its "
            "own to it"
        )

    def _refuse(self, sentence: str) -> None:
        if sentence not in self._refusals and len(self._refusals) < _MOST:
            self._refusals.append(sentence)
            self._tell(sentence)


def _rules_of_its_own(model: nn.Module) -> Plan | None:
    """What the program attached to a model, to a part of it, or to what it is a part of."""
    inside = set(map(id, model.modules()))
    for other, planned in attached_models():
        near = id(other) in inside or any(each is model for each in other.modules())
        if planned is not None and near:
            return planned
    return None


def _alike(one: Policy, other: Policy) -> bool:
    """Whether two policies say the same, also of modules, which a fingerprint leaves out."""
    return one.fingerprint == other.fingerprint and dict(one.modules) == dict(other.modules)
