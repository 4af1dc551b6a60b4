"""How fast `precast-lint check` is, beside LibCST, ruff and TorchFix, on a tree of a million lines that it makes.

`python -m benchmarks.check` prints the table; with `--write` it keeps the numbers in docs/data/check_speed.json and
puts the table into docs/check.md. Each program is a process of its own, on one core. What counts is the
time that it computes (user and system), the best of several rounds taken in turns: others on the machine disturb
it less than the time that passes. TorchFix gets an environment of its own, and a tenth of the tree.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.sections import put
from benchmarks.tables import about

__all__ = ["Tree", "measure", "table"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "check.md"
DATA = ROOT / "docs" / "data" / "check_speed.json"
TORCHFIX = "torchfix==0.7.0"
BEGIN, END = "<!-- figures: python -m benchmarks.check --write -->\n", "<!-- end of figures -->"

_PLAIN = '''
class Block{n}(nn.Module):
    """A block with {width} channels."""

    def __init__(self, width: int = {width}, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(x))  # {n}
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return x + self.dropout(self.second(hidden))


def prepare_{n}(rows: list[dict[str, float]], limit: int = {width}) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {{}}
    for row in sorted(rows, key=lambda row: row["weight"])[:limit]:
        for name, value in row.items():
            if name.startswith("loss/") and value > {n} / 7:
                found.setdefault(name.removeprefix("loss/"), []).append(value * 2 - 1)
    return found
'''
_AMP = """
def train_{n}(model, batches, optimizer):
    scaler = torch.cuda.amp.GradScaler()
    for batch in batches:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Trainer{n}:
    def __init__(self, model, optimizer, scheduler=None, clip=None, accumulate=1):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.cuda.amp.GradScaler()
        self.clip, self.accumulate = clip, accumulate

    def fit(self, batches, epochs):
        for epoch in range(epochs):
            for number, batch in enumerate(batches):
                self.backward(self.loss(batch))
                if (number + 1) % self.accumulate == 0:
                    self.step()
            self.report(epoch)

    def loss(self, batch):
        with torch.cuda.amp.autocast():
            return self.model(batch).mean() / self.accumulate

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def report(self, epoch):
        if epoch % 10 == 0:
            print(epoch, self.scaler.get_scale())
