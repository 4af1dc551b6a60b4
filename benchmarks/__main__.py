"""`python -m benchmarks`: every measurement, as tables on the terminal and as one JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import clients, demos, overhead

Rows = Iterator[dict[str, Any]]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(["overhead", "demos", "clients"]))
@click.option(
    "--rounds", default=overhead.ROUNDS, show_default=True, help="Rounds of each comparison."
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice(list(clients.SIZES)),
    help="Of clients; all but the large one if none is given.",
)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write all rows here."
)
def main(names: tuple[str, ...], rounds: int, sizes: tuple[str, ...], path: Path | None) -> None:
    """Measure precast beside torch.autocast, in one process, in turns.

    Without NAMES: overhead and demos. Clients need the extra test-clients.
    """
    suites: dict[str, Callable[[], Rows]] = {
        "overhead": lambda: overhead.run(rounds=rounds),
        "demos": lambda: iter(demos.run()),
        "clients": lambda: clients.run(rounds=rounds, sizes=sizes or clients.USUAL_SIZES),
    }
    rows = [
        row
        for name in names or ("overhead", "demos")
        for row in _with_progress(name, suites[name]())
    ]
    _print(rows)
    if path is not None:
        path.write_text(json.dumps({"machine": _machine(), "rows": rows}, indent=2) + "\n")
        click.echo(f"wrote {path}")


def _with_progress(name: str, rows: Rows) -> Rows:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name)
        for row in rows:
            progress.update(task, description=f"{name}: {row['kind']}, {row['case']}")
            yield row


def _print(rows: list[dict[str, Any]]) -> None:
    console = Console()
    console.print(_machine_line())
    tables = {"overhead": _overhead, "growth": _growth, "demos": _demos, "clients": _clients}
    for benchmark, fill in tables.items():
        chosen = [row for row in rows if row["benchmark"] == benchmark]
        if chosen:
            console.print(fill(chosen))


def _overhead(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Overhead of a call, us (median; difference: median of rounds, and its spread)"
    )
    for heading in ("kind", "call", "policy"):
        table.add_column(heading)
    for heading in ("torch", "precast", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        difference = f"{row['difference_us']:+.2f} ({row['difference_iqr_us']:.2f})"
        medians = [f"{row[name]['median_us']:.2f}" for name in ("torch", "precast")]
        table.add_row(row["kind"], row["case"], row["policy"], *medians, difference)
    return table


def _growth(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="How the cost of a call grows (linear with a weight)")
    for heading in ("with", "", "us", "ratio"):
        table.add_column(heading, justify="left" if heading in ("with", "") else "right")
    for row in rows:
        for name, ratio in row["ratio_to_first"].items():
            table.add_row(row["kind"], name, f"{row[name]['median_us']:.2f}", f"{ratio:.2f}")
    return table


def _demos(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Training step of the demos (ratio: to torch.autocast + torch's scaler)")
    for heading in ("demo", "variant"):
        table.add_column(heading)
    for heading in ("ms", "spread", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        step = (f"{row['median_ms']:.2f}", f"{row['iqr_ms']:.2f}")
        table.add_row(row["case"], row["kind"], *step, f"{row['ratio']:.3f}")
    return table


def _clients(rows: list[dict[str, Any]]) -> Table:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != clients.BASELINE))
    table = Table(
        title="Models and trainers of other libraries (ratios to torch.autocast, and their spread)"
    )
    for heading in ("size", "client", "work"):
        table.add_column(heading, overflow="fold")
    for heading in (f"{clients.BASELINE}, ms", *kinds):
        table.add_column(heading, justify="right", overflow="fold")
    for case in dict.fromkeys((row["size"], row["case"], row["work"]) for row in rows):
        found = {r["kind"]: r for r in rows if (r["size"], r["case"], r["work"]) == case}
        ratios = [
            f"{found[kind]['ratio']:.3f} ({found[kind]['ratio_iqr']:.3f})" if kind in found else ""
            for kind in kinds
        ]
        table.add_row(*case, f"{found[clients.BASELINE]['median_ms']:.2f}", *ratios)
    return table


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _machine_line() -> str:
    return ", ".join(f"{name} {value}" for name, value in _machine().items())


if __name__ == "__main__":
    main()
