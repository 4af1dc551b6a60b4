"""Finds where numbers first became infinite or NaN in a step, and says so in a sentence.

The tensors of a step are looked through in the order of time: outputs as modules end in forward, gradients as backward
reaches them. So the first tensor that is not finite is where it began, or comes right after.

Invariant: nothing waits for the device; the steps were read, so their numbers are on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from precast._internal.events import BrokenState, NonfiniteOrigin
from precast.diagnostics import schema
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.record import Record, Slot, is_finite
from precast.diagnostics.numerics.tally import Key
from precast.diagnostics.records import as_json, from_json

__all__ = ["bad_slots", "first_of", "of_parameter", "plain", "recorded"]

_SAID = {"inf": "infinite", "nan": "NaN"}


def bad_slots(step: Record, usual: AbstractSet[Key]) -> list[int]:
    """Places of the tensors that are not finite, but for those that are not in good steps either, as masks."""
    slots = zip(step.slots, step.extremes, strict=True)
    return [
        place
        for place, (slot, numbers) in enumerate(slots)
        if not is_finite(numbers) and slot.key not in usual
    ]


def first_of(
    step: Record, place: int, hint: str = "", state: BrokenState | None = None
) -> NonfiniteOrigin:
    """Return the origin for the first tensor that is not finite, at `place`; `hint` is about its module."""
    slot = step.slots[place]
    what: Any = "nan" if any(map(math.isnan, step.extremes[place])) else "inf"
    before = _made_from(place, step.slots)
    doubts = _doubts(step, place)
    was = f"was the first {'that was seen ' if doubts else ''}to be {_SAID[what]}"
    module = _called(slot.name) + (f" in its call {slot.call} of the step" if slot.call > 1 else "")
    seen = {
        "output": f" the output of {module} {was}",
        "input": f" an input of {module} {was}: {_whence(slot, step.slots, before)}",
        "gradient": f"{_at(step)} the gradient of the output of {module} {was} in backward",
    }[slot.kind]
    inputs, ranges = _ranges(step, before)
    message = f"In step {step.number}{seen}{ranges}.{_end_of(slot)}{_doubted(doubts)}{hint}"
    kind: Any = slot.kind
    return NonfiniteOrigin(step.number, kind, slot.name, what, inputs, message, doubts, state)


def of_parameter(step: Record, name: str, what: Literal["inf", "nan"]) -> NonfiniteOrigin:
    """The same for a parameter's gradient, where all that was noted was finite."""
    owner = name.rpartition(".")[0]
    latest = {slot.key: place for place, slot in enumerate(step.slots)}
    gradient, output = latest.get(("gradient", owner)), latest.get(("output", owner))
    made_from = [] if gradient is None else [gradient]
    if output is not None:
        made_from += step.slots[output].inputs
    seen = f"{_at(step)} the gradient of the parameter `{name}` was the first to be {_SAID[what]}"
    inputs, ranges = _ranges(step, made_from)
    message = f"In step {step.number}{seen}{ranges}."
    return NonfiniteOrigin(step.number, "parameter", name, what, inputs, message)


def recorded(first: NonfiniteOrigin | None) -> schema.NonfiniteOrigin | None:
    """As a document has it."""
    return None if first is None else from_json(schema.NonfiniteOrigin, as_json(first))


def plain(first: NonfiniteOrigin | None) -> dict[str, Any] | None:
    """As plain data."""
    found: dict[str, Any] | None = as_json(recorded(first))
    return found


def _made_from(place: int, slots: Sequence[Slot]) -> tuple[int, ...]:
    """The places of what a tensor was made from.

    A gradient was made from the one before it in backward, and from the output of its module; an input of unknown
    origin from the last output before it.
    """
    slot = slots[place]
    if slot.kind == "output" or slot.inputs:
        return slot.inputs
    is_gradient = slot.kind == "gradient"
    gradients = [k for k in range(place) if is_gradient and slots[k].kind == "gradient"]
    outputs = [
        k
        for k in range(place)
        if slots[k].kind == "output" and (not is_gradient or slots[k].name == slot.name)
    ]
    return (*gradients[-1:], *outputs[-1:])


def _whence(slot: Slot, slots: Sequence[Slot], before: Sequence[int]) -> str:
    """Where an input comes from."""
    if not slot.name:
        return "it came so from outside of the model"
    last = slots[before[-1]].name if before else ""
    between = f"between `{last}` and `{slot.name}`"
    if last == slot.name:
        between = f"between two calls of `{last}`"
    if slot.inputs:
        return f"code {between if last else f'before `{slot.name}`'} wrote it in place"
    return f"it was made {between if last else 'between modules'}"


def _doubts(step: Record, place: int) -> tuple[str, ...]:
    """Modules whose tensors may have been infinite or NaN before the first that was seen to be."""
    missed = (one for _, one in step.missed if one.place <= place)
    return tuple(one.name for one in missed if one.seen is None or one.seen >= place)


def _doubted(doubts: Sequence[str]) -> str:
    if not doubts:
        return ""
    return (
        f" It may have begun before, in {_called(doubts[0])}: what that module gave or was given was written in place "
        "before it could be looked at. From the next step on it is looked at before."
    )


def _ranges(step: Record, places: Sequence[int]) -> tuple[tuple[dict[str, Any], ...], str]:
    """The ranges of tensors, as data and in words."""
    inputs, said = [], []
    for place in places:
        slot, (low, high) = step.slots[place], step.extremes[place]
        finite = is_finite((low, high))
        of = f"the {slot.kind} of {_called(slot.name)}"
        went = f"went from {low:.4g} to {high:.4g}" if finite else "was not finite"
        said.append(f"{of} {went} ({slot.dtype})")
        inputs.append(
            {
                "of": of,
                "dtype": slot.dtype,
                "minimum": low if finite else None,
                "maximum": high if finite else None,
                "rms": None,
                "nonfinite": 0 if finite else 1,
            }
        )
    return tuple(inputs), f"; just before, {', '.join(said)}" if said else ""


def _called(name: str) -> str:
    return f"`{name}`" if name else "the whole model"


def _at(step: Record) -> str:
    return "" if step.scale is None else f", at scale {step.loss_scale:g},"


def _end_of(slot: Slot) -> str:
    if slot.dtype in {"float32", "bfloat16"} or slot.dtype not in FORMATS:
        return ""
    return f" {slot.dtype} ends at {FORMATS[slot.dtype].largest:g}."
