"""The oldest PyTorch that a project supports, read from its requirements without running a file.

Invariants: only the files of one folder are read, the nearest one above a path with requirements; a file that cannot be
read is ignored; of several pins the oldest counts, because the code has to run with it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from precast_lint.torch_versions import MINORS

__all__ = ["oldest_torch"]

_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_PATTERNS = (
    "*requirements*.txt",
    "*requirements*.in",
    "requirements/*.txt",
    "requirements/*.in",
    "environment*.y*ml",
    "env.y*ml",
    "conda*.y*ml",
    "meta.yaml",
    "recipe/meta.yaml",
    "conda/meta.yaml",
    "conda.recipe/meta.yaml",
    "conda-recipe/meta.yaml",
    "recipe.yaml",
    "recipe/recipe.yaml",
)
_LARGEST = 1 << 20  # bytes; a list of requirements is smaller
_LONGEST = 200  # characters of a requirement; a longer text is a description
_PIN = re.compile(
    r"""(?<![\w.-])(?:py)?torch(?:\[[\w,\s-]*\])?\s*\(?\s*(?P<signs>(?:[<>=~!^]=?=?\s*v?\d[\w.*+!-]*\s*,?\s*)+)"""
)
_WHEEL = re.compile(r"/torch-(?P<number>\d+(?:\.\d+)*)[^/]*\.whl")
_CONDITION = re.compile(r"([<>=~!^]+)\s*v?(\d[\w.*+!-]*)")


def oldest_torch(start: Path) -> str | None:
    """Return the oldest PyTorch that the project around a path allows; None if it has no requirement on it.

    Args:
        start: a file or folder of the project.
    """
    for folder in [start.absolute(), *start.absolute().parents]:
        results = [lowest for text in _texts(folder) if (lowest := _lowest(text)) is not None]
        if results:
            return min(results, key=_release)
        if (folder / ".git").exists() or any((folder / name).is_file() for name in _FILES):
            return None
    return None


def _texts(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        return
    for path in [*(folder / name for name in _FILES), *_listed(folder)]:
        text = _read(path)
        if path.name == "pyproject.toml":
            yield from _in_pyproject(text)
        elif path.suffix == ".py":
            yield from _in_python(text)
        else:
            yield from (line.partition("#")[0] for line in text.splitlines())


def _listed(folder: Path) -> list[Path]:
    return sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))


def _read(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size <= _LARGEST:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    return ""


def _in_python(text: str) -> Iterator[str]:
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and len(value) < _LONGEST:
            yield value


def _in_pyproject(text: str) -> Iterator[str]:
    """Yield the requirements in a pyproject.toml: the standard tables, and those of Poetry, PDM, Hatch and uv."""
    import tomllib

    try:
        document = tomllib.loads(text)
    except ValueError:
        return
    project = document.get("project", {})
    yield from _strings(project.get("dependencies"))
    yield from _strings(project.get("optional-dependencies"))
    yield from _strings(document.get("dependency-groups"))
    tools = document.get("tool", {})
    for name in ("pdm", "uv", "hatch"):
        yield from _strings(tools.get(name))
    for table in _tables(tools.get("poetry")):
        expected = table.get("torch")
        for choice in expected if isinstance(expected, list) else [expected]:
            number = choice.get("version") if isinstance(choice, dict) else choice
            if isinstance(number, str):
                yield f"torch{number if number[:1] in '<>=~!^' else '==' + number}"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _tables(inner)


def _lowest(text: str) -> str | None:
    """Return the oldest PyTorch that a requirement allows; None if it allows every one or is not about PyTorch."""
    match = _PIN.search(text)
    if match is None:
        wheel = _WHEEL.search(text)
        return wheel["number"] if wheel else None
    conditions = _CONDITION.findall(match["signs"])
    floors = [number for sign, number in conditions if sign[0] in "=~^" or sign in (">=", ">")]
    entries = [floor for floor in map(_number, floors) if floor]
    if entries:
        return max(entries, key=_release)
    return _below(_number(number) for sign, number in conditions if sign in ("<", "<="))


def _number(text: str) -> str:
    match = re.match(r"\d+(\.\d+)*", text)
    return match[0] if match else ""


def _release(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def _below(bounds: Iterable[str]) -> str | None:
    """Return the newest minor version below some upper bounds; None if that is the newest of all."""
    highest = min((_release(bound) for bound in bounds if bound), default=None)
    if highest is None:
        return None
    older = [minor for minor in MINORS if _release(minor) < highest]
    return older[-1] if older and older[-1] != MINORS[-1] else None
