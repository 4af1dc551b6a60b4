"""Commands that other distributions bring: those of precast-lint become `precast check`, `fix` and `rule`.

Invariants: a distribution names its commands in the entry point group `precast.commands`, and nothing of it is imported
before its command is asked for, or the list of all commands.
"""

from __future__ import annotations

import click

__all__ = ["GROUP", "find", "names"]

GROUP = "precast.commands"
_OF_THE_CHECKER = ("check", "fix", "rule")


def names() -> list[str]:
    """The commands of the distributions that are installed here."""
    from importlib.metadata import entry_points

    return sorted({found.name for found in entry_points(group=GROUP)})


def find(name: str) -> click.Command | None:
    """The command of that name; None if no distribution is known to have one.

    Raises:
        click.ClickException: precast-lint has it, and is not installed here.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group=GROUP, name=name):
        command: click.Command = found.load()
        return command
    if name in _OF_THE_CHECKER:
        raise click.ClickException(
            f"`precast {name}` is a command of precast-lint, which is not installed. Install it, in a clone "
            "of precast: pip install ./lint. It needs no PyTorch."
        )
    return None
