"""The search for the first tensor of a step that became infinite or NaN, and its description in a sentence.

The tensors of a step are examined in order of time: outputs as modules end in forward, gradients as backward reaches
them. So the first tensor that is not finite is the origin, or comes right after it.

Invariant: nothing waits for the device, because the steps were read before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from precast._internal.events import BrokenState, NonfiniteOrigin, TensorRange
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.record import StepRecord, TensorSlot, is_finite
from precast.diagnostics.numerics.tally import TensorKey

__all__ = ["bad_slots", "first_of", "of_parameter"]

_WORDS = {"inf": "infinite", "nan": "NaN"}


def bad_slots(step: StepRecord, usual: AbstractSet[TensorKey]) -> list[int]:
    """Return the places of tensors that are not finite, except those that never are, such as masks."""
    slots = zip(step.slots, step.extremes, strict=True)
    return [
        place
        for place, (slot, numbers) in enumerate(slots)
        if not is_finite(numbers) and slot.key not in usual
    ]


def first_of(
    step: StepRecord, place: int, hint: str = "", state: BrokenState | None = None
) -> NonfiniteOrigin:
    """Return the origin for the first tensor that is not finite, at `place`; `hint` is about its module."""
    slot = step.slots[place]
    what: Any = "nan" if any(map(math.isnan, step.extremes[place])) else "inf"
    before = _made_from(place, step.slots)
    doubts = _doubts(step, place)
    was = f"was the first {'that was seen ' if doubts else ''}to be {_WORDS[what]}"
    module = _quoted(slot.name) + (f" in its call {slot.call} of the step" if slot.call > 1 else "")
    seen = {
        "output": f" the output of {module} {was}",
        "input": f" an input of {module} {was}: {_input_origin(slot, step.slots, before)}",
        "gradient": f"{_at(step)} the gradient of the output of {module} {was} in backward",
    }[slot.kind]
    inputs, ranges = _ranges(step, before)
    message = (
        f"In step {step.number}{seen}{ranges}.{_format_limit(slot)}{_doubt_sentence(doubts)}{hint}"
    )
    kind: Any = slot.kind
    return NonfiniteOrigin(step.number, kind, slot.name, what, inputs, message, doubts, state)


def of_parameter(step: StepRecord, name: str, what: Literal["inf", "nan"]) -> NonfiniteOrigin:
    """Return the origin for a parameter's gradient, if all recorded tensors are finite."""
    owner = name.rpartition(".")[0]
    latest = {slot.key: place for place, slot in enumerate(step.slots)}
    gradient, output = latest.get(("gradient", owner)), latest.get(("output", owner))
    made_from = [] if gradient is None else [gradient]
    if output is not None:
        made_from += step.slots[output].inputs
    seen = f"{_at(step)} the gradient of the parameter `{name}` was the first to be {_WORDS[what]}"
    inputs, ranges = _ranges(step, made_from)
    message = f"In step {step.number}{seen}{ranges}."
    return NonfiniteOrigin(step.number, "parameter", name, what, inputs, message)


def _made_from(place: int, slots: Sequence[TensorSlot]) -> tuple[int, ...]:
    """Return the places of the tensors that a tensor was computed from.

    These are, for a gradient, the gradient before it in backward and the output of its module; for an input of unknown
    origin, the last output before it.
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


def _input_origin(slot: TensorSlot, slots: Sequence[TensorSlot], before: Sequence[int]) -> str:
    """Return a phrase on the origin of an input."""
    if not slot.name:
        return "it came from outside of the model"
    last = slots[before[-1]].name if before else ""
    between = f"between `{last}` and `{slot.name}`"
    if last == slot.name:
        between = f"between two calls of `{last}`"
    if slot.inputs:
        return f"code {between if last else f'before `{slot.name}`'} wrote it in place"
    return f"it was computed {between if last else 'between modules'}"


def _doubts(step: StepRecord, place: int) -> tuple[str, ...]:
    """Return the modules whose tensors may have been infinite or NaN before the first recorded one."""
    missed = (one for _, one in step.missed if one.place <= place)
    return tuple(one.name for one in missed if one.later_place is None or one.later_place >= place)


def _doubt_sentence(doubts: Sequence[str]) -> str:
    if not doubts:
        return ""
    return (
        f" It may have begun before, in {_quoted(doubts[0])}: a tensor of that module was written in place before it "
        "could be examined. From the next step on it is examined earlier."
    )


def _ranges(step: StepRecord, places: Sequence[int]) -> tuple[tuple[TensorRange, ...], str]:
    """Return the ranges of tensors, as data and in words."""
    inputs, texts = [], []
    for place in places:
        slot, (low, high) = step.slots[place], step.extremes[place]
        finite = is_finite((low, high))
        of = f"the {slot.kind} of {_quoted(slot.name)}"
        went = f"went from {low:.4g} to {high:.4g}" if finite else "was not finite"
        texts.append(f"{of} {went} ({slot.dtype})")
        maximum, minimum = (high, low) if finite else (None, None)
        inputs.append(TensorRange(slot.dtype, maximum, minimum, int(not finite), of))
    return tuple(inputs), f"; just before, {', '.join(texts)}" if texts else ""


def _quoted(name: str) -> str:
    return f"`{name}`" if name else "the whole model"


def _at(step: StepRecord) -> str:
    return "" if step.scale is None else f", at scale {step.loss_scale:g},"


def _format_limit(slot: TensorSlot) -> str:
    if slot.dtype in {"float32", "bfloat16"} or slot.dtype not in FORMATS:
        return ""
    return f" {slot.dtype} ends at {FORMATS[slot.dtype].largest:g}."
