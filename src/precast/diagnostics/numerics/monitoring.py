"""monitor: underflow and overflow in a model, step by step, and the first tensor that became infinite or NaN.

Invariants:

- results keep their bits: tensors are read and never written, and no random numbers are used;
- the stored data is bounded: the counts of `keep` steps, and the extremes of the latest steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from precast import _torch
from precast._internal import atomic_write
from precast._internal.display import Card, Displayed
from precast._internal.events import HealthEvent, NonfiniteOrigin
from precast.diagnostics.numerics.model_watcher import DEFAULT_EVERY, ModelWatcher
from precast.errors import MonitorError
from precast.policy.module_names import named_parameters

__all__ = ["DEFAULT_EVERY", "Monitor", "monitor"]

T = TypeVar("T")


def monitor(
    model: nn.Module,
    every: int | None = None,
    *,
    scaler: Any = None,
    ring: str | os.PathLike[str] | None = None,
    keep: int = 50,
) -> Monitor:
    """Watch the values of a model: outputs of modules, their gradients, and gradients of parameters.

    Args:
        model: any module, also a wrapper such as `DistributedDataParallel`.
        every: count the values by exponent in steps 0, `every`, 2 * `every` ... By default in steps 0, 1, 2, 4, 8 ...
            128, and in every 200th step, so that short runs are counted too. In other steps only the extremes of each
            tensor are computed, on the device, so that the first infinity or NaN is found in any step.
        scaler: a `torch.amp.GradScaler`, to record the steps that it skips. A `precast.GradScaler` is found without it.
        ring: a file for the latest steps, written after each step that is counted or skipped, for the case that the
            process is killed.
        keep: the most counted steps to store; beyond that every other one is dropped.

    Returns:
        The monitor, which watches until `detach`, or until the model is freed.

    Raises:
        MonitorError: `model` is not a module, `every` or `keep` is too small, or `scaler` is not a gradient scaler.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> with monitor(model) as watched:
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     watched.end_step()
        >>> [entry["kind"] for entry in watched.to_dict()["modules"]]
        ['output', 'gradient', 'parameter', 'parameter']
        >>> watched.first is None
        True
    """
    _check(model, DEFAULT_EVERY if every is None else every, keep, scaler)
    return Monitor(model, every, scaler, None if ring is None else Path(ring), keep)


def _check(model: Any, every: Any, keep: Any, scaler: Any) -> None:
    if not isinstance(model, nn.Module):
        raise MonitorError(
            f"monitor(model): expected a torch.nn.Module, got {type(model).__name__}"
        )
    for name, value, least in (("every", every, 1), ("keep", keep, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MonitorError(
                f"monitor({name}=): expected a whole number of steps, at least {least}, got {value!r}"
            )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise MonitorError(
            f"monitor(scaler=): expected a torch.amp.GradScaler, got {type(scaler).__name__}. A precast.GradScaler "
            "is found without this argument."
        )


class Monitor(Displayed):
    """The results of a watched model; created by `monitor`."""

    def __init__(
        self, model: nn.Module, every: int | None, scaler: Any, ring: Path | None, keep: int
    ) -> None:
        self._watcher = ModelWatcher(model, every, scaler, ring, keep)
        self._low_modules = _low_modules(model)

    @property
    def first(self) -> NonfiniteOrigin | None:
        """The first tensor that became infinite or NaN, of all steps so far. Waits for the device."""
        return self._read(ModelWatcher.first)

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self._watcher.ended

    @property
    def events(self) -> tuple[HealthEvent, ...]:
        """The counted steps, oldest first: at most `keep`, as observers received them. Waits for the device."""
        return self._read(lambda watcher: watcher.samples.events())

    @property
    def ring(self) -> list[dict[str, Any]]:
        """The latest steps, including the current one, as plain data. Waits for the device."""
        return self._read(ModelWatcher.ring)

    def to_dict(self) -> dict[str, Any]:
        """Return all results as plain data for JSON, as docs/health.md describes. Waits for the device."""
        return {**self._read(ModelWatcher.results), "low_modules": self._low_modules}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as a JSON file, completely or not at all.

        Raises:
            OutputError: the file could not be written.
        """
        text = json.dumps(self.to_dict(), allow_nan=False)
        atomic_write.replace(Path(path), text.encode())

    def end_step(self) -> None:
        """End the current step, for loops without an optimizer of `torch.optim`."""
        self._watcher.end_step()

    def detach(self) -> None:
        """Stop watching. The results stay; a second call does nothing."""
        self._watcher.detach()

    def _read(self, read: Callable[[ModelWatcher], T]) -> T:
        with self._watcher.mutex.lock:
            self._watcher.finish_if_over()
            return read(self._watcher)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def _card(self) -> Card:
        return self._watcher.samples.card(self.steps, self.first)


def _low_modules(model: nn.Module) -> list[str]:
    owners = (
        n.rpartition(".")[0] for n, p in named_parameters(model) if p.dtype in _torch.SIXTEEN_BIT
    )
    return list(dict.fromkeys(owners))
