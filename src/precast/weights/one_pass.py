"""An optimizer's step in one pass over memory: gradients are read, and weights, states and copies written, once.

Invariants:

- what is computed is what the optimizer's own `step` says, which is called for each weight, recorded and compiled; no
  list says which optimizers that goes with;
- states and groups stay the optimizer's, so its `state_dict` is what it would be without this;
- a weight is stepped once: in the pass, or by the optimizer as before. A weight's first step is the optimizer's own,
  which makes its states;
- what cannot be recorded or compiled has changed nothing, is stepped as before, and is said once for each optimizer.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from precast._internal.callers import callers_level
from precast._torch import dispatch_modes, is_dtensor, step_without_hooks
from precast.errors import AttachError, PrecastWarning
from precast.weights import held, shards
from precast.weights.clipping import Clipping
from precast.weights.held import HeldParameter
from precast.weights.low_precision_gradients import factors_of
from precast.weights.partial_steps import (
    closure_of,
    outside_autocast,
    parameters_of,
    set_gradient,
    without_scaler,
)
from precast.weights.rounding import REST, Rounding, seeds
from precast.weights.step_program import ProgramKey, program, row
from precast.weights.step_recorder import NotElementwiseError
from precast.weights.step_recording import Recording, alike, has_states
from precast.weights.stored_weights import StoredWeights
from precast.weights.view_cache import is_dense

__all__ = ["OnePassStep"]

_PART: Final = 1 << 20
"""Numbers that are written elsewhere at a time: 2 MiB, 4 with what was rounded away."""


class OnePassStep:
    """Has the steps of an optimizer go through the memory of its large weights once.

    Its hook has to come before that of `LowPrecisionGradients`, which casts the gradients that are left.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._name = type(optimizer).__name__
        self._held_parameters: dict[int, HeldParameter] = {}
        self._without_copies: set[int] = set()
        """``id`` of float32 weights that are not held, and are stepped so all the same."""
        self._stored: Mapping[int, Rounding] = {}
        """``id`` of weights in bfloat16 -> how they are rounded."""
        self._stored_weights: StoredWeights | None = None
        self._begun: set[int] = set()
        """What has been stepped once by the optimizer itself, which then has all the states that it wants."""
        self._refused: set[int] = set()
        self._taken: list[tuple[Tensor, Tensor]] = []
        """Parameters that were stepped, and their gradients, while a step lasts."""
        self._clipping = Clipping()
        self._says = True
        self._hook = optimizer.register_step_pre_hook(_Before(self))

    def ask_for(
        self, held_parameters: Iterable[HeldParameter], without_copies: Iterable[Tensor] = ()
    ) -> None:
        """Has these weights be stepped so, as far as the optimizer trains them."""
        self._held_parameters = {id(h.parameter()): h for h in held_parameters}
        self._without_copies = set(map(id, without_copies))
        for known in (self._begun, self._refused):
            known.intersection_update(self._asked_for())

    def ask_for_stored(self, weights: StoredWeights) -> None:
        """Has weights in bfloat16 be stepped so, too."""
        self._stored, self._stored_weights = weights.roundings, weights

    def clip(
        self, optimizer: Optimizer, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Clips the gradients of all that the optimizer trains; those that are read in one pass are multiplied there.

        Returns:
            The norm before clipping, shape ().
        """
        parameters = parameters_of(optimizer)
        later = {
            id(p)
            for p in parameters
            if self._is_stepped(p) and p.grad is not None and _why_not(p, p.grad) is None
        }
        return self._clipping.clip(parameters, later, max_norm, norm_type, error_if_nonfinite)

    def end(self) -> None:
        """Has the optimizer take its steps itself."""
        self._hook.remove()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Steps all weights that can be, and hides them from the step that follows."""
        self._taken = []  # where the last step raised, there may be some
        parameters = parameters_of(optimizer)
        clipped = self._clipping.take(parameters)
        if closure_of(args, kwargs) is not None:
            self._say("a closure computes the gradients in the middle of the step")
            _multiply(parameters, clipped)
            return
        if self._has_sparse_gradient(parameters):
            _multiply(parameters, clipped)
            return
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            return  # the step that follows is skipped
        factors = {key: float(factor) for key, factor in factors_of(optimizer).items()}
        if scale is not None:
            inverse = 1.0 / scale.double().item()
            factors = dict.fromkeys(self._asked_for(), inverse)
        for key, factor in clipped.items():
            factors[key] = factors.get(key, 1.0) * factor
        if self._stored_weights is not None:
            self._stored_weights.forget_if_written(optimizer)
        groups, step = optimizer.param_groups, step_without_hooks(optimizer)
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for group in groups:
                alone = {**group}
                alone |= {name: False for name in ("foreach", "fused") if name in group}
                taken = [p for p in group["params"] if self._is_taken(optimizer, p)]

                def call(parameter: Tensor, alone: dict[str, Any] = alone) -> None:
                    optimizer.param_groups = [{**alone, "params": [parameter]}]
                    try:
                        step()
                    finally:
                        optimizer.param_groups = groups

                for some in alike(optimizer, taken):
                    self._step(optimizer, some, call, factors)
            stepped = {id(parameter) for parameter, _ in self._taken}
            _multiply((p for p in parameters if id(p) not in stepped), clipped)

    def after_step(self) -> set[int]:
        """Gives gradients back; returns ``id`` of each parameter whose copies are renewed already."""
        taken, self._taken = self._taken, []
        for parameter, gradient in taken:
            set_gradient(parameter, gradient)
        return {id(p) for p, _ in taken if id(p) not in self._without_copies}

    def _asked_for(self) -> set[int]:
        return {*self._held_parameters, *self._stored, *self._without_copies}

    def _has_sparse_gradient(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the optimizer has to look at all gradients first, as it may refuse some that are sparse.

        Raises:
            AttachError: such a gradient is that of a weight in bfloat16, which is not stepped so.
        """
        sparse = [
            p for p in parameters if p.grad is not None and p.grad.layout is not torch.strided
        ]
        for parameter in sparse:
            if id(parameter) in self._stored:
                raise AttachError(
                    f"{self._name}.step() met a sparse gradient, of a weight in bfloat16 and of shape "
                    f"{tuple(parameter.shape)}. With masters=... gradients have to be dense: leave sparse=True out of "
                    "nn.Embedding, or give that module's weight another optimizer."
                )
        if sparse:
            self._say("a gradient is sparse")
        return bool(sparse)

    def _is_taken(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None or not self._is_stepped(parameter):
            return False
        if id(parameter) not in self._begun and not has_states(optimizer, parameter):
            self._begun.add(id(parameter))
            return False
        reason = _why_not(parameter, gradient)
        if reason is not None:
            self._refuse(parameter, reason)
        return reason is None

    def _is_stepped(self, parameter: Tensor) -> bool:
        """Whether it is among the parameters that are stepped in one pass, where nothing is in the way."""
        held_parameter = self._held_parameters.get(id(parameter))
        is_held = held_parameter is not None and not (
            held_parameter.overlapping or held_parameter.suspended
        )
        return (
            (is_held or id(parameter) in self._stored or id(parameter) in self._without_copies)
            and id(parameter) not in self._refused
            and shards.numbers_here(parameter) >= held.MIN_ELEMENTS_FOR_NODE
        )

    def _step(
        self,
        optimizer: Optimizer,
        parameters: list[Tensor],
        call: Callable[[Tensor], None],
        factors: Mapping[int, float],
    ) -> None:
        """Steps parameters to which a step does the same; what has to be stepped as before has not been changed."""
        recording: Recording | None = None
        runs: dict[Any, _Run] = {}
        for parameter in parameters:
            try:
                if recording is None or not recording.serves_others:
                    recording, runs = Recording(optimizer, parameter, call), {}
                self._run(optimizer, parameter, recording, factors.get(id(parameter)), runs)
                recording.count_for(parameter)
            except Exception as error:  # whatever a compiler raises: the step as before has its own
                if recording is not None and recording.parameter is parameter:
                    recording.undo()
                    recording = None
                self._refuse(parameter, _reason(error))
            else:
                assert parameter.grad is not None
                self._taken.append((parameter, parameter.grad))
                parameter.grad = None  # the step that follows leaves it out

    def _run(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        recording: Recording,
        factor: float | None,
        runs: dict[Any, _Run],
    ) -> None:
        """Steps one parameter; `runs` has what was found for those of the same recording."""
        gradient = parameter.grad
        assert gradient is not None
        states, rounding = recording.states_of(parameter), self._stored.get(id(parameter))
        its = optimizer.state.get(parameter, {})
        rest = its[REST] if rounding == "kahan" else None
        written: Sequence[Tensor] = states if rest is None else [*states, rest]
        shard = 0
        if is_dtensor(parameter):
            reason = shards.why_not(parameter, (gradient, *written))
            if reason is not None:
                raise NotElementwiseError(reason)
            wholes, shard = (parameter, *written), shards.shard_number(parameter)
            parameter, gradient, *states = map(shards.part_of, (parameter, gradient, *states))
            rest = None if rest is None else shards.part_of(rest)
            written = [*wholes, *states]
        tensors = parameter, gradient, *states
        with held.written_together(parameter, written) as copies:
            stored = tuple([tensor.dtype for tensor in tensors])
            low_copies = tuple([copy.tensor.dtype for copy in copies])
            like = stored, low_copies, factor, rounding
            found = runs.get(like)
            if found is None:
                is_low = gradient.dtype is not torch.float32
                scaled = factor is not None
                key = ProgramKey(recording.recorded, stored, scaled, is_low, low_copies, rounding)
                scalars = recording.scalars if factor is None else [factor, *recording.scalars]
                numbers = torch.tensor(scalars or [0.0], dtype=torch.float32)
                found = _Run(key, program(key, self._name), numbers)
            key, run, numbers = found
            count = parameter.numel()
            low = (parameter,) if rest is None else (rest, parameter)
            others = [copy.tensor for copy in copies]
            parts = list(_parts(count, _PART if key.writes_elsewhere else count))
            chances: Sequence[tuple[Tensor, ...]] = [()] * len(parts)
            if key.takes_seeds:
                chances = [*zip(seeds(its, (len(key.stored) + 1) // 2, shard, len(parts)))]
            if key.writes_elsewhere:
                for part, chance in zip(parts, chances, strict=True):
                    written = [row(each, part) for each in low]
                    elsewhere = [torch.empty_like(each) for each in written]
                    given = [row(each, part) for each in tensors]
                    to = *elsewhere, *[row(each, part) for each in others]
                    run((*given, numbers, *chance, *written[:-1], *to), len(part))
                    for each, made in zip(written, elsewhere, strict=True):
                        each.copy_(made)
            else:
                run((*tensors, numbers, *chances[0], *low[:-1], *others), count)
        if (
            like not in runs
        ):  # it is compiled now; a key is asked for once, as its recording is long
            runs[like] = _Run(key, program(key, self._name), numbers)

    def _refuse(self, parameter: Tensor, reason: str) -> None:
        self._refused.add(id(parameter))
        self._say(reason)

    def _say(self, reason: str) -> None:
        if self._says:
            self._says = False
            text = f"{self._name} steps as before, not in one pass, where it has to: {reason}."
            warnings.warn(text, PrecastWarning, stacklevel=callers_level())


class _Run(NamedTuple):
    """What carries out a step for parameters that are alike."""

    key: ProgramKey
    run: Callable[[Sequence[Tensor], int], None]
    numbers: Tensor
    """The scalars, float32 (k,)."""


class _Before:
    """What an optimizer calls before its step; it belongs to the optimizer, and copies of that to nobody."""

    def __init__(self, steps: OnePassStep) -> None:
        self._steps = weakref.ref(steps)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._steps()
        if steps is not None:
            steps.before_step(optimizer, args, kwargs)


def _why_not(parameter: Tensor, gradient: Tensor) -> str | None:
    if not parameter.is_cpu:
        return f"it has been tried on the CPU alone, and a weight is on {parameter.device}"
    if is_dtensor(parameter) or is_dtensor(gradient):
        reason = shards.why_not(parameter, (gradient,))
        if reason is not None:
            return reason
        parameter, gradient = shards.part_of(parameter), shards.part_of(gradient)
    if type(gradient) is not Tensor or gradient.stride() != parameter.stride():
        return "a gradient has another layout than its weight"
    if parameter.untyped_storage().nbytes() == 0 or not (
        parameter.is_contiguous() or is_dense(parameter)
    ):
        return "the numbers of a weight do not lie side by side"
    if dispatch_modes():
        return "a mode watches its operations"
    return None


def _multiply(parameters: Iterable[Tensor], factors: Mapping[int, float]) -> None:
    """Multiplies gradients in place."""
    for parameter in parameters if factors else ():
        if parameter.grad is not None and id(parameter) in factors:
            parameter.grad.detach().mul_(factors[id(parameter)])


def _parts(count: int, size: int) -> Iterator[range]:
    """Which numbers of a row of `count` a program is called for at a time."""
    for start in range(0, count, size):
        yield range(start, min(count, start + size))


def _reason(error: Exception) -> str:
    if isinstance(error, NotElementwiseError):
        return str(error)
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
