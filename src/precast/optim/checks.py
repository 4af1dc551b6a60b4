"""Errors for optimizers and parameters that `bfloat16_weights` does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from precast._torch import is_dtensor
from precast.errors import AttachError
from precast.optim.low_precision_weights import active
from precast.optim.rounding import SEED, Rounding
from precast.optim.shards import part_of

__all__ = ["check", "refuse_copy"]


def check(optimizer: Optimizer, parameters: Mapping[str, Tensor], how: Rounding) -> None:
    """Raise an error for an optimizer or a parameter that is not supported.

    Raises:
        AttachError: the optimizer or a parameter is not supported.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise AttachError(
            f'bfloat16_weights(masters="{how}") got a {kind}, which does not compute a step from one dense '
            "gradient for each weight. Train with an optimizer that does, such as AdamW."
        )
    stored = {id(p): weights for weights in active for p in weights.parameters()}
    for name, parameter in parameters.items():
        theirs = stored[id(parameter)].optimizer if id(parameter) in stored else None
        if theirs is not None:
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is stored without a master already, for the step of '
                f"{'this' if theirs is optimizer else 'another'} {type(theirs).__name__}. The rounding error of a "
                "weight can be stored for one optimizer only: give each its own parameters, or remove the other."
            )
        if is_dtensor(parameter):
            _check_sharded(name, parameter, how)
        elif type(parameter) not in (Tensor, nn.Parameter) or parameter.layout is not torch.strided:
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is a {type(parameter).__name__} with layout '
                f"{parameter.layout}; expected a plain, strided parameter. Leave it out of this optimizer."
            )
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is {parameter.dtype}; expected torch.float32 or '
                "torch.bfloat16. Convert it first."
            )


def _check_sharded(name: str, parameter: Tensor, how: Rounding) -> None:
    if parameter.dtype is not torch.bfloat16:
        raise AttachError(
            f'bfloat16_weights(masters="{how}"): {name} is sharded, and {parameter.dtype}: its memory is '
            "allocated. Convert the model to torch.bfloat16 first (model.bfloat16()), and shard it then."
        )
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    is_sum = any(placement.is_partial() for placement in placements)
    if is_sum or type(part_of(parameter)) is not Tensor:
        raise AttachError(
            f'bfloat16_weights(masters="{how}"): {name} is sharded as {placements}, '
            f"and the part in a process is a {type(part_of(parameter)).__name__}; expected plain parts, "
            "and no sums of parts. Leave it out of this optimizer."
        )


def refuse_copy(optimizer: Optimizer) -> None:
    """Raise an error if an optimizer has states of weights in bfloat16, and no hooks to step these."""
    if any(weights.optimizer is optimizer for weights in active):
        return
    for parameter, states in optimizer.state.items():
        if SEED in states and parameter.dtype is torch.bfloat16:
            kind = type(optimizer).__name__
            raise AttachError(
                f"{kind}.step(): this {kind} has states of bfloat16_weights for a parameter of shape "
                f"{tuple(parameter.shape)}, and steps it without the hooks of bfloat16_weights: copies and pickles "
                "do not have them. Call precast.optim.bfloat16_weights(model, optimizer) before the step."
            )
