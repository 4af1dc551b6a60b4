"""`python -m tests.lint.mutation`: how many of all mistakes are found, by rule, and which are not."""

from __future__ import annotations

from collections import Counter

import click

from tests.lint.mutation.measuring import alarms, correct, is_found, mistakes, sample, table


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
    shown: Counter[str] = Counter()
    for mistake in mistakes(two) if seed is None else sample(seed, for_each):
        if code not in (None, mistake.code):
            continue
        found = is_found(mistake)
        counts.setdefault(mistake.code, Counter())[found] += 1
        if not found:
            shown[mistake.code] += 1
            if shown[mistake.code] <= missed:
                click.echo(f"missed: {mistake}")
    click.echo(table(counts))
    for program, way, written in correct(two):
        for alarm in alarms(written):
            click.echo(f"false: {alarm}: in {program}, {' + '.join(way) or 'as it stands'}")


if __name__ == "__main__":
    main()