"""


@dataclass(frozen=True)
class Tree:
    """A folder of modules, the first of which use AMP."""

    folder: Path
    files: int
    using: int
    lines: int


def make(folder: Path, *, lines: int, using: int, blocks: int = 20) -> Tree:
    """Writes modules until there are so many lines; `using` of them have a function and a class with AMP."""
    written = number = 0
    while written < lines:
        parts = ["import torch\nfrom torch import nn\n"]
        parts += [_PLAIN.format(n=number * blocks + b, width=8 * (b + 1)) for b in range(blocks)]
        parts += [_AMP.format(n=number)] if number < using else []
        text = "\n".join(parts)
        path = folder / f"part{number // 100:03}" / f"module{number:05}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written += text.count("\n")
        number += 1
    return Tree(folder, number, using, written)


_PARSE = """
import sys
from pathlib import Path
import libcst
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    libcst.parse_module(path.read_bytes())
"""


def seconds(*command: str, **environment: str) -> float:
    """The time that a program computes.

    Raises:
        RuntimeError: it failed (finding something is no failure).
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(rounds: int, work: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The shortest time of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            times[name].append(run())
    return {name: min(found) for name, found in times.items()}


def _check(tree: Tree, *arguments: str) -> float:
    command = [sys.executable, "-m", "precast_lint", "check", "--jobs", "1", "--statistics"]
    return seconds(*command, *arguments, str(tree.folder))


def measure(
    folder: Path, *, lines: int, using: int, rounds: int, torchfix: str | None
) -> dict[str, Any]:
    """All numbers: seconds on the whole tree, on trees with more and more files that use AMP, from the cache."""
    tree = make(folder / "tree", lines=lines, using=using)
    (tree.folder / "pyproject.toml").write_text("[tool.precast.check]\n", encoding="utf-8")
    _check(tree)  # fills the cache
    work = {
        "precast-lint check": lambda: _check(tree, "--no-cache"),
        "precast-lint check, from its cache": lambda: _check(tree),
        "ruff check": lambda: seconds(
            *(sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"),
            str(tree.folder),
            RAYON_NUM_THREADS="1",
        ),
    }
    found = best(rounds, work) | starts(folder, rounds)
    found["LibCST parses it all"] = seconds(sys.executable, "-c", _PARSE, str(tree.folder))
    tenth = make(folder / "tenth", lines=lines // 10, using=using // 10)
    if torchfix is not None:
        name = "TorchFix (ten times a tenth of the tree)"
        found[name] = 10 * seconds(torchfix, "--jobs", "1", str(tenth.folder))
    return {
        "lines": tree.lines,
        "files": tree.files,
        "using": tree.using,
        "seconds": {name: round(value, 3) for name, value in found.items()},
        "growth": _growth(folder, lines // 10, max(2, using // 4), rounds),
        "following": _following(tree, rounds),
    }


def _following(tree: Tree, rounds: int) -> dict[str, float]:
    """Seconds with and without following of `self.` and of calls."""
    program = (sys.executable, "-m", "benchmarks.following", "--turn")
    work = {
        turn: partial(seconds, *program, turn, str(tree.folder), PYTHONPATH=str(ROOT))
        for turn in ("with", "without")
    }
    return {turn: round(found, 3) for turn, found in best(rounds, work).items()}


def starts(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds to start: they are few, and the best of more rounds."""
    small = make(folder / "small", lines=1, using=0)
    work = {
        "precast-lint check, of one file without AMP": lambda: _check(small, "--no-cache"),
        "import precast_lint": lambda: seconds(sys.executable, "-c", "import precast_lint"),
    }
    return best(10 * rounds, work)


def _growth(folder: Path, lines: int, using: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds on trees of one size, of which more and more files use AMP."""
    trees = [
        make(folder / f"growth{count}", lines=lines, using=count)
        for count in (0, using, 2 * using, 4 * using)
    ]
    work = {str(tree.using): partial(_check, tree, "--no-cache") for tree in trees}
    found = best(rounds, work)
    return [
        {"using": t.using, "lines": t.lines, "seconds": round(found[str(t.using)], 3)}
        for t in trees
    ]


def table(found: dict[str, Any]) -> str:
    """The numbers as text: times as multiples of those of precast-lint."""
    times = found["seconds"]
    base = times["precast-lint check"]
    rows = [f"| {name} | {value:.2f} | {value / base:.2f} |" for name, value in times.items()]
    first = found["growth"][0]["seconds"]
    growth = ", ".join(
        f"{row['seconds'] - first:.2f} s for {row['using']}" for row in found["growth"][1:]
    )
    about_it = (
        f"A tree of {found['lines']:,} lines in {found['files']:,} files, {found['using']} of which use AMP. "
        f"Seconds that a process on one core computes, best of {found['rounds']}, on {found['cpu']}, "
        f"load {found['load']}, on {found['date']}."
    )
    more = (
        "What it costs grows with the number of files that use AMP, and with nothing else but reading: beyond a tree "
        f"of {found['growth'][0]['lines']:,} lines in which none does, {growth} of them. {found['torchfix']}"
    )
    if "following" in found:
        followed, unfollowed = found["following"]["with"], found["following"]["without"]
        more += (
            f" Following `self.` and calls costs {followed / unfollowed:.2f} times here: {followed:.2f} s against "
            f"{unfollowed:.2f} s."
        )
    lines = ["", "| program | seconds | in times of precast-lint |", "|---|---|---|", *rows, ""]
    wrapped = [textwrap.fill(part, 118, break_on_hyphens=False) for part in (about_it, more)]
    return "\n".join([wrapped[0], *lines, wrapped[1]]) + "\n"


def install_torchfix(folder: Path) -> str | None:
    """TorchFix's program in an environment of its own; None where it can't be installed."""
    program = folder / "torchfix" / "bin" / "torchfix"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "torchfix")], check=True)
        command = [str(folder / "torchfix" / "bin" / "pip"), "install", "--quiet", TORCHFIX]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
    return str(program)


@click.command()
@click.option(
    "--write", is_flag=True, help="Keep the numbers, and put the table into docs/check.md."
)
@click.option("--lines", default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--starts",
    "only_starts",
    is_flag=True,
    help="How long it takes to start alone; the rest stays.",
)
def main(write: bool, lines: int, rounds: int, only_starts: bool) -> None:
    """Measure `precast-lint check` beside LibCST, ruff and TorchFix."""
    with tempfile.TemporaryDirectory() as folder:
        found = (
            _with_new_starts(Path(folder), rounds)
            if only_starts
            else _everything(Path(folder), lines, rounds)
        )
    click.echo(table(found))
    if write:
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        put(PAGE, BEGIN, END, f"\n{table(found)}\n")


def _with_new_starts(folder: Path, rounds: int) -> dict[str, Any]:
    if not DATA.exists():
        raise click.UsageError(f"--starts: there are no other numbers in {DATA}; measure all first")
    found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    new = {name: round(value, 3) for name, value in starts(folder, rounds).items()}
    return found | {"seconds": found["seconds"] | new}


def _everything(folder: Path, lines: int, rounds: int) -> dict[str, Any]:
    torchfix = install_torchfix(ROOT / ".venvs")
    machine = about()
    using = max(8, lines // 50_000)
    found = measure(folder, lines=lines, using=using, rounds=rounds, torchfix=torchfix)
    found |= {key: machine[key] for key in ("date", "cpu", "load", "python")} | {"rounds": rounds}
    version = TORCHFIX.replace("==", " ")
    found["torchfix"] = f"{version}." if torchfix else f"{version} could not be installed here."
    return found


if __name__ == "__main__":
    main()
