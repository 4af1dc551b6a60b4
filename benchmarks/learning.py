"""Whether weights in bfloat16 learn: trainings with float32 masters, without, and with what replaces them.

Invariants:
- seeds, batches and first weights are the same for all that are compared, so differences are taken in pairs;
- the float32 masters are those of an attached model, so that the numbers which a forward pass computes with are 16 bits
  of the same weights in every variant;
- data is real, and ships with what is installed: scikit-learn's digits, and the texts of Python's `pydoc`;
- optimizers of other libraries are measured where these are installed (torch-optimi, torchao), with the same settings.

`python -m benchmarks.learning` prints the tables; `--write` puts them into the recipe, with a picture of the bytes.
`--only` measures some variants, and takes the others from what was written before.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from benchmarks.networks import VOCABULARY, Batch, decoder
from benchmarks.sections import put
from benchmarks.tables import about
from precast._internal.atomic_write import replace
from precast.tuning.intervals import mean_interval
from precast.weights.rounding import REST
from precast.weights.stored_weights import is_worth_storing_low

__all__ = ["CASES", "VARIANTS", "Batch", "Case", "cross_entropy", "run", "text"]

DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "recipes" / "fewer-bytes.md", DOCS / "recipes" / "fewer-bytes.zh.md"
DATA, PICTURE = DOCS / "data" / "learning.json", DOCS / "images" / "fewer-bytes.png"
LOSSES = (
    "<!-- figures: python -m benchmarks.learning --write -->\n",
    "<!-- end of what is learnt -->",
)
BYTES = (
    "<!-- figures of bytes: python -m benchmarks.learning --write -->\n",
    "<!-- end of bytes -->",
)
REFERENCE: Final = "float32 masters"
PLAIN: Final = "plain bfloat16"
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    REFERENCE: {"step": "one-pass", "grad_dtype": torch.bfloat16},
    "kahan": {"masters": "kahan"},
    "kahan, states in bfloat16": {"masters": "kahan", "states": torch.bfloat16},
    "stochastic": {"masters": "stochastic"},
    "stochastic, states in bfloat16": {"masters": "stochastic", "states": torch.bfloat16},
    PLAIN: {},
}
_SETTINGS: Final[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_LENGTH, _WIDTH = 64, 128
_EVALUATED: Final = 32
"""Batches that the final loss is a mean of."""


def _optimi(parameters: Any, rate: float) -> torch.optim.Optimizer:
    from optimi import AdamW

    made: torch.optim.Optimizer = AdamW(parameters, lr=rate, kahan_sum=True, **_SETTINGS)
    return made


def _torchao(parameters: Any, rate: float) -> torch.optim.Optimizer:
    from torchao.optim import _AdamW

    made: torch.optim.Optimizer = _AdamW(
        parameters, lr=rate, bf16_stochastic_round=True, **_SETTINGS
    )
    return made


OTHERS: Final[dict[str, tuple[str, Callable[[Any, float], torch.optim.Optimizer]]]] = {
    "torch-optimi, kahan_sum": ("optimi", _optimi),
    "torchao, bf16_stochastic_round": ("torchao", _torchao),
}
"""Those of other libraries: the module, and what makes it."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        model: makes the model, in float32, from PyTorch's generator.
        batch: draws a batch, from PyTorch's generator.
        steps: of the optimizer.
        rate: learning rate of AdamW.
        before: steps at a rate of 1e-3 on other data, in float32, which come before in all variants alike.
        first: draws a batch of that other data.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    rate: float
    before: int = 0
    first: Callable[[], tuple[Tensor, Tensor]] | None = None


def _digits() -> Callable[[], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    numbers = torch.tensor(data.target)

    def batch() -> tuple[Tensor, Tensor]:
        some = torch.randint(len(images), (64,))
        return images[some], numbers[some]

    return batch


def text(half: int, rows: int = 8) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches of bytes of one half of what `help()` says about Python's topics."""
    from pydoc_data.topics import topics

    whole = torch.tensor(list("".join(topics.values()).encode()), dtype=torch.int64)
    tokens = whole.chunk(2)[half]

    def batch() -> tuple[Tensor, Tensor]:
        places = torch.randint(len(tokens) - _LENGTH - 1, (rows,)).tolist()
        drawn = torch.stack([tokens[place : place + _LENGTH + 1] for place in places])
        return drawn[:, :-1], drawn[:, 1:]

    return batch


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


_decoder = decoder(_WIDTH, 8, _LENGTH, layers=2).model
CASES: Final[dict[str, Callable[[], Case]]] = {
    "digits, lr 1e-3": lambda: Case(_perceptron, _digits(), 400, 1e-3),
    "decoder on text, lr 1e-3": lambda: Case(_decoder, text(0), 400, 1e-3),
    "fine-tuning, lr 1e-5": lambda: Case(_decoder, text(1), 400, 1e-5, 300, text(0)),
}


def run(
    case: Case, variant: str, seed: int, *, steps: int | None = None
) -> tuple[float, dict[str, float]]:
    """One training: the mean loss afterwards, and the bytes a number of what is stored in 16 bits."""
    model = _begun(case, seed)
    large = [p for p in model.parameters() if is_worth_storing_low(p)]
    if variant == PLAIN or variant in OTHERS:
        for parameter in large:
            parameter.data = parameter.detach().to(torch.bfloat16)
    make = OTHERS[variant][1] if variant in OTHERS else _adamw
    optimizer, attachment = make(model.parameters(), case.rate), None
    if variant in VARIANTS and variant != PLAIN:
        generator = torch.Generator().manual_seed(seed)
        attachment = precast.attach(
            model, optimizer=optimizer, generator=generator, **VARIANTS[variant]
        )
    torch.manual_seed(1000 + seed)
    _train(model, optimizer, case.batch, case.steps if steps is None else steps)
    stored = {
        "weights": _bytes(large),
        "copies": 0 if attachment is None else int(attachment.memory()),
        "gradients": _bytes(p.grad for p in large),
        "states": _bytes(
            s for p in large for n, s in optimizer.state[p].items() if n not in _RESTS
        ),
        "rounded away": _bytes(optimizer.state[p].get(n) for p in large for n in _RESTS),
    }
    numbers = sum(p.numel() for p in large)
    torch.manual_seed(77)
    with torch.no_grad(), precast.autocast("cpu", dtype=torch.bfloat16):
        batches = [case.batch() for _ in range(_EVALUATED)]
        losses = [cross_entropy(model, *each).item() for each in batches]
    return statistics.fmean(losses), {name: size / numbers for name, size in stored.items()}


_RESTS: Final = (REST, "kahan_comp")
"""Where precast and torch-optimi keep what was rounded away."""


def _adamw(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, **_SETTINGS)


_known: Final[dict[tuple[int, int], nn.Module]] = {}


def _begun(case: Case, seed: int) -> nn.Module:
    """The model as the training finds it, made once for all variants."""
    key = id(case), seed
    if key not in _known:
        torch.manual_seed(seed)
        model = case.model()
        if case.first is not None:
            _train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), case.first, case.before)
        _known[key] = model
    return copy.deepcopy(_known[key])


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    steps: int,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model, *batch())
        loss.backward()
        optimizer.step()


