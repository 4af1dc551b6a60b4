"""Commands of other distributions: that of precast-lint is `precast check`.

Invariants: a distribution names its commands in the entry point group `precast.commands`, and nothing of it is imported
before its command, or the help text of `precast`, is requested.
"""

from __future__ import annotations

import click

__all__ = ["GROUP", "find", "names"]

GROUP = "precast.commands"


def names() -> list[str]:
    """Return the names of the commands of all installed distributions."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


def find(name: str) -> click.Command | None:
    """Return the command of that name; None if no distribution has it.

    Raises:
        click.ClickException: it is the command of precast-lint, which is not installed.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=name):
        command: click.Command = point.load()
        return command
    if name == "check":
        raise click.ClickException(
            f"`precast {name}` is a command of precast-lint, which is not installed. Install it, in a clone "
            "of precast: pip install ./lint. It needs no PyTorch."
        )
    return None
