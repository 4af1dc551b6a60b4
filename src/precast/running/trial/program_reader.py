"""What a trial reads from the running program: the lines that call models and optimizers, and outputs of modules.

Invariants: lines are recorded in the first steps only, so that measured steps are not slowed down; outputs of modules
are read in the first steps of an examined trial, when weights in float32 and in mixed precision are still alike.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from precast import _torch
from precast._internal.pytree import tensors_in
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.policy.module_names import named_modules
from precast.report.tree import seconds_by_dtype
from precast.running.source_check import installed_folders
from precast.running.trace_window import TraceWindow
from precast.running.trial.plan import TrialOutcome

__all__ = ["ModelExaminer", "ProgramLines"]

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
_MOST: Final = 64  # records
_READ_STEPS: Final = 2
_TRACED: Final = (2, 4)


class ProgramLines:
    """Records lines and the trainer in an outcome, from `start` until a number of records."""

    def __init__(self, outcome: TrialOutcome) -> None:
        self._outcome = outcome
        self._records = 0

    def start(self) -> None:
        """Start to record."""
        _torch.on_backward(lambda _roots, _gradients: self.record("backward"))
        on_optimizer_step(before=lambda _optimizer: self.record("step"))
        _torch.on_gradient_clipping(self._clip)

    def record(self, event: str) -> None:
        """Record the line of the program that runs now."""
        if self._records >= _MOST:
            return
        self._records += 1
        if event == "step" and self._outcome.trainer is None:
            names = [f"{frame.f_globals.get('__name__')}." for frame in _stack()]
            starts = (x for x in _TRAINERS if any(name.startswith(x) for name in names))
            self._outcome.trainer = next((_TRAINERS[each] for each in starts), None)
        for frame in _stack():
            path = frame.f_code.co_filename
            if not path.startswith(("<", *_INSTALLED)) and os.path.isabs(path):
                lines, line = self._outcome.lines.setdefault(event, []), f"{path}:{frame.f_lineno}"
                lines += [line] if line not in lines else []
                if event not in {"model", "callers"}:
                    return
                event = "callers"  # of the model: also the lines that lead to the call

    def _clip(self, _name: str, run: Callable[..., Any], parameters: Any, *_limit: Any) -> Any:
        self.record("clip")
        return run(parameters)


class ModelExaminer:
    """Traces some steps, and records the outputs of all modules in the steps before."""

    def __init__(self, outcome: TrialOutcome) -> None:
        self._modules = outcome.modules
        self.window = TraceWindow(*_TRACED, model=lambda: None)
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._step = 0

    def begins(self, step: int) -> None:
        """Handle the beginning of a step."""
        self._step = step
        self.window.begins(step)

    def watch(self, model: nn.Module) -> None:
        """Read the outputs of a model's modules. A second call for the same model does nothing."""
        if model not in self._watched:
            self._watched.add(model)
            for name, module in named_modules(model):
                if not any(module.children()):
                    read = functools.partial(self._read, name or type(model).__name__)
                    module.register_forward_hook(read)

    def shares(self) -> dict[str, float]:
        """Return the shares of the traced time by dtype and of casts, and the mean seconds of an operation."""
        self.window.stop()
        trace = self.window.data()
        if trace is None or not trace.totals.seconds:
            return {}
        totals, seconds = trace.totals, seconds_by_dtype(trace.rows)
        shares = {dtype: each / totals.seconds for dtype, each in seconds.items()}
        shares["casts"] = totals.cast_seconds / totals.seconds
        return {**shares, "operation": totals.seconds / max(1, totals.calls)}

    def _read(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._step >= _READ_STEPS:
            return
        with torch.no_grad():
            for tensor in tensors_in(output):
                if tensor.is_floating_point() and tensor.numel():
                    value = math.sqrt(float(tensor.detach().double().square().mean()))
                    previous = self._modules.get(name, 0.0)
                    is_finite = math.isfinite(value) and previous >= 0
                    self._modules[name] = max(value, previous) if is_finite else -1.0


def _stack() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
