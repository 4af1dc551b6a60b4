"""`use`, which adds a policy, a `precast.GradScaler` and monitors to an `Accelerator`.

No name of Accelerate's is replaced, and this file does not import it. The `torch.autocast` regions that Accelerate
opens, around models and in `accelerator.autocast()`, use the installed policy. Prepared optimizers refer to its scaler,
so this object is not replaced: it gets the class and the attributes of a precast scaler.

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
        models: The models that are passed to `prepare`. Events name their parameters, and the policy's rules for
            modules apply to them.
        policy: A `Policy`, the name of a preset or the path of a policy file.
        scaler: A `precast.GradScaler` with your own settings, for "fp16". None creates one with the settings and the
            scale of Accelerate's.
        every: Number of steps between two counts of the models' values; None counts nothing.

    Returns:
        The session, which ends with its ``with`` block or by its `end`.

    Raises:
        ScalerError: A scaler was passed, but Accelerate has no scaler, or that of FSDP.
        PolicyError: The policy cannot be read.
    """
    original, device = accelerator.scaler, accelerator.device.type
    precision = f"its mixed_precision is {accelerator.mixed_precision!r} on {device!r}"
    scaler = chosen_scaler(original, device, scaler, precision)
    return AcceleratorSession(original, scaler, models, policy, every)


class AcceleratorSession(AbstractContextManager["AcceleratorSession"]):
    """The policy, scaler and monitors of an `Accelerator` until `end`; created by `use`.

    Attributes:
        scaler: The scaler in use; None if there is none.
        attachments: The attachment of each model.
        monitors: The monitor of each model, if values are counted.
    """

    def __init__(
        self,
        original: Any,
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
                parts.enter_context(_replace_contents(original, scaler))
            self._parts = parts.pop_all()

    def end(self) -> None:
        """Restore the previous state; a second call does nothing."""
        self._parts.close()

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def chosen_scaler(
    original: Any, device: str, scaler: GradScaler | None, precision: str
) -> GradScaler | None:
    """Return `scaler`, or else a scaler with the settings of `original`, or None if both are None.

    Raises:
        ScalerError: `scaler` cannot be used; `precision` describes the trainer's precision.
    """
    if type(original) not in GradScaler.__mro__[:-1]:  # None, or a subclass of PyTorch's: FSDP's
        if scaler is None:
            return None
        actual = "no scaler" if original is None else f"a {type(original).__name__}"
        raise ScalerError(
            f"a precast.GradScaler needs a scaler of the trainer that it can replace, but there is {actual}: "
            f"{precision}. Omit scaler, or train in 'fp16' on a device with a scaler, without FSDP1."
        )
    if scaler is not None or isinstance(original, GradScaler):
        return scaler or original
    ours = GradScaler(device, enabled=original.is_enabled())
    ours.load_state_dict(original.state_dict())
    return ours


@contextmanager
def _replace_contents(original: Any, ours: GradScaler) -> Iterator[None]:
    """Give `original` the class and attributes of `ours`, so that all references to it refer to a precast scaler."""
    before = original.__class__, original.__dict__
    original.__class__, original.__dict__ = type(ours), ours.__dict__
    try:
        yield
    finally:
        original.__class__, original.__dict__ = before
        if original.is_enabled() and ours.is_enabled():
            original.load_state_dict(ours.state_dict())
