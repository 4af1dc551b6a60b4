"""A precision plugin for Lightning: its `Trainer` and its `Fabric` use precast's regions and scaler.

Needs the extra ``lightning``. If the program has imported `pytorch_lightning` or `lightning_fabric` but not
`lightning`, it is a plugin for those.

Invariants:
- with the policy "torch" a run has the same bits as with Lightning's own `MixedPrecision`;
- gradients are never clipped while they are scaled, and each is divided by the scale of its loss: the scale changes
  when the next loss is scaled, not before all optimizers have stepped.
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
    """Return a method that calls the method of that name in the `Trainer`'s or `Fabric`'s plugin."""

    def method(self: Precast, *args: Any, **kwargs: Any) -> Any:
        owner = _InTrainer if self._is_trainers else _InFabric
        return getattr(owner, name)(self, *args, **kwargs)

    return method


class Precast(_InTrainer, _InFabric):
    """Mixed precision by precast: ``Trainer(plugins=[Precast("16-mixed")])``, and the same for `Fabric`.

    Args:
        precision: "bf16-mixed", or "16-mixed", which scales the loss, as in Lightning.
        device: The device type of the regions: "cuda", "cpu" ... None for that of the model.
        scaler: A `precast.GradScaler` with your own settings, for "16-mixed". None for the default settings.
        policy: A `Policy`, the name of a preset or the path of a policy file. None for the installed one, or else
            "default". Its rules for modules act on the models that Lightning sets up.
        hold: Cast the weights of those models once and hold them, as ``attach(model)`` does.

    Attributes:
        attachments: The attachment of each model that is set up; they end with a run of the `Trainer`.

    Raises:
        RegionError: `precision` is invalid.
        PolicyError: The policy cannot be read.
        ScalerError: The scaler is not precast's, or was passed with "bf16-mixed", which needs none.
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
        """The scaler, after the end of the iteration that has stepped; None for "bf16-mixed"."""
        self._end_iteration()
        return self._iteration_scaler()

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        _check(self.precision, scaler)
        self._scaler = scaler

    def _iteration_scaler(self) -> GradScaler | None:
        """Return the scaler without ending the iteration; create it if necessary."""
        if self._scaler is None and self.precision == "16-mixed":
            self._scaler = GradScaler(self.device)
        return self._scaler

    def _end_iteration(self) -> None:
        if self._has_stepped and self._scaler is not None:
            self._has_stepped = False
            self._scaler.update()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Attach the policy's rules for modules to the model, and use its device."""
        self._model = weakref.ref(module)
        policy = self.policy if self.policy is not None and self.policy.modules else None
        self.attachments.append(attach(module, policy, hold=self._hold))
        return module

    def connect(self, *trained: Any) -> Any:
        """Record that the `Trainer` uses this plugin: only the `Trainer` calls this, first of all."""
        self._is_trainers = True
        return super().connect(*trained)

    def teardown(self) -> None:
        """End the attachments of one run of the `Trainer`."""
        for attachment in self.attachments:
            attachment.detach()
        self.attachments, self._model, self._is_trainers = [], None, False
        super().teardown()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a region of precast's."""
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
        """Step the optimizer, through the scaler if there is one."""
        scaler = self._iteration_scaler()
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
            return None  # training_step skipped this batch, so there is no step
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        result = scaler.step(optimizer, **kwargs)
        self._has_stepped = True
        if model.automatic_optimization:
            self._end_iteration()  # no other optimizer steps in it
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, if there is one and they are still scaled."""
        scaler = self._iteration_scaler()
        if scaler is not None and not scaler.is_unscaled(optimizer):
            scaler.unscale_(optimizer)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Unscale and clip the gradients, also those of a fused optimizer, whose step would unscale them itself."""
        if clip_val > 0:
            optimizer = optimizer.optimizer if isinstance(optimizer, _Wrapped) else optimizer
            self.unscale_gradients(optimizer)
            super(_InTrainer, self).clip_gradients(optimizer, clip_val, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scaler's state also under the name of Lightning's own plugin, which can load it then."""
        state = self.state_dict()
        if state:
            checkpoint[_InTrainer.__qualname__] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the scaler's state from a checkpoint of Lightning's own plugin."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint.get(_InTrainer.__qualname__, {}))


def _check(precision: str, scaler: object) -> None:
    if precision not in _DTYPES:
        raise RegionError(
            f"Precast(precision={precision!r}): expected {' or '.join(map(repr, _DTYPES))}. Pass other precisions "
            "to Lightning: Trainer(precision=...)."
        )
    if scaler is not None and (precision != "16-mixed" or not isinstance(scaler, GradScaler)):
        raise ScalerError(
            f"Precast({precision!r}, scaler={scaler!r}): pass a precast.GradScaler, with '16-mixed' only."
        )
