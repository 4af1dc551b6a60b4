"""Which weights of a model are stored in which dtype, and whether that can be had.

Invariants: what is refused has changed nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._torch import is_dtensor
from precast.errors import AttachError
from precast.policy.module_names import named_parameters
from precast.weights.partial_steps import is_large, parameters_of
from precast.weights.stored_weights import (
    StoredWeights,
    check,
    is_distributed,
    is_worth_storing_low,
)

__all__ = ["Storage", "check_states"]


class Storage(NamedTuple):
    """What `attach` was asked about masters, states, and the chances of rounding."""

    masters: Literal["float32", "kahan", "stochastic"] | None
    states: torch.dtype | None
    generator: torch.Generator | None

    def check(self, model: nn.Module, optimizer: Optimizer | None, *, hold: bool) -> None:
        """Refuses what cannot be had.

        Raises:
            AttachError: says what was asked, what is allowed, and what to do.
        """
        if self.masters not in (None, "float32", "kahan", "stochastic"):
            raise AttachError(
                f'attach(masters={self.masters!r}): give "kahan" or "stochastic", with which weights in bfloat16 '
                'learn, "float32", or None, which leaves parameters as they are.'
            )
        if self.states not in (None, torch.float32, torch.bfloat16):
            raise AttachError(
                f"attach(states={self.states!r}): states are stored in torch.bfloat16 or torch.float32. Give one of "
                "these, or None for torch.float32."
            )
        how = self.masters or "float32"
        if how == "float32" and self.states is torch.bfloat16:
            raise AttachError(
                'attach(states=torch.bfloat16) is for weights in bfloat16: add masters="kahan" or "stochastic", or '
                "leave states out."
            )
        if self.masters is None:
            return
        if optimizer is None or not hold:
            raise AttachError(
                f'attach(masters="{how}") needs the optimizer that trains these weights: '
                f'attach(model, optimizer=optimizer, masters="{how}").'
            )
        changed = [
            name for name, p in self._chosen(model, optimizer) if p.dtype is not self._stored
        ]
        if changed and _is_in_ddp(model):
            raise AttachError(
                f'attach(masters="{how}") is to change the dtype of {changed[0]}, which DistributedDataParallel has '
                "made its buffers for. Attach the model first, and wrap it then."
            )
        for name, parameter in self._chosen(model, optimizer):
            if self.masters == "float32" and is_dtensor(parameter):
                raise AttachError(
                    f'attach(masters="float32"): {name} is sharded and {parameter.dtype}, and what has sharded it has '
                    "allocated its memory. Shard a float32 model, for FSDP2 with "
                    "MixedPrecisionPolicy(param_dtype=torch.bfloat16): its shards are masters, and it gathers 16 bits."
                )
        if self.masters in ("kahan", "stochastic"):
            check(optimizer, dict(self._chosen(model, optimizer)), self.masters)

    def apply(self, model: nn.Module, optimizer: Optimizer) -> StoredWeights | None:
        """Changes the weights; None where the optimizer then steps them as before."""
        chosen = dict(self._chosen(model, optimizer))
        if self.masters in ("kahan", "stochastic"):
            states = self.states or torch.float32
            stored = StoredWeights(optimizer, chosen, self.masters, states, self._seed())
            stored.average_in_float32(model)
            return stored
        for parameter in chosen.values() if self.masters is not None else ():
            parameter.data = parameter.detach().float()
        return None

    @property
    def _stored(self) -> torch.dtype:
        return torch.float32 if self.masters == "float32" else torch.bfloat16

    def _chosen(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        trained = set(map(id, parameters_of(optimizer)))
        for name, parameter in named_parameters(model):
            if id(parameter) not in trained:
                continue
            is_low = parameter.dtype in (torch.bfloat16, torch.float16)
            becomes_low = self.masters != "float32" and parameter.dtype is torch.float32
            if is_low or (becomes_low and is_worth_storing_low(parameter)):
                yield name, parameter

    def _seed(self) -> int:
        """The same in all processes of a group, where none is given: replicas are rounded alike."""
        if self.generator is None and is_distributed():
            return 0
        return int(torch.randint(2**31, (), generator=self.generator))


def check_states(model: nn.Module, optimizer: Optimizer, *, stored_low: bool, asked: str) -> None:
    """Refuses an optimizer that has states already which a compiled step does not compute with.

    Args:
        model: whose parameters are looked at.
        optimizer: whose states they are.
        stored_low: whether large weights become bfloat16, whose states may be bfloat16, too.
        asked: what `attach` was asked for.

    Raises:
        AttachError: says which state of which parameter has which dtype.
    """
    for name, parameter in named_parameters(model):
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            continue
        is_low = stored_low and (
            parameter.dtype is torch.bfloat16 or is_worth_storing_low(parameter)
        )
        allowed = (torch.float32, torch.bfloat16) if is_low else (parameter.dtype, torch.float32)
        for key, value in optimizer.state.get(parameter, {}).items():
            if is_large(value) and value.is_floating_point() and value.dtype not in allowed:
                raise AttachError(
                    f"attach({asked}): the optimizer's state {key!r} of {name} is {value.dtype}, and the parameter is "
                    f"{parameter.dtype}. States are float32, or bfloat16 with states=torch.bfloat16. Convert it, or "
                    "make the optimizer anew."
                )


def _is_in_ddp(model: nn.Module) -> bool:
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    return ddp is not None and any(
        isinstance(module, ddp.DistributedDataParallel) for module in model.modules()
    )
