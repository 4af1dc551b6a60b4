"""monitor: the health of a model's numbers, step by step: what under- and overflows, and where it began.

Invariants:
- results keep their bits: what is watched is read, never written, and no random numbers are drawn;
- nothing waits for the device but in steps that are counted or skipped, where somebody asks, and after `_UNREAD` steps;
- what is kept is bounded: the counts of `keep` steps, the extremes of the latest ones;
- one thread at a time runs a method of a monitor;
- after `detach`, or when the model is gone, nothing is left on the model, its optimizers and its scaler.

A step ends where a forward begins after an optimizer with parameters of the model has stepped, or a scaler has skipped
its step: so an iteration with several optimizers is one, and so is one that accumulates gradients. As long as no
gradients were asked for and no optimizer has stepped, each call of the model is a step, beside those of other threads.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal import atomic_write, events
from precast._internal.display import Card, Displayed, size
from precast._internal.events import HealthEvent, NonfiniteOrigin, ScalerDiagnosis, StepEvent
from precast._internal.locks import ForkSafeLock, synchronized
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.deferred_calls import unseen_by_modes
from precast.diagnostics.numerics.history import History
from precast.diagnostics.numerics.model_hooks import follow, install
from precast.diagnostics.numerics.nonfinite_origin import plain
from precast.diagnostics.numerics.record import Numbering, Record
from precast.diagnostics.numerics.running_step import RunningStep
from precast.diagnostics.numerics.samples import Samples, figures
from precast.diagnostics.numerics.tally import Key
from precast.errors import MonitorError, OutputError, PrecastWarning
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import named_parameters, names_in

__all__ = ["DEFAULT_EVERY", "Monitor", "monitor"]

DEFAULT_EVERY: Final = 200
"""After the first steps. A step that is counted may cost as much as two; another one costs a few hundredths more
(docs/performance.md)."""
_UNREAD: Final = 256
P = ParamSpec("P")
R = TypeVar("R")
_LOW: Final = (torch.float16, torch.bfloat16)


def monitor(
    model: nn.Module,
    every: int | None = None,
    *,
    scaler: Any = None,
    ring: str | os.PathLike[str] | None = None,
    keep: int = 50,
) -> Monitor:
    """Watches the numbers of a model: outputs of modules, their gradients, gradients of parameters.

    Args:
        model: any module; wrappers as `DistributedDataParallel` too.
        every: in steps 0, `every`, 2 * `every` ... the numbers are counted by exponent; without it in steps 0, 1, 2, 4,
            8 ... 128, and in every 200th, so that a short run is seen, too. In the others only the extremes of each
            tensor are taken, on the device, so that what first became infinite or NaN is known in any step.
        scaler: a `torch.amp.GradScaler`, so that steps that it skips are known. `precast.GradScaler` need not be given.
        ring: a file to which the latest steps are written after each step that is counted or skipped, so that they are
            there when the process is killed.
        keep: how many counted steps are kept; where there are more, every other one is dropped.

    Returns:
        The monitor, which watches as long as the model lives, or until its `detach`.

    Raises:
        MonitorError: `model` is no module, `every` or `keep` no number above 0, `scaler` no gradient scaler.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> with monitor(model) as watched:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     watched.end_step()
        >>> [entry["kind"] for entry in watched.as_dict()["modules"]]
        ['output', 'gradient', 'parameter', 'parameter']
        >>> watched.first is None
        True
    """
    _check(model, DEFAULT_EVERY if every is None else every, keep, scaler)
    return Monitor(model, every, scaler, None if ring is None else Path(ring), keep)


def _check(model: Any, every: Any, keep: Any, scaler: Any) -> None:
    """Refuses what `monitor` cannot be given."""
    if not isinstance(model, nn.Module):
        raise MonitorError(
            f"monitor(model) got {type(model).__name__}. It takes a torch.nn.Module: the model, or a part of it."
        )
    for name, value, least in (("every", every, 1), ("keep", keep, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MonitorError(
                f"monitor({name}={value!r}): give a whole number of steps, at least {least}."
            )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise MonitorError(
            f"monitor(scaler=...) got {type(scaler).__name__}. It takes a torch.amp.GradScaler; a precast.GradScaler "
            "need not be given."
        )


def _guarded(method: Callable[P, R]) -> Callable[P, R | None]:
    """Count an exception of a monitor's method, for the program that is watched to go on."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        monitor = args[0]
        assert isinstance(monitor, Monitor)
        return monitor.failures.call(method.__name__, functools.partial(method, **kwargs), *args)

    return guarded