def cross_entropy(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """The loss of a classifier, or of a decoder: of a batch, in float32."""
    output = model(inputs)
    if output.dim() == 3:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())
    return F.cross_entropy(output.float(), target)


def _bytes(tensors: Any) -> int:
    """Of tensors of several numbers; what an optimizer counts in is left out."""
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.numel() > 1)


def _table(rows: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Final losses, and how much more than with float32 masters: a mean with its interval of 95%."""
    for case, losses in rows.items():
        exact = losses[REFERENCE]
        for variant, its in losses.items():
            yield f"| {case} | {variant} | {statistics.fmean(its):.4f} | {_more(its, exact)} |\n"


def _more(its: list[float], exact: list[float]) -> str:
    if its is exact:
        return ""
    more = mean_interval([100 * (a / b - 1) for a, b in zip(its, exact, strict=True)])
    return f"{more.middle:+.2f}% ({more.low:+.2f} to {more.high:+.2f})"


def _losses(rows: dict[str, dict[str, list[float]]], machine: dict[str, Any], seeds: int) -> str:
    where = (
        f"\n{seeds} seeds, AdamW, regions of bfloat16; on {machine['date']}: {machine['cpu']}, PyTorch "
        f"{machine['torch']}.\n"
    )
    head = (
        "| training | weights | final loss | more than float32 masters (95%) |\n|---|---|---|---|\n"
    )
    return head + "".join(_table(rows)) + where


def _sizes(stored: dict[str, dict[str, float]]) -> str:
    text = f"| bytes a number | {' | '.join(stored[REFERENCE])} | in all |\n|---|{'---|' * 6}\n"
    for variant, its in stored.items():
        cells = " | ".join(f"{size:.1f}" if size else "" for size in its.values())
        text += f"| {variant} | {cells} | {sum(its.values()):.1f} |\n"
    return text


def _png(stored: dict[str, dict[str, float]]) -> bytes:
    """Bytes a number, a bar for each variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((8, 2.9), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors = "#1f6feb", "#8c959f", "#d1570a", "#1a7f37", "#8250df"
    names = list(stored)
    begun = [0.0] * len(names)
    for part, color in zip(stored[REFERENCE], colors, strict=True):
        sizes = [stored[name][part] for name in names]
        axes.barh(names, sizes, left=begun, color=color, label=part, height=0.62)
        begun = [a + b for a, b in zip(begun, sizes, strict=True)]
    for place, total in enumerate(begun):
        axes.text(total + 0.15, place, f"{total:.1f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(begun) * 1.08)
    axes.set_xlabel("bytes a number of a large weight, between two steps of AdamW")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.2), ncols=5, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--only", multiple=True, help="A variant; may be given several times.")
@click.option("--write", is_flag=True, help="Put the tables into the recipe, in both languages.")
def main(seeds: int, only: tuple[str, ...], write: bool) -> None:
    """Measure whether weights in bfloat16 learn, and what they take."""
    document: dict[str, Any] = {"losses": {}, "bytes": {}}
    if only:
        document |= json.loads(DATA.read_text())
    document["machine"], rows, stored = about(), document["losses"], document["bytes"]
    some = only or (
        *VARIANTS,
        *(name for name, (library, _) in OTHERS.items() if _is_there(library)),
    )
    for name, make in CASES.items():
        case = make()
        for variant in some:
            runs = [run(case, variant, seed) for seed in range(seeds)]
            rows.setdefault(name, {})[variant] = [loss for loss, _ in runs]
            stored[variant] = runs[0][1]
            click.echo(f"{name}: {variant}: {statistics.fmean(rows[name][variant]):.4f}", err=True)
    losses, sizes = _losses(rows, document["machine"], seeds), _sizes(stored)
    click.echo(losses + "\n" + sizes)
    if write:
        replace(DATA, json.dumps(document, indent=1).encode() + b"\n")
        replace(PICTURE, _png(stored))
        for page in PAGES:
            put(page, *LOSSES, losses)
            put(page, *BYTES, sizes)


def _is_there(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


assert VOCABULARY >= 256  # bytes are tokens

if __name__ == "__main__":
    main()
