"""Conversion of the texts on the command line of `precast tune` to objects.

Invariants: an invalid text is a `ValueError` whose message shows a valid one; an object that a text names is imported
here and nowhere else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast.cli.python_objects import load_model, load_named
from precast.errors import PrecastError
from precast.policy.rows import FLOAT8_RULES
from precast.policy.values import canonical_dtype, nearest
from precast.tuning.setups import Workload, read_batches

__all__ = ["Inputs", "budget", "candidates", "inputs", "tolerance"]

_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Inputs:
    """The arguments of `precast.tune` that are objects; `step` is None where the model is not trained."""

    model: nn.Module
    step: Callable[[nn.Module, Any], Tensor] | None
    batches: Any
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    metric: Callable[[nn.Module, Any], Any] | None

    @property
    def task(self) -> str:
        """The kind of task: training or inference."""
        return "inference" if self.step is None else "training"

    def workload(self, seed: int) -> Workload:
        """Return the workload for a check."""
        kinds = {parameter.device.type for parameter in self.model.parameters()}
        return Workload(
            self.model,
            self.step,
            read_batches(self.batches),
            self.optimizer or torch.optim.AdamW,
            min(kinds, default="cpu"),
            self.metric,
            seed,
        )


def inputs(
    *,
    model: str,
    data: str,
    loss: str | None,
    step: str | None,
    optimizer: str | None,
    metric: str | None,
) -> Inputs:
    """Return the objects that these texts name.

    Raises:
        ValueError: an object is not found, or is not a function where one is needed.
        PrecastError: an object is found, and raises an error.
    """
    module = model.partition(":")[0]
    loaded = load_model(model)
    step_function = None
    if step is not None:
        step_function = _function(step, module, "--step")
    elif loss is not None:
        step_function = _step_of(_function(loss, module, "--loss"), loss)
    batches = load_named(
        _full(data, module), "--data", "MODULE:NAME, such as my_data:batches", callable
    )
    measure = None if metric is None else _function(metric, module, "--metric")
    makes = None if optimizer is None else _optimizer(optimizer)
    return Inputs(loaded, step_function, batches, makes, measure)


def tolerance(text: str) -> float:
    """Return a share: `1%` or `0.01`.

    Raises:
        ValueError: the text is not a share.
    """
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest.strip() or not 0 < share < 1:
        raise ValueError(
            f"--tolerance: expected a share between 0 and 1, such as 1% or 0.01, got {text!r}"
        )
    return share


def budget(text: str) -> float:
    """Return seconds: `90`, `90s`, `5m` or `1h`.

    Raises:
        ValueError: the text is not a time above 0.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    seconds = float(matched[1]) * _SECONDS[matched[2]] if matched else 0.0
    if seconds <= 0:
        raise ValueError(f"--budget: expected a time above 0, such as 90s, 5m or 1h, got {text!r}")
    return seconds


def candidates(text: str) -> list[torch.dtype | str]:
    """Return 16-bit dtypes and float8 rules, separated by commas in the text.

    Raises:
        ValueError: one of them is neither.
    """
    names = [canonical_dtype(name.strip()) or name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DTYPES and name not in FLOAT8_RULES:
            allowed = ", ".join((*_DTYPES, *FLOAT8_RULES))
            near = nearest(name, (*_DTYPES, *FLOAT8_RULES))
            raise ValueError(
                f"--candidates: {name!r} is unknown{near} Allowed, separated by commas: {allowed}."
            )
    return [_DTYPES.get(name, name) for name in dict.fromkeys(names)]


def _function(where: str, module: str, option: str) -> Callable[..., Any]:
    """Return the function of that name; an instance, where it is a class such as torch.nn:CrossEntropyLoss."""
    function = load_named(
        _full(where, module),
        option,
        "MODULE:NAME, such as my_model:my_loss",
        lambda value: isinstance(value, type),
    )
    if not callable(function):
        raise ValueError(
            f"{option} {where} is of type {type(function).__name__}; it has to be a function"
        )
    return function  # type: ignore[no-any-return]


def _full(where: str, module: str) -> str:
    """Return a name with its module; by default the model's module."""
    return where if ":" in where else f"{module}:{where}"


def _step_of(loss: Callable[..., Any], name: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return a step that runs the model on the input of a pair, and compares its output with the target."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise PrecastError(
                f"--loss {name} takes the model's output and a target, so each batch of --data has to be a pair "
                f"(input, target); one is {_described(batch)}. For other batches name a function of the model and a "
                "batch that returns the loss, with --step"
            )
        inputs, target = batch
        return loss(model(inputs), target)  # type: ignore[no-any-return]

    return step


def _described(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"of type {type(batch).__name__}"


def _optimizer(text: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return a function that makes the optimizer: one of torch.optim with its settings, or a named function."""
    if ":" in text:
        form = "MODULE:FUNCTION, such as my_model:make_optimizer"
        function = load_named(text, "--optimizer", form, lambda _: False)
        if not callable(function):
            raise ValueError(
                f"--optimizer {text} is of type {type(function).__name__}; name a function that makes an optimizer of "
                "parameters"
            )
        return function  # type: ignore[no-any-return]
    name, *settings = (part.strip() for part in text.split(","))
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise ValueError(
            f"--optimizer {name!r} is not in torch.optim; write one with its settings, such as SGD,lr=0.1, or "
            "MODULE:FUNCTION"
        )
    make: Callable[..., Optimizer] = functools.partial(kind, **dict(map(_setting, settings)))
    try:
        make([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {text}: {error}") from error
    return make


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key.isidentifier() and equals and value):
        raise ValueError(f"--optimizer: {text!r} is not a setting; write it as lr=0.1")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    try:
        return key, int(value) if value.lstrip("+-").isdecimal() else float(value)
    except ValueError:
        raise ValueError(
            f"--optimizer: {value!r} is not a number, true, false or none; for other values name a function that makes "
            "the optimizer: MODULE:FUNCTION"
        ) from None
