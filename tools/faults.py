"""What goes wrong in training, under PyTorch's gradient scaler and under precast's.

`python -m tools.faults` runs every fault under both and writes docs/reliability.md. A fault is a
function that takes the class of a scaler; what it returns is what was seen, nothing is written down
by hand. Those that need two processes are in `tools/fault_ranks.py`.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import precast

__all__ = ["FAULTS", "SCALERS", "Seen", "main", "page", "table"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
SCALERS: dict[str, type[Any]] = {"torch": torch.amp.GradScaler, "precast": precast.GradScaler}


class Seen(NamedTuple):
    """What a fault did."""

    what: str
    intact: bool
    """Whether the parameters are what they were before, or what a good step makes of them."""


Fault = Callable[[type[Any]], Seen]
FAULTS: dict[str, Fault] = {}


def fault(title: str) -> Callable[[Fault], Fault]:
    """Adds a function to `FAULTS`."""

    def add(function: Fault) -> Fault:
        FAULTS[title] = function
        return function

    return add


class Training:
    """One parameter of three ones; SGD with a rate of 0.5."""

    def __init__(self, kind: type[Any], optimizer: type[Any] = torch.optim.SGD) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer = optimizer([self.parameter], lr=0.5)
        self.scaler: Any = kind("cpu")

    def backward(self, factor: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.parameter * factor).sum()
        self.scaler.scale(loss).backward()
        return loss

    def iterate(self, factor: float = 1.0) -> None:
        self.backward(factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iterate_on(self, gradient: float) -> None:
        """An iteration whose gradients are all this number."""
        self.backward()
        self.parameter.grad = torch.full((3,), gradient)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> list[float]:
        values: list[float] = self.parameter.tolist()
        return values

    def good_steps(self, count: int) -> bool:
        """Whether the parameters are what that many good steps make of them."""
        return self.values() == [1 - 0.5 * count] * 3


def _error(error: BaseException) -> str:
    return f"`{type(error).__name__}`"


def _scale(training: Training) -> str:
    scale = training.scaler.get_scale()
    exponent = math.log2(scale) if scale else 0.0
    return f"2^{exponent:g}" if scale and exponent.is_integer() else f"{scale:g}"


def _until_a_verdict(
    training: Training, iterate: Callable[[], object], iterations: int, else_: str
) -> Seen:
    """What ends iterations that the scaler should not let go on, and the parameters then."""
    seen = else_
    for number in range(iterations):
        try:
            iterate()
        except precast.BrokenModelError as error:
            reason = error.verdict.reason  # type: ignore[attr-defined]
            seen = f"iteration {number}: {_error(error)}, reason {reason}"
            break
    return Seen(f"{seen}; scale {_scale(training)}", training.good_steps(0))


@fault("NaN in the loss, for ever")
def _nan_loss(kind: type[Any]) -> Seen:
    training = Training(kind)
    return _until_a_verdict(training, lambda: training.iterate(math.nan), 400, "skipped in silence")


@fault("NaN in the loss of three batches, then good ones")
def _bad_batches(kind: type[Any]) -> Seen:
    training = Training(kind)
    for number in range(4):
        training.iterate(math.nan if number < 3 else 1.0)
    return Seen(f"skipped, and trains on; scale {_scale(training)}", training.good_steps(1))


@fault("gradients of NaN for 400 iterations, then a good one")
def _nan_forever(kind: type[Any]) -> Seen:
    training, verdicts = Training(kind), 0
    for _ in range(400):
        try:
            training.iterate_on(math.nan)
        except precast.BrokenModelError:
            verdicts += 1
    scale = _scale(training)
    training.iterate()
    what = f"{verdicts} verdicts, for who goes on after the first" if verdicts else "no word"
    return Seen(
        f"{what}; scale {scale}; then parameters {training.values()}", training.good_steps(1)
    )


@fault("overflow with the scale at its floor")
def _floor(kind: type[Any]) -> Seen:
    training = Training(kind)
    return _until_a_verdict(training, lambda: training.iterate_on(math.inf), 200, "no floor")


@fault("gradients broken between unscale_ and step")
def _broken_later(kind: type[Any]) -> Seen:
    training = Training(kind)
    training.backward()
    training.scaler.unscale_(training.optimizer)
    training.parameter.grad[0] = math.inf  # type: ignore[index]
    training.scaler.step(training.optimizer)
    training.scaler.update()
    what = "skipped" if training.good_steps(0) else f"parameters {training.values()}"
    return Seen(what, training.good_steps(0))


@fault("SIGINT between unscale_ and step; the loop goes on")
def _interrupted(kind: type[Any]) -> Seen:
    training = Training(kind)
    try:
        training.backward()
        training.scaler.unscale_(training.optimizer)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    try:
        training.iterate()
    except RuntimeError as error:
        what = f"{_error(error)}, which says to call update()"
        intact = training.good_steps(0)
        training.optimizer.zero_grad()
        training.scaler.update()
        training.iterate()
        return Seen(f"{what}; then goes on", intact and training.good_steps(1))
    return Seen(f"parameters {training.values()}", training.good_steps(1))


class _Fails(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 1:
            raise OSError("disk full")
        super().step(closure)


@fault("an optimizer whose step raises; step is called again")
def _step_raises(kind: type[Any]) -> Seen:
    training = Training(kind, _Fails)
    training.backward()
    try:
        training.scaler.step(training.optimizer)
    except OSError:
        intact = training.good_steps(0)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return Seen("the error; the second call steps", intact and training.good_steps(1))


@fault("LBFGS whose closure raises in its third call")
def _closure_raises(kind: type[Any]) -> Seen:
    parameter = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
    optimizer = torch.optim.LBFGS([parameter], max_iter=5)
    scaler, before, calls = kind("cpu"), parameter.tolist(), 0
    scaler.scale(torch.ones(()))

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss = parameter.square().sum() + parameter.pow(4).sum()
        scaler.scale(loss).backward()
        return loss

    try:
        scaler.step(optimizer, closure=closure)
    except KeyboardInterrupt:
        intact = parameter.tolist() == before
        return Seen("put back as before the step" if intact else "left in the middle", intact)
    except RuntimeError as error:
        return Seen(f"{_error(error)}: no closures", parameter.tolist() == before)
    return Seen("nothing", False)


@fault("a state with a wrong key")
def _wrong_key(kind: type[Any]) -> Seen:
    training = Training(kind)
    before = training.scaler.state_dict()
    state = {"scale": 2.0, "growth_factor": 3.0, "backof_factor": 0.1}
    try:
        training.scaler.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        same = training.scaler.state_dict() == before
        left = "state as before" if same else "half of it loaded"
        return Seen(f"{_error(error)}; {left}", training.good_steps(0))
    return Seen("loaded", training.good_steps(0))


@fault("the empty state of a scaler that was off")
def _empty_state(kind: type[Any]) -> Seen:
    training = Training(kind)
    try:
        training.scaler.load_state_dict({})
    except RuntimeError as error:
        return Seen(_error(error), training.good_steps(0))
    training.iterate()
    return Seen("changes nothing", training.good_steps(1))


@fault("a checkpoint cut off while it was written")
def _cut_off(kind: type[Any]) -> Seen:
    training = Training(kind)
    whole = io.BytesIO()
    torch.save({"model": training.parameter, "scaler": training.scaler.state_dict()}, whole)
    before = training.scaler.state_dict()
    try:
        torch.load(io.BytesIO(whole.getvalue()[: whole.tell() // 2]))
    except (RuntimeError, EOFError) as error:
        same = training.scaler.state_dict() == before and training.good_steps(0)
        return Seen(f"{_error(error)} of torch.load; nothing loaded", same)
    return Seen("loaded", False)


@fault("a state with a scale of 0, which such a run leaves")
def _scale_of_zero(kind: type[Any]) -> Seen:
    training = Training(kind)
    state = {**training.scaler.state_dict(), "scale": 0.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.scaler.load_state_dict(state)
    training.iterate()
    what = "a warning, and the floor" if caught else f"parameters {training.values()}"
    return Seen(what, training.good_steps(1))


RANKS = {
    "inf in one gradient of one of two ranks": "inf",
    "one of two ranks killed in the middle of a step": "killed",
}


def _in_ranks(name: str, kind: str) -> Seen:
    """A fault of `tools/fault_ranks.py`, as its first rank saw it."""
    with tempfile.TemporaryDirectory() as folder:
        # Not torchrun: it ends the others as soon as one is killed, before they can say anything.
        command = [sys.executable, "-m", "tools.fault_ranks", name, kind, folder]
        started = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in (0, 1)]
        for process in started:
            process.wait(timeout=120)
        return Seen(*json.loads((Path(folder) / "seen.json").read_text(encoding="utf-8")))


def table(ranks: bool = True) -> list[tuple[str, Seen, Seen]]:
    """Every fault, as PyTorch's scaler and as precast's takes it."""
    rows = [
        (title, *(function(kind) for kind in SCALERS.values()))
        for title, function in FAULTS.items()
    ]
    if ranks:
        rows += [(t, *(_in_ranks(name, kind) for kind in SCALERS)) for t, name in RANKS.items()]
    return rows  # type: ignore[return-value]


def page(rows: list[tuple[str, Seen, Seen]]) -> str:
    """docs/reliability.md."""
    version = torch.__version__.partition("+")[0]
    lines = [
        "# Reliability",
        "",
        "What goes wrong in training, and what a gradient scaler makes of it. `python -m tools.faults` runs each",
        "fault under `torch.amp.GradScaler` and under `precast.GradScaler`, and writes this page;",
        f"`tests/project/test_faults.py` runs those of one process. PyTorch is version {version}, on the CPU.",
        "",
        "| fault | torch.amp | parameters intact | precast | parameters intact |",
        "|---|---|---|---|---|",
    ]
    for title, theirs, ours in rows:
        cells = [cell for seen in (theirs, ours) for cell in (seen.what, _yes(seen.intact))]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += [
        "",
        "Intact means: what they were before, or what as many good steps as ran make of them. A process that is",
        "killed takes its parameters with it: what is said is of the other one's.",
        "[The gradient scaler](scaler.md) says why each is as it is.",
        "",
    ]
    return "\n".join(lines)


def _yes(intact: bool) -> str:
    return "yes" if intact else "**no**"


@click.command()
def main() -> None:
    """Run every fault under both scalers, and write the first part of docs/reliability.md."""
    # What another program writes begins at its heading, and stays.
    _, heading, attack = PAGE.read_text(encoding="utf-8").partition("\n## The attack\n")
    PAGE.write_text(page(table()) + heading + attack, encoding="utf-8")
    click.echo(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
