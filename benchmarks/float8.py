"""From which shapes the float8 rules pay on a GPU: a layer's forward and backward beside bfloat16, eager and compiled.

Invariants:
- a ratio is taken within a round, in which all variants take turns; what is quoted is the median of the rounds;
- a rule pays from a size on only if it is faster there in nine rounds of ten, and at every larger size as well;
- without a kernel for float8 products nothing is measured, and the file says why: an emulation's time tells nothing;
- torchao is measured where it is installed, with the same shapes, as its recipes `tensorwise` and `rowwise`.

`python -m benchmarks.float8 --json FILE` writes what it measured, for `make gpu`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import torch
from torch import Tensor, nn

import precast
from benchmarks.tables import about
from precast._internal.atomic_write import replace
from precast.diagnostics.hardware.machine import interleaved_seconds
from precast.weights.float8.support import Way, support_of

__all__ = ["LLAMA", "Shape", "measured", "pays_from", "reason_to_skip", "run", "said", "variants"]

BFLOAT16: Final = "bfloat16"
RULES: Final = ("float8", "float8_rowwise", "float8_hp_grad")
TORCHAO: Final = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
_ROUNDS: Final = 20
_SURE: Final = 0.9
"""Of the rounds have to be faster."""


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


def reason_to_skip(device: torch.device) -> str | None:
    """Why nothing can be learnt on a device; None where something can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    support = support_of(device)
    if support.way is Way.KERNEL:
        return None
    return f"{device} emulates float8, whose time tells nothing: {support.reason}"


def run(
    device: torch.device,
    shapes: Iterable[Shape] = LLAMA,
    *,
    rounds: int = _ROUNDS,
    compiles: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """One row for each shape, way to run and variant but bfloat16, with its ratio to that; or one with "error"."""
    for shape, compiled in itertools.product(shapes, compiles):
        steps, errors = variants(shape, device, compiled=compiled)
        seconds = dict(
            zip(steps, interleaved_seconds([*steps.values()], device, rounds), strict=True)
        )
        about_it = {"benchmark": "float8", **shape._asdict(), "compiled": compiled}
        for name, error in errors.items():
            yield {**about_it, "kind": name, "error": error}
        for name, its in seconds.items():
            if name != BFLOAT16:
                yield {**about_it, "kind": name, **measured(its, seconds[BFLOAT16])}


def variants(
    shape: Shape, device: torch.device, *, compiled: bool
) -> tuple[dict[str, Step], dict[str, str]]:
    """What is timed, by name, each run once; and what cannot run, with the first line of its error."""
    makers: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        name: (lambda rule=name: _under(shape, device, rule, compiled=compiled))  # type: ignore[misc]
        for name in (BFLOAT16, *RULES)
    }
    if importlib.util.find_spec("torchao") is not None:
        makers |= {
            name: (lambda recipe=recipe: _torchao(shape, device, recipe, compiled=compiled))  # type: ignore[misc]
            for name, recipe in TORCHAO.items()
        }
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for name, make in makers.items():
        try:
            step = _step(make(), shape, device)
            step()
            steps[name] = step
        except Exception as error:  # a compiler or a kernel may raise anything
            if name == BFLOAT16:
                raise
            errors[name] = str(error).strip().partition("\n")[0]
    return steps, errors


def measured(its: Sequence[float], bfloat16: Sequence[float]) -> dict[str, float]:
    """A variant's time in milliseconds, and its ratio to bfloat16 in each round."""
    ratios = [a / b for a, b in zip(its, bfloat16, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "median_ms": statistics.median(its) * 1e3,
        "bfloat16_ms": statistics.median(bfloat16) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "faster": sum(ratio < 1 for ratio in ratios) / len(ratios),
    }


def pays_from(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each variant, eager and compiled: the smallest shape from which on it is faster than bfloat16.

    It is null where the largest shape is not faster, or was an error.
    """
    groups: dict[tuple[str, bool], list[tuple[Shape, bool]]] = {}
    for row in rows:
        shape = Shape(row["tokens"], row["inputs"], row["outputs"])
        is_faster = "error" not in row and row["faster"] >= _SURE
        groups.setdefault((row["kind"], row["compiled"]), []).append((shape, is_faster))
    found = []
    for (kind, compiled), its in groups.items():
        by_size = sorted(its, key=lambda each: each[0].size, reverse=True)
        paying = [shape for shape, _ in itertools.takewhile(lambda each: each[1], by_size)]
        smallest = paying[-1]._asdict() if paying else None
        found.append({"kind": kind, "compiled": compiled, "from": smallest})
    return found


def said(document: Mapping[str, Any]) -> str:
    """What came out, in one line."""
    if "skipped" in document:
        return f"skipped: {document['skipped']}"
    words = []
    for each in document["pays_from"]:
        way = "compiled" if each["compiled"] else "eager"
        where = "at no size" if each["from"] is None else f"from {Shape(**each['from'])}"
        words.append(f"{each['kind']} ({way}) {where}")
    return "faster than bfloat16: " + "; ".join(words)


def _under(
    shape: Shape, device: torch.device, rule: str, *, compiled: bool
) -> Callable[[Tensor], Tensor]:
    """A layer in a region with this rule for it, as a function of its input."""
    layer = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device)
    ops = {} if rule == BFLOAT16 else {"linear": rule}
    policy = precast.Policy.load("default").replace(ops=ops)
    call = torch.compile(layer) if compiled else layer

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
    call = torch.compile(model) if compiled else model

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


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="The file that is written.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--rounds", default=_ROUNDS, show_default=True)
def main(path: Path | None, device: str, rounds: int) -> None:
    """Measure from which shapes the float8 rules pay."""
    where = torch.device(device)
    document: dict[str, Any] = {"machine": about(), "rows": []}
    reason = reason_to_skip(where)
    if reason is not None:
        document = {"machine": about(), "skipped": reason}
    else:
        try:
            for row in run(where, rounds=rounds):
                document["rows"].append(row)
                click.echo(json.dumps(row), err=True)
        except KeyboardInterrupt:
            document["interrupted"] = True
        document["pays_from"] = pays_from(document["rows"])
    if path is not None:
        replace(path, json.dumps(document, indent=1).encode() + b"\n")
    click.echo(said(document))


if __name__ == "__main__":
    main()
