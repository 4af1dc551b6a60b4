"""`python -m tests.attack`: runs the scenarios, and says which did not hold."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.attack import page
from tests.attack.runner import HOLDS, LIMIT, Outcome, attack, load
from tests.attack.scenarios import AREAS, Scenario
from tests.attack.table import OPEN, TABLE


@click.command()
@click.option("--area", "areas", multiple=True, type=click.Choice(AREAS), help="Only this area.")
@click.option("--name", "part", default="", help="Only scenarios with this text in their names.")
@click.option("--list", "lists", is_flag=True, help="Print the scenarios and run none.")
@click.option("--quick", is_flag=True, help="Only those that `make test` runs.")
@click.option("--open", "is_open", is_flag=True, help="Those of defects that are not mended yet.")
@click.option("--seed", type=int, help="The first seed; without it, a fresh one.")
@click.option("--seeds", default=1, show_default=True, help="How many seeds each scenario gets.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="How many at a time.")
@click.option("--seconds", default=180.0, show_default=True, help="How long one may take.")
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write the outcomes here.")
@click.option("--write", is_flag=True, help="Write the counts into docs/reliability.md.")
def main(  # noqa: PLR0917 -- click hands on what it was given
    areas: tuple[str, ...],
    part: str,
    lists: bool,
    quick: bool,
    is_open: bool,
    seed: int | None,
    seeds: int,
    jobs: int,
    seconds: float,
    to: Path | None,
    write: bool,
) -> None:
    """Attack precast, and say what did not hold; exits with 1 if anything did not."""
    chosen = [
        s
        for s in (OPEN if is_open else TABLE).values()
        if (not areas or s.area in areas) and part in s.name and (s.quick or not quick)
    ]
    if not chosen:
        raise click.UsageError(f"no scenario has {part!r} in its name and is in that area")
    if lists:
        for one in chosen:
            click.echo(f"{one.area}: {one.name}: {one.claim} ({one.oracle})")
        return
    first = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    click.echo(f"{len(chosen)} scenarios, {seeds} seeds each, from --seed {first}")
    outcomes = _run(chosen, range(first, first + seeds), jobs, seconds)
    failed = [one for one in outcomes if one.result not in (HOLDS, LIMIT)]
    for one in failed:
        click.echo(
            f"\n{one.area}: {one.name} (--name {one.name!r} --seed {one.seed})\n{one.message}"
        )
    limits = sum(one.result == LIMIT for one in outcomes)
    click.echo(
        f"{len(outcomes) - len(failed) - limits} held, {limits} known limits, {len(failed)} failed"
    )
    if to is not None:
        to.write_text(json.dumps([one.to_dict() for one in outcomes], indent=1), encoding="utf-8")
    if write and not failed and chosen == list(TABLE.values()):
        page.write(seeds)
    sys.exit(bool(failed))


def _run(chosen: list[Scenario], seeds: range, jobs: int, seconds: float) -> list[Outcome]:
    load()
    tries = [(scenario, seed) for seed in seeds for scenario in chosen]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes = []
    # Its thread would be alive when processes are forked, so it draws when it is told to.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("attack", total=len(tries))
        for one in attack(tries, jobs=jobs, seconds=seconds):
            outcomes.append(one)
            progress.update(task, advance=1, refresh=True, description=one.area)
    return outcomes


if __name__ == "__main__":
    main()
