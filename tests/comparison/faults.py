"""Faults of at least twenty kinds, and the program in which they are planted.

`python -m tests.comparison.faults FOLDER NAME...` records the sound runs, in a process of their own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import precast
from precast.comparison.recording import record
from precast.policy.policy import Policy
from tests.comparison.networks import (
    NETWORKS,
    Attention,
    Block,
    Dense,
    Drop,
    Gat,
    Moe,
    Norm,
    Positions,
    batch_for,
)

STEPS = 2


@dataclass
class Program:
    """A training of a network, whose parts a fault may change."""

    network: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float | None = None
    smoothing: float = 0.0
    zeroes: bool = True
    state: float | None = None
    region: torch.dtype | None = None
    policy: Policy | None = None
    reduction: str = "mean"


@dataclass(frozen=True)
class Planted:
    """The truth about a fault: any of these modules, operations and kinds names it."""

    modules: tuple[str, ...]
    operations: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        places: the places in a program where it can be planted.
        plant: changes a program, and returns the truth.
        needs_region: True if the program has to run in a region.
    """

    places: Callable[[Program], list[str]]
    plant: Callable[[Program, str], Planted]
    needs_region: bool = field(default=False)


def program_of(network: str, *, in_region: bool = False) -> Program:
    """Return the sound program."""
    torch.manual_seed(3)
    model = NETWORKS[network]()
    generator = torch.Generator().manual_seed(4)
    batches = [batch_for(network, generator) for _ in range(STEPS)]
    program = Program(network, model, batches)
    if in_region:
        program.region, program.policy = torch.bfloat16, Policy.load("default")
    return program


def run(program: Program, path: Path, **options: object) -> None:
    """Record the training of a program."""
    torch.manual_seed(5)
    model = program.model
    optimizer = torch.optim.AdamW(
        model.parameters(), program.lr, program.betas, weight_decay=program.weight_decay
    )
    if program.state is not None:
        for parameter in model.parameters():
            average = torch.full_like(parameter, program.state)
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0), "exp_avg": average, "exp_avg_sq": average.square(),
            }  # fmt: skip
    with record(path, model, **options):  # type: ignore[arg-type]
        for inputs, labels in program.batches:
            if program.region is None:
                loss = _loss(program, model(inputs), labels)
            else:
                with precast.autocast("cpu", program.region, policy=program.policy):
                    loss = _loss(program, model(inputs), labels)
            loss.backward()
            if program.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.clip)
            optimizer.step()
            if program.zeroes:
                optimizer.zero_grad()


def _loss(program: Program, out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        out, labels, label_smoothing=program.smoothing, reduction=program.reduction
    )


def _parts(kind: type[nn.Module]) -> Callable[[Program], list[str]]:
    return lambda program: [n for n, m in program.model.named_modules() if isinstance(m, kind)]


def _anywhere(_program: Program) -> list[str]:
    return [""]


def _set(
    kind: type[nn.Module], attribute: str, value: object, *operations: str, kinds: str
) -> Fault:
    """Return a fault that changes an attribute of a module."""

    def plant(program: Program, place: str) -> Planted:
        setattr(program.model.get_submodule(place), attribute, value)
        return Planted((place,), operations, tuple(kinds.split()))

    return Fault(_parts(kind), plant)


def _change(attribute: str, value: object, *operations: str, kinds: str) -> Fault:
    """Return a fault that changes the program outside of the model."""

    def plant(program: Program, _place: str) -> Planted:
        setattr(program, attribute, value)
        return Planted((), operations, tuple(kinds.split()))

    return Fault(_anywhere, plant)


def _causal(fault: Fault) -> Fault:
    """Return a fault of a mask, which only one network has."""
    return Fault(lambda p: fault.places(p) if p.network == "decoder" else [], fault.plant)


