"""Finds where numbers first became infinite or NaN in a step, and says so in a sentence.

What is looked through is in the order of time: modules as they end in forward, gradients as backward reaches them. So
the first that is not finite is the offender, or stands right behind it.

Invariants: waits for nothing: the numbers are on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from precast._internal.events import NonfiniteOrigin
from precast.diagnostics import schema
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.record import Extremes, Slot, Step
from precast.diagnostics.records import as_json

__all__ = ["bad_slots", "first_of", "is_finite", "of_parameter", "plain", "recorded"]


def is_finite(extremes: Extremes) -> bool:
    """Whether all numbers of a tensor are."""
    return math.isfinite(extremes[0]) and math.isfinite(extremes[1])


def bad_slots(
    slots: Sequence[Slot], extremes: Sequence[Extremes], usual: AbstractSet[tuple[str, str]]
) -> list[int]:
    """Places of the tensors that are not finite, but for those that are not in good steps either, as masks."""
    return [
        place
        for place, (slot, numbers) in enumerate(zip(slots, extremes, strict=True))
        if not is_finite(numbers) and (slot.kind, slot.name) not in usual
    ]


def first_of(
    step: Step, place: int, extremes: Sequence[Extremes], hint: str = ""
) -> NonfiniteOrigin:
    """What there is to say of the first tensor that is not finite, at `place`; `hint` is about its module."""
    slots, scale = step.slots, step.loss_scale
    slot = slots[place]
    what = "nan" if any(map(math.isnan, extremes[place])) else "inf"
    before = _before(place, slots)
    inputs = tuple(_range(slots[k], extremes[k]) for k in before)
    said = "NaN" if what == "nan" else "infinite"
    doubts = _doubts(step, place)
    was = f"was the first {'that was seen ' if doubts else ''}to be {said}"
    module = _called(slot.name) + _which(slot)
    seen = f"In step {step.number}{_at(scale) if slot.kind == 'gradient' else ''} "
    if slot.kind == "output":
        seen += f"the output of {module} {was}"
    elif slot.kind == "input":
        seen += f"an input of {module} {was}: {_made(slot, slots, before)}"
    else:
        seen += f"the gradient of the output of {module} {was} in backward"
    message = f"{seen}{_ranges(inputs)}.{_end_of(slot)}{_doubted(doubts)}{hint}"
    return NonfiniteOrigin(step.number, slot.kind, slot.name, what, inputs, message, doubts)  # type: ignore[arg-type]


def of_parameter(step: Step, name: str, what: str, extremes: Sequence[Extremes]) -> NonfiniteOrigin:
    """The same for a parameter's gradient, where all that was noted was finite."""
    slots = step.slots
    owner = name.rpartition(".")[0]
    wanted = ("gradient", owner), ("output", owner)
    places = [k for k, slot in enumerate(slots) if (slot.kind, slot.name) in wanted]
    latest = {slots[k].kind: k for k in places}
    made_from = [latest[kind] for kind in ("gradient",) if kind in latest]
    if "output" in latest:
        made_from += slots[latest["output"]].inputs
    inputs = tuple(_range(slots[k], extremes[k]) for k in made_from)
    said = "NaN" if what == "nan" else "infinite"
    message = (
        f"In step {step.number}{_at(step.loss_scale)} the gradient of the parameter `{name}` was the first to be {said}"
        f"{_ranges(inputs)}."
    )
    return NonfiniteOrigin(step.number, "parameter", name, what, inputs, message)  # type: ignore[arg-type]


def recorded(first: NonfiniteOrigin | None) -> schema.NonfiniteOrigin | None:
    """As a document has it."""
    if first is None:
        return None
    inputs = [schema.Range(**one) for one in first.inputs]
    return schema.NonfiniteOrigin(
        first.step, first.kind, first.name, first.what, inputs, first.message
    )


def plain(first: NonfiniteOrigin | None) -> dict[str, Any] | None:
    """As plain data."""
    found: dict[str, Any] | None = as_json(recorded(first))
    return found


def _before(place: int, slots: Sequence[Slot]) -> tuple[int, ...]:
    """What a tensor was made from: of a gradient, the one before it in backward, and the module's output."""
    slot = slots[place]
    if slot.kind == "output" or slot.inputs:
        return slot.inputs
    same = (
        [k for k in range(place) if slots[k].kind == slot.kind] if slot.kind == "gradient" else []
    )
    outputs = [k for k in range(place) if slots[k].kind == "output"]
    if slot.kind == "gradient":
        outputs = [k for k in outputs if slots[k].name == slot.name]
    return (*same[-1:], *outputs[-1:])


def _made(slot: Slot, slots: Sequence[Slot], before: Sequence[int]) -> str:
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


def _which(slot: Slot) -> str:
    return f" in its call {slot.call} of the step" if slot.call > 1 else ""


def _doubts(step: Step, place: int) -> tuple[str, ...]:
    """Modules whose tensors may have been infinite or NaN before the first that was seen to be."""
    missed = (one for one in step.missed if one.place <= place)
    return tuple(one.name for one in missed if one.seen is None or one.seen >= place)


def _doubted(doubts: Sequence[str]) -> str:
    if not doubts:
        return ""
    return (
        f" It may have begun before, in {_called(doubts[0])}: what that module gave or was given was written in place "
        "before it could be looked at. From the next step on it is looked at before."
    )


def _range(slot: Slot, extremes: Extremes) -> dict[str, Any]:
    finite = is_finite(extremes)
    return {
        "of": f"{_OF[slot.kind]} of {_called(slot.name)}",
        "dtype": slot.dtype,
        "minimum": extremes[0] if finite else None,
        "maximum": extremes[1] if finite else None,
        "rms": None,
        "nonfinite": 0 if finite else 1,
    }


_OF = {"output": "the output", "input": "the input", "gradient": "the gradient"}


def _ranges(inputs: Sequence[dict[str, Any]]) -> str:
    said = [f"{one['of']} {_numbers(one)} ({one['dtype']})" for one in inputs]
    return f"; just before, {', '.join(said)}" if said else ""


def _numbers(one: dict[str, Any]) -> str:
    if one["minimum"] is None:
        return "was not finite"
    return f"went from {one['minimum']:.4g} to {one['maximum']:.4g}"


def _called(name: str) -> str:
    return f"`{name}`" if name else "the whole model"


def _at(scale: float | None) -> str:
    return "" if scale is None else f", at scale {scale:g},"


def _end_of(slot: Slot) -> str:
    format = FORMATS.get(slot.dtype)
    if format is None or slot.dtype in {"float32", "bfloat16"}:
        return ""
    return f" {slot.dtype} ends at {format.largest:g}."
