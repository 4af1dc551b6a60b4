"""`python -m tests.lint.following FOLDER`: what following of `self.` and of calls costs, in processor time.

Invariant: the same files are checked with it and without it in turns, all by this process, after a first turn that
does not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from precast_lint.checking.engine import check
from precast_lint.meaning import functions
from precast_lint.parsing.handed import Handed
from precast_lint.parsing.text import decode
from precast_lint.parsing.values import Values
from precast_lint.selecting.settings import Settings

_TURNS = 2


def _set_everywhere(old: Any, new: Any) -> None:
    """Sets a function in each module that has imported it."""
    for module in [m for name, m in sys.modules.items() if name.startswith("precast_lint.")]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


@contextmanager
def _without_following() -> Iterator[None]:
    """Nothing is known of attributes of `self`, of what calls run and return, and of what parameters get."""

    def nothing(*_: Any) -> None:
        return None

    followed = [functions.followed_call, functions.called_method, functions.called_function]
    owners: list[tuple[Any, str, Any]] = [
        (Handed, "to", lambda *_: []),
        (Handed, "function_called", nothing),
        (Values, "attributes", lambda *_: {}),
    ]
    kept = [getattr(owner, name) for owner, name, _ in owners]
    replaced = [lambda *_: None for _ in followed]
    for old, new in zip(followed, replaced, strict=True):
        _set_everywhere(old, new)
    for owner, name, new in owners:
        setattr(owner, name, new)
    yield
    for old, new in zip(followed, replaced, strict=True):
        _set_everywhere(new, old)
    for (owner, name, _), old in zip(owners, kept, strict=True):
        setattr(owner, name, old)


def _seconds(files: list[Path]) -> float:
    start = time.process_time()
    for path in files:
        check(decode(path.read_bytes()), str(path), Settings())
    return time.process_time() - start


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--most", default=60, show_default=True, help="How many files at most.")
def main(folder: Path, most: int) -> None:
    """Check the files of a folder that speak of a scaler most often, with and without following."""
    found = ((path.read_bytes().count(b"scaler"), path) for path in folder.rglob("*.py"))
    heavy = sorted((pair for pair in found if pair[0]), reverse=True)[:most]
    files = [path for _, path in heavy]
    _seconds(files)
    for turn in range(_TURNS):
        on = _seconds(files)
        with _without_following():
            off = _seconds(files)
        click.echo(
            f"{turn}: {len(files)} files, with {on:.2f} s, without {off:.2f} s: {on / off:.2f}"
        )


if __name__ == "__main__":
    main()
