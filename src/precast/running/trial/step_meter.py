"""The measurement of a trial in its process: the duration, loss and memory of each step, and the end after the last.

Invariants: measured steps are watched by the step tracker alone; memory on a CPU is counted, operations are traced, and
lines and outputs of modules are recorded, in steps that are not measured; `TrialEnd` is raised between two steps, after
the outcome has been written.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.events import StepEvent, Witness, witnesses
from precast._internal.pytree import tensors_in
from precast._torch import ResultMemory, storage_sizes
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import named_modules
from precast.policy.policy import Policy
from precast.report.tree import seconds_by_dtype
from precast.running.exit_status import exit_now
from precast.running.machine_speed import cpu_speeds
from precast.running.scaler_observer import ScalerObserver
from precast.running.source_check import installed_folders
from precast.running.step_tracker import StepTracker
from precast.running.trace_window import TraceWindow
from precast.running.trial.mixed_precision import LossScaling, ModelRegions
from precast.running.trial.plan import TrialEnd, TrialEnding, TrialOutcome, TrialPlan

__all__ = ["StepMeter"]

_TRAINERS: Final = {
    "lightning.pytorch.": "lightning",
    "pytorch_lightning.": "lightning",
    "transformers.trainer.": "transformers",
    "lightning.fabric.": "fabric",
    "lightning_fabric.": "fabric",
    "accelerate.": "accelerate",
    "ignite.": "ignite",
}
"""Maps the beginning of a module's name to the library; the first of these on the stack counts."""
_INSTALLED: Final = installed_folders()
_READ_STEPS: Final = 2
_TRACED: Final = (2, 4)


