"""Results of finished steps: the latest steps as plain data, and the first tensor that became infinite or NaN.

Invariants: adding a step does not wait for the device, and reading waits once for all added steps. The latest `_LENGTH`
steps are stored, and the first origin.

The tensors of a step are examined in order of time: outputs as modules end in forward, gradients as backward reaches
them. So the first tensor that is not finite is the origin, or comes right after it.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast._internal.events import BrokenState, NonfiniteOrigin, TensorRange
from precast._internal.records import as_json
from precast.diagnostics.numerics.formats import FORMATS
from precast.diagnostics.numerics.host_transfer import move_to_host
from precast.diagnostics.numerics.step_record import StepRecord, TensorSlot, is_finite, read
from precast.diagnostics.numerics.tally import TensorKey, comparable, countable
from precast.engine.operator_kinds import dtype_of
from precast.grad_scaler.gradients import bad_gradients
from precast.policy.module_names import modules_by_name, named_parameters

__all__ = ["StepResults"]

_LENGTH: Final = 64
_WORST: Final = 3


class StepResults:
    """The results of the steps of one model."""

    def __init__(self, model: weakref.ref[nn.Module], optimizers: WeakIdKeyDictionary) -> None:
        self.tensors: dict[TensorKey, None] = {}
        """All recorded tensors, in the order of their first appearance."""
        self._model = model
        self._optimizers = optimizers
        """The optimizers of the model, as keys."""
        self.unread: list[StepRecord] = []
        """The steps that were added since the latest `read`."""
        self._latest: deque[dict[str, Any]] = deque(maxlen=_LENGTH)
        self._first: NonfiniteOrigin | None = None
        self._usual: set[TensorKey] = set()
        """Tensors that are infinite or NaN in good steps too, such as masks."""
        self._slots: list[TensorSlot] = []
        """The slots of the latest step."""
        self._dtypes: set[str] = set()

    def add(self, step: StepRecord) -> None:
        """Add a finished step."""
        if step.slots == self._slots:
            step.slots = self._slots  # equal steps share one list
        else:
            self._slots = step.slots
            self.tensors.update(dict.fromkeys(slot.key for slot in step.slots))
            self._dtypes.update(slot.dtype for slot in step.slots)
        self.unread.append(step)

    def move_to_host(self, record: StepRecord) -> None:
        """Copy the values of all unread steps and the counts of one of them to the CPU. Waits once for each device."""
        values = (group for step in self.unread for group in step.values())
        move_to_host([*record.count_values(), *values])

    def read(self) -> None:
        """Examine the steps that were added since the last call."""
        steps, self.unread = self.unread, []
        read(steps)
        for step in steps:
            self._examine(step)

    def first_or(self, other: NonfiniteOrigin | None) -> NonfiniteOrigin | None:
        """Return the first origin of all steps; `other` if there is none."""
        self.read()
        return self._first or other

    def first_in(self, step: StepRecord, optimizer: Optimizer) -> NonfiniteOrigin | None:
        """Return the origin in a step: among the tensors, then among the parameters of `optimizer`."""
        read([step])
        return self._first_among(step) or self._first_parameter(optimizer, step)

    def entries(self, running: StepRecord | None) -> list[dict[str, Any]]:
        """Return the latest steps and the current one as plain data."""
        self.read()
        if running is None:
            return list(self._latest)
        read([running])
        return [*self._latest, _entry(running, running.first)]

    def format(self) -> str:
        """Return the name of the narrowest format of the recorded tensors."""
        formats = (FORMATS[name] for name in self._dtypes if name in FORMATS)
        return min(formats, key=lambda format: format.largest, default=FORMATS["float32"]).name

    def _examine(self, step: StepRecord) -> None:
        skipped = None if step.skipped is None else bool(step.skipped)
        wrong = _went_wrong(step) if skipped is None else skipped
        first = step.first
        if first is None and wrong and (skipped or self._first is None):
            first = self._first_among(step)
        if not wrong:
            self._usual.update(step.slots[place].key for place in _bad_slots(step, self._usual))
        self._first = self._first or first
        self._latest.append(_entry(step, first))

    def _first_among(self, step: StepRecord) -> NonfiniteOrigin | None:
        for place in _bad_slots(step, self._usual)[:1]:
            slot, model, hint, state = step.slots[place], self._model(), "", None
            module = None if model is None else modules_by_name(model).get(slot.name)
            if slot.kind == "output" and module is not None:
                state = self._broken_state(slot.name, module)
                hint = _sentence(state, step.number) if state else _hint(slot, module)
            return _first_of(step, place, hint, state)
        return None

    def _broken_state(self, prefix: str, module: nn.Module) -> BrokenState | None:
        """Return the module's own parameter or buffer that is not finite, if there is one.

        Infinity in a buffer may be intended, as in a mask, so only NaN counts there.
        """
        for own, parameter in module.named_parameters(recurse=False):
            if not math.isfinite(_largest(parameter)):
                name = f"{prefix}.{own}".lstrip(".")
                return BrokenState(
                    name, "parameter", dtype_of(parameter), *self._trainer(parameter)
                )
        for own, buffer in module.named_buffers(recurse=False):
            if math.isnan(_largest(buffer)):
                name = f"{prefix}.{own}".lstrip(".")
                return BrokenState(name, "buffer", dtype_of(buffer), None, None)
        return None

    def _trainer(self, parameter: Tensor) -> tuple[str | None, float | None]:
        """Return the class of the optimizer of a parameter, and its eps if that is zero in the parameter's dtype."""
        for optimizer in list(self._optimizers.keys()):
            for group in optimizer.param_groups:
                if any(parameter is each for each in group["params"]):
                    eps = group.get("eps")
                    is_zero = isinstance(eps, float) and not torch.tensor(eps).to(parameter.dtype)
                    return type(optimizer).__name__, eps if is_zero else None
        return None, None

    def _first_parameter(self, optimizer: Optimizer, step: StepRecord) -> NonfiniteOrigin | None:
        """Return the origin for the parameter gradient whose module backward reached first."""
        model = self._model()
        if model is None:
            return None
        names = {id(p): n for n, p in named_parameters(model)}
        bad = {names[id(p)]: p for _, _, p in bad_gradients(optimizer) if id(p) in names}
        if not bad:
            return None
        order = _backward_order(step)
        name = min(bad, key=lambda n: order.get(n.rpartition(".")[0], len(order)))
        gradient = bad[name].grad
        memory = None if gradient is None else countable(gradient)
        is_nan = memory is not None and bool(memory.isnan().any())
        return _of_parameter(step, name, "nan" if is_nan else "inf")


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor; NaN if it contains one, 0 without floating-point elements."""
    memory = countable(tensor.detach())
    return 0.0 if memory is None or not memory.numel() else float(comparable(memory).abs().max())


def _hint(slot: TensorSlot, module: nn.Module) -> str:
    """Return a sentence on a parameter of the module that exceeds the output's format."""
    for name, parameter in module.named_parameters(recurse=False):
        largest = _largest(parameter)
        if slot.dtype in FORMATS and largest > FORMATS[slot.dtype].largest:
            return f" Its {name} reaches {largest:.4g}, beyond that."
    return ""


