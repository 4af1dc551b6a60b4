"""Runs of copies of a model for inference, with their metrics, times, memory and errors of outputs.

Invariants:
- a copy under a policy is converted, so that its weights are stored only in the dtypes in which they are used. If it
  cannot be converted, it is attached, with 16-bit copies in addition to its weights;
- the time is that of the model's calls, without the rest of the metric;
- errors of outputs are measured at the first call of the model for each batch, because later calls may depend on its
  result.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, Final

from torch import nn

from precast._internal.pytree import tensors_in
from precast._torch import ResultMemory, storage_sizes
from precast.errors import PrecastError, PrecastWarning
from precast.policy.policy import Policy
from precast.shipping.converted import convert
from precast.tuning.setups import Setup, Workload, attached, copy_model, current_time
from precast.tuning.tasks import ErrorMeter, ModelTrial, PrecisionErrors, Results, TuningTask
from precast.tuning.words import INFERENCE

__all__ = ["InferenceRun", "InferenceTask", "OutputMeter"]

_EXAMPLE_BATCHES: Final = 2
"""The number of batches whose calls are the examples for `convert`."""
_ERROR_BATCHES: Final = 4
"""The number of batches for which errors are measured."""


class _CallTimer:
    """A timer of the calls of a model, and with `records` records the arguments and the result of the first one."""

    def __init__(
        self, model: nn.Module, device_type: str = "cpu", *, records: bool = False
    ) -> None:
        self._records = records
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
        self.seconds, self.count, self._depth = 0.0, 0, 0
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.result: Any = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._records and self.arguments is None:
                self.arguments = copy.deepcopy((args, kwargs))
            self._start = current_time(self._device_type)

    def _after(self, _model: nn.Module, _args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += current_time(self._device_type) - self._start
            self.count += 1
            if self._records and self.count == 1:
                self.result = result


class InferenceRun(ModelTrial):
    """A copy of the model that is run under one setup. If `converts` is False, it is always attached.

    If `is_converted` is True, it runs without a region.
    """

    def __init__(self, workload: Workload, setup: Setup, *, converts: bool = True) -> None:
        super().__init__(workload, setup)
        self.model.requires_grad_(False)
        converted = self._converted(setup.policy) if converts and setup.policy else None
        self.is_converted = converted is not None
        self.attachment = None if self.is_converted else attached(self.model, setup, hold=True)
        self.model = self.model if converted is None else converted
        self._timer = _CallTimer(self.model, workload.device_type)

    def step(self, place: int) -> tuple[float, float]:
        """Run a batch, and return the metric and the seconds of the model's calls."""
        device_type = self.workload.device_type
        self._timer.reset()
        start = current_time(device_type)
        with nullcontext() if self.is_converted else self.setup.region(device_type):
            value = self.workload.measure(self.model, place)
        whole = current_time(device_type) - start
        return value, self._timer.seconds if self._timer.count else whole

    def values(self) -> list[float]:
        """Return the metric of each batch."""
        return list(self.losses)

    def weight_bytes(self) -> int:
        """Return the memory of all weights and buffers, each once, with the 16-bit copies of an attachment."""
        held = self.attachment.memory() if self.attachment is not None else 0
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(storage_sizes(tensors).values()) + int(held)

    def close(self) -> None:
        """Remove the hooks and the policy."""
        self._timer.close()
        super().close()

    def _converted(self, policy: Policy) -> nn.Module | None:
        """Return a converted copy; None if the copy cannot be converted or run."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecastWarning)
                examples = self._examples()
                model = copy_model(self.model)
                converted: nn.Module = convert(model, policy, self.setup.dtype, example=examples)
                for number in range(len(examples)):
                    self.workload.measure(converted, number)
        except Exception:  # the metric may also call parts of the model, which are not converted
            return None
        return converted

    def _examples(self) -> list[Any]:
        """Return the arguments of the model's first call for the first batches, in the form that `convert` takes."""
        examples: list[Any] = []
        with closing(_CallTimer(self.model, records=True)) as timer:
            for number in range(min(_EXAMPLE_BATCHES, len(self.workload.batches))):
                timer.reset()
                self.workload.measure(self.model, number)
                if timer.arguments is None:
                    raise PrecastError("the metric does not call the model itself")
                args, kwargs = timer.arguments
                if args and kwargs:
                    bound = inspect.signature(self.model.forward).bind(*args, **kwargs)
                    args, kwargs = (), dict(bound.arguments)
                examples.append(kwargs or args)
        return examples


class InferenceTask(TuningTask):
    """The task of a search for inference."""

    words = INFERENCE
    allowed_change = 0.1
    looks = (1, 2, 4, 8, 16)
    warmup = 0
    steps = (1, 1)

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._runs: dict[str, InferenceRun] = {}

    def open(self, setup: Setup, _number: int) -> InferenceRun:
        """Return the copy of a setup, which all passes share."""
        if setup.name not in self._runs:
            self._runs[setup.name] = InferenceRun(self.workload, setup)
            self._runs[setup.name].run(0)  # the first run loads code and memory
        run = self._runs[setup.name]
        run.losses, run.seconds = [], []
        return run

    def release(self, trial: ModelTrial) -> None:
        """Do nothing, because the next pass needs the copy."""

    def close(self) -> None:
        """Close all copies."""
        for run in self._runs.values():
            run.close()
        self._runs = {}

    def traced_trial(self, setup: Setup) -> InferenceRun:
        """Return a copy with the policy attached."""
        return InferenceRun(self.workload, setup, converts=False)

    @functools.cached_property
    def meter(self) -> OutputMeter:
        """The meter of metrics and outputs."""
        return OutputMeter(self.workload)

    def forward(self, model: nn.Module) -> float:
        """Return the metric of the first batch."""
        return self.workload.measure(model, 0)

    def needed_bytes(self, setup: Setup) -> int:
        """Return the memory of the weights plus the peak memory of the results of operations."""
        run = self.open(setup, 0)
        with ResultMemory() as results:
            run.run(0)
        most: int = results.most
        return run.weight_bytes() + most


class OutputMeter(ErrorMeter):
    """The meter of differences from metrics and outputs in float32."""

    subject = "an output"
    may_be_infinite = True

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.add_points(copy_model(workload.model).requires_grad_(False), _ERROR_BATCHES)
        self.find_reliable()

    def errors(self, setup: Setup) -> PrecisionErrors:
        """Return the errors under a setup; infinite if the model cannot run, or a result is not finite."""
        return replace(super().errors(setup), parameter="", flushed=0.0, silent="")

    def results(self, setup: Setup, model: nn.Module, number: int) -> Results:
        """Return the metric of a batch, and the outputs of the model's first call by their places."""
        with (
            closing(_CallTimer(model, records=True)) as timer,
            attached(model, setup) or nullcontext(),
            setup.region(self.workload.device_type),
        ):
            metric = self.workload.measure(model, number)
        outputs = [each for each in tensors_in(timer.result) if each.is_floating_point()]
        return metric, {str(place): each.detach().clone() for place, each in enumerate(outputs)}
