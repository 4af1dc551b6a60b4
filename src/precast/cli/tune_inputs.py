"""What `precast tune` is given, read from the texts of the command line.

Invariants: a text that means nothing is a `ValueError` whose message shows how to write it; an object that a text names
is imported here and nowhere else.
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

from precast.diagnostics.explain.model import load_model, load_named
from precast.errors import PrecastError
from precast.policy.rows import FLOAT8_RULES
from precast.policy.values import canonical_dtype, nearest
from precast.tuning.training import Workload, read_batches

__all__ = ["Inputs", "budget", "candidates", "inputs", "tolerance"]

_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Inputs:
    """What is tuned: the arguments of `precast.tune` that are objects."""

    model: nn.Module
    step: Callable[[nn.Module, Any], Tensor] | None
    """None where the model is not trained."""
    batches: Any
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    metric: Callable[[nn.Module, Any], Any] | None
    prepare: Callable[[nn.Module], nn.Module] | None = None

    @property
    def task(self) -> str:
        """Whether the model is trained or run."""
        return "inference" if self.step is None else "training"

    def workload(self, seed: int) -> Workload:
        """What is trained."""
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
    prepare: str | None,
) -> Inputs:
    """The objects that these texts name.

    Raises:
        ValueError: there is no such thing, or it is no function where one is wanted.
        PrecastError: it is there, and fails.
    """
    module = model.partition(":")[0]
    made = load_model(model)
    chosen = None
    if step is not None:
        chosen = _function(step, module, "--step")
    elif loss is not None:
        chosen = _step_of(_function(loss, module, "--loss"), loss)
    batches = load_named(
        _full(data, module), "--data", "MODULE:NAME, as in my_data:batches", callable
    )
    measure = None if metric is None else _function(metric, module, "--metric")
    makes = None if optimizer is None else _optimizer(optimizer)
    wraps = None if prepare is None else _function(prepare, module, "--prepare")
    return Inputs(made, chosen, batches, makes, measure, wraps)


def tolerance(text: str) -> float:
    """A share: `1%` or `0.01`.

    Raises:
        ValueError: it is none.
    """
    number, percent, rest = text.partition("%")
    try:
        found = float(number) / (100 if percent else 1)
    except ValueError:
        found = -1.0
    if rest.strip() or not 0 < found < 1:
        raise ValueError(f"{text!r} is no share between 0 and 1; write 1% or 0.01")
    return found


def budget(text: str) -> float:
    """Seconds: `90`, `90s`, `5m` or `1h`.

    Raises:
        ValueError: it is no time above 0.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    found = float(matched[1]) * _SECONDS[matched[2]] if matched else 0.0
    if found <= 0:
        raise ValueError(f"{text!r} is no time above 0; write 90s, 5m or 1h")
    return found


def candidates(text: str) -> list[torch.dtype | str]:
    """16-bit dtypes and float8 rules with commas between them.

    Raises:
        ValueError: one of them is neither.
    """
    names = [canonical_dtype(name.strip()) or name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DTYPES and name not in FLOAT8_RULES:
            known = ", ".join((*_DTYPES, *FLOAT8_RULES))
            near = nearest(name, (*_DTYPES, *FLOAT8_RULES))
            raise ValueError(f"{name!r} cannot be tried{near} Write some of {known}, with commas.")
    return [_DTYPES.get(name, name) for name in dict.fromkeys(names)]


def _function(where: str, module: str, option: str) -> Callable[..., Any]:
    """The function of that name; an instance, where it is a class such as torch.nn:CrossEntropyLoss."""
    found = load_named(
        _full(where, module),
        option,
        "MODULE:NAME, as in my_model:my_loss",
        lambda named: isinstance(named, type),
    )
    if not callable(found):
        raise ValueError(
            f"{option} {where} is of type {type(found).__name__}; it has to be a function"
        )
    return found  # type: ignore[no-any-return]


def _full(where: str, module: str) -> str:
    """A name with its module, which is the model's where none is given."""
    return where if ":" in where else f"{module}:{where}"


def _step_of(loss: Callable[..., Any], name: str) -> Callable[[nn.Module, Any], Tensor]:
    """The step that runs the model on the first of a pair, and compares its result with the second."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise PrecastError(
                f"--loss {name} takes the model's output and a target, so each batch of --data has to be a pair "
                f"(input, target); one is {_described(batch)}. For other batches name a function of the model and a "
                "batch that returns the loss, with --step"
            )
        given, target = batch
        return loss(model(given), target)  # type: ignore[no-any-return]

    return step


def _described(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"of type {type(batch).__name__}"


def _optimizer(text: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """What makes the optimizer: one of torch.optim with its settings, or a function of the parameters."""
    if ":" in text:
        form = "MODULE:FUNCTION, as in my_model:make_optimizer"
        found = load_named(text, "--optimizer", form, lambda _: False)
        if not callable(found):
            raise ValueError(
                f"--optimizer {text} is of type {type(found).__name__}; name a function that makes an optimizer of "
                "parameters"
            )
        return found  # type: ignore[no-any-return]
    name, *settings = (part.strip() for part in text.split(","))
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise ValueError(
            f"--optimizer {name!r} is none of torch.optim; write one with its settings, as SGD,lr=0.1, or "
            "MODULE:FUNCTION"
        )
    made: Callable[..., Optimizer] = functools.partial(kind, **dict(map(_setting, settings)))
    try:
        made([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {text}: {error}") from error
    return made


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key.isidentifier() and equals and value):
        raise ValueError(f"--optimizer: {text!r} is no setting; write it as lr=0.1")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    try:
        return key, int(value) if value.lstrip("+-").isdecimal() else float(value)
    except ValueError:
        raise ValueError(
            f"--optimizer: {value!r} is no number, true, false or none; for others name a function that makes the "
            "optimizer, as MODULE:FUNCTION"
        ) from None
