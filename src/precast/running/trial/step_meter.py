"""The measurement of a trial in its process: the duration, loss and memory of each step, and the end after the last.

Invariants: measured steps are watched by the step tracker alone; memory on a CPU is counted, and operations are traced,
in steps that are not measured; `TrialEnd` is raised between two steps, after the outcome has been written.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal.display import dtype_name
from precast._internal.events import StepEvent, witnesses
from precast._internal.pytree import tensors_in
from precast._torch import ResultMemory, storage_sizes
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.hardware.machine import matmul_speed
from precast.grad_scaler.scaler import GradScaler
from precast.policy.module_names import named_modules
from precast.policy.policy import Policy
from precast.running.scaler_observer import ScalerObserver
from precast.running.step_tracker import StepTracker
from precast.running.trial.mixed_precision import LossScaling, ModelRegions
from precast.running.trial.model_examiner import ModelExaminer
from precast.running.trial.plan import TrialEnd, TrialEnding, TrialOutcome, TrialPlan
from precast.running.trial.program_lines import ProgramLines

__all__ = ["StepMeter"]

_DTYPES: Final = ("bfloat16", "float16")
_SCALER_CALLS: Final = ("scale", "step", "unscale_", "update")


class StepMeter:
    """Runs one trial's program in its precision, and measures its steps.

    Args:
        plan: the plan of the trial.
        progress: called with the number of steps that have ended.
        write: called with the outcome before `TrialEnd` is raised.
    """

    def __init__(
        self, plan: TrialPlan, progress: Callable[[int], None], write: Callable[[], None]
    ) -> None:
        self._plan, self._progress, self._write = plan, progress, write
        self._examiner = ModelExaminer() if plan.examines else None
        self._policy = Policy.load(plan.policy)
        self._tracker = StepTracker(self._on_boundary, self._on_call, self._on_output)
        self._scalers = ScalerObserver(self._on_scaler_step, lambda _diagnosis: None)
        self._lines = ProgramLines()
        self._device = torch.device("cpu")
        self._moments: list[Any] = []
        """The beginning of the first step, and the end of each step: times, or events on a GPU."""
        self._started_at = self._boundary_at = 0.0
        self._waits: list[float] = []
        self._is_waiting = False
        self._outputs: dict[int, Tensor] = {}
        self._function_losses: list[float | None] = []
        self._skips: set[int] = set()
        self._region_dtypes: set[str] = set()
        self._stored: set[str] = set()
        self._memory: ResultMemory | None = None
        self._peak: int | None = None
        self._has_optimizer = False
        self._outcome: TrialOutcome | None = None

    def start(self) -> None:
        """Start to measure, and to run the program in the precision of the plan."""
        plan = self._plan
        _torch.seed_all(plan.seed)
        if plan.is_reseeded:
            _torch.change_seeds(lambda seed: seed + 7919 * plan.seed)
        if plan.dtype is None:
            self._watch_regions()
        else:
            ModelRegions(self._policy, getattr(torch, plan.dtype), self._prepare).start()
        if plan.dtype == "float16":
            LossScaling(lambda: self._skips.add(self._tracker.number)).start()
        self._lines.start()
        self._scalers.start()
        if self._examiner is not None:
            self._examiner.start()
        if plan.step_function is None:
            self._tracker.start()

    # --- the program's own mixed precision ---

    def _watch_regions(self) -> None:
        """Record the regions and scalers that the program uses, or disable them."""

        def enters(dtype: torch.dtype) -> bool:
            self._region_dtypes.add(dtype_name(dtype))
            return not self._plan.disables

        _torch.on_region_entry(enters)
        _wrap_own_regions(enters)
        own_scalers: Any = SimpleNamespace(
            on_step=self._on_scaler_step,
            on_diagnosis=lambda _diagnosis: None,
            first_of_step=lambda _optimizer: None,
            names_of=lambda _parameters: {},
            models=list,
        )
        witnesses.append(own_scalers)
        if self._plan.disables:
            for name in _SCALER_CALLS:
                _torch.on_scaler_call(name, _disabled)
            _disable_own_scalers()

    def _on_scaler_step(self, _optimizer: Any, event: StepEvent) -> None:
        self._region_dtypes.add("scaler")
        self._tracker.failures.call_unseen("step of a scaler", self._tracker.scaled, event)

    # --- models ---

    def _prepare(self, model: nn.Module) -> None:
        """Change a model as the plan says, before its first call."""
        plan = self._plan
        module = plan.float32_module
        if module and any(name == module for name, _ in named_modules(model)):
            attach(model, self._policy.replace(modules={module: "fp32"}), hold=False)
        if plan.variant == "attach":
            attach(model, self._policy)
        if plan.variant == "compile":
            model.compile()

    def _on_call(self, module: nn.Module) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._waits.append(time.perf_counter() - self._boundary_at)
        first = next(module.parameters(), None)
        if first is None:
            return
        self._begin(first.device)
        self._lines.record("model")
        if self._examiner is not None:
            self._examiner.watch(module)
        if len(self._moments) < 2:
            self._stored |= {dtype_name(each.dtype) for each in module.parameters()} & {*_DTYPES}

    def _on_output(self, _module: nn.Module, output: Any) -> None:
        floats = [each for each in tensors_in(output) if each.is_floating_point() and each.numel()]
        if floats and not self._tracker.trains:
            with torch.no_grad():
                self._outputs[self._tracker.number] = floats[0].detach().float().square().mean()

    # --- steps ---

    def count_call(self, call: Callable[[], Any]) -> Any:
        """Run a call that the user named as a step."""
        self._begin(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        result = call()
        is_number = isinstance(result, float | int) or (
            isinstance(result, Tensor) and result.numel() == 1
        )
        self._function_losses.append(float(result) if is_number else None)
        self._ends(len(self._function_losses))
        return result

    def _begin(self, device: torch.device) -> None:
        """Begin the first step, unless it has begun."""
        if not self._moments:
            self._device = device
            self._started_at = self._boundary_at = time.perf_counter()
            self._waits.append(0.0)
            self._moments.append(self._moment())

    def _on_boundary(self, number: int) -> None:
        if number:
            self._ends(number)
        elif self._moments and self._tracker.trains:  # the calls so far were no inference
            del self._moments[:-1], self._waits[:-1]
            self._outputs.clear()
            self._end_memory()
            self._peak = None

    def _ends(self, number: int) -> None:
        """Handle the end of a step; `number` steps have ended."""
        plan = self._plan
        self._begin(self._device)  # an optimizer without a model
        self._moments.append(self._moment())
        self._boundary_at, self._is_waiting = time.perf_counter(), True
        self._progress(number)
        if self._examiner is not None:
            self._examiner.begins(number)
        elif number == plan.warm_up:
            self._end_memory()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        elif number == 1 and self._device.type == "cpu":
            self._count_memory()
        is_last = number >= plan.warm_up + plan.steps and not self._will_train()
        if is_last or self._boundary_at - self._started_at > plan.seconds:
            self._outcome = self._outcome or self.outcome("steps" if is_last else "time")
            self._write()
            raise TrialEnd

    def _will_train(self) -> bool:
        """Return True if the calls so far are an evaluation before the training: an optimizer exists."""
        if self._tracker.trains or self._plan.step_function is not None:
            return False
        self._has_optimizer = self._has_optimizer or any(
            issubclass(type(each), Optimizer) for each in gc.get_objects()
        )
        return self._has_optimizer

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count_memory(self) -> None:
        """Start to count the memory of tensors, on the CPU."""
        alive = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        self._peak = sum(storage_sizes(alive).values())
        self._memory = ResultMemory()
        self._memory.__enter__()  # type: ignore[no-untyped-call]

    def _end_memory(self) -> None:
        if self._memory is not None and self._peak is not None:
            self._peak += self._memory.most
            _torch.leave_mode(self._memory)
            self._memory = None

    # --- the outcome ---

    def outcome(self, ended: TrialEnding) -> TrialOutcome:
        """Return the outcome; waits for the device."""
        if self._outcome is not None:
            return self._outcome
        self._scalers.stop()
        if self._plan.step_function is None:
            self._tracker.stop()
        self._end_memory()
        seconds = self._seconds()
        losses = self._losses(len(seconds))
        if ended in {"steps", "time"} and "scaler" in self._region_dtypes and len(losses) > 1:
            losses[-1] = None  # its scale is not known before the scaler's step has ended
        bad = [n for n, each in enumerate(losses) if each is not None and not math.isfinite(each)]
        is_on_gpu = self._device.type == "cuda"
        outcome = TrialOutcome(
            ended=ended,
            seconds=seconds,
            losses=[None if n in bad else each for n, each in enumerate(losses)],
            nonfinite=bad,
            trains=self._tracker.trains,
            input_seconds=self._waits[: len(seconds)],
            peak_memory=torch.cuda.max_memory_allocated() if is_on_gpu else self._peak,
            device=self._device.type,
            skipped=self._tracker.history.skipped + len(self._skips),
            region_dtypes=sorted(self._region_dtypes),
            stored_dtypes=sorted(self._stored),
            lines=self._lines.lines,
            trainer=self._lines.trainer,
        )
        if self._examiner is not None:
            outcome.shares, outcome.modules = self._examiner.shares(), self._examiner.modules
        elif self._plan.is_first and not is_on_gpu:
            speeds = {dtype: matmul_speed(self._device, dtype) for dtype in _DTYPES}
            outcome.speeds = {name: ratio for name, ratio in speeds.items() if ratio is not None}
        return outcome

    def _seconds(self) -> list[float]:
        moments = self._moments
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(moments)]
        return [b - a for a, b in itertools.pairwise(moments)]

    def _losses(self, steps: int) -> list[float | None]:
        if self._plan.step_function is not None:
            values: dict[int, float | None] = dict(enumerate(self._function_losses))
        elif self._tracker.trains:
            values = self._tracker.history.losses()
        else:
            values = {n: math.sqrt(float(each)) for n, each in self._outputs.items()}
        return [values.get(step) for step in range(steps)]


def _wrap_own_regions(enters: Callable[[torch.dtype], bool]) -> None:
    """Call `enters` before an enabled region of precast's; False disables the region."""
    plain = autocast.__enter__

    @wraps(plain)
    def enter(region: autocast) -> autocast:
        if getattr(region, "enabled", False) and not enters(region.fast_dtype):
            region.enabled = False
        return plain(region)

    autocast.__enter__ = enter  # type: ignore[method-assign]


def _disable_own_scalers() -> None:
    """Make new `precast.GradScaler`s disabled ones."""
    plain = GradScaler.__init__

    @wraps(plain)
    def __init__(self: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        plain(self, *args[:5], **{**kwargs, "enabled": False})

    GradScaler.__init__ = __init__  # type: ignore[method-assign]


def _disabled(scaler: Any, run: Callable[[], Any], *_: Any) -> Any:
    _torch.disable_scaler(scaler)
    return run()
