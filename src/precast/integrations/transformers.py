"""A callback for the Transformers `Trainer` that trains on precast and logs values of the scaler and the monitor.

Needs the extra ``transformers``. The Trainer trains through Accelerate, so this uses `integrations/accelerate.py`.

Invariant: the callback's session starts when training begins, and ends when training ends or by `close`.
"""

from __future__ import annotations

import os
from typing import Any

from precast._internal.missing import missing_extra
from precast.grad_scaler.scaler import GradScaler
from precast.integrations.accelerate import AcceleratorSession, chosen_scaler
from precast.policy.policy import Policy, as_policy

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing_extra(
        "precast.integrations.transformers", "transformers", "transformers"
    ) from error

__all__ = ["PrecastCallback"]


class PrecastCallback(TrainerCallback):
    """``Trainer(..., callbacks=[PrecastCallback()])`` trains on precast.

    With each loss the Trainer logs "loss_scale" and "skipped_steps", the number of skipped steps so far, if it trains
    with a scaler; and "first_nonfinite", a sentence on the origin of infinite or NaN values, once a monitor has seen
    them. They are in ``trainer.state.log_history``, and reach the callbacks after this one.

    Args:
        policy: A `Policy`, the name of a preset or the path of a policy file. Its rules for modules act on the model.
        scaler: A `precast.GradScaler` with your own settings, for ``fp16=True`` on a GPU. None creates one with the
            settings of the Trainer's. A resumed checkpoint sets its scale.
        every: Number of steps between two counts of the model's values; None counts nothing.

    Attributes:
        used: The session of the current or latest training, with its `scaler` and `monitors`; None before the first.

    Raises:
        PolicyError: The policy cannot be read.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str] = "default",
        *,
        scaler: GradScaler | None = None,
        every: int | None = None,
    ) -> None:
        self.policy = as_policy(policy)
        self.used: AcceleratorSession | None = None
        self._scaler, self._every, self._has_reported = scaler, every, False

    def close(self) -> None:
        """End the session. Call it after an exception in the training, when the Trainer calls no callback."""
        if self.used is not None:
            self.used.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Start the session with the policy, the scaler and the monitor."""
        self.close()
        original = getattr(named["optimizer"], "scaler", None)
        resumed = original.state_dict() if original is not None and state.global_step else {}
        device = args.device.type
        precision = f"the Trainer has fp16={args.fp16}, bf16={args.bf16} on {device!r}"
        scaler = chosen_scaler(original, device, self._scaler, precision)
        self.used = AcceleratorSession(
            original, scaler, (named["model"],), self.policy, self._every
        )
        if self._scaler is not None and resumed:
            self._scaler.load_state_dict(resumed)
        self._has_reported = False

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """End the session."""
        self.close()

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Add values of the scaler and the monitor to the log of a loss; "first_nonfinite" only once."""
        logs = named.get("logs")
        if self.used is None or logs is None or "loss" not in logs:
            return
        values: dict[str, float | str] = {}
        scaler = self.used.scaler
        if scaler is not None and scaler.is_enabled():
            values |= {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.counters.skipped}
        first = next((m.first for m in self.used.monitors if m.first is not None), None)
        if first is not None and not self._has_reported:
            self._has_reported = True
            values["first_nonfinite"] = first.message
        logs.update(values)
        state.log_history[-1].update(values)