def _weight(change: Callable[[Tensor], Tensor]) -> Fault:
    def places(program: Program) -> list[str]:
        return [
            name for name, each in program.model.named_parameters()
            if each.dim() >= 2 and not torch.equal(change(each.detach()), each)
        ]  # fmt: skip

    def plant(program: Program, place: str) -> Planted:
        parameter = program.model.get_parameter(place)
        with torch.no_grad():
            parameter.copy_(change(parameter.detach().clone()))
        return Planted((place.rpartition(".")[0],), (place,), ("weight",))

    return Fault(places, plant)


def _transposed(weight: Tensor) -> Tensor:
    return weight.T if weight.dim() == 2 and weight.shape[0] == weight.shape[1] else weight


def _one_element(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed.view(-1)[7] += 1e-3
    return changed


def _stale(program: Program, place: str) -> Planted:
    layer = program.model.get_submodule(place)
    assert isinstance(layer, Dense)
    layer.stale = layer.weight.detach().clone() * 1.001
    return Planted((place,), (), ("weight",))


def _buffer(program: Program, place: str) -> Planted:
    module = program.model.get_submodule(place)
    assert isinstance(module, nn.BatchNorm2d)
    module.running_mean += 0.1  # type: ignore[operator]
    return Planted((place,), (f"{place}.running_mean",), ("weight",))


def _detached(program: Program, place: str) -> Planted:
    block = program.model.get_submodule(place)
    assert isinstance(block, Block)
    block.detaches = True
    # The gradients of the two branches are added by the node of one of them.
    return Planted((place, f"{place}.norm1"), ("add",), ("operation", "gradient"))


def _mode(program: Program, place: str) -> Planted:
    program.model.get_submodule(place).eval()
    return Planted((place,), (), ("mode",))


def _inputs(program: Program, _place: str) -> Planted:
    inputs, labels = program.batches[0]
    program.batches[0] = inputs.flip(0), labels
    return Planted((), ("input",), ("input",))


def _later_inputs(program: Program, _place: str) -> Planted:
    inputs, labels = program.batches[1]
    program.batches[1] = inputs.roll(1, -1), labels
    return Planted((), ("input",), ("input",))


def _labels(program: Program, _place: str) -> Planted:
    inputs, labels = program.batches[0]
    program.batches[0] = inputs, labels.roll(1)
    return Planted((), ("input",), ("input",))


def _gradient_hook(program: Program, place: str) -> Planted:
    program.model.get_parameter(place).register_hook(lambda gradient: gradient * 0.5)
    return Planted((), ("mul", place), ("gradient", "operation"))


def _parameters(program: Program) -> list[str]:
    return [name for name, _ in program.model.named_parameters()]


def _rule(operation: str, rule: str) -> Fault:
    def places(program: Program) -> list[str]:
        return (
            [operation] if operation == "linear" or program.network not in {"unet", "rnn"} else []
        )

    def plant(program: Program, place: str) -> Planted:
        assert program.policy is not None
        program.policy = program.policy.replace(ops={"cpu": {place: rule}})
        return Planted((), (), ("rule", "dtype"))

    return Fault(places, plant, needs_region=True)


def _region(program: Program, _place: str) -> Planted:
    program.region = torch.float16
    return Planted((), (), ("dtype",))


FAULTS: dict[str, Fault] = {
    "weight scaled": _weight(lambda weight: weight * 1.001),
    "weight transposed": _weight(_transposed),
    "one element of a weight": _weight(_one_element),
    "weight drawn again": _weight(lambda weight: torch.randn_like(weight) * weight.std()),
    "weight rounded to 16 bits": _weight(lambda weight: weight.bfloat16().float()),
    "stale copy": Fault(_parts(Dense), _stale),
    "buffer": Fault(_parts(nn.BatchNorm2d), _buffer),
    "eps in 16 bits": _set(
        Norm, "eps", float(torch.tensor(1e-3).bfloat16()), "add", kinds="operation"
    ),
    "another eps": _set(Norm, "eps", 1e-2, "add", kinds="operation"),
    "a cast lacks": _set(Norm, "dtype", torch.float32, "_to_copy", kinds="dtype"),
    "a cast too many": _set(Dense, "rounds_input", True, "_to_copy", kinds="dtype"),
    "less precise kernel": _set(
        Dense, "is_imprecise", True, "bitwise_and", "__and__", kinds="operation"
    ),
    "dropout seed": _set(Drop, "draws", 1, "native_dropout", "bernoulli", "rand", kinds="random"),
    "dropout off": Fault(_parts(Drop), _mode),
    "batch norm in evaluation": Fault(_parts(nn.BatchNorm2d), _mode),
    "mask off by one": _causal(_set(Attention, "diagonal", 1, "tril", kinds="operation")),
    "mask value": _causal(_set(Attention, "fill", -1.0, "masked_fill", kinds="operation")),
    "softmax over another dimension": _set(Attention, "dim", -2, "_softmax", kinds="operation"),
    "scale": _set(Attention, "scale", 0.3, "mul", kinds="operation"),
    "heads mixed up": _set(Attention, "swaps", True, kinds="operation"),
    "positions in 16 bits": _set(Positions, "dtype", torch.bfloat16, "_to_copy", kinds="dtype"),
    "gelu by tanh": _set(Block, "approximate", "tanh", "gelu", kinds="operation"),
    "residual scaled": _set(Block, "residual", 1.01, "mul", kinds="operation"),
    "slope": _set(Gat, "slope", 0.1, "leaky_relu", kinds="operation"),
    "experts": _set(Moe, "top", 1, "topk", kinds="operation"),
    "detached": Fault(_parts(Block), _detached),
    "another batch": Fault(_anywhere, _inputs),
    "another second batch": Fault(_anywhere, _later_inputs),
    "other labels": Fault(_anywhere, _labels),
    "label smoothing": _change("smoothing", 0.1, kinds="operation"),
    "sum for mean": _change("reduction", "sum", "nll_loss_forward", kinds="operation"),
    "clipped": _change("clip", 0.01, kinds="gradient"),
    "learning rate": _change("lr", 1.1e-2, kinds="optimizer"),
    "betas": _change("betas", (0.8, 0.999), kinds="optimizer"),
    "weight decay": _change("weight_decay", 0.02, kinds="optimizer"),
    "optimizer state": _change("state", 0.01, kinds="optimizer"),
    "gradients not zeroed": _change("zeroes", False, kinds="gradient operation"),
    "gradient halved": Fault(_parameters, _gradient_hook),
    "rule of linear": _rule("linear", "fp32"),
    "rule of softmax": _rule("softmax.int", "fp32"),
    "dtype of the region": Fault(_anywhere, _region, needs_region=True),
}


def cases(seed: int, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield networks, faults and places: every kind of fault in turn, drawn places."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        for name in draw.sample(sorted(FAULTS), len(FAULTS)):
            networks = draw.sample(sorted(NETWORKS), len(NETWORKS))
            for network in networks:
                fault = FAULTS[name]
                if fault.needs_region and network == "rnn":
                    continue  # oneDNN has no LSTM in 16 bits on every processor
                places = fault.places(program_of(network, in_region=fault.needs_region))
                if places:
                    yield network, name, draw.choice(places)
                    made += 1
                    break
            if made == count:
                return


def sound_file(folder: Path, network: str, *, in_region: bool) -> Path:
    """Return the file of a sound run."""
    return folder / f"{network}{'-region' if in_region else ''}.run"


def main(folder: Path, *networks: str) -> None:
    """Record the sound runs, with and without a region."""
    torch.set_num_threads(1)  # so that sums have the same order in every process
    for network in networks:
        for in_region in (False, True)[: 1 + (network != "rnn")]:
            program = program_of(network, in_region=in_region)
            run(program, sound_file(folder, network, in_region=in_region))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
