"""Arguments of `tune`, and their validation before anything runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from precast.autocast_mode.arguments import dtype_of
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_RULES

__all__ = ["TuningOptions", "TuningProgress", "check_arguments", "check_options"]


@dataclass(frozen=True)
class TuningProgress:
    """The progress of a search, as plain data.

    Attributes:
        stage: the part of the search.
        text: its current work, in a few words.
        seconds: the seconds since the start.
        budget: in seconds.
        best: the name of the best setup that is proven so far.
    """

    stage: Literal["record", "errors", "costs", "prove", "done"]
    text: str
    seconds: float
    budget: float
    best: str


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Rarely used arguments of `tune`.

    Attributes:
        candidates: the 16-bit dtypes to try: torch.bfloat16, torch.float16; and float8 rules, such as "float8_rowwise",
            under which products of a policy in the first of these dtypes are tried.
        base: the policy to change: a `Policy`, a preset's name or a file's path.
        metric: ``metric(model, batch)`` is compared at the end of a training instead of the loss; smaller is better.
            For inference it is required: the value of the model's results for a batch.
        device_type: the device type of the model; None takes that of its parameters.
        seed: the random seed.
        progress: called with a `TuningProgress` before each part of the search.
    """

    candidates: Sequence[torch.dtype | str] = (torch.bfloat16,)
    base: Policy | str | os.PathLike[str] = "default"
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None
    device_type: str | None = None
    seed: int = 0
    progress: Callable[[TuningProgress], None] | None = None


def check_arguments(  # noqa: PLR0917 -- in the order of `tune`
    model: object,
    step: object,
    optimizer: object,
    objective: object,
    tolerance: object,
    budget: object,
) -> None:
    """Check the arguments of `tune`.

    Raises:
        TuningError: one has another type, or is out of its range.
    """
    if not isinstance(model, nn.Module):
        raise TuningError(f"model is {type(model).__name__}; it has to be a torch.nn.Module")
    _check_function("step", step, "a model and a batch")
    _check_function("optimizer", optimizer, "parameters")
    if step is None and optimizer is not None:
        raise TuningError(
            "optimizer needs step: pass the step of the training, or leave out optimizer for inference"
        )
    if objective not in ("time", "memory"):
        raise TuningError(f'objective is {objective!r}. Allowed: "time", "memory"')
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise TuningError(
            f"tolerance is {tolerance!r}; it has to be a number between 0 and 1, such as 0.01"
        )
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise TuningError(f"budget is {budget!r}; it has to be a number of seconds above 0")


def check_options(step: object, options: TuningOptions) -> list[torch.dtype | str]:
    """Check the options, and return the candidates as dtypes and rules.

    Raises:
        TuningError: one has another type or an unknown value.
    """
    candidates = options.candidates
    _check_function("metric", options.metric, "a model and a batch")
    if step is None and options.metric is None:
        raise TuningError(
            "step is None: pass step(model, batch), which returns the loss; for inference, pass "
            "options=TuningOptions(metric=...)"
        )
    allowed = torch.bfloat16, torch.float16, *FLOAT8_RULES
    names: list[torch.dtype | str] = []
    if not isinstance(candidates, str):
        names = [dtype_of(candidate) for candidate in candidates]
    if not names or any(name not in allowed for name in names):
        rules = ", ".join(repr(str(rule)) for rule in FLOAT8_RULES)
        raise TuningError(
            f"candidates is {candidates!r}; it has to be a sequence of torch.bfloat16, torch.float16, {rules}"
        )
    if step is None and any(name in FLOAT8_RULES for name in names):
        raise TuningError(
            f"candidates is {candidates!r}: float8 rules are tried in trainings, and without a step nothing is trained"
        )
    return names


def _check_function(name: str, value: object, arguments: str) -> None:
    if value is not None and not callable(value):
        raise TuningError(
            f"{name} is {type(value).__name__}; it has to be a function of {arguments}"
        )
