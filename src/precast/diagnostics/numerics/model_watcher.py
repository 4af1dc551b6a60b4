"""The watcher of one model: its hooks, and the record of each step.

Invariants:

- it waits for the device only in counted or skipped steps, when a result is read, and after `_UNREAD` steps;
- one thread at a time runs a method;
- after `detach`, or when the model is freed, nothing is left on the model, its optimizers and its scaler;
- a copy of the model, by `deepcopy` or pickle, is not watched: its hooks do nothing;
- graphs of `torch.compile` and `torch.export` contain no hooks: of a compiled part, only the final outputs and
  gradients are recorded.

A step ends where a forward begins after an optimizer with parameters of the model has stepped, or a scaler has skipped
its step. So an iteration with several optimizers is one step, and so is one that accumulates gradients. Until gradients
are recorded or an optimizer steps, each call of the model is a step, also next to those of other threads.
"""

from __future__ import annotations

import functools
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from precast import _torch
from precast._internal import atomic_write, events
from precast._internal.events import NonfiniteOrigin, ScalerDiagnosis, StepEvent
from precast._internal.locks import ForkSafeLock
from precast._internal.records import as_json
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.history import StepResults
from precast.diagnostics.numerics.running_step import RunningStep, may_write, unseen_by_modes
from precast.diagnostics.numerics.samples import TensorHistory, health_event
from precast.diagnostics.numerics.step_record import StepRecord
from precast.diagnostics.numerics.tally import TensorKey
from precast.errors import OutputError, PrecastWarning
from precast.grad_scaler.scaler import GradScaler
from precast.optim.partial_steps import parameters_of
from precast.policy.module_names import name_of_each, named_parameters, names_in

__all__ = ["DEFAULT_EVERY", "ModelWatcher"]

DEFAULT_EVERY: Final = 200
"""After the first steps. A counted step may take twice as long; another one takes a few per cent more
(docs/performance.md)."""
_UNREAD: Final = 256
P = ParamSpec("P")
R = TypeVar("R")


def _callback(
    method: Callable[Concatenate[ModelWatcher, P], R],
) -> Callable[Concatenate[ModelWatcher, P], R | None]:
    """Let the program call a method: one thread at a time, unseen by its dispatch modes, and exceptions are counted."""
    hidden = unseen_by_modes(method)

    @functools.wraps(method)
    def guarded(self: ModelWatcher, /, *args: P.args, **_: P.kwargs) -> R | None:
        with self.mutex.lock:
            return self.failures.call(method.__name__, hidden, self, *args)

    return guarded


