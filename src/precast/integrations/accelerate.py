"""Accelerate on precast: `use` gives an `Accelerator` a policy, a scaler that reports its steps, and a monitor.

No name of Accelerate's is replaced, and this file does not import it. The `torch.autocast` regions that Accelerate
opens, around models and in `accelerator.autocast()`, use the installed policy. Its scaler, which prepared optimizers
refer to as well, stays the same object and gets the class and the contents of a precast scaler.

Invariant: the end of `use` restores PyTorch's regions and scaler, with the current scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

import precast
from precast.attachment.attachment import attach
from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler
from precast.integrations.torch_amp.installation import install
from precast.policy.policy import Policy, as_policy

__all__ = ["AcceleratorSession", "use"]


def use(
    accelerator: Any,
    *models: nn.Module,
    policy: Policy | str | os.PathLike[str] = "default",
    scaler: GradScaler | None = None,
    every: int | None = None,
) -> AcceleratorSession:
    """Run an `Accelerator` on precast, before or after `prepare`.

    Accelerate's regions are PyTorch's, so the policy is installed for the whole process, like Accelerate's precision.

    Args:
        accelerator: The `accelerate.Accelerator`.
        models: Models, as passed to `prepare`: events use the names of their parameters, and the policy's rules for
            modules apply to their modules.
        policy: A `Policy`, the name of a preset or the path of a policy file.
        scaler: A `precast.GradScaler` with your own settings, for "fp16". None creates one with the settings and the
            scale of Accelerate's.
        every: Number of steps between two counts of the models' numbers; None counts nothing.

    Returns:
        The session, which ends with its ``with`` block or by its `end`.

    Raises:
        ScalerError: A scaler was passed, but Accelerate has none here, or FSDP's.
        PolicyError: The policy cannot be read.
    """
    theirs, device = accelerator.scaler, accelerator.device.type
    precision = f"its mixed_precision is {accelerator.mixed_precision!r} on {device!r}"
    scaler = chosen_scaler(theirs, device, scaler, precision)
    return AcceleratorSession(theirs, scaler, models, policy, every)


class AcceleratorSession(AbstractContextManager["AcceleratorSession"]):
    """The policy, scaler and monitors of an `Accelerator` until `end`; created by `use`.

    Attributes:
        scaler: The scaler in use; None if there is none.
        attachments: The attachment of each model.
        monitors: The monitor of each model, if numbers are counted.
    """

    def __init__(
        self,
        theirs: Any,
        scaler: GradScaler | None,
        models: tuple[nn.Module, ...],
        policy: Policy | str | os.PathLike[str],
        every: int | None,
    ) -> None:
        policy = as_policy(policy)
        self.scaler = scaler
        rules = policy if policy.modules else None
        with ExitStack() as parts:
            parts.enter_context(install(policy))
            self.attachments = [
                parts.enter_context(attach(model, rules, hold=False)) for model in models
            ]
            monitored = models if every is not None else ()
            self.monitors = [
                parts.enter_context(precast.monitor(model, every or 1)) for model in monitored
            ]
            if scaler is not None:
                parts.enter_context(_as(theirs, scaler))
            self._parts = parts.pop_all()

    def end(self) -> None:
        """Restore the previous state; a second call does nothing."""
        self._parts.close()

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def chosen_scaler(
    theirs: Any, device: str, scaler: GradScaler | None, precision: str
) -> GradScaler | None:
    """Return the scaler to use: `scaler`, or else one like `theirs`, or None if there is no scaler at all.

    Raises:
        ScalerError: `scaler` cannot be used; `precision` describes the trainer's precision.
    """
    if type(theirs) not in GradScaler.__mro__[:-1]:  # None, or a subclass of PyTorch's: FSDP's
        if scaler is None:
            return None
        actual = "no scaler" if theirs is None else f"a {type(theirs).__name__}"
        raise ScalerError(
            f"a precast.GradScaler needs a scaler of the trainer that it can replace, but there is {actual}: "
            f"{precision}. Leave scaler out, or train in 'fp16' on a device with a scaler, without FSDP1."
        )
    if scaler is not None or isinstance(theirs, GradScaler):
        return scaler or theirs
    ours = GradScaler(device, enabled=theirs.is_enabled())
    ours.load_state_dict(theirs.state_dict())
    return ours


@contextmanager
def _as(theirs: Any, ours: GradScaler) -> Iterator[None]:
    """Give `theirs` the class and contents of `ours`, so that all references to it refer to a precast scaler."""
    before = theirs.__class__, theirs.__dict__
    theirs.__class__, theirs.__dict__ = type(ours), ours.__dict__
    try:
        yield
    finally:
        theirs.__class__, theirs.__dict__ = before
        if theirs.is_enabled() and ours.is_enabled():
            theirs.load_state_dict(ours.state_dict())