def _sentence(state: BrokenState, step: int) -> str:
    """Return the sentence of a message on a parameter or buffer that was not finite before the step."""
    own = state.name.rpartition(".")[2]
    if not step:
        return f" Its {own} was not finite before the first step."
    if state.kind == "buffer":
        return f" Its buffer {own} is not finite: forward wrote that, in this step or before."
    writer = f"{state.optimizer}'s step" if state.optimizer else "the step"
    return f" Its {own} is not finite: {writer} before wrote that."


def _backward_order(step: StepRecord) -> dict[str, int]:
    """Return the order in which backward reaches modules; those without a recorded gradient come last."""
    names = [slot.name for slot in step.slots if slot.kind == "gradient"]
    names += [slot.name for slot in reversed(step.slots) if slot.kind == "output"]
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _went_wrong(step: StepRecord) -> bool:
    """Return True if the last output or a gradient is not finite, for a step without a scaler."""
    pairs = [*zip(step.slots, step.extremes, strict=True)]
    outputs = [numbers for slot, numbers in pairs if slot.kind == "output"]
    gradients = [numbers for slot, numbers in pairs if slot.kind == "gradient"]
    return not all(map(is_finite, [*outputs[-1:], *gradients]))


def _entry(step: StepRecord, first: NonfiniteOrigin | None) -> dict[str, Any]:
    return {
        "step": step.number,
        "loss": None,
        "scale": step.loss_scale,
        "skipped": None if step.skipped is None else bool(step.skipped),
        "names": list(step.names),
        "seconds": step.seconds,
        "first": as_json(first),
        "worst": _worst(step),
    }


