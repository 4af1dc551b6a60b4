"""The steps that are over: where each went wrong, if it did, and the latest as plain data.

Invariants: adding a step waits for nothing, reading waits once for all; the latest `_LENGTH` stay, the first offender
does for ever.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from precast._internal.events import NonfiniteOrigin
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.nonfinite_origin import (
    bad_slots,
    first_of,
    is_finite,
    of_parameter,
    plain,
)
from precast.diagnostics.numerics.record import Extremes, Slot, Step, read
from precast.diagnostics.numerics.tally import countable
from precast.grad_scaler.gradients import bad_gradients
from precast.policy.module_names import modules_by_name, named_parameters

__all__ = ["History"]

_LENGTH: Final = 64
_WORST: Final = 3


class History:
    """What is known of the steps of one model."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self.tensors: dict[tuple[str, str], None] = {}
        """Kind and name of all that was noted, as they first came."""
        self._model = model
        self._unread: list[Step] = []
        self._latest: deque[dict[str, Any]] = deque(maxlen=_LENGTH)
        self._first: NonfiniteOrigin | None = None
        self._usual: set[tuple[str, str]] = set()
        """Tensors that are infinite or NaN in good steps, too, as masks are."""
        self._slots: tuple[Slot, ...] = ()
        """Of the step that was added last."""
        self._known: tuple[Slot, ...] | None = None
        """Those that were looked at last."""
        self._dtypes: set[str] = set()

    @property
    def unread(self) -> int:
        """How many steps were added since the last reading."""
        return len(self._unread)

    def add(self, step: Step) -> None:
        """A step is over."""
        if step.slots == self._slots:
            step.slots = self._slots  # one for all that are alike
        self._slots = step.slots
        self._unread.append(step)

    def read(self) -> None:
        """Looks at the steps that were added since the last time."""
        steps, self._unread = self._unread, []
        for step, extremes in zip(steps, read(steps), strict=True):
            self._look(step, extremes)

    def first_or(self, other: NonfiniteOrigin | None) -> NonfiniteOrigin | None:
        """The first offender of all; `other` if there was none."""
        self.read()
        return self._first or other

    def first_in(self, step: Step, optimizer: Optimizer | None = None) -> NonfiniteOrigin | None:
        """Where a step went wrong: among the tensors, then among the parameters of `optimizer`."""
        [extremes] = read([step])
        return self._first_among(step, extremes) or self._first_parameter(optimizer, step, extremes)

    def entries(self, running: Step | None) -> list[dict[str, Any]]:
        """The latest steps, and the one that runs."""
        self.read()
        if running is None:
            return list(self._latest)
        [extremes] = read([running])
        return [*self._latest, _entry(running, extremes, running.first)]

    def format(self) -> str:
        """The narrowest type of what was noted."""
        self.read()
        some = [FORMATS[name] for name in self._dtypes if name in FORMATS]
        return (
            min(some, key=lambda f: (f.exponent_bits, f.mantissa_bits)).name if some else "float32"
        )

    def _look(self, step: Step, extremes: list[Extremes]) -> None:
        if step.slots is not self._known:
            self._known = step.slots
            self.tensors.update(dict.fromkeys((slot.kind, slot.name) for slot in step.slots))
            self._dtypes.update(slot.dtype for slot in step.slots)
        skipped = None if step.skipped is None else bool(step.skipped)
        wrong = skipped or (skipped is None and _went_wrong(step.slots, extremes))
        first = step.first
        if first is None and wrong and (skipped or self._first is None):
            first = self._first_among(step, extremes)
        if not wrong:
            bad = bad_slots(step.slots, extremes, self._usual)
            self._usual.update((step.slots[k].kind, step.slots[k].name) for k in bad)
        self._first = self._first or first
        self._latest.append(_entry(step, extremes, first))

    def _first_among(self, step: Step, extremes: list[Extremes]) -> NonfiniteOrigin | None:
        bad = bad_slots(step.slots, extremes, self._usual)
        if not bad:
            return None
        slot = step.slots[bad[0]]
        hint = self._hint(slot) if slot.kind == "output" else ""
        return first_of(step, bad[0], extremes, hint)

    def _hint(self, slot: Slot) -> str:
        """What a module's own parameters have to do with it: NaN in them, or numbers beyond the output's type."""
        model = self._model()
        modules = {} if model is None else modules_by_name(model)
        own = modules[slot.name].named_parameters(recurse=False) if slot.name in modules else ()
        for name, parameter in own:
            memory = countable(parameter.detach())
            largest = 0.0 if memory is None or not memory.numel() else float(memory.abs().max())
            if not math.isfinite(largest):
                return f" Its {name} is not finite: the step before wrote it so."
            if slot.dtype in FORMATS and largest > FORMATS[slot.dtype].largest:
                return f" Its {name} reaches {largest:.4g}, beyond that."
        return ""

    def _first_parameter(
        self, optimizer: Optimizer | None, step: Step, extremes: list[Extremes]
    ) -> NonfiniteOrigin | None:
        """Of the bad gradients of parameters that whose module was reached first in backward."""
        model = self._model()
        if model is None or optimizer is None:
            return None
        names = {id(p): n for n, p in named_parameters(model)}
        bad = {names[id(p)]: p for _, _, p in bad_gradients(optimizer) if id(p) in names}
        if not bad:
            return None
        reached = list(_in_backward(step.slots))
        name = min(bad, key=lambda n: _place(n.rpartition(".")[0], reached))
        gradient = bad[name].grad
        memory = None if gradient is None else countable(gradient)
        what = "nan" if memory is not None and bool(memory.isnan().any()) else "inf"
        return of_parameter(step, name, what, extremes)


