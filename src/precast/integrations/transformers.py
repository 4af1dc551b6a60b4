"""A callback for the Transformers `Trainer`: it trains on precast, and logs what the scaler and the monitor say.

Needs the extra ``transformers``. The Trainer trains through Accelerate, so this uses `integrations/accelerate.py`.

Invariants: what the callback puts in use when training begins is ended when training ends, or by `close`.
"""

from __future__ import annotations

import os
from typing import Any

from precast._internal.missing import missing_extra
from precast.grad_scaler.scaler import GradScaler
from precast.integrations.accelerate import Use, chosen_scaler
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

    With each loss the Trainer logs "loss_scale" and "skipped_steps", the number of steps so far that were skipped, if
    it trains under a scaler; and "first_nonfinite", a sentence on where numbers first became infinite or NaN, once a
    monitor has seen that. They are in ``trainer.state.log_history``, and reach the callbacks that come after this one.

    Args:
        policy: A `Policy`, the name of a preset or the path of a policy file. Its rules for modules act on the model.
        scaler: A `precast.GradScaler` with settings of your own, for ``fp16=True`` on a GPU. None is one with the
            settings of the Trainer's. A checkpoint that is resumed from gives it its scale.
        every: How many steps there are from one count of the model's numbers to the next; None watches no numbers.

    Attributes:
        used: What the Trainer trains with, or trained with last: its `scaler` and `monitors`; None before it trains.

    Raises:
        PolicyError: A policy that cannot be read.
    """

    def __init__(
        self,
        policy: Policy | str | os.PathLike[str] = "default",
        *,
        scaler: GradScaler | None = None,
        every: int | None = None,
    ) -> None:
        self.policy = as_policy(policy)
        self.used: Use | None = None
        self._scaler, self._every, self._has_told = scaler, every, False

    def close(self) -> None:
        """Ends what is in use; to be called after an exception, of which the Trainer tells no callback."""
        if self.used is not None:
            self.used.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Puts the policy, the scaler and the monitor in use."""
        self.close()
        theirs = getattr(named["optimizer"], "scaler", None)
        resumed = theirs.state_dict() if theirs is not None and state.global_step else {}
        device = args.device.type
        precision = f"the Trainer has fp16={args.fp16}, bf16={args.bf16} on {device!r}"
        scaler = chosen_scaler(theirs, device, self._scaler, precision)
        self.used = Use(theirs, scaler, (named["model"],), self.policy, self._every)
        if self._scaler is not None and resumed:
            self._scaler.load_state_dict(resumed)
        self._has_told = False

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ends what is in use."""
        self.close()

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Adds what the scaler and the monitor say to the log of a loss; the sentence on numbers once."""
        logs = named.get("logs")
        if self.used is None or logs is None or "loss" not in logs:
            return
        said: dict[str, float | str] = {}
        scaler = self.used.scaler
        if scaler is not None and scaler.is_enabled():
            said |= {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.counters.skipped}
        first = next((m.first for m in self.used.monitors if m.first is not None), None)
        if first is not None and not self._has_told:
            self._has_told = True
            said["first_nonfinite"] = first.message
        logs.update(said)
        state.log_history[-1].update(said)
