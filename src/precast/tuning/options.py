"""Arguments of `tune`, and their validation before anything runs."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from precast._internal.display import dtype_name
from precast._internal.missing import missing_extra
from precast.autocast_mode.arguments import dtype_of
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_RULES, PRODUCT_OPERATIONS
from precast.policy.values import nearest

__all__ = ["Objective", "TuningOptions", "TuningProgress", "check_arguments"]
__all__ += ["checked_candidates", "import_scipy"]

Objective = Literal["time", "memory"]


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
        candidates: the 16-bit dtypes to try: torch.bfloat16, torch.float16; and rules for products of a policy in the
            first of these dtypes: float8 rules, such as "float8_rowwise", and "lower_out_fp32" for output heads.
        base: the policy to change: a `Policy`, a preset's name or a file's path.
        metric: ``metric(model, batch)`` is compared at the end of a training instead of the loss; smaller is better.
            For inference it is required: the value of the model's results for a batch.
        seed: the random seed.
        progress: called with a `TuningProgress` before each part of the search.
    """

    candidates: Sequence[torch.dtype | str] = (torch.bfloat16,)
    base: Policy | str | os.PathLike[str] = "default"
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None
    seed: int = 0
    progress: Callable[[TuningProgress], None] | None = None


def check_arguments(
    model: object, functions: Mapping[str, object], objective: object, tolerance: Any, budget: Any
) -> None:
    """Check the arguments of `tune`; `functions` are its `step`, `optimizer` and `metric`, or None."""
    if not isinstance(model, nn.Module):
        raise _refusal("model", model, "a torch.nn.Module")
    for name, function in functions.items():
        if not (function is None or callable(function)):
            raise _refusal(name, function, "a function")
    if objective not in ("time", "memory"):
        raise _refusal("objective", objective, '"time" or "memory"')
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise _refusal("tolerance", tolerance, "a number between 0 and 1, such as 0.01")
    if not (isinstance(budget, int | float) and 0 < budget < math.inf):
        raise _refusal("budget", budget, "a number of seconds above 0")
    if functions["step"] is None and functions["optimizer"] is not None:
        raise TuningError(
            "optimizer needs step: pass the step of the training, or leave out optimizer for inference"
        )
    if functions["step"] is None and functions["metric"] is None:
        raise TuningError(
            "step is None: pass step(model, batch), which returns the loss; for inference, pass "
            "options=TuningOptions(metric=...)"
        )


def _refusal(name: str, value: object, expected: str) -> TuningError:
    return TuningError(f"{name} is {value!r}; it has to be {expected}")


def checked_candidates(
    candidates: Sequence[torch.dtype | str], *, is_training: bool = True
) -> list[torch.dtype | str]:
    """Return the candidates as dtypes and rules for products, each once."""
    allowed = ["bfloat16", "float16", *map(str, PRODUCT_OPERATIONS)]
    texts = [] if isinstance(candidates, str) else candidates
    names = [dtype_of(each.strip() if isinstance(each, str) else each) for each in texts]
    if not names:
        raise TuningError(
            f"candidates is {candidates!r}; it has to be a sequence of {', '.join(map(repr, allowed))}"
        )
    for name in names:
        if dtype_name(name) not in allowed:
            raise TuningError(
                f"candidates: {name!r} is unknown{nearest(str(name), allowed)} Allowed: {', '.join(allowed)}"
            )
        if not is_training and name in FLOAT8_RULES:
            raise TuningError(
                f"candidates: {name!r} is tried in trainings only, and without a step nothing is trained"
            )
    return list(dict.fromkeys(names))


def import_scipy(name: str) -> Any:
    """Return a module of SciPy, which is loaded when a search needs it."""
    try:
        import scipy  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra("precast.tune", "scipy", "tune") from error
    return importlib.import_module(f"scipy.{name}")
