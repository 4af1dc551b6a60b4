"""Whether models learn in 8 bits: trainings under each float8 rule beside bfloat16, and which layers to keep out of it.

Invariants:
- seeds, batches and first weights are the same for all that are compared, so differences are taken in pairs;
- data is real, and ships with what is installed: scikit-learn's digits, and the texts of Python's `pydoc`;
- the vision transformer has begun to learn in float32, alike in all variants: at its first steps two seeds differ more
  than two precisions;
- the losses at the end are those of the same batches for all, in a region with the policy that was trained under; for
  digits they are images that no training saw;
- whether 8 bits are emulated changes how long this takes, and nothing that it measures. It reports no times.

`python -m benchmarks.learning_float8` prints the tables; `--write` puts them into the recipe, with a picture.
"""

from __future__ import annotations

import io
import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from benchmarks.learning import Batch, cross_entropy, text
from benchmarks.networks import decoder
from benchmarks.sections import put
from benchmarks.tables import about
from precast._internal.atomic_write import replace
from precast.errors import PrecastWarning
from precast.tuning.intervals import mean_interval

__all__ = ["CASES", "VARIANTS", "Case", "policy_of", "sensitivity", "train"]

DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "recipes" / "float8.md", DOCS / "recipes" / "float8.zh.md"
DATA, PICTURE = DOCS / "data" / "learning-float8.json", DOCS / "images" / "learning-float8.png"
COMMAND: Final = "python -m benchmarks.learning_float8 --write"
LOSSES = f"<!-- figures: {COMMAND} -->\n", "<!-- end of what is learnt -->"
LAYERS = f"<!-- figures of layers: {COMMAND} -->\n", "<!-- end of layers -->"
REFERENCE: Final = "bfloat16"
_LENGTH, _WIDTH = 64, 128
_SIDE, _HELD_OUT = 8, 297
_EVALUATED: Final = 16
"""Batches that the final loss is a mean of."""
_BEFORE: Final = 100
"""Steps in bfloat16 before a layer is run alone."""
_BEGUN: Final = 150
"""Steps in float32 with which the vision transformer begins."""
_POINT: Final = 20
"""Steps whose mean is a point of a curve."""


class Variant(NamedTuple):
    """What is trained: a float8 rule for products, but for some layers; None for bfloat16 everywhere."""

    rule: str | None
    in_16_bits: tuple[str, ...] = ()
    """Of `first` and `last`."""


VARIANTS: Final[dict[str, Variant]] = {
    REFERENCE: Variant(None),
    "float8": Variant("float8"),
    "float8_rowwise": Variant("float8_rowwise"),
    "float8_hp_grad": Variant("float8_hp_grad"),
    "float8, first and last in bfloat16": Variant("float8", ("first", "last")),
}


SENSITIVE: Final = ("float8",)
"""Rules under which each layer is run alone."""


class Case(NamedTuple):
    """A training.

    Attributes:
        model: makes the model, in float32, from PyTorch's generator.
        batch: draws a batch, from PyTorch's generator.
        held_out: draws one to evaluate.
        steps: of AdamW.
        rate: its learning rate.
        first: the linear layer that is called first.
        last: the one that is called last.
        before: steps at a rate of 1e-3, in float32, which come before in all variants alike.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    held_out: Callable[[], Batch]
    steps: int
    rate: float
    first: str
    last: str
    before: int = 0


class Patches(nn.Module):
    """A vision transformer for images of 8x8: patches of 2x2, two blocks of attention, the mean of all patches."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tiles = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
        x = self.blocks(self.patches(tiles) + self.places)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        perceived: Tensor = x + self.perceptron(self.norm2(x))
        return perceived


def _images(held_out: bool) -> Callable[[], Batch]:
    from sklearn.datasets import load_digits

    data = load_digits()
    which = slice(-_HELD_OUT, None) if held_out else slice(None, -_HELD_OUT)
    images = torch.tensor(data.images, dtype=torch.float32)[which] / 16
    numbers = torch.tensor(data.target)[which]

    def batch() -> Batch:
        some = torch.randint(len(images), (32,))
        return images[some], numbers[some]

    return batch


_decoder = decoder(_WIDTH, 8, _LENGTH, layers=2).model
CASES: Final[dict[str, Callable[[], Case]]] = {
    "decoder on text": lambda: Case(
        _decoder, text(0, 4), text(0, 4), 300, 1e-3, "blocks.0.attend", "head"
    ),
    "ViT on digits": lambda: Case(
        Patches, _images(False), _images(True), 200, 1e-4, "patches", "head", _BEGUN
    ),
}


def policy_of(case: Case, variant: Variant) -> precast.Policy:
    """The policy of a variant."""
    return _policy(variant.rule, [getattr(case, layer) for layer in variant.in_16_bits])