class ModelWatcher(events.Witness):
    """Records the steps of one model, which is referenced weakly."""

    def __init__(
        self, model: nn.Module, every: int | None, scaler: Any, ring: Path | None, keep: int
    ) -> None:
        self._model = weakref.ref(model)
        self._every = every
        self._path = ring
        self._keep = keep
        self._mine = WeakIdKeyDictionary()
        """Optimizers with parameters of the model, by identity: some cannot be hashed."""
        self._running: RunningStep | None = None
        """The current step. In inference, a call of the model in another thread has its own."""
        self.mutex = ForkSafeLock()
        self.failures = Failures()
        self._thread = threading.local()
        """Its `whole` is the step of the call of the whole model in that thread."""
        self._urgent: set[TensorKey] = set()
        """The keys of tensors that must be examined at once."""
        self._over = False
        """True if the current step ends where the next forward begins."""
        self._stepped_by: set[int] = set()
        """Optimizers that have stepped in the current step."""
        self._trains = False
        self._reset()
        self._installed = _install(model, self)
        self._installed.callback(_follow(scaler, self))
        events.witnesses.append(self)
        weakref.finalize(model, _end, weakref.ref(self), self._installed).atexit = False

    def _reset(self) -> None:
        """Discard all results, and count steps from 0."""
        self._started = self.ended = self._next = 0
        """The numbers of steps that have started and ended, and the smallest number for the next one."""
        self.samples = TensorHistory(self._keep)
        self._results = StepResults(self._model, self._mine)

    # --- results, which wait for the device; call them with the mutex, after `finish_if_over` ---

    def results(self) -> dict[str, Any]:
        """Return all results as plain data for JSON."""
        return {
            "format": self._results.format(),
            "every": self._every or DEFAULT_EVERY,
            "steps": self.ended,
            "modules": self.samples.as_list(self._results.tensors),
            "first": as_json(self.first()),
            "ring": self.ring(),
            "notes": self.failures.notes(
                "call", "could not be examined, because the monitor failed"
            ),
        }

    def first(self) -> NonfiniteOrigin | None:
        """Return the first tensor that became infinite or NaN, of all steps so far."""
        return self._results.first_or(None if self._running is None else self._running.record.first)

    def ring(self) -> list[dict[str, Any]]:
        """Return the latest steps, including the current one, as plain data."""
        running = self._running
        if running is not None:
            self._fix_number(running.record)
        return self._results.entries(None if running is None else running.so_far())

    @_callback
    def end_step(self) -> None:
        """End the current step."""
        self._count_parameters(None)
        self._finish(self._running)

    @_callback
    def detach(self) -> None:
        """Stop watching. The results stay; a second call does nothing."""
        self.finish_if_over()
        self._installed.close()
        if self in events.witnesses:
            events.witnesses.remove(self)

    # --- called by hooks on modules, optimizers and a scaler of PyTorch's ---

    @property
    def _running_whole(self) -> RunningStep | None:
        """The current step while this thread calls the whole model: calls of modules wait until that call ends."""
        running: RunningStep | None = getattr(self._thread, "whole", None)
        # Another thread may have ended the step.
        return None if running is None or running.is_over else running

    @_callback
    def on_model_start(self) -> None:
        """Handle the start of a call of the whole model."""
        self._thread.whole = None if _torch.in_backward() else self._running_now(whole=True)

    @_callback
    def on_model_end(self) -> None:
        """Handle the end of a call of the whole model, also by an exception."""
        running, self._thread.whole = self._running_whole, None
        if running is None:
            return
        if not self._trains:
            _ask_number(running.record, None)
        running.examine()
        if not self._trains:
            self._finish(running)
        elif running is self._running and not running.record.has_outputs:  # it failed at once
            running.is_over, self._running = True, None
            self._started = self.ended

    @_callback
    def on_module_start(self, name: str, args: Any, kwargs: Any) -> None:
        """Handle the start of a module, inside a call of the whole model or by itself."""
        whole = self._running_whole
        running = whole or (None if _torch.in_backward() else self._running_now())
        if running is not None:
            running.on_module_start(name, args, kwargs, now=whole is None)

    @_callback
    def on_module_end(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Handle the end of a module: as above, or repeated by a checkpoint in backward."""
        whole = self._running_whole
        if whole is None and _torch.in_backward():
            if self._running is not None:
                self._running.on_recomputed(name, output)
            return
        running = whole or self._running_now()
        if running is not None:
            running.on_module_end(name, module, args, kwargs, output, now=whole is None)

    @_callback
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the gradients of an optimizer that is about to step."""
        if not self._is_mine(optimizer):
            return
        if id(optimizer) in self._stepped_by:  # a compiled forward was not recorded
            self._finish(self._running)
        running = self._open()
        _ask_number(running.record, optimizer)
        running.examine()  # while the gradients are in the processor's caches
        self._count_parameters(optimizer)
        if running.record.tallies is not None:
            names = self.names_of(parameters_of(optimizer))
            running.record.lost_updates.before(optimizer, names)

    @_callback
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Mark the current step as over, for the next forward to end it."""
        if not self._is_mine(optimizer):
            return
        if self._running is not None:
            record, model = self._running.record, self._model()
            record.lost_updates.after()
            if record.tallies is not None and model is not None:
                record.averages.before(dict(named_parameters(model)))
        self._over = self._trains = True
        self._stepped_by.add(id(optimizer))

    @_callback
    def on_scaler_update(self, scale: Any) -> None:
        """Handle the update of a scaler of PyTorch's: if no optimizer has stepped, the step was skipped."""
        if self._running is not None:
            self._running.record.scale = scale
            self._running.record.skipped = not self._stepped_by
            self._over = True

    # --- called by gradient scalers (`events.Witness`) ---

    def names_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, str]:
        """Return the model's names of those of `parameters` that it has, by ``id``."""
        model = self._model()
        return {} if model is None else names_in(model, parameters)

    def models(self) -> list[nn.Module]:
        """Return the watched model, if it still exists."""
        model = self._model()
        return [] if model is None else [model]

    @_callback
    def first_of_step(self, optimizer: Optimizer) -> NonfiniteOrigin | None:
        """Return the first tensor that was not finite in a skipped step of `optimizer`. Waits for the device."""
        running = self._running
        if running is None or not self._is_mine(optimizer):
            return None
        _ask_number(running.record, optimizer)
        self._count_parameters(optimizer)
        if running.record.first is None:
            self._results.read()  # finds tensors that are not finite in good steps either
            running.record.first = self._results.first_in(running.so_far(), optimizer)
        return running.record.first

    @_callback
    def on_step(self, optimizer: Optimizer, event: StepEvent) -> None:
        """Record the end of a scaler's step, skipped or not."""
        if self._running is None or not self._is_mine(optimizer):
            return
        record = self._running.record
        record.set_number(event.step)
        record.scale = event.scale
        if record.skipped is not True:
            record.skipped = event.skipped
        self._over = True
        if event.skipped is True:
            record.names = event.names
            self._write_ring()

    def on_diagnosis(self, diagnosis: ScalerDiagnosis) -> None:
        """Do nothing: the scaler reports the diagnosis itself."""

    # --- the current step, and its end ---

    def _is_mine(self, optimizer: Optimizer) -> bool:
        model = self._model()
        if model is None or optimizer in self._mine:
            return model is not None
        of_model = set(map(id, model.parameters()))
        if of_model.isdisjoint(map(id, parameters_of(optimizer))):
            return False
        self._mine[optimizer] = True
        return True

    def _running_now(self, *, whole: bool = False) -> RunningStep | None:
        """Return the step that a call belongs to; None for an evaluation during training."""
        model, learns = self._model(), torch.is_grad_enabled()
        if model is None or (self._trains and not learns and not model.training):
            return None
        if learns and not self._trains:
            self._trains, self._running, self._over = True, None, False
            self._reset()
        self.finish_if_over()
        running = self._open()
        is_anothers = whole and not self._trains and not running.is_called_here()
        return self._new() if is_anothers else running

    def _open(self) -> RunningStep:
        self._running = self._running or self._new()
        return self._running

    def _new(self) -> RunningStep:
        number, self._started = self._started, self._started + 1
        every = self._every or DEFAULT_EVERY
        is_early = self._every is None and number < every and number & (number - 1) == 0
        record = StepRecord(number, counts=is_early or number % every == 0)
        return RunningStep(record, self._urgent, self.mutex, self.failures)

    def finish_if_over(self) -> None:
        """End the current step if an optimizer has stepped, or a scaler has skipped its step."""
        if self._over:
            self._finish(self._running)

    def _fix_number(self, record: StepRecord) -> None:
        """Set the number that a step has if it ends now: that of a run or scaler, or the next one; they increase."""
        assigned = record.assigned_number
        record.number = self._next if assigned is None else max(assigned, self._next)

    def _finish(self, running: RunningStep | None) -> None:
        self._over = False
        self._stepped_by.clear()
        if running is None:
            return
        if running is self._running:
            self._running = None
        record = running.record
        self._fix_number(record)
        self._next, self.ended = record.number + 1, self.ended + 1
        self._results.add(running.end())
        record.averages.after()
        if record.tallies is not None:
            self._results.move_to_host(record)
            counts = record.counts()
            self.samples.add(record.number, counts)
            if events.is_observed():
                events.emit(health_event(record.number, counts))
            self._results.read()
            self._write_ring()
        elif len(self._results.unread) >= _UNREAD:
            self._results.read()

    def _count_parameters(self, optimizer: Optimizer | None) -> None:
        model = self._model()
        if self._running is not None and model is not None:
            self._running.count_parameters(model, optimizer)

    def _write_ring(self) -> None:
        if self._path is None:
            return
        ring = {"first": as_json(self.first()), "ring": self.ring()}
        try:
            atomic_write.replace(self._path, json.dumps(ring, allow_nan=False).encode())
        except OutputError as error:  # no reason to end a training; the next step tries again
            warnings.warn(f"monitor(ring=...): {error}", PrecastWarning, stacklevel=2)


