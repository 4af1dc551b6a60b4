"""The observation of a program from the import of PyTorch to its end, described in a document.

Invariants: the program computes the same values; memory does not grow with the run; a forked process is not observed.
A module with parameters that is called outside of all modules is a model. Names are taken from the largest model, and
the values of the first one are monitored.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from precast import _torch
from precast._internal.display import plural
from precast._internal.events import ScalerDiagnosis, StepEvent, Witness, witnesses
from precast._internal.records import from_json
from precast.comparison.recording import Recording, record
from precast.diagnostics.numerics.monitoring import Monitor, monitor
from precast.integrations.torch_amp.installation import install_to_observe
from precast.policy.module_names import names_in
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file
from precast.report.numbers import numeric_findings
from precast.report.remedies import all_findings
from precast.report.schema import Health, PolicyName, RunDocument
from precast.running.dtype_error import record_regions
from precast.running.machine_speed import speeds_of
from precast.running.nonfinite import NonfiniteOutputs, NonfiniteStates
from precast.running.scaler_observer import ScalerObserver
from precast.running.step_order import StepOrder
from precast.running.step_tracker import StepTracker
from precast.running.trace_window import TraceWindow

__all__ = ["RunObserver"]

_MOST_DIAGNOSES = 16


class RunObserver(Witness):
    """Runs the program's regions on precast's engine, and observes its steps, operations and scalers.

    `traced` is the first step that is traced in full, and the step after the last one. `begins` is called when a step
    begins. A policy that cannot be read is a `PolicyError`.
    """

    def __init__(
        self,
        policy: str,
        traced: tuple[int, int],
        health: bool,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = Policy.load(policy)
        self.window = TraceWindow(*traced, model=self._model)
        self._to_trace = list(traced)
        self._begins = begins
        self.outputs = NonfiniteOutputs()
        self.steps = StepTracker(self._on_step_begin, self._on_call, self.outputs.add)
        self._states = NonfiniteStates()
        self._scalers = ScalerObserver(_notify_witnesses, self.on_diagnosis)
        self._order = StepOrder(lambda: self.steps.number)
        self._diagnoses: list[ScalerDiagnosis] = []
        self._diagnosed_at = -2
        self._health = health
        self._monitor: Monitor | None = None
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._largest: tuple[int, weakref.ref[nn.Module]] | None = None
        self.recording: Recording | None = None
        self._ends = ExitStack()

    def start(self) -> None:
        """Start to observe."""
        self._installed = install_to_observe(self.policy)
        self.window.start()
        self._ends.callback(self.window.stop)
        witnesses.append(self)
        self._ends.callback(witnesses.remove, self)
        self.steps.start()
        self._ends.callback(self.steps.stop)
        if self.policy.name.partition("@")[0] == "torch":  # advice names another policy
            self._ends.callback(record_regions())
        self._order.start()
        self._ends.callback(self._order.stop)
        self._scalers.start()
        self._ends.callback(self._scalers.stop)
        os.register_at_fork(after_in_child=self.stop)

    def record(self, path: Path, options: dict[str, Any]) -> None:
        """Also record the run for a comparison, with the options of `precast.record`."""
        self.recording = record(path, **options)
        self._ends.enter_context(self.recording)

    def stop(self) -> None:
        """End the observation. The policy stays in force for the program's exit functions."""
        self._ends.close()

    def describe(self, document: RunDocument) -> None:
        """Write the observations into the document of this process."""
        run, history, policy = document.run, self.steps.history, self.policy
        run.devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
        run.policy = PolicyName(policy.name, policy.fingerprint, whole_file(policy))
        run.steps, run.skipped = history.count, history.skipped
        run.nonfinite_losses, run.skipped_losses = history.nonfinite, history.skipped_nonfinite
        run.first_nonfinite_loss = history.first_nonfinite
        run.elsewhere = self.window.elsewhere
        run.traced, run.to_trace = self.window.traced, self._to_trace
        run.compiled = _torch.has_compiled()
        run.nonfinite = self._states.at_the_end(reversed(self.models()))
        self.outputs.describe(run)
        if policy.modules:
            run.module_rules = self._installed.rules
        document.steps, document.diagnoses = history.steps(), self._diagnoses
        document.counts, document.trace = self.window.counts(), self.window.data()
        if document.trace is not None:
            document.trace.notes.extend(self._notes())
        if self._monitor is not None:
            document.health = from_json(Health, self._monitor.to_dict())
        document.findings = [*numeric_findings(document), *self._order.findings()]
        document.findings = all_findings(document)
        if run.ended != "interrupted":
            run.speeds = speeds_of(document)

    def _notes(self) -> list[str]:
        """Return the events that could not be recorded, one sentence for each kind."""
        watchers = {
            "steps": self.steps.failures,
            "scalers": self._scalers.failures,
            "the order of steps": self._order.failures,
        }
        return [
            f"{plural(failures.total, 'event')} of {name} could not be recorded: {failures.examples()}."
            for name, failures in watchers.items()
            if failures.total
        ]

    # The next four methods are the interface for gradient scalers (`events.Witness`).

    def names_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, str]:
        """Return ``id`` -> name for each of `parameters` that belongs to a model."""
        named: dict[int, str] = {}
        tensors = list(parameters)
        for module in self.models():  # the names in the largest replace those in others
            named |= names_in(module, tensors)
        return named

    def models(self) -> list[nn.Module]:
        """Return the models of the program, the largest last."""
        with self.steps.mutex.lock:
            return sorted(self._models, key=_size)

    def on_step(self, optimizer: Optimizer, event: StepEvent) -> None:  # noqa: ARG002 -- a witness's
        """Record a scaler's step, skipped or not."""
        self.steps.failures.call_unseen("step of a scaler", self.steps.scaled, event)

    def on_diagnosis(self, diagnosis: ScalerDiagnosis) -> None:
        """Record a diagnosis. Of several steps in a row only the first is recorded."""
        step = diagnosis.step
        if step > self._diagnosed_at + 1 and len(self._diagnoses) < _MOST_DIAGNOSES:
            # The steps of the document have the origin, and the scaler prints the message.
            self._diagnoses.append(replace(diagnosis, message="", first=None))
        self._diagnosed_at = step

    def _model(self) -> nn.Module | None:
        return None if self._largest is None else self._largest[1]()

    def _on_step_begin(self, number: int) -> None:
        self._begins()
        self.window.begins(number)

    def _on_call(self, module: nn.Module) -> None:
        # TorchScript's tracer would record the reading of a size as an operation.
        if module in self._models or _torch.is_tracing() or any(map(is_lazy, module.parameters())):
            return
        self._models.add(module)
        elements = _size(module)
        if elements and (
            self._largest is None or self._model() is None or elements > self._largest[0]
        ):
            self._largest = elements, weakref.ref(module)
        self._states.first_call(module)
        if elements and self._health and self._monitor is None:
            self._monitor = monitor(module)
            self._ends.callback(self._monitor.detach)


def _notify_witnesses(optimizer: Optimizer, event: StepEvent) -> None:
    for witness in tuple(witnesses):
        witness.on_step(optimizer, event)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
