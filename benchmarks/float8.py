"""Time of the float8 rules on a GPU: a layer's forward and backward beside bfloat16, eager and compiled.

Invariants:
- A ratio is taken within a round, in which all variants take turns; the median of the rounds is reported.
- On a GPU without a kernel for float8 products nothing is measured: the time of an emulation tells nothing.
- The largest shape is measured first.
- torchao is measured where it is installed, with the same shapes, as its recipes `tensorwise` and `rowwise`.
- What cannot run is a row with its error, and takes no other row with it.

`python -m benchmarks.cuda float8 --rows FILE` measures the layers of language models.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import precast
from precast.diagnostics.hardware.machine import interleaved_seconds, synchronize
from precast.weights.float8.support import ProductMethod, support_of

__all__ = ["LLAMA", "RULES", "Shape", "run"]

BFLOAT16: Final = "bfloat16"
RULES: Final = ("float8", "float8_rowwise", "float8_hp_grad")
TORCHAO: Final = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
_ROUNDS: Final = 20


class Shape(NamedTuple):
    """A linear layer and its input."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Multiplications of one product."""
        return self.tokens * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.tokens} x {self.inputs} -> {self.outputs}"


LLAMA: Final = tuple(
    Shape(tokens, *layer)
    for tokens, layer in itertools.product(
        (4096, 8192, 16384),
        ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672), (16384, 16384)),
    )
)
"""Layers of models of 8, 70 and some 400 thousand million parameters."""

Step = Callable[[], object]


def run(
    device: torch.device,
    shapes: Iterable[Shape],
    *,
    rounds: int = _ROUNDS,
    compiles: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """One row for each way to run, shape and variant but bfloat16, with its ratio to that; or one with "error".

    Raises:
        RuntimeError: The device is a GPU that emulates float8.
    """
    support = support_of(device)
    if device.type == "cuda" and support.method is not ProductMethod.KERNEL:
        raise RuntimeError(f"float8 is emulated, whose time tells nothing: {support.reason}")
    largest_first = sorted(shapes, key=lambda shape: shape.size, reverse=True)
    for compiled, shape in itertools.product(compiles, largest_first):
        # Each shape is compiled for itself, and what was compiled for others counts toward no limit.
        torch.compiler.reset()
        seconds, errors = _seconds(shape, device, rounds, compiled=compiled)
        about_it = {"benchmark": "float8", **shape._asdict(), "compiled": compiled}
        for name, error in errors.items():
            yield {**about_it, "kind": name, "error": error}
        for name, its in seconds.items():
            if name != BFLOAT16:
                yield {**about_it, "kind": name, **_figures(its, seconds[BFLOAT16])}


def _seconds(
    shape: Shape, device: torch.device, rounds: int, *, compiled: bool
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times by name, of bfloat16 too; and the errors of what did not run, or of all where bfloat16 did not."""
    steps, errors = variants(shape, device, compiled=compiled)
    kinds = [name for name in steps if name != BFLOAT16]
    failed: dict[str, str] = {}
    try:
        guarded = [partial(_guarded, name, step, failed, device) for name, step in steps.items()]
        seconds = dict(zip(steps, interleaved_seconds(guarded, device, rounds), strict=True))
    except Exception as error:  # what a kernel broke may show only when the next one starts
        failed, seconds = dict.fromkeys(steps, _first_line(error)), {}
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()
    errors |= failed
    if BFLOAT16 in errors:
        errors = {**dict.fromkeys(kinds, f"bfloat16: {errors[BFLOAT16]}"), **errors}
        return {}, errors
    return {name: its for name, its in seconds.items() if name not in errors}, errors


def _guarded(name: str, step: Step, failed: dict[str, str], device: torch.device) -> None:
    """A step; after an error, which is noted, none."""
    if name in failed:
        return
    try:
        step()
        synchronize(device)
    except Exception as error:  # memory may be short in some rounds alone
        failed[name] = _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def variants(
    shape: Shape, device: torch.device, *, compiled: bool
) -> tuple[dict[str, Step], dict[str, str]]:
    """Return the steps by name, each run twice; and the first line of the error of each that cannot run."""
    makers: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        name: partial(_under, shape, device, name, compiled=compiled) for name in (BFLOAT16, *RULES)
    }
    if _torchao_version() is not None:
        makers |= {
            name: partial(_torchao, shape, device, recipe, compiled=compiled)
            for name, recipe in TORCHAO.items()
        }
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for name, make in makers.items():
        try:
            step = _step(make(), shape, device)
            for _ in range(2):
                step()
            synchronize(device)
            steps[name] = step
        except Exception as error:  # a compiler or a kernel may raise anything
            errors[name] = _first_line(error)
    return steps, errors


def _torchao_version() -> str | None:
    try:
        return importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return None


def _figures(its: Sequence[float], bfloat16: Sequence[float]) -> dict[str, float]:
    """A variant's time in milliseconds, and its ratio to bfloat16 in each round."""
    ratios = [a / b for a, b in zip(its, bfloat16, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "median_ms": statistics.median(its) * 1e3,
        "bfloat16_ms": statistics.median(bfloat16) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def _under(
    shape: Shape, device: torch.device, rule: str, *, compiled: bool
) -> Callable[[Tensor], Tensor]:
    """A layer in a region with this rule for it, as a function of its input."""
    layer = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device)
    ops = {} if rule == BFLOAT16 else {"linear": rule}
    policy = precast.Policy.load("default").replace(ops=ops)
    call = torch.compile(layer, dynamic=False) if compiled else layer

    def forward(x: Tensor) -> Tensor:
        with precast.autocast(device.type, torch.bfloat16, policy=policy):
            result: Tensor = call(x)
        return result

    return forward


def _torchao(
    shape: Shape, device: torch.device, recipe: str, *, compiled: bool
) -> Callable[[Tensor], Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(shape.inputs, shape.outputs, bias=False, device=device))
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config)
    call = torch.compile(model, dynamic=False) if compiled else model

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            result: Tensor = call(x)
        return result

    return forward


def _step(forward: Callable[[Tensor], Tensor], shape: Shape, device: torch.device) -> Step:
    x = torch.randn(
        shape.tokens, shape.inputs, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    gradient = torch.randn(shape.tokens, shape.outputs, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x.grad = None
        forward(x).backward(gradient)

    return step