def _ask_number(record: StepRecord, optimizer: Optimizer | None) -> None:
    """Use the step tracker's number, if there is one; `optimizer` is about to step, None in inference."""
    for tracker in events.step_trackers[:1]:
        number = tracker.number if optimizer is None else tracker.before_step(optimizer)
        record.set_number(number)


def _end(watcher: weakref.ref[ModelWatcher], installed: ExitStack) -> None:
    installed.close()
    alive = watcher()
    if alive is not None:
        alive.detach()


# --- the hooks of a watcher: on each module, on all optimizers, and on a scaler of PyTorch's ---


class _ModuleHooks:
    """The hooks of one module; in a copy of the model they have no watcher, and do nothing."""

    def __init__(
        self, watcher: ModelWatcher | None = None, name: str = "", is_whole: bool = False
    ) -> None:
        self._watcher, self._name, self._is_whole = watcher, name, is_whole

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHooks, ()

    @_torch.runs_uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            if self._is_whole:
                watcher.on_model_start()
            if may_write(module):
                watcher.on_module_start(self._name, args, kwargs)

    @_torch.runs_uncompiled
    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Handle the end of a call; an exception has no output."""
        watcher = self._active_watcher()
        if watcher is not None:
            watcher.on_module_end(self._name, module, args, kwargs, output)
            if self._is_whole:
                watcher.on_model_end()

    def around(self, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a call between the hooks, for a module whose result hooks would change."""
        output = None
        self.before(module, args, kwargs)
        try:
            output = run()
        finally:
            self.after(module, args, kwargs, output)
        return output

    def _active_watcher(self) -> ModelWatcher | None:
        """Return the watcher; None in a copy of the model, and while no values are computed."""
        is_traced = torch.compiler.is_dynamo_compiling() or not _torch.is_real()
        return None if is_traced else self._watcher


