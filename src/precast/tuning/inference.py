"""Runs of copies of a model for inference under setups: metrics, times, memory, and errors of outputs.

Invariants:
- a copy under a policy is converted, so that its weights are stored once, in the dtypes in which they are used. Where
  it cannot be converted, it is attached, which keeps 16-bit copies beside its weights;
- only calls of the model count as its time, not the rest of the metric;
- errors of outputs are those of the model's first call for each batch, as later calls may depend on choices made by
  earlier ones. An output that is rounding noise in float32 does not count.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from precast._internal.pytree import map_tensors, tensors_in
from precast._torch import ObservingMode
from precast.attachment.attachment import Attachment
from precast.diagnostics.tracing.tracer import trace
from precast.errors import PrecastError, PrecastWarning, TuningError
from precast.policy.policy import Policy
from precast.report.tree import TreeNode, tree
from precast.shipping.converted import convert
from precast.tuning.recording import record
from precast.tuning.sensitivity import GroupErrors
from precast.tuning.setups import (
    FLOAT32,
    MOVED_BY_ROUNDING,
    Setup,
    Workload,
    attached,
    copy_model,
    current_time,
    move_weights,
    restore_buffers,
    seed_all,
)
from precast.tuning.sites import TunedProgram
from precast.tuning.words import INFERENCE

__all__ = ["InferenceRun", "InferenceTask", "OutputMeter"]

LOOKS: Final = (1, 2, 4, 8, 16)
"""The numbers of passes over the batches after which the times are compared."""
LEAST_BATCHES: Final = 3
_EXAMPLES: Final = 2
"""The batches whose calls show `convert` how the model uses its weights."""
_NOISE: Final = 1e-2
"""An output that differs by more than this share of itself in float64 is noise."""
_BATCHES: Final = 4
"""The batches for which errors are measured."""


def metric_of(workload: Workload, model: nn.Module, number: int, batch: Any = None) -> float:
    """Return the metric of a batch, without gradients.

    Args:
        workload: the workload with the metric.
        model: the model to run.
        number: the number of the batch, which also seeds random operations.
        batch: replaces that batch if it is not None.

    Raises:
        TuningError: the metric is not a number.
    """
    assert workload.metric is not None, "inference has a metric"
    seed_all(workload.seed, number)
    with torch.no_grad():
        value = workload.metric(model, workload.batches[number] if batch is None else batch)
    if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
    raise TuningError(
        f"metric(model, batch) returned {what}; it has to return one number, of which a smaller one is better"
    )


class _CallTimer:
    """Times the calls of a model, and records the arguments and the result of the first one if `keeps` is True."""

    def __init__(self, model: nn.Module, device_type: str = "cpu", *, keeps: bool = False) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._keeps = keeps
        self._device_type = device_type
        self.reset()
        self._handles = [  # through the class, because the method of a scripted module raises an error
            nn.Module.register_forward_pre_hook(
                model, self._before, with_kwargs=True, prepend=True
            ),
            nn.Module.register_forward_hook(model, self._after, always_call=True),
        ]

    def reset(self) -> None:
        """Forget the calls so far."""
        self.seconds, self.count, self._depth, self._start = 0.0, 0, 0, 0.0
        self.arguments = None
        self.result: Any = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._keeps and self.arguments is None:
            self.arguments = copy.deepcopy((args, kwargs))
        self._start = current_time(self._device_type)

    def _after(self, _model: nn.Module, _args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.seconds += current_time(self._device_type) - self._start
        self.count += 1
        if self._keeps and self.count == 1:
            self.result = result


@dataclass(eq=False)
class InferenceRun:
    """A copy of the model that is run under one setup.

    Attributes:
        workload: the workload.
        setup: the setup.
        losses: the metric of each run.
        seconds: the time of each run.
        failure: why it cannot continue; empty while it can.
        is_converted: True if the copy is converted, so that it needs no region.
    """

    workload: Workload
    setup: Setup
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""
    is_converted: bool = False

    def __post_init__(self) -> None:
        self._attachment: Attachment | None = None
        self.model = copy_model(self.workload.model).requires_grad_(False)
        if self.setup.policy is not None:
            self._apply(self.setup.policy)
        self._timer = _CallTimer(self.model, self.workload.device_type)

    def run(self, place: int) -> None:
        """Run a batch; do nothing after a failure."""
        if self.failure:
            return
        self._timer.reset()
        start = current_time(self.workload.device_type)
        try:
            with self._region():
                value = metric_of(self.workload, self.model, place)
        except TuningError:
            raise
        except Exception as error:  # of the program, or of an operation in 16 bits
            if self.setup.policy is None:
                raise
            self.failure = f"{type(error).__name__}: {error}"
            return
        whole = current_time(self.workload.device_type) - start
        self.seconds.append(self._timer.seconds if self._timer.count else whole)
        self.losses.append(value)
        if not math.isfinite(value):
            self.failure = f"the metric of batch {place + 1} is {value}"

    def values(self) -> list[float]:
        """Return the metric of each batch."""
        return list(self.losses)

    def restart(self) -> None:
        """Forget the runs so far."""
        self.losses, self.seconds = [], []

    def weight_bytes(self) -> int:
        """Return the memory of all weights and buffers, each once, with the 16-bit copies of an attachment."""
        held = self._attachment.memory() if self._attachment is not None else 0
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(_storage_sizes(tensors).values()) + int(held)

    def close(self) -> None:
        """Do nothing: the task closes copies, which rounds share."""

    def detach(self) -> None:
        """Remove the hooks and the policy."""
        self._timer.close()
        if self._attachment is not None:
            self._attachment.detach()

    def _region(self) -> AbstractContextManager[object]:
        return nullcontext() if self.is_converted else self.setup.region(self.workload.device_type)

    def _apply(self, policy: Policy) -> None:
        """Convert the copy and run it once, or attach the policy."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecastWarning)
                examples = self._examples()
                copied = copy_model(self.model)
                converted = convert(copied, policy, self.setup.dtype, example=examples)
                for number in range(len(examples)):
                    metric_of(self.workload, converted, number)
        except (
            Exception
        ):  # the metric may also call parts of the model that conversion does not cover
            self._attachment = attached(self.model, self.setup, hold=True)
        else:
            self.model, self.is_converted = converted, True

    def _examples(self) -> list[Any]:
        """Return the arguments of the model's first call for the first batches, in the form that `convert` takes."""
        timer = _CallTimer(self.model, keeps=True)
        examples: list[Any] = []
        try:
            for number in range(min(_EXAMPLES, len(self.workload.batches))):
                timer.reset()
                metric_of(self.workload, self.model, number)
                if timer.arguments is None:
                    raise PrecastError("the metric does not call the model itself")
                args, kwargs = timer.arguments
                if args and kwargs:
                    bound = inspect.signature(self.model.forward).bind(*args, **kwargs)
                    args, kwargs = (), dict(bound.arguments)
                examples.append(kwargs or args)
        finally:
            timer.close()
        return examples


