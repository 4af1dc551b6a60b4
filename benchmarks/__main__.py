"""`python -m benchmarks`: every measurement, as tables in Markdown and as one JSON file."""

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
    elsewhere,
    models,
    observing,
    overhead,
    page,
    shared_process,
    targets,
)
from benchmarks.machine import about
from precast.engine import registration

Rows = Iterator[dict[str, Any]]


class Suite(NamedTuple):
    """Measurements, and how many comparisons they are, where that is known before."""

    run: Callable[[], Rows]
    total: int | None = None


Suites = Mapping[str, Suite]


class Output(NamedTuple):
    """The destination of the rows."""

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

    Without COMMAND: overhead (also with the reference engine, in a separate process), shared-process, models,
    observing, and the clients that have a target, in their environment. Each target is judged.
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
        **_shared_process(rounds or shared_process.ROUNDS),
        **_models(rounds or models.ROUNDS),
        "observing": Suite(lambda: observing.run(rounds=rounds or _ROUNDS_OF_OBSERVING)),
        "clients": Suite(lambda: elsewhere.clients(rounds or overhead.ROUNDS)),
    }


_ROUNDS_OF_REFERENCE, _ROUNDS_OF_OBSERVING = 7, 9
"""Fewer than in the separate commands, so that all suites end within twenty minutes."""


@main.command("overhead")
@_rounds(overhead.ROUNDS)
@_output
def _overhead(rounds: int, output: Output) -> None:
    """Measure the cost of a call and of a region."""
    _measure({"overhead": Suite(lambda: overhead.run(rounds=rounds))}, output)


@main.command("shared-process")
@_rounds(shared_process.ROUNDS)
@_output
def _shared(rounds: int, output: Output) -> None:
    """The first call of an attached model after other work in its process, beside the next call."""
    _measure(_shared_process(rounds), output)


def _shared_process(rounds: int) -> Suites:
    return {"shared process": Suite(lambda: shared_process.run(rounds=rounds))}


@main.command("observing")
@_rounds(observing.ROUNDS)
@_output
def _observing(rounds: int, output: Output) -> None:
    """Measure the cost of watching a training step: traced, counted, monitored."""
    _measure({"observing": Suite(lambda: observing.run(rounds=rounds))}, output)


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
@click.option("--only", multiple=True, help="Cases with this in their name.")
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
    """Write the tables and the chart of FILE into docs/figures.md."""
    for path in page.write(json.loads(file.read_text(encoding="utf-8"))):
        click.echo(f"wrote {path}")


def _models(
    rounds: int = models.ROUNDS,
    only: tuple[str, ...] = (),
    device: torch.device | None = None,
    threads: int = 1,
) -> Suites:
    where = device or torch.device("cpu")
    return {
        "models": Suite(
            lambda: models.run(rounds=rounds, only=only, device=where, threads=threads),
            models.comparisons(only, where),
        )
    }


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
        click.echo(page.render({"machine": machine, "rows": rows}))
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
        measurements: set[tuple[Any, ...]] = set()
        start = time.monotonic()
        for row in suite.run():
            keys = ("case", "size", "work", "dtype", "compiled")
            measured = tuple(row[key] for key in keys if key in row)
            case = ", ".join(str(row[key]) for key in ("case", "work") if key in row)
            if measured not in measurements and not shown:
                console.out(f"{name}: {case}: {time.monotonic() - start:.0f} s", highlight=False)
            measurements.add(measured)
            progress.update(task, description=f"{name}: {case}", completed=len(measurements))
            yield row


if __name__ == "__main__":
    main()
