"""Writes the steps of a gradient scaler and the counts of a monitor to TensorBoard: an observer for `precast.observe`.

Needs the extra ``tensorboard``, or a writer that you pass.

Invariants: a writer that you pass stays open; the steps of the charts are the scaler's iterations.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from precast._internal.events import HealthEvent, ScalerDiagnosis, StepEvent
from precast._internal.missing import missing_extra
from precast.integrations._event_values import health_values, skipped_words, step_values

__all__ = ["TensorBoard"]


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Scalars of each step, and text for skipped steps and diagnoses; of a monitor, scalars and histograms.

    For each tensor that a `precast.monitor` counts there is a histogram of binary exponents, and scalars: "maximum",
    "rms", and the shares of its values that are "zero", "lost" to underflow (if measured), "subnormal",
    "infinite", "nan". Their names are ``health/<figure>/<kind> <name>``; the step is the monitor's.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter` or anything with `add_scalar`,
            `add_text` and, for a monitor, `add_histogram_raw`; or a folder, for a writer that `close` closes.
        prefix: Prefix of the names of all charts of the scaler.

    Raises:
        MissingExtraError: `writer` is a folder, and TensorBoard is not installed.

    Use it as an observer of the thread that trains:

        with TensorBoard("runs/first") as board, precast.observe(board):
            train()
    """

    def __init__(self, writer: Any, prefix: str = "scaler") -> None:
        self._owned = isinstance(writer, str | os.PathLike)
        self._writer = _open(os.fspath(writer)) if self._owned else writer
        self._prefix = prefix

    def __call__(self, event: object) -> None:
        """Write a `StepEvent`, a `ScalerDiagnosis` or a `HealthEvent`; ignore other events."""
        if isinstance(event, StepEvent):
            self._write_step(event)
        elif isinstance(event, ScalerDiagnosis):
            self._writer.add_text(f"{self._prefix}/diagnosis", event.message, event.step)
        elif isinstance(event, HealthEvent):
            for tensor in event.tensors:
                self._write_tensor(tensor, event.step)

    def close(self) -> None:
        """Close the writer if it was opened here."""
        if self._owned:
            self._writer.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_step(self, event: StepEvent) -> None:
        for name, value in step_values(event, self._prefix).items():
            self._writer.add_scalar(name, value, event.step)
        if event.skipped:
            names, rest = skipped_words(event)
            name = f"{self._prefix}/optimizer {event.optimizer}/skipped"
            self._writer.add_text(name, f"not finite: {names}{rest}", event.step)

    def _write_tensor(self, tensor: dict[str, Any], step: int) -> None:
        for name, value in health_values(tensor).items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        counts = sorted(tensor["exponents"].items())
        if counts:
            name = f"health/exponents/{tensor['kind']} {tensor['name'] or 'model'}"
            self._writer.add_histogram_raw(name, **_raw(counts), global_step=step)


def _raw(counts: list[tuple[int, int]]) -> dict[str, Any]:
    """Return a histogram of exponents in TensorBoard's format: a bucket for each exponent, named by its upper end."""
    by_exponent, exponents = dict(counts), range(counts[0][0], counts[-1][0] + 1)
    return {
        "min": float(exponents.start),
        "max": float(exponents.stop),
        "num": sum(by_exponent.values()),
        "sum": float(sum(exponent * count for exponent, count in counts)),
        "sum_squares": float(sum(exponent**2 * count for exponent, count in counts)),
        "bucket_limits": [float(exponent + 1) for exponent in exponents],
        "bucket_counts": [by_exponent.get(exponent, 0) for exponent in exponents],
    }


def _open(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        subject = "TensorBoard(folder), unlike TensorBoard(writer),"
        raise missing_extra(subject, "tensorboard", "tensorboard") from error
    return SummaryWriter(folder)
