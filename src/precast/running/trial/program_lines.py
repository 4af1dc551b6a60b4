"""The lines of the program that call models, backward passes and optimizers, and the library whose loop trains.

Invariant: lines are recorded in the first steps only, so that measured steps are not slowed down.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import precast
from precast import _torch
from precast._torch.optimizer_hooks import on_optimizer_step

__all__ = ["ProgramLines"]

_TRAINERS: Final = {
    "lightning.pytorch.": "lightning",
    "pytorch_lightning.": "lightning",
    "transformers.trainer": "transformers",
    "lightning.fabric.": "fabric",
    "lightning_fabric.": "fabric",
    "accelerate.": "accelerate",
    "ignite.": "ignite",
}
"""Maps the beginning of a module's name to the library; the first of these on the stack counts."""
_PATHS: Final = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))]
_INSTALLED: Final = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in [*_PATHS, os.path.dirname(os.path.abspath(str(precast.__file__)))]
)
_MOST: Final = 64  # records


class ProgramLines:
    """Records lines from `start` until a number of records."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}
        """Maps "model", "callers" (of it), "backward", "step" and "clip" to lines, as "path:number"."""
        self.trainer: str | None = None
        self._records = 0

    def start(self) -> None:
        """Start to record."""
        _torch.on_backward(lambda _roots, _gradients: self.record("backward"))
        on_optimizer_step(before=lambda _optimizer: self._step())
        _torch.on_gradient_clipping(self._clip)

    def record(self, event: str) -> None:
        """Record the line of the program that runs now."""
        if self._records >= _MOST:
            return
        self._records += 1
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith(("<", *_INSTALLED)) and os.path.isabs(path):
                line = f"{path}:{frame.f_lineno}"
                if line not in self.lines.setdefault(event, []):
                    self.lines[event].append(line)
                if event not in {"model", "callers"}:
                    return
                event = "callers"  # of the model: also the lines that lead to the call
            frame = frame.f_back

    def _step(self) -> None:
        if self._records >= _MOST:
            return
        self.record("step")
        names: list[str] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            names.append(f"{frame.f_globals.get('__name__', '')}.")
            frame = frame.f_back
        uses = (
            library
            for start, library in _TRAINERS.items()
            if any(name.startswith(start) for name in names)
        )
        self.trainer = self.trainer or next(uses, None)

    def _clip(self, _name: str, run: Callable[..., Any], parameters: Any, *_limit: Any) -> Any:
        self.record("clip")
        return run(parameters)