@dataclass
class InferenceTask:
    """The task of a search for inference."""

    workload: Workload
    words = INFERENCE
    allowed_change = 0.1
    """The relative error that an output may have."""
    looks = LOOKS
    warmup = 0
    least_pairs = LEAST_BATCHES
    steps = (1, 1)
    is_training = False

    def __post_init__(self) -> None:
        self._runs: dict[str, InferenceRun] = {}

    def length(self, _steps: int) -> int:
        """Return the number of batches."""
        return len(self.workload.batches)

    def open(self, setup: Setup, _number: int) -> InferenceRun:
        """Return the copy of a setup, which all passes share."""
        if setup.name not in self._runs:
            self._runs[setup.name] = InferenceRun(self.workload, setup)
            self._runs[setup.name].run(0)  # the first run loads code and memory
        run = self._runs[setup.name]
        run.restart()
        return run

    def close(self) -> None:
        """Detach all copies."""
        for run in self._runs.values():
            run.detach()
        self._runs = {}

    @functools.cached_property
    def meter(self) -> OutputMeter:
        """The meter of metrics and outputs."""
        return OutputMeter(self.workload)

    def record(self, base: Policy, low: torch.dtype) -> TunedProgram:
        """Record the operations of a run."""
        workload = self.workload
        program = record(
            workload.model,
            lambda model: metric_of(workload, model, 0),
            base,
            low=low,
            device=workload.device_type,
        )
        return replace(program, is_inference=True)

    def seconds(self) -> float:
        """Return the time of the shortest of three runs of the first batch, including all of the metric."""
        run = InferenceRun(self.workload, FLOAT32)
        times = []
        try:
            for _ in range(3):
                start = current_time(self.workload.device_type)
                run.run(0)
                times.append(current_time(self.workload.device_type) - start)
        finally:
            run.detach()
        return min(times)

    def needed_bytes(self, setup: Setup) -> int:
        """Return the memory of the weights and the most that results of operations take at once beside them."""
        run = InferenceRun(self.workload, setup)
        try:
            run.run(0)
            with _ResultMemory() as results:
                run.run(0)
            most: int = results.most
            return run.weight_bytes() + most
        finally:
            run.detach()

    def traced(self, setup: Setup) -> list[TreeNode]:
        """Return the modules of a run of the first batch, with their dtypes, times and casts."""
        model = copy_model(self.workload.model).requires_grad_(False)
        attachment = attached(model, setup, hold=True)
        try:
            with setup.region(self.workload.device_type):
                metric_of(self.workload, model, 0)
                with trace(model) as recorded:
                    metric_of(self.workload, model, 0)
        finally:
            if attachment is not None:
                attachment.detach()
        return tree(recorded.data)


