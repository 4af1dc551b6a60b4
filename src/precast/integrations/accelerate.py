"""Accelerate on precast: `use` gives an `Accelerator` a policy, a scaler that says what it did, and a monitor.

Nothing of Accelerate's is replaced, and this file does not import it. The `torch.autocast` regions that Accelerate
opens, around models and in `accelerator.autocast()`, run on the policy that is installed. Its scaler, to which prepared
optimizers refer as well, stays the same object and gets the class and the contents of one of precast's.

Invariants: what `use` did ends with it: regions are PyTorch's again, and so is the scaler, with the scale it has then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from precast.attachment.attachment import attach
from precast.diagnostics.numerics.monitoring import monitor
from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler
from precast.integrations.torch_amp.installation import install
from precast.policy.policy import Policy, as_policy

__all__ = ["Use", "use"]


def use(
    accelerator: Any,
    *models: nn.Module,
    policy: Policy | str | os.PathLike[str] = "default",
    scaler: GradScaler | None = None,
    every: int | None = None,
) -> Use:
    """Has an `Accelerator` run on precast, before or after `prepare`.

    Regions are PyTorch's, so the policy is installed for the process, as Accelerate's own precision is.

    Args:
        accelerator: The `accelerate.Accelerator`.
        models: Models, as they are before `prepare`, whose parameters events are to name, and to whose modules the
            policy's rules for modules apply.
        policy: A `Policy`, the name of a preset or the path of a policy file.
        scaler: A `precast.GradScaler` with settings of your own, for "fp16". None is one with the settings and the
            scale that Accelerate's has.
        every: How many steps there are from one count of the models' numbers to the next; None watches no numbers.

    Returns:
        What is in use, to be ended by ``with`` or by its `end`.

    Raises:
        ScalerError: A scaler was given, and Accelerate has none here, or FSDP's.
        PolicyError: A policy that cannot be read.
    """
    theirs, device = accelerator.scaler, accelerator.device.type
    precision = f"its mixed_precision is {accelerator.mixed_precision!r} on {device!r}"
    return Use(theirs, chosen_scaler(theirs, device, scaler, precision), models, policy, every)


class Use:
    """What is in use until `end`; `use` makes it.

    Attributes:
        scaler: The scaler that is in use; None where there is none.
        attachments: What `attach` returned for each model.
        monitors: The monitor of each model, if they are watched.
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
            watched = models if every is not None else ()
            self.monitors = [parts.enter_context(monitor(model, every or 1)) for model in watched]
            if scaler is not None:
                parts.enter_context(_as(theirs, scaler))
            self._parts = parts.pop_all()

    def end(self) -> None:
        """Puts back what was there before; a second call does nothing."""
        self._parts.close()

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


def chosen_scaler(
    theirs: Any, device: str, scaler: GradScaler | None, precision: str
) -> GradScaler | None:
    """The scaler to use: the one that was given, or else one like `theirs`, if there is a scaler at all.

    Raises:
        ScalerError: a scaler was given and cannot be used; `precision` says what the trainer computes in.
    """
    if type(theirs) not in GradScaler.__mro__[:-1]:  # none, or a subclass of PyTorch's: FSDP's
        if scaler is None:
            return None
        found = "no scaler" if theirs is None else f"a {type(theirs).__name__}"
        raise ScalerError(
            f"there is {found} here for a precast.GradScaler to stand for: {precision}. Leave scaler out, or train in "
            "'fp16' on a device with a scaler, without FSDP's first version."
        )
    if scaler is not None or isinstance(theirs, GradScaler):
        return scaler or theirs
    ours = GradScaler(device, enabled=theirs.is_enabled())
    ours.load_state_dict(theirs.state_dict())
    return ours


@contextmanager
def _as(theirs: Any, ours: GradScaler) -> Iterator[None]:
    """Gives `theirs` the class and contents of `ours`, so that all references to it refer to a scaler of precast's."""
    before = theirs.__class__, theirs.__dict__
    theirs.__class__, theirs.__dict__ = type(ours), ours.__dict__
    try:
        yield
    finally:
        theirs.__class__, theirs.__dict__ = before
        if theirs.is_enabled() and ours.is_enabled():
            theirs.load_state_dict(ours.state_dict())
