"""An examined trial: the time of operations by dtype, and the outputs of modules, instead of a measurement.

Invariant: outputs are read in the first steps only, when weights in float32 and in mixed precision are still alike.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Final

import torch
from torch import nn

from precast._internal.pytree import tensors_in
from precast.policy.module_names import named_modules
from precast.report.tree import seconds_by_dtype
from precast.running.trace_window import TraceWindow

__all__ = ["ModelExaminer"]

_READ_STEPS: Final = 2
_TRACED: Final = (2, 4)


class ModelExaminer:
    """Traces some steps, and reads the outputs of all modules in the steps before.

    Attributes:
        modules: the largest root mean square of the output of each module by its name, in the order of the calls;
            -1 if an output was not finite.
    """

    def __init__(self) -> None:
        self.modules: dict[str, float] = {}
        self._window = TraceWindow(*_TRACED, model=lambda: None)
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._step = 0

    def start(self) -> None:
        """Start to trace."""
        self._window.start()

    def begins(self, step: int) -> None:
        """Handle the beginning of a step."""
        self._step = step
        self._window.begins(step)

    def watch(self, model: nn.Module) -> None:
        """Read the outputs of a model's modules. A second call for the same model does nothing."""
        if model in self._watched:
            return
        self._watched.add(model)
        for name, module in named_modules(model):
            if not any(module.children()):
                module.register_forward_hook(self._reader(name or type(model).__name__))

    def shares(self) -> dict[str, float]:
        """Return the shares of the traced time by dtype and of casts, and the mean seconds of an operation."""
        self._window.stop()
        trace = self._window.data()
        if trace is None or not trace.totals.seconds:
            return {}
        totals = trace.totals
        shares = {
            dtype: seconds / totals.seconds
            for dtype, seconds in seconds_by_dtype(trace.rows).items()
        }
        operation = totals.seconds / max(1, totals.calls)
        return {**shares, "casts": totals.cast_seconds / totals.seconds, "operation": operation}

    def _reader(self, name: str) -> Any:
        def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._step >= _READ_STEPS:
                return
            with torch.no_grad():
                for tensor in tensors_in(output):
                    if tensor.is_floating_point() and tensor.numel():
                        value = math.sqrt(float(tensor.detach().double().square().mean()))
                        previous = self.modules.get(name, 0.0)
                        is_finite = math.isfinite(value) and previous >= 0
                        self.modules[name] = max(value, previous) if is_finite else -1.0

        return read
