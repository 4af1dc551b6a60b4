"""From which shapes the float8 rules pay on a GPU: a layer's forward and backward beside bfloat16, eager and compiled.

Invariants:
- a ratio is taken within a round, in which all variants take turns; what is quoted is the median of the rounds;
- a rule pays from a size on only if it is faster there in nine rounds of ten, and at every larger size as well. So the
  largest shape is measured first: what there was no time for is smaller;
- without a kernel for float8 products nothing is measured, and the file says why: an emulation's time tells nothing;
- torchao is measured where it is installed, with the same shapes, as its recipes `tensorwise` and `rowwise`; the file
  says its version, or that it is missing;
- what cannot run is a row with its error, and takes no other row with it; the file has all rows that there are so far.

`python -m benchmarks.float8 --json FILE` writes what it measured, for `make gpu`. `--device cpu --emulated
--shape 32x64x48` tries it out where there is no kernel.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import torch
from torch import Tensor, nn

import precast
from benchmarks.tables import about
from precast._internal.atomic_write import replace
from precast.diagnostics.hardware.machine import interleaved_seconds, synchronize
from precast.weights.float8.support import ProductMethod, support_of

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
    if support.method is ProductMethod.KERNEL:
        return None
    return f"{device} emulates float8, whose time tells nothing: {support.reason}"


def run(
    device: torch.device,
    shapes: Iterable[Shape] = LLAMA,
    *,
    rounds: int = _ROUNDS,
    compiles: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """One row for each way to run, shape and variant but bfloat16, with its ratio to that; or one with "error"."""
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
                yield {**about_it, "kind": name, **measured(its, seconds[BFLOAT16])}


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
    """What is timed, by name, each run twice; and what cannot run, with the first line of its error."""
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
    """For each variant, eager and compiled: the smallest shape from which on it is faster than bfloat16, of how many.

    It is null where the largest shape is not faster, or was an error.
    """
    groups: dict[tuple[str, bool], list[tuple[Shape, bool]]] = {}
    for row in rows:
        if row["kind"] == BFLOAT16:  # its errors are those of all others
            continue
        shape = Shape(row["tokens"], row["inputs"], row["outputs"])
        is_faster = "error" not in row and row["faster"] >= _SURE
        groups.setdefault((row["kind"], row["compiled"]), []).append((shape, is_faster))
    found = []
    for (kind, compiled), its in groups.items():
        by_size = sorted(its, key=lambda each: each[0].size, reverse=True)
        paying = [shape for shape, _ in itertools.takewhile(lambda each: each[1], by_size)]
        smallest = paying[-1]._asdict() if paying else None
        found.append({"kind": kind, "compiled": compiled, "from": smallest, "shapes": len(its)})
    return found


def said(document: Mapping[str, Any]) -> str:
    """What came out, in one line."""
    if "skipped" in document:
        return f"skipped: {document['skipped']}"
    words = []
    for each in document["pays_from"]:
        way = "compiled" if each["compiled"] else "eager"
        where = "at no size" if each["from"] is None else f"from {Shape(**each['from'])}"
        words.append(f"{each['kind']} ({way}) {where} of {each['shapes']}")
    text = "faster than bfloat16: " + ("; ".join(words) or "nothing was measured")
    errors = sum("error" in row for row in document["rows"])
    if errors:
        text += f"; {errors} rows are errors"
    if document.get("torchao") is None:
        text += "; torchao is not installed"
    if "ended" in document:
        text += f"; ended early: {document['ended']}"
    return f"emulated, which tells nothing: {text}" if document.get("emulated") else text


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


def _shape(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> list[Shape]:
    try:
        return [Shape(*map(int, value.split("x", 2))) for value in values]
    except (TypeError, ValueError):
        raise click.BadParameter(
            "a shape is three numbers, tokens, inputs and outputs, such as 4096x4096x14336"
        ) from None


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="The file that is written.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--rounds", default=_ROUNDS, show_default=True, type=click.IntRange(min=2))
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=_shape,
    help="In place of the layers of language models: TOKENSxINPUTSxOUTPUTS; may be repeated.",
)
@click.option("--way", type=click.Choice(["eager", "compiled"]), help="One of both ways to run.")
@click.option(
    "--emulated",
    is_flag=True,
    help="Measure also where there is no kernel, to try this program out.",
)
def main(
    *,
    path: Path | None,
    device: str,
    rounds: int,
    shapes: list[Shape],
    way: str | None,
    emulated: bool,
) -> None:
    """Measure from which shapes the float8 rules pay."""
    where = torch.device(device)
    reason = reason_to_skip(where)
    if reason is not None and not (emulated and where.type != "cuda"):
        document: dict[str, Any] = {"machine": about(), "skipped": reason}
        _write(path, document)
    else:
        compiles = (False, True) if way is None else (way == "compiled",)
        document = {
            "machine": about(),
            "torchao": _torchao_version(),
            "emulated": reason is not None,
        }
        _measure(document, path, run(where, shapes or LLAMA, rounds=rounds, compiles=compiles))
    click.echo(said(document))


def _measure(document: dict[str, Any], path: Path | None, rows: Iterator[dict[str, Any]]) -> None:
    """Fills a document, and writes it at each row: who is killed has it too."""
    document |= {"rows": [], "pays_from": []}
    try:
        for row in rows:
            document["rows"].append(row)
            document["pays_from"] = pays_from(document["rows"])
            _write(path, document)
            click.echo(json.dumps(row), err=True)
    except (Exception, KeyboardInterrupt) as error:  # what was measured until then is kept
        document["ended"] = repr(error).partition("\n")[0]
    _write(path, document)


def _write(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        replace(path, json.dumps(document, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
