"""The measurement of a trial in its process: the duration, loss and memory of each step, and the end after the last.

Invariants: measured steps are watched by the step tracker alone; memory on a CPU is counted, and operations are traced,
in steps that are not measured; `TrialEnd` is raised between two steps, after the outcome has been written.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.events import StepEvent, witnesses
from precast._internal.pytree import tensors_in
from precast._torch import ResultMemory, storage_sizes
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import named_modules
from precast.policy.policy import Policy
from precast.running.exit_status import exit_now
from precast.running.machine_speed import cpu_speeds
from precast.running.scaler_observer import ScalerObserver
from precast.running.step_tracker import StepTracker
from precast.running.trial.mixed_precision import LossScaling, ModelRegions
from precast.running.trial.plan import TrialEnd, TrialEnding, TrialOutcome, TrialPlan
from precast.running.trial.program_reader import ModelExaminer, ProgramLines

__all__ = ["StepMeter"]

_DTYPES: Final = ("bfloat16", "float16")


class StepMeter:
    """Runs one trial's program in its precision, and measures its steps.

    It calls `progress` with the number of steps that have ended, and `write` before it raises `TrialEnd`.
    """

    def __init__(
        self, plan: TrialPlan, progress: Callable[[int], None], write: Callable[[], None]
    ) -> None:
        self._plan, self._progress, self._write = plan, progress, write
        self._outcome = TrialOutcome()
        self._is_complete = False
        self._policy = Policy.load(plan.policy)
        self._tracker = StepTracker(self._on_boundary, self._on_call, self._on_output)
        self._scalers = ScalerObserver(self._on_scaler_step, lambda _diagnosis: None)
        self._lines = ProgramLines(self._outcome)
        self._examiner = ModelExaminer(self._outcome) if plan.examines else None
        self._moments: list[Any] = []
        """The beginning of the first step, and the end of each step: times, or events on a GPU."""
        self._started_at = self._boundary_at = 0.0
        self._is_waiting = False
        self._outputs: dict[int, float | Tensor | None] = {}
        """The results of a step function, or the mean squares of the outputs of a model that is not trained."""
        self._memory: ResultMemory | None = None
        self._has_optimizer = False

    def start(self) -> None:
        """Start to measure, and to run the program in the precision of the plan."""
        plan = self._plan
        _torch.seed_all(plan.seed)
        if plan.seed:
            _torch.change_seeds(lambda seed: seed + 7919 * plan.seed)
        if plan.batch_factor > 1:
            _torch.multiply_batches(plan.batch_factor)
        if plan.disables:
            _torch.disable_scalers(GradScaler)
        if plan.dtype is None:
            _torch.on_region_entry(self._enters_region, autocast)
        else:
            ModelRegions(self._policy, getattr(torch, plan.dtype), self._prepare).start()
        if plan.dtype == "float16":
            LossScaling(self._skips).start()
        self._lines.start()
        self._scalers.start()
        own_scalers: Any = SimpleNamespace(
            on_step=self._on_scaler_step,
            on_diagnosis=lambda _diagnosis: None,
            first_of_step=lambda _optimizer: None,
            names_of=lambda _parameters: {},
            models=list,
        )
        witnesses.append(own_scalers)
        if self._examiner is not None:
            self._examiner.window.start()
        if plan.step_function is None:
            self._tracker.start()

    def _enters_region(self, dtype: torch.dtype) -> bool:
        """Record a region of the program. False disables it."""
        self._add_dtype(dtype_name(dtype))
        return not self._plan.disables

    def _on_scaler_step(self, _optimizer: Any, event: StepEvent) -> None:
        self._add_dtype("scaler")
        self._tracker.failures.call_unseen("step of a scaler", self._tracker.scaled, event)

    def _add_dtype(self, name: str) -> None:
        dtypes = self._outcome.region_dtypes
        dtypes += [name] if name not in dtypes else []

    def _skips(self) -> None:
        self._outcome.skipped += 1

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
        self._lines.record("model")
        if self._examiner is not None:
            self._examiner.watch(module)
        if len(self._moments) < 2:
            dtypes = {dtype_name(each.dtype) for each in module.parameters()} & {*_DTYPES}
            self._outcome.stored_dtypes = sorted({*self._outcome.stored_dtypes, *dtypes})

    def _on_output(self, _module: nn.Module, output: Any) -> None:
        floats = [each for each in tensors_in(output) if each.is_floating_point() and each.numel()]
        if floats and not self._tracker.trains:
            with torch.no_grad():
                self._outputs[self._tracker.number] = floats[0].detach().float().square().mean()

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
        plan, is_on_gpu = self._plan, self._outcome.device == "cuda"
        self._begin(self._outcome.device)  # an optimizer without a model
        self._moments.append(self._moment())
        self._boundary_at, self._is_waiting = time.perf_counter(), True
        self._progress(number)
        if self._examiner is not None:
            self._examiner.begins(number)
        elif is_on_gpu and number == plan.warm_up:
            torch.cuda.reset_peak_memory_stats()
        elif number == 1 and not is_on_gpu:
            self._outcome.peak_memory = sum(storage_sizes(_torch.instances_of(Tensor)).values())
            self._memory = ResultMemory()
            self._memory.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._end_memory()
        is_last = number >= plan.warm_up + plan.steps and not self._will_train()
        if is_last or self._boundary_at - self._started_at > plan.seconds:
            if self._is_complete:
                exit_now(0)  # the program has caught the exception
            self.outcome("steps" if is_last else "time")
            self._write()
            raise TrialEnd

    def _will_train(self) -> bool:
        """Return True if the calls so far are an evaluation before the training: an optimizer exists."""
        if self._tracker.trains or self._plan.step_function is not None:
            return False
        self._has_optimizer = self._has_optimizer or bool(_torch.instances_of(Optimizer))
        return self._has_optimizer

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
        outcome = self._outcome
        if self._is_complete:
            return outcome
        self._is_complete = True
        self._scalers.stop()
        if self._plan.step_function is None:
            self._tracker.stop()
        self._end_memory()
        outcome.ended, outcome.trains = ended, self._tracker.trains
        outcome.skipped += self._tracker.history.skipped
        if outcome.device == "cuda":
            torch.cuda.synchronize()
            outcome.peak_memory = torch.cuda.max_memory_allocated()
        outcome.seconds = [
            b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
            for a, b in itertools.pairwise(self._moments)
        ]
        losses = self._losses(len(outcome.seconds))
        if ended in {"steps", "time"} and "scaler" in outcome.region_dtypes and len(losses) > 1:
            losses[-1] = None  # its scale is not known before the scaler's step has ended
        outcome.losses = [x if x is not None and math.isfinite(x) else None for x in losses]
        outcome.nonfinite = [n for n, x in enumerate(losses) if x != outcome.losses[n]]
        if self._examiner is not None:
            outcome.shares = self._examiner.shares()
            outcome.has_loader = bool(_torch.instances_of(DataLoader))
        elif self._plan.is_first and outcome.device == "cpu":
            outcome.speeds = cpu_speeds()
        return outcome

    def _losses(self, steps: int) -> list[float | None]:
        values: dict[int, Any] = self._outputs
        if self._tracker.trains:
            values = self._tracker.history.losses()
        elif self._plan.step_function is None:
            values = {step: math.sqrt(float(each)) for step, each in values.items()}
        return [values.get(step) for step in range(steps)]
