"""PyTorch Ignite on precast: an update function with a region and a scaler, and the scaler's figures as metrics.

Needs the extra ``ignite``. Ignite's own update function for mixed precision opens regions for CUDA only, with PyTorch's
policy. It accepts a `precast.GradScaler` too, and so does `ignite.handlers.Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from precast._internal.missing import missing_extra
from precast.autocast_mode.region import autocast
from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler

try:
    from ignite.engine import Engine, Events
    from ignite.utils import convert_tensor
except ImportError as error:
    raise missing_extra("precast.integrations.ignite", "pytorch-ignite", "ignite") from error

__all__ = ["ScalerMetrics", "supervised_training_step"]


def supervised_training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    region: autocast,
    *,
    scaler: GradScaler | None = None,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] | None = None,
    model_transform: Callable[[Any], Any] = lambda output: output,
    output_transform: Callable[..., Any] = lambda x, y, y_pred, loss: loss.item(),  # noqa: ARG005
    gradient_accumulation_steps: int = 1,
    model_fn: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
    max_norm: float | None = None,
) -> Callable[[Engine, Any], Any]:
    """Return an update function for `Engine` like Ignite's `supervised_training_step_amp`, in a region of precast's.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_fn: Called in the region, with the predictions and the targets.
        region: ``precast.autocast("cuda", policy=...)``; model and loss run in it.
        scaler: A scaler, which float16 needs; None for no scaling, as bfloat16 needs none.
        device: Device of the batches; None does not move them.
        non_blocking: Copy batches asynchronously.
        prepare_batch: Called as ``prepare_batch(batch, device=device, non_blocking=non_blocking)``, returns inputs and
            targets. None is for batches of two.
        model_transform: Computes predictions from the model's output.
        output_transform: Computes ``engine.state.output`` from inputs, targets, predictions and the loss.
        gradient_accumulation_steps: Iterations for each step of the optimizer; their losses are averaged.
        model_fn: Calls the model.
        max_norm: Maximum norm of the unscaled gradients before each step; None for no clipping.

    Raises:
        ScalerError: `scaler` is not a `precast.GradScaler`.
        ValueError: `gradient_accumulation_steps` is less than 1.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ScalerError(
            f"supervised_training_step(scaler={scaler!r}): pass a precast.GradScaler."
        )
    if gradient_accumulation_steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps must be 1 or more; got {gradient_accumulation_steps!r}."
        )
    steps, prepare = gradient_accumulation_steps, prepare_batch or _prepared
    step_scaler = scaler if scaler is not None else GradScaler("cpu", enabled=False)

    def update(engine: Engine, batch: Any) -> Any:
        if (engine.state.iteration - 1) % steps == 0:
            optimizer.zero_grad()
        model.train()
        x, y = prepare(batch, device=device, non_blocking=non_blocking)
        with region:
            y_pred = model_transform(model_fn(model, x))
            loss = loss_fn(y_pred, y) / steps
        step_scaler.scale(loss).backward()
        if engine.state.iteration % steps == 0:
            if max_norm is not None:
                step_scaler.clip_grad_norm_(optimizer, max_norm)
            step_scaler.step(optimizer)
            step_scaler.update()
        return output_transform(x, y, y_pred, loss * steps)

    return update


class ScalerMetrics:
    """Writes "loss_scale" and "skipped_steps" to ``engine.state.metrics``, for Ignite's loggers.

    Args:
        scaler: A `precast.GradScaler`.
        prefix: Prefix of both names.

    Example: ``ScalerMetrics(scaler).attach(trainer, Events.ITERATION_COMPLETED(every=10))``.
    """

    def __init__(self, scaler: GradScaler, prefix: str = "") -> None:
        if not isinstance(scaler, GradScaler):
            raise ScalerError(f"ScalerMetrics({scaler!r}): pass a precast.GradScaler.")
        self._scaler, self._prefix = scaler, prefix

    def attach(self, engine: Engine, event: Any = Events.ITERATION_COMPLETED) -> None:
        """Make `engine` write both figures at each `event`, which waits for the device."""
        engine.add_event_handler(event, self)

    def __call__(self, engine: Engine) -> None:
        """Write both figures once."""
        engine.state.metrics[f"{self._prefix}loss_scale"] = self._scaler.get_scale()
        engine.state.metrics[f"{self._prefix}skipped_steps"] = self._scaler.counters.skipped


def _prepared(batch: Any, device: Any, non_blocking: bool) -> tuple[Any, Any]:
    x, y = (convert_tensor(each, device=device, non_blocking=non_blocking) for each in batch)
    return x, y
