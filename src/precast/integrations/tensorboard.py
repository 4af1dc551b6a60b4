"""Writes what a gradient scaler did, and what a monitor counted, into TensorBoard: an observer for `precast.observe`.

Needs the extra ``tensorboard``, or a writer of your own. Invariants: a writer that was given stays
open; the number of a step on the chart is the number of the scaler's iteration.
"""

from __future__ import annotations

import os
from typing import Any

from precast._internal.events import HealthEvent, ScalerDiagnosis, StepEvent
from precast._internal.missing import missing_extra

__all__ = ["TensorBoard"]


class TensorBoard:
    """Scalars of each step, and text for skipped steps and verdicts; of a monitor, scalars and histograms.

    Of each tensor that a `precast.monitor` counts there is a histogram of binary exponents, and scalars: "maximum",
    "rms", and the shares of its numbers that are "zero", "lost" to underflow (where that is known), "subnormal",
    "infinite", "nan". Their names are ``health/<figure>/<kind> <name>``; the step is the monitor's.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter` or anything with `add_scalar`,
            `add_text` and, for a monitor, `add_histogram_raw`; or a folder, for a writer that `close` closes.
        prefix: Before the names of all charts of the scaler.

    Raises:
        MissingExtraError: A folder was given, and TensorBoard is not installed.

    Use it as an observer of the thread that trains:

        with TensorBoard("runs/first") as board, precast.observe(board):
            train()
    """

    def __init__(self, writer: Any, prefix: str = "scaler") -> None:
        self._owned = isinstance(writer, str | os.PathLike)
        self._writer = _open(os.fspath(writer)) if self._owned else writer
        self._prefix = prefix

    def __call__(self, event: object) -> None:
        """Writes a `StepEvent`, a `ScalerDiagnosis` or a `HealthEvent`; other events are none of its business."""
        if isinstance(event, StepEvent):
            self._write_step(event)
        elif isinstance(event, ScalerDiagnosis):
            self._writer.add_text(f"{self._prefix}/verdict", event.message, event.step)
        elif isinstance(event, HealthEvent):
            for tensor in event.tensors:
                self._write_tensor(tensor, event.step)

    def close(self) -> None:
        """Ends a writer that was made here."""
        if self._owned:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_step(self, event: StepEvent) -> None:
        skipped = bool(event.skipped)
        name = f"{self._prefix}/optimizer {event.optimizer}"
        self._writer.add_scalar(f"{self._prefix}/scale", float(event.scale), event.step)
        self._writer.add_scalar(f"{name}/skipped", float(skipped), event.step)
        self._writer.add_scalar(f"{name}/seconds", event.seconds, event.step)
        if skipped:
            loss = "" if event.loss_finite else "; the loss was not finite either"
            began = f". {event.first.message}" if event.first else ""
            text = f"not finite: {', '.join(event.names) or 'unknown'}{loss}{began}"
            self._writer.add_text(f"{name}/skipped", text, event.step)

    def _write_tensor(self, tensor: dict[str, Any], step: int) -> None:
        name = f"{tensor['kind']} {tensor['name'] or 'model'}"
        elements = max(tensor["elements"], 1)
        shares = {share: tensor[key] / elements for share, key in _SHARES.items()}
        if not tensor["underflow_known"]:
            del shares["lost"]
        for figure, value in {"maximum": tensor["maximum"], "rms": tensor["rms"], **shares}.items():
            if value is None:  # no number of it is finite
                continue
            self._writer.add_scalar(f"health/{figure}/{name}", value, step)
        counts = sorted(tensor["exponents"].items())
        if counts:
            self._writer.add_histogram_raw(
                f"health/exponents/{name}", **_raw(counts), global_step=step
            )


_SHARES = {
    "zero": "zeros",
    "lost": "underflow_zeros",
    "subnormal": "subnormal",
    "infinite": "overflow",
    "nan": "nan",
}


def _raw(counts: list[tuple[int, int]]) -> dict[str, Any]:
    """A histogram of exponents as TensorBoard has it: a bucket for each, up to its upper end."""
    low, high = counts[0][0], counts[-1][0]
    numbers, found = sum(count for _, count in counts), dict(counts)
    return {
        "min": float(low),
        "max": float(high + 1),
        "num": numbers,
        "sum": float(sum(exponent * count for exponent, count in counts)),
        "sum_squares": float(sum(exponent**2 * count for exponent, count in counts)),
        "bucket_limits": [float(exponent + 1) for exponent in range(low, high + 1)],
        "bucket_counts": [found.get(exponent, 0) for exponent in range(low, high + 1)],
    }


def _open(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        what = "TensorBoard(folder), unlike one with a writer of your own,"
        raise missing_extra(what, "tensorboard", "tensorboard") from error
    return SummaryWriter(folder)
