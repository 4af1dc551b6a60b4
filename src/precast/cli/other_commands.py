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
        try:
            command: click.Command = point.load()
        except (ImportError, AttributeError) as error:  # of another version
            return _unusable(name, error)
        return command
    if name == "check":
        raise click.ClickException(
            f"`precast {name}` is a command of precast-lint, which is not installed. Install it, in a clone "
            "of precast: pip install ./lint. It needs no PyTorch."
        )
    return None


def _unusable(name: str, error: Exception) -> click.Command:
    """Return a command that only raises an error, so that the help text and the other commands stay usable."""
    text = (
        f"`precast {name}` of the installed precast-lint does not fit this precast ({error}). Install both from one "
        "clone: pip install . ./lint"
    )

    @click.command(name, help=text, add_help_option=False)
    @click.argument("_arguments", nargs=-1, type=click.UNPROCESSED)
    def command(_arguments: tuple[str, ...]) -> None:
        raise click.ClickException(text)

    command.context_settings = {"ignore_unknown_options": True}
    return command
