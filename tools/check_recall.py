"""How much of what `grep` can enumerate in other people's projects the checker finds: `python -m tools.check_recall`.

Each pattern is a search in text, function by function, which knows nothing of what names stand for. What it finds is
looked at by hand where the checker says nothing: some of it is right, such as a clip whose caller has unscaled.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from precast_lint.running.cache import Cache
from precast_lint.running.files import find
from precast_lint.running.runner import Mode, run
from precast_lint.selecting.settings import Settings
from tools.check_projects import FOLDER, LATER, PROJECTS, Project, oldest, roots

__all__ = ["PATTERNS", "Place", "places"]

_OLD = r"torch\.(cuda|cpu)\.amp"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Pattern:
    """What a function's text has and has not, and the rules that are to say so there."""

    has: tuple[str, ...]
    has_not: tuple[str, ...]
    codes: tuple[str, ...]


PATTERNS = {
    "clip of scaled gradients, no `unscale_`": Pattern(
        (r"\.scale\([^\n]*\)\.backward\(", r"clip_grad_(norm|value)_\(", r"scaler\.step\("),
        (r"unscale_\(",),
        ("AMP203",),
    ),
    "`clip_grad` above the first `unscale_`": Pattern(
        (r"(?s)\.scale\([^\n]*\)\.backward\(.*clip_grad_(norm|value)_\(.*unscale_\(",),
        (r"(?s)unscale_\(.*clip_grad_(norm|value)_\(",),
        ("AMP203",),
    ),
    "`scaler.step` without `update`": Pattern(
        (r"scaler\.step\(", r"\.backward\("), (r"scaler\.update\(", r"\.update_?\("), ("AMP204",)
    ),
    "plain `backward`, `scaler.step`": Pattern(
        (r"loss\.backward\(", r"scaler\.step\("), (r"\.scale\(", r"get_scale"), ("AMP206",)
    ),
    "`scaler.scale(...).backward()` and `optimizer.step()` alone": Pattern(
        (r"scaler\.scale\([^\n]*\)\.backward\(", r"optimizer\.step\("),
        (r"scaler\.step\(", r"unscale_\("),
        ("AMP205",),
    ),
}
# Lines, not functions: an old name that is called or imported.
_LINES = {
    "an old name is called": (rf"{_OLD}\.(autocast|GradScaler|custom_fwd|custom_bwd)\b", "AMP00"),
    "an old name is imported": (
        rf"^\s*(from\s+{_OLD}(\.\w+)?\s+import|import\s+{_OLD}\s+as)\b",
        "AMP00",
    ),
}


@dataclass(frozen=True)
class Place:
    """A function or line that a pattern fits, and whether a rule says something there."""

    pattern: str
    file: Path
    row: int
    is_found: bool


def places(path: Path, found: list[tuple[int, str]], min_torch: str | None) -> Iterator[Place]:
    """The places of all patterns in a file, of whose findings rows and codes are known."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "amp" not in text and "scaler" not in text:
        return
    lines = text.split("\n")
    is_new = min_torch is None or tuple(map(int, min_torch.split(".")[:2])) >= (2, 4)
    for name, (pattern, code) in _LINES.items() if is_new else ():
        for row, line in enumerate(lines, 1):
            if re.search(pattern, line) and not line.lstrip().startswith(("#", '"', "'")):
                yield Place(name, path, row, any(r == row and c.startswith(code) for r, c in found))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for function in ast.walk(tree):
        if isinstance(function, _FUNCTIONS) and function.end_lineno is not None:
            body = "\n".join(
                line.partition("#")[0] for line in lines[function.lineno - 1 : function.end_lineno]
            )
            for name, wanted in PATTERNS.items():
                if all(re.search(p, body) for p in wanted.has) and not any(
                    re.search(p, body) for p in wanted.has_not
                ):
                    here = range(function.lineno, function.end_lineno + 1)
                    said = any(row in here and code in wanted.codes for row, code in found)
                    yield Place(name, path, function.lineno, said)


def _of(project: Project, site: Path) -> Iterator[Place]:
    min_torch = oldest(project, site)
    settings = Settings(min_torch=min_torch)
    files = list(find(roots(project, site), settings))
    reports = run(files, settings, Mode(), Cache(None, settings))
    found = {Path(r.filename): [(f.row, f.code) for f in r.findings] for r in reports}
    for path in files:
        if path.suffix == ".py":
            yield from places(path, found.get(path, []), min_torch)


@click.command()
@click.option("--only", multiple=True, help="These projects.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=True)
@click.option("--missed", is_flag=True, help="Show the places where nothing is said.")
def main(only: tuple[str, ...], folder: Path, missed: bool) -> None:
    """Count the places of each pattern, and those where a rule says something."""
    site = folder / "site"
    all_places: list[Place] = []
    for project in (*PROJECTS, *LATER):
        if (not only or project.name in only) and project.name != "torch":
            all_places += _of(project, site)
    names = list(dict.fromkeys([*_LINES, *PATTERNS]))
    for name in names:
        here = [place for place in all_places if place.pattern == name]
        click.echo(f"{name}: {sum(place.is_found for place in here)} of {len(here)}")
        for place in here if missed else ():
            if not place.is_found:
                click.echo(f"  {place.file.relative_to(site)}:{place.row}")


if __name__ == "__main__":
    main()
