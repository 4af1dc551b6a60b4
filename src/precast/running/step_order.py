"""Detection of two mistakes in the order of a training step: scaled gradients are clipped; backward runs in a region.

Invariants: results are not changed; an error here is counted and never reaches the program; until a scaler has scaled a
loss, clipping does nothing more; the device is waited for once for each line that clips scaled gradients.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal import cures
from precast._internal.display import plural
from precast._internal.events import scaler_listeners
from precast._internal.locks import ForkSafeLock, synchronized
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing.call_sites import frame_above, program_line
from precast.report.schema import Finding, FindingCost, FindingLocation

__all__ = ["BACKWARD_IN_REGION", "SCALED_CLIPPING", "StepOrder"]

SCALED_CLIPPING: Final = "scaled gradients clipped"
BACKWARD_IN_REGION: Final = "backward in region"
_DELIBERATE: Final = 0.05
"""A limit of at least this share of the scale is taken for one that the program has multiplied by the scale."""
_MOST_LINES: Final = 64

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _guarded(method: _Method) -> _Method:
    """Have one thread at a time run a method, which counts its exceptions and returns None then."""
    locked = synchronized(method)

    @functools.wraps(method)
    def counting(self: StepOrder, *args: Any) -> Any:
        return self.failures.call_unseen(method.__name__.strip("_"), locked, self, *args)

    return cast(_Method, counting)


@dataclass
class _Line:
    """A line of the program on which a mistake happened."""

    steps: int = 0
    latest: int = -1
    scale: float = 1.0
    limit: float = 0.0
    function: str = ""
    is_mistake: bool = False

    def count(self, step: int) -> None:
        """Count a step once."""
        self.steps += step != self.latest
        self.latest = step


@dataclass(eq=False)
class _Iteration:
    """The actions of a scaler and the program since the scaler's last `update`."""

    is_scaled: bool = False
    has_backward: bool = False
    unscaled: set[int] = field(default_factory=set)
    """Ids of optimizers."""
    clipped: list[_Clipping] = field(default_factory=list)


@dataclass(frozen=True)
class _Clipping:
    """A call that clipped gradients after a backward pass of a scaled loss."""

    parameters: frozenset[int]
    line: str
    function: str
    limit: Any


class StepOrder:
    """Watches scalers, clipping and backward passes of all threads from `start` until `stop`."""

    def __init__(self, step: Callable[[], int]) -> None:
        self.mutex = ForkSafeLock()
        self.failures = Failures()
        self._step = step
        self._iterations = WeakIdKeyDictionary()
        self._clippings: dict[str, _Line] = {}
        self._backwards: dict[str, _Line] = {}
        self._stop: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start to watch."""
        scaler_listeners.append(self)
        self._stop = [
            lambda: scaler_listeners.remove(self),
            _torch.on_backward(self._backward),
            _torch.on_gradient_clipping(self._clip),
        ]

    def stop(self) -> None:
        """Stop watching."""
        while self._stop:
            self._stop.pop()()

    @synchronized
    def findings(self) -> list[Finding]:
        """Return a finding for each line with a mistake."""
        mistakes = [(SCALED_CLIPPING, *x) for x in self._clippings.items() if x[1].is_mistake]
        mistakes += [(BACKWARD_IN_REGION, *each) for each in self._backwards.items()]
        return [_finding(*each) for each in mistakes]

    # --- `events.ScalerListener` ---

    @_guarded
    def on_scale(self, scaler: Any) -> None:
        """Record that a loss was multiplied by the scale."""
        self._of(scaler).is_scaled = True

    @_guarded
    def on_unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        """Check the clipping of gradients that are about to be divided by the scale, or used by a step."""
        iteration = self._of(scaler)
        clipped, iteration.clipped = iteration.clipped, []
        is_unscaled = id(optimizer) in iteration.unscaled
        iteration.unscaled.add(id(optimizer))
        if not clipped:
            return
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for clipping in clipped:
            if clipping.parameters.isdisjoint(own):
                iteration.clipped.append(clipping)
            elif not is_unscaled:
                self._report(scaler, clipping)

    @_guarded
    def on_update(self, scaler: Any) -> None:
        """Discard the iteration that has ended."""
        self._iterations.pop(scaler, None)

    # --- calls of the program ---

    @_guarded
    def _backward(self, roots: object, gradients: object) -> None:  # noqa: ARG002 -- as `on_backward` calls it
        for iteration in self._iterations.values():
            iteration.has_backward = iteration.is_scaled
        candidates = roots if isinstance(roots, list | tuple) else [roots]
        root = next((each for each in candidates if isinstance(each, Tensor)), None)
        if root is None or not torch.is_autocast_enabled(root.device.type):
            return
        line = _line_of(self._backwards, program_line(frame_above(1)))
        if line is not None:
            line.count(self._step())

    def _clip(self, function: str, run: Callable[..., Any], parameters: Any, *limit: Any) -> Any:
        iterations = self._with_backward()
        if not iterations or not limit:
            return run(parameters)
        is_generator = isinstance(parameters, types.GeneratorType)
        members = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._add_clipping(iterations, function, members, limit[0])
        # PyTorch warns of a generator without parameters, and of nothing else that is empty.
        return run((each for each in members) if is_generator else members)

    @_guarded
    def _with_backward(self) -> list[_Iteration]:
        return [each for each in self._iterations.values() if each.has_backward]

    @_guarded
    def _add_clipping(
        self, iterations: list[_Iteration], function: str, members: list[Any], limit: Any
    ) -> None:
        line = program_line(frame_above(1))
        clipping = _Clipping(frozenset(map(id, members)), line, function, limit)
        for iteration in iterations:
            iteration.clipped.append(clipping)

    def _report(self, scaler: Any, clipping: _Clipping) -> None:
        line = _line_of(self._clippings, clipping.line)
        if line is None:
            return
        if not line.steps:
            with _torch.without_dispatch():
                scale = _torch.scale_of(scaler)
                if scale is None or _torch.is_captured(scale) or float(scale) == 1.0:
                    return
                line.scale, line.limit = float(scale), float(clipping.limit)
            line.function = clipping.function
            line.is_mistake = line.limit < _DELIBERATE * line.scale
        line.count(self._step())

    def _of(self, scaler: Any) -> _Iteration:
        iteration: _Iteration | None = self._iterations.get(scaler)
        if iteration is None:
            iteration = self._iterations[scaler] = _Iteration()
        return iteration


def _line_of(lines: dict[str, _Line], place: str) -> _Line | None:
    if place not in lines and len(lines) >= _MOST_LINES:
        return None
    return lines.setdefault(place, _Line())


def _finding(kind: str, place: str, line: _Line) -> Finding:
    if kind == SCALED_CLIPPING:
        state = f"still multiplied by the loss scale ({line.scale:g})"
        what = f"`{line.function}` clipped gradients that were {state}"
        acts_as = f"{line.limit / line.scale:.2g}"
        advice = cures.UNSCALE_BEFORE_CLIPPING(limit=f"{line.limit:g}", acts_as=acts_as)
    else:
        what, advice = "Backward ran inside an autocast region", cures.BACKWARD_OUTSIDE()
    where = place.partition(" in ")[0]
    return Finding(
        kind=kind,
        title=f"{what}, in {plural(line.steps, 'step')}, at `{where}`",
        cost=FindingCost(),
        suggestion=advice,
        policy=None,
        where=FindingLocation(source=place),
        severity="error" if kind == SCALED_CLIPPING else "warning",
    )