def _in_backward(slots: Iterable[Slot]) -> Iterable[str]:
    """Names of modules as backward reaches them; those without a gradient of their own after these."""
    slots = list(slots)
    yield from (slot.name for slot in slots if slot.kind == "gradient")
    yield from (slot.name for slot in reversed(slots) if slot.kind == "output")


def _place(name: str, reached: list[str]) -> int:
    return reached.index(name) if name in reached else len(reached)


def _went_wrong(slots: tuple[Slot, ...], extremes: list[Extremes]) -> bool:
    """Whether a step that nobody judged is bad: what the model gave in the end, or a gradient, is not finite."""
    outputs = [
        numbers for slot, numbers in zip(slots, extremes, strict=True) if slot.kind == "output"
    ]
    pairs = zip(slots, extremes, strict=True)
    gradients = [numbers for slot, numbers in pairs if slot.kind == "gradient"]
    return not all(map(is_finite, [*outputs[-1:], *gradients]))


def _entry(step: Step, extremes: list[Extremes], first: NonfiniteOrigin | None) -> dict[str, Any]:
    """A step as plain data."""
    return {
        "step": step.number,
        "loss": None,
        "scale": step.loss_scale,
        "skipped": None if step.skipped is None else bool(step.skipped),
        "names": list(step.names),
        "seconds": step.seconds,
        "first": plain(first),
        "worst": _worst(step.slots, extremes),
    }


def _worst(slots: tuple[Slot, ...], extremes: list[Extremes]) -> list[dict[str, Any]]:
    """The tensors that came nearest to the end of their type, the worst first."""
    shares = [_share(slot, numbers) for slot, numbers in zip(slots, extremes, strict=True)]
    places = sorted(range(len(slots)), key=lambda k: -shares[k])[:_WORST]
    return [
        {
            "kind": slots[k].kind,
            "name": slots[k].name,
            "dtype": slots[k].dtype,
            "maximum": max(map(abs, extremes[k])) if is_finite(extremes[k]) else None,
            "share": shares[k] if is_finite(extremes[k]) else None,
        }
        for k in places
    ]


def _share(slot: Slot, numbers: Extremes) -> float:
    """How near a tensor came to the end of its type: 1.0 is there, infinity beyond."""
    if not is_finite(numbers):
        return float("inf")
    format = FORMATS.get(slot.dtype, FORMATS["float32"])
    return max(map(abs, numbers)) / format.largest