class StepMeter(Witness):
    """Runs one trial's program in its precision, and measures its steps, until the process ends.

    It calls `progress` with the number of steps that have ended, and `write` before it raises `TrialEnd`.
    """

    def __init__(
        self, plan: TrialPlan, progress: Callable[[int], None], write: Callable[[], None]
    ) -> None:
        self._plan, self._progress, self._write = plan, progress, write
        self._outcome = TrialOutcome(warm_up=plan.warm_up)
        self._is_complete = False
        self._policy = Policy.load(plan.policy)
        self._tracker = StepTracker(self._on_boundary, self._on_call, self._on_output)
        self._scalers = ScalerObserver(self.on_step, self.on_diagnosis)
        self._window = TraceWindow(*_TRACED, model=lambda: None)
        self._examined: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._moments: list[Any] = []  # times, or events on a GPU: of the first begin and each end
        self._started_at = self._boundary_at = 0.0
        self._is_waiting = False
        self._outputs: dict[int, float | Tensor | None] = {}  # of a step function, or mean squares
        self._memory: ResultMemory | None = None
        self._has_optimizer = False
        self._set_precision(plan)
        _torch.seed_all(plan.seed)
        if plan.seed:
            _torch.change_seeds(lambda seed: seed + 7919 * plan.seed)
        if plan.batch_factor > 1:
            _torch.multiply_batches(plan.batch_factor)
        _torch.on_backward(lambda _roots, _gradients: self._record("backward"))
        on_optimizer_step(before=lambda _optimizer: self._record("step"))
        _torch.on_gradient_clipping(self._clip)
        self._scalers.start()
        witnesses.append(self)
        if plan.examines:
            self._window.start()
        if plan.step_function is None:
            self._tracker.start()

    # --- the program ---

    def _set_precision(self, plan: TrialPlan) -> None:
        if plan.disables:
            _torch.disable_scalers(GradScaler)
        if plan.dtype is None:
            _torch.on_region_entry(self._enters_region, autocast)
        else:
            ModelRegions(self._policy, getattr(torch, plan.dtype), self._prepare)
        if plan.dtype == "float16":
            LossScaling(self._outcome)

    def _enters_region(self, dtype: torch.dtype) -> bool:
        """Record a region of the program. False disables it."""
        self._outcome.region_dtypes[dtype_name(dtype)] += 1
        return not self._plan.disables

    def on_step(self, optimizer: Optimizer, event: StepEvent) -> None:  # noqa: ARG002 -- a witness's
        """Record a step of a scaler of the program."""
        self._outcome.region_dtypes["scaler"] += 1
        self._tracker.failures.call_unseen("step of a scaler", self._tracker.scaled, event)

    def _clip(self, _name: str, run: Callable[..., Any], parameters: Any, *_limit: Any) -> Any:
        self._record("clip")
        return run(parameters)

    def _record(self, event: str) -> None:
        """Record the line of the program that runs now, and in a step the trainer that runs it."""
        if len(self._moments) > max(1, self._plan.warm_up):
            return  # a measured step
        frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
        if event == "step" and self._outcome.trainer is None:
            names = [f"{frame.f_globals.get('__name__')}." for frame in frames]
            starts = (x for x in _TRAINERS if any(name.startswith(x) for name in names))
            self._outcome.trainer = next((_TRAINERS[each] for each in starts), None)
        for frame in frames:
            path = frame.f_code.co_filename
            if not path.startswith(("<", *_INSTALLED)) and os.path.isabs(path):
                numbers = self._outcome.lines.setdefault(event, {}).setdefault(path, [])
                numbers += [frame.f_lineno] if frame.f_lineno not in numbers else []
                if event not in {"model", "callers"}:
                    return
                event = "callers"  # of the model: also the lines that lead to the call

    # --- models ---

    def _prepare(self, model: nn.Module) -> None:
        """Change a model as the plan says, before its first call."""
        plan, module = self._plan, self._plan.float32_module
        if module and any(name == module for name, _ in named_modules(model)):
            attach(model, self._policy.replace(modules={module: "fp32"}), hold=False)
        if plan.variant == "attach":
            attach(model, self._policy)
        if plan.variant == "compile":
            model.compile()

    def _on_call(self, module: nn.Module) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._outcome.input_seconds.append(time.perf_counter() - self._boundary_at)
        first = next(module.parameters(), None)
        if first is None:
            return
        self._begin(first.device.type)
        self._record("model")
        if self._plan.examines and module not in self._examined:
            self._examined.add(module)
            self._examine(module)
        if len(self._moments) < 2:
            dtypes = {dtype_name(each.dtype) for each in module.parameters() if each.itemsize == 2}
            self._outcome.stored_dtypes = sorted({*self._outcome.stored_dtypes, *dtypes})

    def _on_output(self, _module: nn.Module, output: Any) -> None:
        if not self._tracker.trains:
            for each in _floats(output)[:1]:
                self._outputs[self._tracker.number] = each.float().square().mean()

    def _examine(self, model: nn.Module) -> None:
        """Record the root mean square of the outputs of a model's innermost modules."""
        modules = self._outcome.modules

        def read(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            if len(self._moments) > _READ_STEPS:
                return
            for each in _floats(output):
                value = float(each.double().square().mean().sqrt())
                previous = modules.get(name, 0.0)
                is_finite = math.isfinite(value) and previous >= 0
                modules[name] = max(value, previous) if is_finite else -1.0

        for name, module in named_modules(model):
            if not any(module.children()):
                module.register_forward_hook(functools.partial(read, name or type(model).__name__))

    # --- steps ---

    def count_call(self, call: Callable[[], Any]) -> Any:
        """Run a call that the user named as a step."""
        self._begin("cuda" if torch.cuda.is_initialized() else "cpu")
        result, number = call(), len(self._outputs)
        is_number = isinstance(result, float | int) or getattr(result, "shape", None) == ()
        self._outputs[number] = float(result) if is_number else None
        self._ends(number + 1)
        return result

    def _begin(self, device: str) -> None:
        """Begin the first step, unless it has begun."""
        if not self._moments:
            self._outcome.device = device
            self._started_at = self._boundary_at = time.perf_counter()
            self._outcome.input_seconds.append(0.0)
            self._moments.append(self._moment())

    def _on_boundary(self, number: int) -> None:
        if number:
            self._ends(number)
        elif self._moments and self._tracker.trains:  # the calls so far were no inference
            del self._moments[:-1], self._outcome.input_seconds[:-1]
            self._outputs.clear()
            self._end_memory()

    def _ends(self, number: int) -> None:
        """Handle the end of a step; `number` steps have ended."""
        plan, outcome, is_on_gpu = self._plan, self._outcome, self._outcome.device == "cuda"
        self._begin(outcome.device)  # an optimizer without a model
        self._moments.append(self._moment())
        self._boundary_at, self._is_waiting = time.perf_counter(), True
        self._progress(number)
        if plan.examines:
            self._window.begins(number)
        elif is_on_gpu and number == plan.warm_up:
            torch.cuda.reset_peak_memory_stats()
        elif number == 1 and not is_on_gpu:
            outcome.peak_memory = sum(storage_sizes(_torch.instances_of(Tensor)).values())
            self._memory = ResultMemory()
            self._memory.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._end_memory()
        # The scale of the last step's loss is not known before the scaler's step has ended: one step more.
        is_last = number >= plan.warm_up + plan.steps + ("scaler" in outcome.region_dtypes)
        is_last = is_last and not self._will_train()
        if is_last or self._boundary_at - self._started_at > plan.seconds:
            if self._is_complete:
                exit_now(0)  # the program has caught the exception
            self.outcome("steps" if is_last else "time")
            self._write()
            raise TrialEnd

    def _will_train(self) -> bool:
        """Return True if the calls so far are an evaluation before the training: an optimizer exists."""
        is_open = not self._tracker.trains and self._plan.step_function is None
        if is_open and not self._has_optimizer:
            self._has_optimizer = bool(_torch.instances_of(Optimizer))
        return is_open and self._has_optimizer

    def _moment(self) -> Any:
        if self._outcome.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end_memory(self) -> None:
        if self._memory is not None:
            self._outcome.peak_memory = (self._outcome.peak_memory or 0) + self._memory.most
            _torch.leave_mode(self._memory)
            self._memory = None

    # --- the outcome ---

    def outcome(self, ended: TrialEnding) -> TrialOutcome:
        """Return the outcome; waits for the device. A second call returns the same."""
        outcome, plan = self._outcome, self._plan
        if self._is_complete:
            return outcome
        self._is_complete = True
        self._scalers.stop()
        if plan.step_function is None:
            self._tracker.stop()
        self._end_memory()
        outcome.ended, outcome.trains = ended, self._tracker.trains
        outcome.skipped += self._tracker.history.skipped
        if outcome.device == "cuda":
            torch.cuda.synchronize()
            outcome.peak_memory = torch.cuda.max_memory_allocated()
        if ended in {"steps", "time"} and "scaler" in outcome.region_dtypes:
            del self._moments[-1], outcome.input_seconds[len(self._moments) - 1 :]
        outcome.seconds = [
            b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
            for a, b in itertools.pairwise(self._moments)
        ]
        values: dict[int, Any] = self._outputs
        if self._tracker.trains:
            values = self._tracker.history.losses()
        elif plan.step_function is None:
            values = {step: math.sqrt(float(each)) for step, each in values.items()}
        losses = [values.get(step) for step in range(len(outcome.seconds))]
        outcome.losses = [x if x is not None and math.isfinite(x) else None for x in losses]
        outcome.nonfinite = [n for n, x in enumerate(losses) if x != outcome.losses[n]]
        if plan.examines:
            outcome.has_loader = bool(_torch.instances_of(DataLoader))
            outcome.shares = self._shares()
        elif plan.is_first and outcome.device == "cpu":
            outcome.speeds = cpu_speeds()
        return outcome

    def _shares(self) -> dict[str, float]:
        """Return the shares of the traced time by dtype and of casts, and the mean seconds of an operation."""
        self._window.stop()
        trace = self._window.data()
        if trace is None or not trace.totals.seconds:
            return {}
        totals, seconds = trace.totals, seconds_by_dtype(trace.rows)
        shares = {dtype: each / totals.seconds for dtype, each in seconds.items()}
        shares["casts"] = totals.cast_seconds / totals.seconds
        return {**shares, "operation": totals.seconds / max(1, totals.calls)}


def _floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, detached."""
    tensors = tensors_in(output)
    return [each.detach() for each in tensors if each.is_floating_point() and each.numel()]
