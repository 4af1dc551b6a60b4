"""The results of a client's run, and the differences of two runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Outcome = dict[str, Tensor]
"""Name -> tensor: every step's loss, and all parameters, buffers, gradients and outputs at the end."""


def outcome(model: nn.Module, losses: Iterable[Tensor | float], **outputs: Tensor) -> Outcome:
    """Copies of all that a run computed."""
    result = {f"loss {step}": torch.as_tensor(loss) for step, loss in enumerate(losses)}
    result |= {f"output {name}": value for name, value in outputs.items()}
    for name, parameter in model.named_parameters():
        result[f"parameter {name}"] = parameter
        if parameter.grad is not None:
            result[f"gradient {name}"] = parameter.grad
    result |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {name: value.detach().clone() for name, value in result.items()}


def steps_in(run: Outcome) -> int:
    """The number of losses of a run."""
    return sum(name.startswith("loss ") for name in run)


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    """The names of all that is not equal bit for bit, or that only one of the two has."""
    return [
        name
        for name in ours | theirs
        if name not in ours or name not in theirs or not _same(ours[name], theirs[name])
    ]


def not_finite(run: Outcome) -> list[str]:
    """Losses, parameters and outputs that hold an infinity or NaN; float16 gradients may."""
    return [
        name
        for name, value in run.items()
        if not name.startswith("gradient ") and not value.isfinite().all()
    ]


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype is theirs.dtype and torch.equal(ours, theirs)