def _worst(step: StepRecord) -> list[dict[str, Any]]:
    """Return the tensors that are closest to the limit of their format; those that are not finite come first."""
    tensors = []
    for slot, numbers in zip(step.slots, step.extremes, strict=True):
        maximum = max(map(abs, numbers)) if is_finite(numbers) else math.inf
        share = maximum / FORMATS.get(slot.dtype, FORMATS["float32"]).largest
        tensors.append((share, maximum, slot))
    return [
        {
            "kind": slot.kind,
            "name": slot.name,
            "dtype": slot.dtype,
            "maximum": None if maximum == math.inf else maximum,
            "share": None if maximum == math.inf else share,
        }
        for share, maximum, slot in sorted(tensors, key=lambda each: -each[0])[:_WORST]
    ]


# --- the origin of infinity or NaN ---


_WORDS = {"inf": "infinite", "nan": "NaN"}


def _bad_slots(step: StepRecord, usual: AbstractSet[TensorKey]) -> list[int]:
    """Return the places of tensors that are not finite, except those that never are, such as masks."""
    bad = (place for place, numbers in enumerate(step.extremes) if not is_finite(numbers))
    return [place for place in bad if step.slots[place].key not in usual]


def _first_of(
    step: StepRecord, place: int, hint: str = "", state: BrokenState | None = None
) -> NonfiniteOrigin:
    """Return the origin for the first tensor that is not finite, at `place`; `hint` is about its module."""
    slot = step.slots[place]
    what: Any = "nan" if any(map(math.isnan, step.extremes[place])) else "inf"
    before = _made_from(place, step.slots)
    doubts, doubt = _doubts(step, place)
    was = f"was the first {'that was seen ' if doubts else ''}to be {_WORDS[what]}"
    module = _quoted(slot.name)
    event = {
        "output": f" the output of {module} {was}",
        "input": f" an input of {module} {was}: {_input_origin(slot, step.slots, before)}",
        "gradient": f"{_at(step)} the gradient of the output of {module} {was} in backward",
    }[slot.kind]
    inputs, ranges = _ranges(step, before)
    message = f"In step {step.number}{event}{ranges}.{_format_limit(slot)}{doubt}{hint}"
    kind: Any = slot.kind
    return NonfiniteOrigin(step.number, kind, slot.name, what, inputs, message, doubts, state)


def _of_parameter(step: StepRecord, name: str, what: Literal["inf", "nan"]) -> NonfiniteOrigin:
    """Return the origin for a parameter's gradient, if all recorded tensors are finite."""
    owner = name.rpartition(".")[0]
    latest = {slot.key: place for place, slot in enumerate(step.slots)}
    gradient, output = latest.get(("gradient", owner)), latest.get(("output", owner))
    made_from = [] if gradient is None else [gradient]
    if output is not None:
        made_from += step.slots[output].inputs
    event = f"{_at(step)} the gradient of the parameter `{name}` was the first to be {_WORDS[what]}"
    inputs, ranges = _ranges(step, made_from)
    message = f"In step {step.number}{event}{ranges}."
    return NonfiniteOrigin(step.number, "parameter", name, what, inputs, message)


def _made_from(place: int, slots: Sequence[TensorSlot]) -> tuple[int, ...]:
    """Return the places of the tensors that a tensor was computed from.

    These are, for a gradient, the gradient before it in backward and the output of its module; for an input of unknown
    origin, the last output before it.
    """
    slot = slots[place]
    if slot.kind == "output" or slot.inputs:
        return slot.inputs
    gradients = [k for k in range(place) if slots[k].kind == slot.kind == "gradient"]
    outputs = [k for k in range(place) if slots[k].kind == "output"]
    if slot.kind == "gradient":
        outputs = [k for k in outputs if slots[k].name == slot.name]
    return (*gradients[-1:], *outputs[-1:])


def _input_origin(slot: TensorSlot, slots: Sequence[TensorSlot], before: Sequence[int]) -> str:
    if not slot.name:
        return "it came from outside of the model"
    last = slots[before[-1]].name if before else ""
    between = f"between `{last}` and `{slot.name}`"
    if last == slot.name:
        between = f"between two calls of `{last}`"
    if slot.inputs:
        return f"code {between if last else f'before `{slot.name}`'} wrote it in place"
    return f"it was computed {between if last else 'between modules'}"


def _doubts(step: StepRecord, place: int) -> tuple[tuple[str, ...], str]:
    """Return the modules whose tensors may have been bad before the first recorded one, and a sentence on them."""
    missed = (one for one in step.missed if one.place <= place)
    doubts = [one.name for one in missed if one.later_place is None or one.later_place >= place]
    text = (
        f" It may have begun before, in {_quoted(doubts[0])}: a tensor of that module was written in place before it "
        "could be examined. From the next step on it is examined earlier."
        if doubts
        else ""
    )
    return tuple(doubts), text


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
