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
from precast._internal.locks import ForkSafeLock, synchronized
from precast._internal.records import as_json
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.diagnostics.failures import Failures
from precast.diagnostics.numerics.deferred_calls import unseen_by_modes
from precast.diagnostics.numerics.history import StepResults
from precast.diagnostics.numerics.running_step import RunningStep, may_write
from precast.diagnostics.numerics.samples import TensorHistory, health_event
from precast.diagnostics.numerics.step_record import StepNumbering, StepRecord
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
    locked = synchronized(unseen_by_modes(method))

    @functools.wraps(method)
    def guarded(self: ModelWatcher, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        call = functools.partial(locked, self, *args, **kwargs)
        return self.failures.call(method.__name__, call)

    return guarded


class ModelWatcher:
    """Records the steps of one model, which is referenced weakly; implements `events.Witness`."""

    def __init__(
        self, model: nn.Module, every: int | None, scaler: Any, ring: Path | None, keep: int
    ) -> None:
        self._model = weakref.ref(model)
        self.every = DEFAULT_EVERY if every is None else every
        self._early = every is None
        self._path = ring
        self.samples = TensorHistory(keep)
        self._mine = WeakIdKeyDictionary()
        """Optimizers with parameters of the model, by identity: some cannot be hashed."""
        self._results = StepResults(self._model, self._mine)
        self._running: RunningStep | None = None
        """The current step. In inference, a call of the model in another thread has its own."""
        self.numbering = StepNumbering()
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
        self._installed = _install(model, self)
        self._leave_scaler = _follow(scaler, self)
        events.witnesses.append(self)
        weakref.finalize(model, _end, weakref.ref(self), self._installed).atexit = False

    # --- results, which wait for the device; call them with the mutex, after `finish_if_over` ---

    def results(self) -> dict[str, Any]:
        """Return all results as plain data for JSON."""
        return {
            "format": self._results.format(),
            "every": self.every,
            "steps": self.numbering.ended,
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
            self.numbering.fix(running.record)
        return self._results.entries(None if running is None else running.so_far())

    @_callback
    def end_step(self) -> None:
        """End the current step."""
        self._count_parameters(None, scaled=False)
        self._finish(self._running)

    @_callback
    def detach(self) -> None:
        """Stop watching. The results stay; a second call does nothing."""
        self.finish_if_over()
        self._installed.close()
        self._leave_scaler()
        if self in events.witnesses:
            events.witnesses.remove(self)

    # --- called by hooks on modules, optimizers and a scaler of PyTorch's ---

    @property
    def running_whole(self) -> RunningStep | None:
        """The current step, while this thread calls the whole model. The hooks then use it instead of the watcher.

        So calls of modules can wait in its queue until the call of the model ends.
        """
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
        running, self._thread.whole = self.running_whole, None
        if running is None:
            return
        if not self._trains:
            self.numbering.ask(running.record, None)
        running.examine()
        if not self._trains:
            self._finish(running)
        elif running is self._running and not running.record.has_outputs:  # it failed at once
            running.is_over, self._running = True, None
            self.numbering.started = self.numbering.ended

    @_callback
    def on_module_start(self, name: str, args: Any, kwargs: Any) -> None:
        """Handle the start of a module that is called outside of a call of the whole model."""
        if not _torch.in_backward() and (running := self._running_now()) is not None:
            running.on_module_start(name, args, kwargs, now=True)

    @_callback
    def on_module_end(
        self, key: TensorKey, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Handle the end of a module that is called by itself, or by a checkpoint in backward."""
        if not _torch.in_backward():
            running = self._running_now()
            if running is not None:
                running.on_module_end(key, module, args, kwargs, output, now=True)
        elif self._running is not None:
            self._running.on_recomputed(key[1], output)

    @_callback
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Count the gradients of an optimizer that is about to step."""
        if self._is_mine(optimizer):
            if id(optimizer) in self._stepped_by:  # a compiled forward was not recorded
                self._finish(self._running)
            running = self._open()
            self.numbering.ask(running.record, optimizer)
            running.examine()  # while the gradients are in the processor's caches
            scaled = getattr(optimizer, "grad_scale", None) is not None
            self._count_parameters(optimizer, scaled=scaled)
            if running.record.tallies is not None:
                names = self.names_of(parameters_of(optimizer))
                running.record.lost_updates.before(optimizer, names)

    @_callback
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Mark the current step as over, for the next forward to end it."""
        if self._is_mine(optimizer):
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
        self.numbering.ask(running.record, optimizer)
        self._count_parameters(optimizer, scaled=False)
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
            self._begin_training()
        self.finish_if_over()
        running = self._open()
        is_anothers = whole and not self._trains and not running.is_called_here()
        return self._new() if is_anothers else running

    def _open(self) -> RunningStep:
        self._running = self._running or self._new()
        return self._running

    def _new(self) -> RunningStep:
        number = self.numbering.new()
        record = StepRecord(number, {} if self._is_counted(number) else None)
        return RunningStep(record, self._urgent, self.mutex, self.failures)

    def _is_counted(self, number: int) -> bool:
        is_early = self._early and number < self.every and number & (number - 1) == 0
        return is_early or number % self.every == 0

    def finish_if_over(self) -> None:
        """End the current step if an optimizer has stepped, or a scaler has skipped its step."""
        if self._over:
            self._finish(self._running)

    def _begin_training(self) -> None:
        """Discard the calls before training, and count steps from 0."""
        self._trains = True
        self._running, self._over = None, False
        self.numbering = StepNumbering()
        self.samples = TensorHistory(self.samples.keep)
        self._results = StepResults(self._model, self._mine)

    def _finish(self, running: RunningStep | None) -> None:
        self._over = False
        self._stepped_by.clear()
        if running is None:
            return
        if running is self._running:
            self._running = None
        self.numbering.end(running.record)
        self._results.add(running.end())
        running.record.averages.after()
        if running.record.tallies is not None:
            self._results.move_to_host(running.record)
            self._count(running.record)
            self._results.read()
            self._write_ring()
        elif len(self._results.unread) >= _UNREAD:
            self._results.read()

    def _count(self, record: StepRecord) -> None:
        counts = record.counts()
        self.samples.add(record.number, counts)
        if events.is_observed():
            events.emit(health_event(record.number, counts))

    def _count_parameters(self, optimizer: Optimizer | None, *, scaled: bool) -> None:
        model = self._model()
        if self._running is not None and model is not None:
            self._running.count_parameters(model, optimizer, scaled=scaled)

    def _write_ring(self) -> None:
        if self._path is None:
            return
        ring = {"first": as_json(self.first()), "ring": self.ring()}
        try:
            atomic_write.replace(self._path, json.dumps(ring, allow_nan=False).encode())
        except OutputError as error:  # no reason to end a training; the next step tries again
            warnings.warn(f"monitor(ring=...): {error}", PrecastWarning, stacklevel=2)


def _end(watcher: weakref.ref[ModelWatcher], installed: ExitStack) -> None:
    installed.close()
    alive = watcher()
    if alive is not None:
        alive.detach()


# --- the hooks of a watcher: on each module, on all optimizers, and on a scaler of PyTorch's ---


class _ModuleHooks:
    """The forward hooks of one module; in a copy of the model, hooks without a watcher."""

    def __init__(
        self, watcher: ModelWatcher | None = None, name: str = "", is_whole: bool = False
    ) -> None:
        self._watcher = watcher
        self.is_whole = is_whole
        self._key = "output", name

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHooks, ()

    @_torch.runs_uncompiled
    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            watcher.failures.call(self._key[1], self._on_start, watcher, args, kwargs)

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            call = module, args, kwargs, output
            watcher.failures.call(self._key[1], self._on_end, watcher, call)

    @_torch.runs_uncompiled
    def begin(self, _module: nn.Module, _args: Any) -> None:
        watcher = self._active_watcher()
        if watcher is not None:
            watcher.on_model_start()

    @_torch.runs_uncompiled
    def end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and self._watcher is not None:
            self._watcher.on_model_end()

    def _on_start(self, watcher: ModelWatcher, args: Any, kwargs: Any) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).on_module_start(self._key[1], args, kwargs)

    def _on_end(self, watcher: ModelWatcher, call: tuple[nn.Module, Any, Any, Any]) -> None:
        with watcher.mutex.lock:
            (watcher.running_whole or watcher).on_module_end(self._key, *call)

    def _active_watcher(self) -> ModelWatcher | None:
        """Return the watcher; None in a copy of the model, and while no values are computed."""
        is_traced = torch.compiler.is_dynamo_compiling() or not _torch.is_real()
        return None if is_traced else self._watcher

    def around(self, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a call between the hooks, for a module whose result hooks would change."""
        if self.is_whole:
            self.begin(module, args)
        try:
            if may_write(module):
                self.enter(module, args, kwargs)
            output = run()
            self.leave(module, args, kwargs, output)
            return output
        finally:
            if self.is_whole:
                self.end(module, args, None)


def _install(model: nn.Module, watcher: ModelWatcher) -> ExitStack:
    """Put hooks on each module of `model`, once, and on all optimizers. Closing the stack removes them."""
    stack = ExitStack()
    # These leave PyTorch's fast path if they, or modules in them, have hooks.
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    without_hooks = {id(module) for layer in layers for module in layer.modules()}
    for name, module in name_of_each(model):
        hook = _ModuleHooks(watcher, name, module is model)
        if id(module) in without_hooks:
            stack.callback(_torch.on_call_without_hooks(module, hook.around))
        else:
            for handle in _hooks_on(module, hook):
                stack.callback(handle.remove)
    before = _weak_call(watcher.before_optimizer_step)
    after = _weak_call(watcher.after_optimizer_step)
    stack.callback(on_optimizer_step(before=before, after=after))
    return stack


def _hooks_on(module: nn.Module, hook: _ModuleHooks) -> list[Any]:
    # Not `module.register...`, which raises for a scripted module, although its hooks are called.
    handles = [nn.Module.register_forward_hook(module, hook.leave, with_kwargs=True)]
    if hook.is_whole:
        handles.append(nn.Module.register_forward_pre_hook(module, hook.begin))
        handles.append(nn.Module.register_forward_hook(module, hook.end, always_call=True))
    if may_write(module):
        handles.append(nn.Module.register_forward_pre_hook(module, hook.enter, with_kwargs=True))
    return handles


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
