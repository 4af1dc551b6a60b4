"""A precision plugin for Lightning: its `Trainer` and its `Fabric` use precast's regions and scaler.

Needs the extra ``lightning``. If the program has imported `pytorch_lightning` or `lightning_fabric`, and not
`lightning`, it is a plugin for those.

Invariants:
- with the policy "torch" a run gives the bits of one with Lightning's own `MixedPrecision`;
- no gradient is clipped while it is scaled, and each is divided by the scale that its loss was multiplied by: the scale
  changes when the next loss is scaled, not while other optimizers have yet to step.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from precast._internal.missing import missing_extra
from precast.attachment.attachment import Attachment, attach
from precast.autocast_mode.region import autocast
from precast.errors import RegionError, ScalerError
from precast.grad_scaler.scaler import GradScaler
from precast.policy.policy import Policy, as_policy

__all__ = ["Precast"]

_OLD: Final = {"pytorch_lightning", "lightning_fabric"}
_IS_OLD: Final = "lightning" not in sys.modules and not _OLD.isdisjoint(sys.modules)
_TRAINER, _FABRIC = sorted(_OLD)[::-1] if _IS_OLD else ("lightning.pytorch", "lightning.fabric")
try:
    _InTrainer: Any = import_module(f"{_TRAINER}.plugins").MixedPrecision
    _InFabric: Any = import_module(f"{_FABRIC}.plugins").MixedPrecision
    _Wrapped: Any = import_module(f"{_TRAINER}.core.optimizer").LightningOptimizer
except ImportError as error:
    raise missing_extra("precast.integrations.lightning", "lightning", "lightning") from error

_DTYPES: Final = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def _by_owner(name: str) -> Callable[..., Any]:
    """A method that calls the `Trainer`'s plugin's method of that name, or `Fabric`'s."""

    def method(self: Precast, *args: Any, **kwargs: Any) -> Any:
        owner = _InTrainer if self._is_trainers else _InFabric
        return getattr(owner, name)(self, *args, **kwargs)

    return method