class _ResultMemory(ObservingMode):
    """Counts the bytes of the results of operations that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0
        self._current = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = _storage_sizes(tensors_in((args, kwargs)))
        for tensor in tensors_in(out):
            storage = _storage(tensor)
            if storage is None or id(storage) in inputs or id(storage) in self._alive:
                continue
            key, size = id(storage), storage.nbytes()
            self._alive[key] = weakref.ref(storage, self._on_free(key, size))
            self._current += size
        self.most = max(self.most, self._current)
        return out

    def _on_free(self, key: int, size: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self._current -= size
            self._alive.pop(key, None)

        return free


class OutputMeter:
    """Compares metrics and outputs with those in float32, on a few batches.

    The error of outputs is that of the tensor where it is largest, and infinite where a number is not finite that is
    finite in float32.
    """

    def __init__(self, workload: Workload) -> None:
        """Run a copy in float32, and one in float64 to find rounding noise.

        Raises:
            TuningError: the metric in float32 is not finite, or not a number.
        """
        self.workload = workload
        self.scale = 1.0
        self._model = copy_model(workload.model).requires_grad_(False)
        self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._expected = [
            self._run(FLOAT32, self._model, number)
            for number in range(min(_BATCHES, len(workload.batches)))
        ]
        for number, (metric, _) in enumerate(self._expected):
            if not math.isfinite(metric):
                raise TuningError(
                    f"in float32 the metric of batch {number + 1} is {metric}: no precision can be compared with it. "
                    "Find the cause first, for example with precast.monitor(model)."
                )
        self._reliable = self._reliable_outputs()

    def errors(self, setup: Setup) -> GroupErrors:
        """Return the errors under a setup; infinite where it cannot run, or a result is not finite."""
        total = worst = 0.0
        for number, (expected, outputs) in enumerate(self._expected):
            try:
                metric, results = self._run(setup, self._model, number)
            except TuningError:
                raise
            except Exception as error:  # an operation may raise anything
                return GroupErrors.infinite(f"{type(error).__name__}: {error}")
            if not math.isfinite(metric):
                return GroupErrors.infinite(f"the metric is {metric}")
            total += ((metric - expected) / (abs(expected) or 1.0)) ** 2
            change = self._change(results, outputs)
            if not math.isfinite(change):
                return GroupErrors.infinite("an output overflows")
            worst = max(worst, change)
        return GroupErrors(total / len(self._expected), worst)

    def find_scale(self, setup: Setup) -> None:
        """Do nothing: without gradients there is no loss scale."""

    def _change(self, results: list[Tensor], expected: list[Tensor]) -> float:
        """Return the largest square of the relative error of an output."""
        worst = 0.0
        for place, (actual, wanted) in enumerate(zip(results, expected, strict=False)):
            if actual.shape != wanted.shape:
                return math.inf
            finite = wanted.isfinite()
            if not bool((actual.isfinite() | ~finite).all()):
                return math.inf
            if place in self._reliable:
                worst = max(worst, _relative_error(actual[finite], wanted[finite]))
        return worst

    def _run(
        self, setup: Setup, model: nn.Module, number: int, batch: Any = None
    ) -> tuple[float, list[Tensor]]:
        """Return the metric of a batch, and the outputs of the model's first call."""
        attachment = attached(model, setup)
        timer = _CallTimer(model, keeps=True)
        try:
            with setup.region(self.workload.device_type):
                metric = metric_of(self.workload, model, number, batch)
            outputs = tensors_in(timer.result)
            return metric, [t.detach().clone() for t in outputs if t.is_floating_point()]
        finally:
            timer.close()
            if attachment is not None:
                attachment.detach()
            restore_buffers(model, self._buffers)

    def _reliable_outputs(self) -> set[int]:
        """Return the places of the outputs that are more than rounding noise in float32."""
        outputs = self._expected[0][1]
        others = self._in_float64()
        if others is None:
            moved = copy_model(self._model)
            move_weights(moved, MOVED_BY_ROUNDING, self.workload.seed, 1)
            others = self._run(FLOAT32, moved, 0)[1]
        reliable = set()
        for place, (one, other) in enumerate(zip(outputs, others, strict=False)):
            if one.shape != other.shape:
                continue
            finite = one.isfinite() & other.isfinite()
            if _relative_error(one[finite], other[finite]) < _NOISE**2:
                reliable.add(place)
        return reliable

    def _in_float64(self) -> list[Tensor] | None:
        """Return the outputs of the first batch in float64; None where the program cannot run in it."""
        try:
            doubled = copy_model(self._model).double()
            batch = map_tensors(
                self.workload.batches[0], lambda t: t.double() if t.is_floating_point() else t
            )
            outputs = self._run(FLOAT32, doubled, 0, batch)[1]
        except Exception:  # the program may make float32 tensors, or the memory may end
            return None
        return outputs if all(each.dtype is torch.float64 for each in outputs) else None


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the square of the relative error of all numbers together."""
    wanted = expected.double()
    norm = float(wanted.square().sum())
    wrong = float((actual.double() - wanted).square().sum())
    return wrong / norm if norm else (math.inf if wrong else 0.0)


def _storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (_storage(tensor) for tensor in tensors)
    return {id(storage): storage.nbytes() for storage in storages if storage is not None}


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return None