class Monitor(Displayed):
    """What a model's numbers did; made by `monitor`."""

    def __init__(
        self, model: nn.Module, every: int | None, scaler: Any, ring: Path | None, keep: int
    ) -> None:
        self._model = weakref.ref(model)
        self._every = DEFAULT_EVERY if every is None else every
        self._early = every is None
        self._path = ring
        self._samples = Samples(keep)
        self._mine = WeakIdKeyDictionary()
        """Optimizers that are known to have parameters of the model, by identity: some cannot be hashed."""
        self._history = History(self._model, self._mine)
        self._low_modules = _low_modules(model)
        self._running: RunningStep | None = None
        """The step that runs; in inference, a call of the model in another thread has one of its own."""
        self.numbering = Numbering()
        self.mutex = ForkSafeLock()
        self.failures = Failures()
        self._here = threading.local()
        """Its `whole` is the step of the call of the whole model that a thread makes."""
        self._hurried: set[Key] = set()
        """The keys of what may not wait to be looked at."""
        self._over = False
        """Whether the step that runs ends where the next forward begins."""
        self._stepped_by: set[int] = set()
        """Optimizers that have stepped in the step that runs."""
        self._trains = False
        self._installed = install(model, self)
        self._leave_scaler = follow(scaler, self)
        events.witnesses.append(self)
        weakref.finalize(model, _end, weakref.ref(self), self._installed).atexit = False

    @property
    @synchronized
    def first(self) -> NonfiniteOrigin | None:
        """Where numbers first became infinite or NaN, of all steps so far; waits for the device."""
        self._finish_if_over()
        return self._first_so_far()

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self.numbering.ended

    @property
    @synchronized
    def ring(self) -> list[dict[str, Any]]:
        """The latest steps, the one that runs among them, as plain data; waits for the device."""
        self._finish_if_over()
        return self._ring_so_far()

    @synchronized
    def as_dict(self) -> dict[str, Any]:
        """All that was seen, as plain data for JSON: docs/health.md has the shape; waits for the device."""
        ring = self.ring
        return {
            "format": self._history.format(),
            "every": self._every,
            "steps": self.steps,
            "modules": self._samples.as_list(self._history.tensors),
            "first": plain(self.first),
            "ring": ring,
            "notes": self._notes(),
            "low_modules": self._low_modules,
        }

    def _notes(self) -> list[str]:
        failures = self.failures
        if not failures.total:
            return []
        return [
            f"{size(failures.total, 'call')} could not be looked at, as the monitor failed: {failures.examples()}."
        ]

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes `as_dict()` as a JSON file, whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        _write(Path(path), self.as_dict())

    @_guarded
    @synchronized
    def end_step(self) -> None:
        """Ends the step now, for loops without an optimizer of `torch.optim`."""
        self._count_parameters(None, scaled=False)
        self._finish(self._running)

    @_guarded
    @synchronized
    def detach(self) -> None:
        """Stops watching; what was seen stays. A second call does nothing."""
        self._finish_if_over()
        self._installed.close()
        self._leave_scaler()
        if self in events.witnesses:
            events.witnesses.remove(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    @synchronized
    def _card(self) -> Card:
        return self._samples.card(self.steps, self.first)

    # What hooks on modules, optimizers and a scaler of PyTorch's tell.

    @property
    def running_whole(self) -> RunningStep | None:
        """The step that runs, while this thread calls the whole model; the hooks then tell it, and not the monitor.

        So what its modules give may wait until the call ends.
        """
        running: RunningStep | None = getattr(self._here, "whole", None)
        # Another thread may have ended the step.
        return None if running is None or running.is_over else running

    @_guarded
    @synchronized
    @unseen_by_modes
    def begins(self) -> None:
        """The whole model is called."""
        self._here.whole = None if _torch.in_backward() else self._running_now(whole=True)

    @_guarded
    @synchronized
    @unseen_by_modes
    def ends(self) -> None:
        """The call of the whole model has ended, by an exception or not."""
        running, self._here.whole = self.running_whole, None
        if running is None:
            return
        if not self._trains:
            self.numbering.ask(running.record, None)
        running.look()
        if not self._trains:
            self._finish(running)
        elif running is self._running and not running.record.calls:  # it failed at once
            running.is_over, self._running, self.numbering.begun = True, None, self.steps

    @_guarded
    @synchronized
    @unseen_by_modes
    def given(self, name: str, args: Any, kwargs: Any) -> None:
        """A module begins that is called by itself."""
        if not _torch.in_backward() and (running := self._running_now()) is not None:
            running.given(name, args, kwargs, now=True)

    @_guarded
    @synchronized
    @unseen_by_modes
    def called(self, key: Key, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module has ended that was called by itself, or by a checkpoint in backward."""
        if not _torch.in_backward():
            running = self._running_now()
            if running is not None:
                running.called(key, module, args, kwargs, output, now=True)
        elif self._running is not None:
            self._running.called_again(key[1], output)

    @_guarded
    @synchronized
    @unseen_by_modes
    def steps_now(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: its gradients are there."""
        if self._is_mine(optimizer):
            if id(optimizer) in self._stepped_by:  # no forward was seen between: it is compiled
                self._finish(self._running)
            running = self._open()
            self.numbering.ask(running.record, optimizer)
            running.look()  # while the gradients are in the processor's caches
            scaled = getattr(optimizer, "grad_scale", None) is not None
            self._count_parameters(optimizer, scaled=scaled)
            if running.record.tallies is not None:
                names = self.names_of(parameters_of(optimizer))
                running.record.lost_updates.before(optimizer, names)

    @_guarded
    @synchronized
    @unseen_by_modes
    def has_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the step is over when the next forward begins."""
        if self._is_mine(optimizer):
            if self._running is not None:
                record, model = self._running.record, self._model()
                record.lost_updates.after()
                if record.tallies is not None and model is not None:
                    record.averages.before(dict(named_parameters(model)))
            self._over = self._trains = True
            self._stepped_by.add(id(optimizer))

    # What a gradient scaler asks and tells (`events.Witness`).

    def names_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, str]:
        """``id`` of each of `parameters` that is the model's -> its name there."""
        model = self._model()
        return {} if model is None else names_in(model, parameters)

    def models(self) -> list[nn.Module]:
        """Return the model that is watched, if it still exists."""
        model = self._model()
        return [] if model is None else [model]

    @_guarded
    @synchronized
    @unseen_by_modes
    def first_of_step(self, optimizer: Optimizer) -> NonfiniteOrigin | None:
        """Where the step of `optimizer`, which is skipped, went wrong; waits for the device."""
        running = self._running
        if running is None or not self._is_mine(optimizer):
            return None
        self.numbering.ask(running.record, optimizer)
        self._count_parameters(optimizer, scaled=False)
        if running.record.first is None:
            self._history.read()  # what is usual in good steps
            running.record.first = self._history.first_in(running.so_far(), optimizer)
        return running.record.first

    @_guarded
    @synchronized
    def stepped(self, optimizer: Optimizer, event: StepEvent) -> None:
        """A scaler's step has ended, skipped or not."""
        if self._running is None or not self._is_mine(optimizer):
            return
        record = self._running.record
        record.number_told(event.step)
        record.scale = event.scale
        if record.skipped is not True:
            record.skipped = event.skipped
        self._over = True
        if event.skipped is True:
            record.names = event.names
            self._keep_ring()

    def judged(self, verdict: ScalerDiagnosis) -> None:
        """Nothing: the scaler itself says what no lower scale mends."""

    @_guarded
    @synchronized
    def updated(self, scale: Any) -> None:
        """A scaler of PyTorch's ends its iteration: where no optimizer has stepped, the step was skipped."""
        if self._running is not None:
            self._running.record.scale = scale
            self._running.record.skipped = not self._stepped_by
            self._over = True

    # The step that runs, and its end.

    def _is_mine(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has parameters of the model."""
        model = self._model()
        if model is None or optimizer in self._mine:
            return model is not None
        of_model = set(map(id, model.parameters()))
        if of_model.isdisjoint(map(id, parameters_of(optimizer))):
            return False
        self._mine[optimizer] = True
        return True

    def _running_now(self, *, whole: bool = False) -> RunningStep | None:
        """The step that a call of the model, or of a part of it, belongs to; None for an evaluation within training."""
        model, learns = self._model(), torch.is_grad_enabled()
        if model is None or (self._trains and not learns and not model.training):
            return None
        if learns and not self._trains:
            self._begin_training()
        self._finish_if_over()
        running = self._open()
        is_anothers = whole and not self._trains and not running.is_called_here()
        return self._new() if is_anothers else running

    def _open(self) -> RunningStep:
        self._running = self._running or self._new()
        return self._running

    def _new(self) -> RunningStep:
        number = self.numbering.new()
        record = Record(number, {} if self._is_counted(number) else None)
        return RunningStep(record, self._hurried, self.mutex, self.failures)

    def _is_counted(self, number: int) -> bool:
        is_early = self._early and number < self._every and number & (number - 1) == 0
        return is_early or number % self._every == 0

    def _first_so_far(self) -> NonfiniteOrigin | None:
        return self._history.first_or(None if self._running is None else self._running.record.first)

    def _ring_so_far(self) -> list[dict[str, Any]]:
        running = self._running
        if running is not None:
            self.numbering.fix(running.record)
        return self._history.entries(None if running is None else running.so_far())

    def _finish_if_over(self) -> None:
        if self._over:
            self._finish(self._running)

    def _begin_training(self) -> None:
        """Forgets the calls before training, and counts steps from 0."""
        self._trains = True
        self._running, self._over = None, False
        self.numbering = Numbering()
        self._samples.clear()
        self._history = History(self._model, self._mine)

    def _finish(self, running: RunningStep | None) -> None:
        self._over = False
        self._stepped_by.clear()
        if running is None:
            return
        if running is self._running:
            self._running = None
        self.numbering.end(running.record)
        self._history.add(running.end())
        running.record.averages.after()
        if running.record.tallies is not None:
            self._count(running.record)
            self._history.read()
            self._keep_ring()
        elif len(self._history.unread) >= _UNREAD:
            self._history.read()

    def _count(self, record: Record) -> None:
        """Reads the counts of a step that is over."""
        counts = record.counts()
        self._samples.add(record.number, counts)
        if events.observed():
            rows = ({"kind": k, "name": n, **figures(c)} for (k, n), c in counts.items())
            events.emit(HealthEvent(record.number, tuple(rows)))

    def _count_parameters(self, optimizer: Optimizer | None, *, scaled: bool) -> None:
        model = self._model()
        if self._running is not None and model is not None:
            self._running.count_parameters(model, optimizer, scaled=scaled)

    def _keep_ring(self) -> None:
        if self._path is None:
            return
        ring = {"first": plain(self._first_so_far()), "ring": self._ring_so_far()}
        try:
            _write(self._path, ring)
        except OutputError as error:  # no reason to end a training; the next step tries again
            warnings.warn(f"monitor(ring=...): {error}", PrecastWarning, stacklevel=2)


def _write(path: Path, value: dict[str, Any]) -> None:
    atomic_write.replace(path, json.dumps(value, allow_nan=False).encode())


def _low_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that have parameters in 16 bits."""
    owners = (n.rpartition(".")[0] for n, p in named_parameters(model) if p.dtype in _LOW)
    return list(dict.fromkeys(owners))


def _end(monitor: weakref.ref[Monitor], installed: ExitStack) -> None:
    """The model is gone."""
    installed.close()
    there = monitor()
    if there is not None:
        there.detach()
