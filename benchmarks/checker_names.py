"""How long the checker takes to find what names stand for, beside LibCST's own metadata providers.

`python -m benchmarks.checker_names torch --every 10` reads every tenth file of an installed package. It parses each
file, and then has both resolve every name and dotted name in it: `Scopes` beside ScopeProvider, and `Names` beside
QualifiedNameProvider, each on a tree of its own. What counts is the time that the process computes. The decision to
keep an own implementation rests on these figures, which stand in the docstrings of `scopes.py` and `names.py`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, ScopeProvider

from precast_lint.parsing.names import Names
from precast_lint.parsing.scopes import Scopes
from precast_lint.parsing.syntax import walk

__all__ = ["measure", "table"]

Seconds = dict[str, float]


def measure(paths: list[Path]) -> Seconds:
    """The seconds of each step, summed up over the files."""
    seconds = dict.fromkeys(("parse", "Scopes", "Names", "ScopeProvider", "QualifiedName"), 0.0)

    def timed(step: str, work: Callable[..., Any], *arguments: object) -> Any:
        start = time.process_time()
        done = work(*arguments)
        seconds[step] += time.process_time() - start
        return done

    for path in paths:
        text = path.read_bytes()
        try:
            module = timed("parse", cst.parse_module, text)
        except (cst.ParserSyntaxError, UnicodeDecodeError):
            continue
        scopes = timed("Scopes", Scopes, module)
        timed("Names", _resolve_all, module, scopes)
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        timed("ScopeProvider", wrapper.resolve, ScopeProvider)
        timed("QualifiedName", _ask_all, wrapper)
        gc.collect()
    return seconds


def _resolve_all(module: cst.Module, scopes: Scopes) -> None:
    names = Names(scopes)
    for node in walk(module):
        if isinstance(node, (cst.Name, cst.Attribute)):
            names.origin(node)


def _ask_all(wrapper: MetadataWrapper) -> None:
    found = wrapper.resolve(QualifiedNameProvider)
    for node in walk(wrapper.module):
        if isinstance(node, (cst.Name, cst.Attribute)):
            value = found.get(node)
            if callable(value):  # LibCST may leave the answer for later
                value()


def table(seconds: Seconds) -> str:
    """The seconds, in times of parsing and of ours."""
    parse = seconds["parse"]
    lines = [f"{step:<16}{s:8.2f} s {s / parse:6.2f} of parsing" for step, s in seconds.items()]
    scopes = seconds["ScopeProvider"] / seconds["Scopes"]
    names = seconds["QualifiedName"] / seconds["Names"]
    lines.append(f"ScopeProvider takes {scopes:.1f} times as long as Scopes,")
    lines.append(f"QualifiedNameProvider after it {names:.1f} times as long as Names")
    return "\n".join(lines)


@click.command()
@click.argument("package", default="torch")
@click.option("--every", default=10, show_default=True, help="Read each file of so many.")
def main(package: str, every: int) -> None:
    """Measure `Scopes` and `Names` beside LibCST's providers, on the files of a package."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))[::every]
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    click.echo(f"{len(paths)} files of {package}, {lines:,} lines, LibCST {_version()}")
    click.echo(table(measure(paths)))


def _version() -> str:
    from importlib.metadata import version

    return version("libcst")


if __name__ == "__main__":
    main()
