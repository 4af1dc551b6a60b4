"""Checks what `tune` is asked, before anything runs.

Invariant: what is wrong raises an error that says what was given, and what it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from precast.errors import TuningError
from precast.policy.rows import FLOAT8_RULES
from precast.tuning.ranks import are_several

__all__ = ["check", "check_study", "check_task", "device_type_of"]


def check(  # noqa: PLR0917 -- in the order of `tune`
    model: object,
    step: object,
    objective: object,
    tolerance: object,
    budget: object,
    candidates: Sequence[torch.dtype | str],
    metric: object,
) -> None:
    """Checks what can be checked before anything runs.

    Raises:
        TuningError: something is of another type, or not between its limits.
    """
    if not isinstance(model, nn.Module):
        raise TuningError(f"model is {type(model).__name__}; it has to be a torch.nn.Module")
    if metric is not None and not callable(metric):
        raise TuningError(
            f"metric is {type(metric).__name__}; it has to be a function of a model and a batch"
        )
    if not callable(step) and (step is not None or metric is None):
        raise TuningError(
            f"step is {type(step).__name__}; it has to be a function of a model and a batch"
        )
    if objective not in ("time", "memory"):
        raise TuningError(f'objective is {objective!r}. Allowed: "time", "memory"')
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise TuningError(
            f"tolerance is {tolerance!r}; it has to be a number between 0 and 1, such as 0.01"
        )
    if not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise TuningError(f"budget is {budget!r}; it has to be a number of seconds above 0")
    known = torch.bfloat16, torch.float16, *FLOAT8_RULES
    if not candidates or isinstance(candidates, str) or any(c not in known for c in candidates):
        rules = ", ".join(repr(str(rule)) for rule in FLOAT8_RULES)
        raise TuningError(
            f"candidates is {candidates!r}; it has to be a sequence of torch.bfloat16, torch.float16, {rules}"
        )
    if step is None and any(candidate in FLOAT8_RULES for candidate in candidates):
        raise TuningError(
            f"candidates is {candidates!r}: float8 rules are tried in trainings, and without a step nothing is trained"
        )


def check_task(step: object, optimizer: object, prepare: object) -> None:
    """Refuses what only a training has.

    Raises:
        TuningError: it is given without a step, or is no function.
    """
    for name, value in (("optimizer", optimizer), ("prepare", prepare)):
        if step is None and value is not None:
            raise TuningError(
                f"{name} is given, and no step: give the step that is trained, or no {name} for inference"
            )
        if value is not None and not callable(value):
            raise TuningError(f"{name} is {type(value).__name__}; it has to be a function")


def check_study(study: object, step: object, *, worker: bool) -> None:
    """Refuses a study where nothing can be spread.

    Raises:
        TuningError: nothing is trained, all processes train together, or a worker has no study.
    """
    if worker and study is None:
        raise TuningError(
            "worker=True needs the study whose trials it runs, as study='/shared/study.log'"
        )
    if study is not None and step is None:
        raise TuningError(
            "study spreads trainings over machines, and without a step nothing is trained"
        )
    if study is not None and are_several():
        raise TuningError(
            "study spreads trainings that are independent, and in a distributed program all processes train together: "
            "give a study, or call tune in several processes"
        )


def device_type_of(model: nn.Module, given: str | None) -> str:
    """The given one, or that of the model's parameters."""
    if given is not None:
        return given
    return next((parameter.device.type for parameter in model.parameters()), "cpu")