class Precast(_InTrainer, _InFabric):
    """Mixed precision by precast: ``Trainer(plugins=[Precast("16-mixed")])``, and the same for `Fabric`.

    Args:
        precision: "bf16-mixed", or "16-mixed", which scales the loss; Lightning's words.
        device: The device type of the regions: "cuda", "cpu" ... None is that of the model.
        scaler: A `precast.GradScaler` with settings of your own, for "16-mixed". None is one with the defaults.
        policy: A `Policy`, the name of a preset or the path of a policy file. None is the one that is installed, or
            else "default". Its rules for modules act on the models that Lightning sets up.
        hold: Whether the weights of those models are cast once and held, as by ``attach(model)``.

    Attributes:
        attachments: What `attach` returned for each model that is set up; the `Trainer` ends them with its run.

    Raises:
        RegionError: A precision that is neither.
        PolicyError: A policy that cannot be read.
        ScalerError: A scaler that is not precast's, or one for "bf16-mixed", which needs none.
    """

    def __init__(
        self,
        precision: str = "bf16-mixed",
        device: str | None = None,
        scaler: GradScaler | None = None,
        *,
        policy: Policy | str | os.PathLike[str] | None = None,
        hold: bool = False,
    ) -> None:
        _check(precision, scaler)
        self.precision = precision
        self.policy = None if policy is None else as_policy(policy)
        self.attachments: list[Attachment] = []
        self._desired_input_dtype = _DTYPES[precision]  # Fabric's `MixedPrecision` reads it
        self._device, self._scaler, self._hold = device, scaler, hold
        self._model: weakref.ref[nn.Module] | None = None
        self._is_trainers = False
        self._has_stepped = False

    @property
    def device(self) -> str:
        """The device type of the regions and the scaler."""
        if self._device is not None:
            return self._device
        model = None if self._model is None else self._model()
        parameter = None if model is None else next(model.parameters(), None)
        if parameter is not None:
            return parameter.device.type
        accelerator = torch.accelerator.current_accelerator()
        return "cpu" if accelerator is None else accelerator.type

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, once the iteration that has stepped is over; None for "bf16-mixed"."""
        self._end_iteration()
        return self._made()

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        _check(self.precision, scaler)
        self._scaler = scaler

    def _made(self) -> GradScaler | None:
        """The scaler as it is during the iteration that has stepped, made if it is needed."""
        if self._scaler is None and self.precision == "16-mixed":
            self._scaler = GradScaler(self.device)
        return self._scaler

    def _end_iteration(self) -> None:
        if self._has_stepped and self._scaler is not None:
            self._has_stepped = False
            self._scaler.update()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Attaches the policy's rules for modules to the model, and takes the device from it."""
        self._model = weakref.ref(module)
        policy = self.policy if self.policy is not None and self.policy.modules else None
        self.attachments.append(attach(module, policy, hold=self._hold))
        return module

    def connect(self, *trained: Any) -> Any:
        """Notes that the `Trainer` uses this plugin: only it calls this, before anything else of a run."""
        self._is_trainers = True
        return super().connect(*trained)

    def teardown(self) -> None:
        """Ends what holds for one run of the `Trainer`."""
        for attachment in self.attachments:
            attachment.detach()
        self.attachments, self._model, self._is_trainers = [], None, False
        super().teardown()

    def forward_context(self) -> AbstractContextManager[Any]:
        """A region of precast's."""
        # The Trainer's own plugin casts a weight at each use, so that the gradients of the uses are added in float32.
        cache = False if self._is_trainers and not self._hold else None
        return autocast(self.device, self._desired_input_dtype, True, cache, policy=self.policy)

    autocast_context_manager = forward_context
    convert_input = _by_owner("convert_input")
    convert_output = _by_owner("convert_output")
    pre_backward = _by_owner("pre_backward")
    backward = _by_owner("backward")
    post_backward = _by_owner("post_backward")

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Steps the optimizer; through the scaler, if there is one."""
        scaler = self._made()
        if scaler is None:
            return _by_owner("optimizer_step")(self, optimizer, **kwargs)
        if self._is_trainers:
            return self._step_for_trainer(scaler, optimizer, **kwargs)
        if kwargs.get("closure") is not None:
            self._end_iteration()  # the closure scales another loss
        result = scaler.step(optimizer, **kwargs)
        self._has_stepped = True
        return result

    def _step_for_trainer(
        self,
        scaler: GradScaler,
        optimizer: Any,
        model: Any,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ScalerError(
                "LBFGS calls backward several times in a step, which the Trainer's hooks and clipping under a loss "
                'scale do not allow. Use Precast("bf16-mixed"), or Fabric, where a scaled LBFGS works.'
            )
        loss = closure()
        if loss is None and model.automatic_optimization:
            return None  # training_step left this batch out, so there is no step
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        result = scaler.step(optimizer, **kwargs)
        self._has_stepped = True
        if model.automatic_optimization:
            self._end_iteration()  # no other optimizer has yet to step
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divides the gradients by the scale, if there is one and this was not done before."""
        scaler = self._made()
        if scaler is not None and not scaler.is_unscaled(optimizer):
            scaler.unscale_(optimizer)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Unscales the gradients, also those of a fused optimizer, which does so itself in its step, and clips them."""
        if clip_val > 0:
            optimizer = optimizer.optimizer if isinstance(optimizer, _Wrapped) else optimizer
            self.unscale_gradients(optimizer)
            super(_InTrainer, self).clip_gradients(optimizer, clip_val, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes the scaler's state under the name of Lightning's own plugin as well, which can load it then."""
        state = self.state_dict()
        if state:
            checkpoint[_InTrainer.__qualname__] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the scaler's state from a checkpoint of Lightning's own plugin."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint.get(_InTrainer.__qualname__, {}))


def _check(precision: str, scaler: object) -> None:
    if precision not in _DTYPES:
        raise RegionError(
            f"Precast(precision={precision!r}): write {' or '.join(map(repr, _DTYPES))}. Other precisions are "
            "Lightning's own: Trainer(precision=...)."
        )
    if scaler is not None and (precision != "16-mixed" or not isinstance(scaler, GradScaler)):
        raise ScalerError(
            f"Precast({precision!r}, scaler={scaler!r}): a scaler is for '16-mixed', and a precast.GradScaler."
        )
