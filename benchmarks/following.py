"""What it costs `precast-lint check` to follow attributes of `self` and calls of functions, in processor time.

`python -m benchmarks.following FOLDER ...` checks each folder with it and without it, in turns, all in one process:
every file, as a user does, and then those alone that speak of scalers most often. `--turn without FOLDER` checks a
folder once, as one of the programs of `python -m benchmarks.check`.

Without following nothing is known of a scaler in `self.scaler`, of what calls run and return, and of what parameters
get. So most rules about training steps have nothing to do in a trainer that is a class: the cost of following is that
of all that is found there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from precast_lint.checking.engine import check
from precast_lint.meaning import functions
from precast_lint.parsing.handed import Handed
from precast_lint.parsing.text import decode
from precast_lint.parsing.values import Values
from precast_lint.running.files import find
from precast_lint.selecting.look import interesting
from precast_lint.selecting.settings import Settings

__all__ = ["Cost", "cost", "heavy"]


@dataclass(frozen=True)
class Cost:
    """The seconds that a process computes for some files, with following and without."""

    files: int
    lines: int
    followed: float
    unfollowed: float

    @property
    def ratio(self) -> float:
        """How many times the time without following is what it takes with it."""
        return self.followed / self.unfollowed

    def __str__(self) -> str:
        return (
            f"{self.files:,} files, {self.lines:,} lines: {self.followed:.2f} s with, {self.unfollowed:.2f} s without, "
            f"{self.ratio:.2f} times; with it {self.files / self.followed:,.0f} files/s, "
            f"{self.lines / self.followed:,.0f} lines/s"
        )


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
    try:
        yield
    finally:
        for old, new in zip(followed, replaced, strict=True):
            _set_everywhere(new, old)
        for (owner, name, _), old in zip(owners, kept, strict=True):
            setattr(owner, name, old)


def _seconds(paths: Iterable[Path], settings: Settings) -> float:
    start = time.process_time()
    for path in paths:
        with suppress(SyntaxError, ValueError):  # in no encoding that is known: no program
            check(decode(path.read_bytes()), str(path), settings)
    return time.process_time() - start


def cost(paths: list[Path], turns: int = 2) -> Cost:
    """What files cost, the best of some turns; one before them, which loads the rules, does not count."""
    settings = Settings()
    _seconds((path for path in paths if interesting(path.read_bytes(), settings.codes)), settings)
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    followed, unfollowed = [], []
    for _ in range(turns):
        followed.append(_seconds(paths, settings))
        with _without_following():
            unfollowed.append(_seconds(paths, settings))
    return Cost(len(paths), lines, min(followed), min(unfollowed))


def heavy(paths: Iterable[Path], most: int) -> list[Path]:
    """The files that speak of scalers, those first that do so most often."""
    counted = ((path.read_bytes().count(b"scaler"), path) for path in paths)
    return [path for count, path in sorted(counted, reverse=True) if count][:most]


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--most", default=60, show_default=True, help="How many files that speak of scalers.")
@click.option("--turns", default=2, show_default=True, help="How many turns; the best counts.")
@click.option(
    "--turn", type=click.Choice(["with", "without"]), help="One turn alone, of all files."
)
def main(folders: tuple[Path, ...], most: int, turns: int, turn: str | None) -> None:
    """Check folders with following of `self.` and calls, and without."""
    paths = {
        folder: [path for path in find([folder], Settings()) if path.suffix != ".ipynb"]
        for folder in folders
    }
    if turn is not None:
        with _without_following() if turn == "without" else nullcontext():
            _seconds((path for found in paths.values() for path in found), Settings())
        return
    for folder, found in paths.items():
        click.echo(f"{folder}: {cost(found, turns)}")
    chosen = heavy((path for found in paths.values() for path in found), most)
    if chosen:
        click.echo(f"of these the files that speak of scalers most: {cost(chosen, turns)}")


if __name__ == "__main__":
    main()