def train(case: Case, variant: Variant, seed: int, *, steps: int | None = None) -> dict[str, Any]:
    """One training: the mean loss afterwards, and those of every 20 steps on the way."""
    model, policy = _begun(case, seed), policy_of(case, variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    attachment = precast.attach(model, policy, hold=False)
    torch.manual_seed(1000 + seed)
    losses = []
    for _ in range(case.steps if steps is None else steps):
        optimizer.zero_grad()
        with precast.autocast("cpu", dtype=torch.bfloat16, policy=policy):
            loss = cross_entropy(model, *case.batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.manual_seed(77)
    final = []
    with torch.no_grad(), precast.autocast("cpu", dtype=torch.bfloat16, policy=policy):
        final = [cross_entropy(model, *case.held_out()).item() for _ in range(_EVALUATED)]
    attachment.detach()
    starts = range(0, len(losses), _POINT)
    points = [round(statistics.fmean(losses[at : at + _POINT]), 5) for at in starts]
    return {"loss": statistics.fmean(final), "curve": points}


def sensitivity(case: Case, rule: str, seed: int, *, steps: int | None = None) -> dict[str, float]:
    """How much the gradient of a trained model changes if one linear layer alone runs in 8 bits, for each.

    The change is in proportion to the gradient, both of all parameters together, beside bfloat16 everywhere; the mean
    of four batches.
    """
    model = _begun(case, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    torch.manual_seed(1000 + seed)
    for _ in range(case.steps if steps is None else steps):
        _gradient(model, None, optimizer, case.batch())
        optimizer.step()
    batches = [case.batch() for _ in range(4)]
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    changes = {}
    exact = [_gradient(model, None, optimizer, batch) for batch in batches]
    for layer in (*layers, "all"):
        policy = _policy(rule, []) if layer == "all" else _one_layer(rule, layer)
        found = [_gradient(model, policy, optimizer, batch) for batch in batches]
        pairs = zip(found, exact, strict=True)
        changes[layer] = statistics.fmean(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return changes


def _begun(case: Case, seed: int) -> nn.Module:
    """The model, which has taken the steps that come before."""
    torch.manual_seed(seed)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(case.before):
        optimizer.zero_grad()
        cross_entropy(model, *case.batch()).backward()
        optimizer.step()
    return model


def _policy(rule: str | None, in_16_bits: list[str]) -> precast.Policy:
    ops = {} if rule is None else {"linear": rule}
    modules = {name: {"ops": {"linear": "lower"}} for name in in_16_bits}
    return precast.Policy.load("default").replace(name=rule or "default", ops=ops, modules=modules)


def _one_layer(rule: str, layer: str) -> precast.Policy:
    modules = {layer: {"ops": {"linear": rule}}}
    return precast.Policy.load("default").replace(name=rule, modules=modules)


def _gradient(
    model: nn.Module, policy: precast.Policy | None, optimizer: torch.optim.Optimizer, batch: Batch
) -> Tensor:
    """That of all parameters, in one vector."""
    attachment = None if policy is None else precast.attach(model, policy, hold=False)
    optimizer.zero_grad()
    with precast.autocast("cpu", dtype=torch.bfloat16, policy=policy):
        loss = cross_entropy(model, *batch)
    loss.backward()
    if attachment is not None:
        attachment.detach()
    grads = (p.grad for p in model.parameters())
    return torch.cat([grad.flatten().float() for grad in grads if grad is not None])


# --- tables and pictures ---


def _table(rows: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Final losses, and how much more than in bfloat16: a mean with its interval of 95%."""
    for case, variants in rows.items():
        exact = [run["loss"] for run in variants[REFERENCE]]
        for variant, runs in variants.items():
            its = [run["loss"] for run in runs]
            yield f"| {case} | {variant} | {statistics.fmean(its):.4f} | {_more(its, exact)} |\n"


def _more(its: list[float], exact: list[float]) -> str:
    if its == exact:
        return ""
    more = mean_interval([100 * (a / b - 1) for a, b in zip(its, exact, strict=True)])
    return f"{more.middle:+.2f}% ({more.low:+.2f} to {more.high:+.2f})"


def losses_text(document: Mapping[str, Any]) -> str:
    """The table of final losses."""
    head = "| training | products | final loss | more than bfloat16 (95%) |\n|---|---|---|---|\n"
    return head + "".join(_table(document["losses"])) + _where(document)


def layers_text(document: Mapping[str, Any]) -> str:
    """The table of what each layer alone does to the gradient."""
    rules = list(next(iter(document["layers"].values())))
    text = f"| network | in 8 bits | {' | '.join(rules)} |\n|---|---|{'---|' * len(rules)}\n"
    for case, by_rule in document["layers"].items():
        for layer in by_rule[rules[0]][0]:
            intervals = (
                mean_interval([100 * run[layer] for run in by_rule[rule]]) for rule in rules
            )
            cells = " | ".join(f"{i.middle:.2f}% ({i.low:.2f} to {i.high:.2f})" for i in intervals)
            text += f"| {case} | {layer if layer == 'all' else f'`{layer}`'} | {cells} |\n"
    return text + _where(document)


def _where(document: Mapping[str, Any]) -> str:
    machine, seeds = document["machine"], document["seeds"]
    return (
        f"\n{seeds} seeds, AdamW, emulated; `{COMMAND}` on {machine['date']}: {machine['cpu']}, PyTorch "
        f"{machine['torch']}.\n"
    )


def _png(losses: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> bytes:
    """Left the curves, the mean of all seeds; right how much more the loss at the end is, with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((9, 2.9 * len(losses)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(losses), 2, squeeze=False)
    colors = "#57606a", "#1f6feb", "#d1570a", "#1a7f37", "#54aeff", "#0a3069", "#fb8f44", "#762c00"
    for (case, variants), (curves, more) in zip(losses.items(), axes, strict=True):
        exact = [run["loss"] for run in variants[REFERENCE]]
        for place, (variant, color) in enumerate(zip(variants, colors, strict=False)):
            runs = variants[variant]
            if VARIANTS[variant].in_16_bits == ():
                points = [
                    statistics.fmean(at) for at in zip(*(r["curve"] for r in runs), strict=True)
                ]
                steps = [_POINT * (k + 0.5) for k in range(len(points))]
                curves.plot(steps, points, color=color, label=variant, linewidth=1.4)
            if variant != REFERENCE:
                pairs = zip((r["loss"] for r in runs), exact, strict=True)
                it = mean_interval([100 * (a / b - 1) for a, b in pairs])
                reach = [[it.middle - it.low], [it.high - it.middle]]
                more.errorbar([it.middle], [place], xerr=reach, fmt="o", color=color, capsize=3)
        curves.set(title=case, xlabel="step", ylabel="loss", yscale="log")
        for axis in ("major", "minor"):  # plain numbers, not powers of ten
            getattr(curves.yaxis, f"set_{axis}_formatter")("{x:g}")
        curves.legend(frameon=False, fontsize=8)
        more.axvline(0, color="#8c959f", linewidth=0.8)
        names = [name for name in variants if name != REFERENCE]
        more.set_yticks(range(1, len(names) + 1), names, fontsize=8)
        more.invert_yaxis()
        more.set_xlabel("loss at the end, more than in bfloat16 (%)")
        for each in (curves, more):
            each.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _write(document: Mapping[str, Any]) -> None:
    replace(DATA, json.dumps(document, indent=1).encode() + b"\n")
    replace(PICTURE, _png(document["losses"]))
    for page in PAGES:
        put(page, *LOSSES, losses_text(document))
        put(page, *LAYERS, layers_text(document))


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option(
    "--raw", type=click.Path(path_type=Path), help="Where what is measured is kept, to go on from."
)
@click.option("--only", type=click.Choice([*CASES]), help="One of the trainings.")
@click.option("--write", is_flag=True, help="Put the tables into the recipe, in both languages.")
def main(seeds: int, raw: Path | None, only: str | None, write: bool) -> None:
    """Measure whether models learn in 8 bits, and which layers to keep in 16."""
    warnings.filterwarnings("ignore", message="float8 is emulated", category=PrecastWarning)
    torch.set_num_threads(1)
    document: dict[str, Any] = {"losses": {}, "layers": {}}
    if raw is not None and raw.exists():
        document = json.loads(raw.read_text())
    document |= {"machine": about(), "seeds": seeds, "command": COMMAND}
    for place, work in _works(seeds):
        if only not in (None, place[1]):
            continue
        kept = document
        for key in place[:-1]:
            kept = kept.setdefault(key, {})
        if place[-1] not in kept:
            kept[place[-1]] = work()
            click.echo(f"{': '.join(place)}", err=True)
            if raw is not None:
                replace(raw, json.dumps(document).encode())
    click.echo(losses_text(document) + "\n" + layers_text(document))
    if write:
        _write(document)


def _works(seeds: int) -> Iterator[tuple[tuple[str, ...], Callable[[], Any]]]:
    """All that is measured: its place in the document, and what measures it."""
    for name, make in CASES.items():
        case = make()
        for variant, what in VARIANTS.items():
            yield ("losses", name, variant), partial(_each, partial(train, case, what), seeds)
        for rule in SENSITIVE:
            yield (
                ("layers", name, rule),
                partial(_each, partial(sensitivity, case, rule, steps=_BEFORE), seeds),
            )


def _each(one: Callable[[int], Any], seeds: int) -> list[Any]:
    return [one(seed) for seed in range(seeds)]


if __name__ == "__main__":
    main()
