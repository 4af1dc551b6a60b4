"""`python -m tests.lint.mutation`: how many of all mistakes are found, by rule, and which are not."""

from __future__ import annotations

from collections import Counter

import click

from tests.lint.mutation.measuring import alarms, correct, is_found, mistakes, sample, table
from tests.lint.mutation.registry import MUTATORS


@click.command()
@click.option("--seed", type=int, help="A sample instead of all.")
@click.option(
    "--for-each", default=40, show_default=True, help="Mistakes of each rule in a sample."
)
@click.option("--two", is_flag=True, help="All, in two other ways at once.")
@click.option("--code", help="One rule alone.")
@click.option(
    "--missed", default=3, show_default=True, help="How many misses of each rule are shown."
)
def main(seed: int | None, for_each: int, two: bool, code: str | None, missed: int) -> None:
    """Break correct programs in every way that the catalogue names, and count what is found."""
    counts: dict[str, Counter[bool]] = {}
    for rule in [code] if code else sorted(MUTATORS):
        result = counts.setdefault(rule, Counter())
        for mistake in mistakes(rule, two) if seed is None else sample(rule, seed, for_each):
            is_one = is_found(mistake)
            result[is_one] += 1
            if not is_one and result[False] <= missed:
                click.echo(f"missed: {mistake}")
        click.echo(f"{rule}: {result[True]} of {result.total()}")
    click.echo(table(counts))
    for program, way, contents in () if code else correct(two):
        for alarm in alarms(contents):
            click.echo(f"false: {alarm}: in {program}, {' + '.join(way) or 'as it stands'}")


if __name__ == "__main__":
    main()
