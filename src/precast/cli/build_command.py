"""The command `precast build`, which compiles the library of the native engine.

Invariants: PyTorch is not loaded in this process; progress is shown on stderr, where that is a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from precast.cli.options import json_option

if TYPE_CHECKING:
    from precast.cli.build import BuildResult

__all__ = ["build"]


@click.command(short_help="Compile the native engine for the installed PyTorch.")
@json_option
def build(as_json: bool) -> None:
    """Compile the native engine for the PyTorch that is installed.

    It takes about a minute and needs a C++ compiler: the one that CXX names, else c++, g++ or
    clang++. The library is kept in the user's cache, where every program finds it; a second
    call compiles nothing.
    """
    built = _build()
    if as_json:
        import json

        result = {"path": str(built.path), "torch": built.torch, "compiler": built.compiler}
        click.echo(json.dumps({**result, "is_new": built.is_new}, indent=2))
    elif built.is_new:
        click.echo(f"compiled for PyTorch {built.torch} by {built.compiler}\n{built.path}")
    else:
        click.echo(f"already compiled for PyTorch {built.torch}\n{built.path}")


def _build() -> BuildResult:
    from precast.cli import build as build_

    torch = build_.installed_torch()  # first, for one error if several packages are missing
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("searching for a compiler", total=None)

        def show(step: str, done: int, of: int) -> None:
            progress.update(task, description=step, completed=done, total=of)

        return build_.build(torch=torch, progress=show)