def _install(model: nn.Module, watcher: ModelWatcher) -> ExitStack:
    """Put hooks on each module of `model`, once, and on all optimizers. Closing the stack removes them."""
    stack = ExitStack()
    # These leave PyTorch's fast path if they, or modules in them, have hooks.
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    without_hooks = {id(module) for layer in layers for module in layer.modules()}
    # Not `module.register...`, which raises for a scripted module, although its hooks are called.
    before, after = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
    for name, module in name_of_each(model):
        is_whole = module is model
        hooks = _ModuleHooks(watcher, name, is_whole)
        if id(module) in without_hooks:
            stack.callback(_torch.on_call_without_hooks(module, hooks.around))
            continue
        after_call = after(module, hooks.after, with_kwargs=True, always_call=is_whole)
        stack.callback(after_call.remove)
        if is_whole or may_write(module):
            stack.callback(before(module, hooks.before, with_kwargs=True).remove)
    before_step = _weak_call(watcher.before_optimizer_step)
    after_step = _weak_call(watcher.after_optimizer_step)
    stack.callback(on_optimizer_step(before=before_step, after=after_step))
    return stack


def _follow(scaler: Any, watcher: ModelWatcher) -> Callable[[], None]:
    """Report the updates of a scaler of PyTorch's to a watcher; return a function that ends this."""
    if scaler is None or isinstance(scaler, GradScaler):
        return lambda: None
    plain_update, report = scaler.update, _weak_call(watcher.on_scaler_update)

    def update(*args: Any, **kwargs: Any) -> Any:
        report(_torch.scale_of(scaler))
        return plain_update(*args, **kwargs)

    def leave() -> None:
        if vars(scaler).get("update") is update:
            del scaler.update

    scaler.update = update
    return leave


def _weak_call(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls a method while its object exists: these hooks must not keep the watcher alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return call
