"""The comparison as a person reads it on a terminal, in 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from precast.demo.compare import Comparison
from precast.demo.findings import reasons, rows, title

__all__ = ["render"]


def render(comparison: Comparison) -> RenderableType:
    """The table, and below it the reasons."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("float32", justify="right", no_wrap=True)
    table.add_column(comparison.mixed.name, justify="right", no_wrap=True)
    table.add_column("mixed beside float32")
    for row in rows(comparison):
        table.add_row(row.name, row.float32, row.mixed, row.beside)
    heading = Text(title(comparison), "bold")
    return Group(heading, table, *(Text(f"- {reason}") for reason in reasons(comparison)))
