"""Writes what a gradient scaler did into TensorBoard: an observer for `precast.observe`.

Needs the extra ``tensorboard``, or a writer of your own. Invariants: a writer that was given stays
open; the number of a step on the chart is the number of the scaler's iteration.
"""

from __future__ import annotations

import os
from typing import Any

from precast.errors import MissingExtraError
from precast.events import StepEvent, Verdict

__all__ = ["TensorBoard"]


class TensorBoard:
    """Scalars of each step, and text for skipped steps and verdicts.

    Reading a step's scale waits for the device, so every step waits while it is observed.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter` or anything with `add_scalar` and
            `add_text`; or a folder, for a writer that `close` closes.
        prefix: Before the names of all charts.

    Raises:
        MissingExtraError: A folder was given, and TensorBoard is not installed.

    Use it as an observer of the thread that trains::

        with TensorBoard("runs/first") as board, precast.observe(board):
            train()
    """

    def __init__(self, writer: Any, prefix: str = "scaler") -> None:
        self._owned = isinstance(writer, str | os.PathLike)
        self._writer = _open(os.fspath(writer)) if self._owned else writer
        self._prefix = prefix

    def __call__(self, event: object) -> None:
        """Writes a `StepEvent` or a `Verdict`; other events are none of its business."""
        if isinstance(event, StepEvent):
            self._write_step(event)
        elif isinstance(event, Verdict):
            self._writer.add_text(f"{self._prefix}/verdict", event.message, event.step)

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
            text = f"not finite: {', '.join(event.names) or 'unknown'}{loss}"
            self._writer.add_text(f"{name}/skipped", text, event.step)


def _open(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "TensorBoard(folder) needs the package tensorboard; write: "
            "pip install 'precast[tensorboard]', or give a writer of your own."
        ) from error
    return SummaryWriter(folder)
