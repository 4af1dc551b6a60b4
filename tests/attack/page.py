"""The attack's section of docs/reliability.md: the counts and the known limits."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sections import put
from tests.attack.scenarios import AREAS, Scenario
from tests.attack.table import OPEN, TABLE

__all__ = ["PAGE", "section", "write"]

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- begin of the attack -->", "<!-- end of the attack -->"


def section() -> str:
    """Return the tables of counts and of limits as Markdown."""
    limits = [one for one in TABLE.values() if one.limit is not None]
    lines = ["| area | scenarios | hold | known limits |", "|---|---|---|---|"]
    lines += [_counts(area, [s for s in TABLE.values() if s.area == area]) for area in AREAS]
    lines += [_counts("**all**", list(TABLE.values())), ""]
    if limits:
        lines += ["### Known limits", "", "| scenario | why |", "|---|---|"]
        lines += [f"| {one.name} | {_cell(one.limit.reason)} |" for one in limits if one.limit]
        lines += [""]
    if OPEN:
        lines += [
            "### Defects that are not mended yet",
            "",
            "| area | scenario | what does not hold |",
        ]
        lines += ["|---|---|---|"]
        lines += [f"| {one.area} | {one.name} | {_cell(one.claim)} |" for one in OPEN.values()]
        lines += [""]
    return "\n".join(lines) + "\n"


def write(seeds: int) -> None:
    """Puts the section into the page, between its marks, with the number of seeds that each scenario had."""
    each = "a fresh seed" if seeds == 1 else f"{seeds} fresh seeds"
    message = f"Each scenario was tried with {each}: {seeds * len(TABLE):,} tries in all.\n\n"
    put(PAGE, f"{BEGIN}\n", END, f"\n{message}{section()}\n")


def _counts(name: str, some: list[Scenario]) -> str:
    limits = sum(one.limit is not None for one in some)
    return f"| {name} | {len(some)} | {len(some) - limits} | {limits} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
