"""`python -m benchmarks`: every measurement, as tables on the terminal and as one JSON file."""

from __future__ import annotations

import functools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import (
    clients,
    demos,
    elsewhere,
    growth,
    models,
    observing,
    overhead,
    packages,
    page,
    shipping,
    starting,
    stepping,
    targets,
)
from benchmarks.tables import about, print_rows
from precast.engine import registration

Rows = Iterator[dict[str, Any]]


class Suite(NamedTuple):
    """Measurements, and how many comparisons they are, where that is known before."""

    run: Callable[[], Rows]
    total: int | None = None


Suites = Mapping[str, Suite]


class Output(NamedTuple):
    """Where rows go."""

    path: Path | None
    as_lines: bool


def _output(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that measures; it gets an `Output`."""

    @click.option(
        "--json",
        "path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write all rows here.",
    )
    @click.option("--lines", is_flag=True, help="Print each row as a line of JSON, and no tables.")
    @functools.wraps(command)
    def with_output(*args: Any, path: Path | None, lines: bool, **kwargs: Any) -> None:
        command(*args, output=Output(path, lines), **kwargs)

    return with_output


def _rounds(default: int | None) -> Callable[[Any], Any]:
    usual = "" if default is not None else "  [default: as many as each command makes]"
    return click.option(
        "--rounds",
        type=click.IntRange(min=1),
        default=default,
        show_default=default is not None,
        help=f"Most rounds of each comparison.{usual}",
    )


@click.group(invoke_without_command=True)
@click.pass_context
@_rounds(None)
@_output
def main(context: click.Context, rounds: int | None, output: Output) -> None:
    """Measure precast beside torch.autocast, in one process, in turns.

    Without COMMAND: overhead (with the reference engine too, in a process of its own), demos, models, observing, steps,
    shipping (converted models, packages, the start of a process), and the clients that have a target, in their
    environment. What has a target gets a verdict.
    """
    if context.invoked_subcommand is None:
        _measure(_all(rounds), output)


def _all(rounds: int | None) -> Suites:
    suites = {"overhead": Suite(lambda: overhead.run(rounds=rounds or overhead.ROUNDS))}
    if registration.engine() != "reference":
        few = rounds or _ROUNDS_OF_REFERENCE
        suites["overhead of the reference engine"] = Suite(
            lambda: elsewhere.overhead_of_reference(few)
        )
    return {
        **suites,
        "demos": Suite(lambda: iter(demos.run(rounds=rounds or demos.ROUNDS))),
        **_models(rounds or models.ROUNDS),
        "observing": Suite(lambda: observing.run(rounds=rounds or _ROUNDS_OF_OBSERVING)),
        "steps": Suite(lambda: stepping.run(rounds=rounds or _ROUNDS_OF_STEPS)),
        **_shipped(rounds),
        "clients": Suite(lambda: elsewhere.clients(rounds or overhead.ROUNDS)),
    }


def _shipped(rounds: int | None, only: tuple[str, ...] = ()) -> Suites:
    return {
        "shipping": Suite(lambda: shipping.run(rounds=rounds or shipping.ROUNDS, only=only)),
        "packages": Suite(lambda: packages.run(rounds=rounds or packages.ROUNDS, only=only)),
        "start": Suite(
            lambda: starting.run(rounds=min(rounds or starting.ROUNDS, starting.ROUNDS))
        ),
    }


_ROUNDS_OF_REFERENCE, _ROUNDS_OF_OBSERVING, _ROUNDS_OF_STEPS = 7, 9, 9
"""Fewer than by themselves: all of it is to end within twenty minutes."""


@main.command("overhead")
@_rounds(overhead.ROUNDS)
@_output
def _overhead(rounds: int, output: Output) -> None:
    """What a call and a region cost."""
    _measure({"overhead": Suite(lambda: overhead.run(rounds=rounds))}, output)


@main.command("demos")
@_rounds(demos.ROUNDS)
@_output
def _demos(rounds: int, output: Output) -> None:
    """A training step of the demos, as the demos train."""
    _measure({"demos": Suite(lambda: iter(demos.run(rounds=rounds)))}, output)


@main.command("observing")
@_rounds(observing.ROUNDS)
@_output
def _observing(rounds: int, output: Output) -> None:
    """What watching a training step costs: traced, counted, monitored."""
    _measure({"observing": Suite(lambda: observing.run(rounds=rounds))}, output)


@main.command("steps")
@_rounds(stepping.ROUNDS)
@click.option(
    "--millions", multiple=True, type=float, help="Of numbers that are stepped; 10, 25 and 100."
)
@click.option("--steps-only", is_flag=True, help="No training steps.")
@_output
def _steps(rounds: int, millions: tuple[float, ...], steps_only: bool, output: Output) -> None:
    """An optimizer's step in one pass beside PyTorch's, alone and in the training of a decoder."""
    shapes = () if steps_only else stepping.SHAPES
    run = partial(
        stepping.run, rounds=rounds, millions=millions or stepping.MILLIONS, shapes=shapes
    )
    _measure({"steps": Suite(run)}, output)


@main.command("shipping")
@_rounds(None)
@click.option("--only", multiple=True, help="Cases with this in their name; all if none is given.")
@_output
def _shipping(rounds: int | None, only: tuple[str, ...], output: Output) -> None:
    """Converted and exported models and packages beside 16 bits by hand; the start of a process."""
    suites = _shipped(rounds, only)
    _measure({name: suite for name, suite in suites.items() if name != "start" or not only}, output)


@main.command("clients")
@_rounds(overhead.ROUNDS)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice(list(clients.SIZES)),
    help="All but the large one if none is given.",
)
@click.option("--model", "only", multiple=True, help="Of the names in the table; all if none.")
@click.option("--work", "works", multiple=True, help="Of those in the table; all if none is given.")
@_output
def _clients(
    rounds: int,
    sizes: tuple[str, ...],
    only: tuple[str, ...],
    works: tuple[str, ...],
    output: Output,
) -> None:
    """Other people's models and trainers; needs the extra test-clients."""
    sizes = sizes or clients.USUAL_SIZES
    run = partial(clients.run, rounds=rounds, sizes=sizes, only=only, works=works)
    _measure({"clients": Suite(run)}, output)


@main.command("models")
@_rounds(models.ROUNDS)
@click.option("--only", multiple=True, help="Cases with this in their name; or: growth.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of PyTorch on the CPU.")
@_output
def _whole(rounds: int, only: tuple[str, ...], device: str, threads: int, output: Output) -> None:
    """Whole networks in every precision: time, memory, casts, and how the time grows."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError(f"--device {device}: PyTorch sees no CUDA device here")
    _measure(_models(rounds, only, where, threads), output)


@main.command("render")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def _render(file: Path) -> None:
    """Write the tables and the chart of FILE's models into docs/performance.md."""
    for written in page.write(json.loads(file.read_text(encoding="utf-8"))):
        click.echo(f"wrote {written}")


def _models(
    rounds: int = models.ROUNDS,
    only: tuple[str, ...] = (),
    device: torch.device | None = None,
    threads: int = 1,
) -> Suites:
    where = device or torch.device("cpu")
    suites = {
        "models": Suite(
            lambda: models.run(rounds=rounds, only=only, device=where, threads=threads),
            models.comparisons(only, where),
        )
    }
    if not only or "growth" in only:
        suites["growth"] = Suite(
            lambda: growth.run(rounds=rounds, device=where, threads=threads), growth.COMPARISONS
        )
    return suites


def _measure(suites: Suites, output: Output) -> None:
    machine, code = about(), 0
    rows: list[dict[str, Any]] = []
    for name, suite in suites.items():
        try:
            for row in _with_progress(name, suite, quiet=output.as_lines):
                rows.append(row)
                if output.as_lines:
                    click.echo(json.dumps(row))
        except KeyboardInterrupt:
            click.echo("interrupted: these are the rows measured before", err=True)
            code = _INTERRUPTED
            break
        except Exception as error:
            traceback.print_exception(error)
            rows.append(elsewhere.skipped(name, f"{type(error).__name__}: {error}"))
            code = 1
    machine = {
        **about(),
        "load": machine["load"],
    }  # its load before it was ours; its threads as they were set
    if not output.as_lines:
        rows += targets.judged(machine, rows)
        print_rows(machine, rows)
    if output.path is not None:
        output.path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        click.echo(f"wrote {output.path}", err=output.as_lines)
    if code:
        raise SystemExit(code)


_INTERRUPTED = 130


def _with_progress(name: str, suite: Suite, *, quiet: bool) -> Rows:
    """The rows as they come; a bar says where it is, or a line for each comparison where there is no terminal."""
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True, quiet=quiet)
    shown = console.is_terminal
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not shown
    ) as progress:
        task = progress.add_task(name, total=suite.total)
        seen: set[tuple[Any, ...]] = set()
        start = time.monotonic()
        for row in suite.run():
            keys = ("case", "size", "work", "dtype", "compiled")
            measured = tuple(row[key] for key in keys if key in row)
            case = ", ".join(str(row[key]) for key in ("case", "work") if key in row)
            if measured not in seen and not shown:
                console.out(f"{name}: {case}: {time.monotonic() - start:.0f} s", highlight=False)
            seen.add(measured)
            progress.update(task, description=f"{name}: {case}", completed=len(seen))
            yield row


if __name__ == "__main__":
    main()
