"""`python -m benchmarks`: every measurement, as tables on the terminal and as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import clients, demos, growth, models, observing, overhead, page
from benchmarks.tables import about, print_rows

Rows = Iterator[dict[str, Any]]


class Suite(NamedTuple):
    """Measurements, and how many comparisons they are, where that is known before."""

    run: Callable[[], Rows]
    total: int | None = None


Suites = Mapping[str, Suite]

_DEMOS = Suite(lambda: iter(demos.run()))
_JSON = click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows here."
)


def _rounds(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--rounds", default=default, show_default=True, help="Most rounds of each comparison."
    )


@click.group(invoke_without_command=True)
@click.pass_context
@_JSON
def main(context: click.Context, path: Path | None) -> None:
    """Measure precast beside torch.autocast, in one process, in turns.

    Without COMMAND: overhead, demos, models and observing.
    """
    if context.invoked_subcommand is None:
        watching = {"observing": Suite(observing.run)}
        suites = {"overhead": Suite(overhead.run), "demos": _DEMOS, **_models(), **watching}
        _measure(suites, path)


@main.command("overhead")
@_rounds(overhead.ROUNDS)
@_JSON
def _overhead(rounds: int, path: Path | None) -> None:
    """What a call and a region cost."""
    _measure({"overhead": Suite(lambda: overhead.run(rounds=rounds))}, path)


@main.command("demos")
@_JSON
def _demos(path: Path | None) -> None:
    """A training step of the demos, as the demos train."""
    _measure({"demos": _DEMOS}, path)


@main.command("observing")
@_rounds(observing.ROUNDS)
@_JSON
def _observing(rounds: int, path: Path | None) -> None:
    """What watching a training step costs: traced, counted, monitored."""
    _measure({"observing": Suite(lambda: observing.run(rounds=rounds))}, path)


@main.command("clients")
@_rounds(overhead.ROUNDS)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice(list(clients.SIZES)),
    help="All but the large one if none is given.",
)
@_JSON
def _clients(rounds: int, sizes: tuple[str, ...], path: Path | None) -> None:
    """Other people's models and trainers; needs the extra test-clients."""
    sizes = sizes or clients.USUAL_SIZES
    _measure({"clients": Suite(lambda: clients.run(rounds=rounds, sizes=sizes))}, path)


@main.command("models")
@_rounds(models.ROUNDS)
@click.option("--only", multiple=True, help="Cases with this in their name; or: growth.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of PyTorch on the CPU.")
@_JSON
def _whole(
    rounds: int, only: tuple[str, ...], device: str, threads: int, path: Path | None
) -> None:
    """Whole networks in every precision: time, memory, casts, and how the time grows."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError(f"--device {device}: PyTorch sees no CUDA device here")
    _measure(_models(rounds, only, where, threads), path)


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


def _measure(suites: Suites, path: Path | None) -> None:
    machine, interrupted = about(), False
    rows: list[dict[str, Any]] = []
    try:
        for name, suite in suites.items():
            rows.extend(_with_progress(name, suite))
    except KeyboardInterrupt:
        interrupted = True
    machine = {
        **about(),
        "load": machine["load"],
    }  # its load before it was ours; its threads as they were set
    print_rows(machine, rows)
    if path is not None:
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        click.echo(f"wrote {path}")
    if interrupted:
        click.echo("interrupted: these are the rows measured before", err=True)
        raise SystemExit(130)


def _with_progress(name: str, suite: Suite) -> Rows:
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=suite.total)
        seen = set()
        for row in suite.run():
            keys = ("case", "size", "work", "dtype", "compiled")
            seen.add(tuple(row[key] for key in keys if key in row))
            case = ", ".join(str(row[key]) for key in ("case", "work") if key in row)
            progress.update(task, description=f"{name}: {case}", completed=len(seen))
            yield row


if __name__ == "__main__":
    main()
