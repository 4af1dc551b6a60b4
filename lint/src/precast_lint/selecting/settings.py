"""Settings of a run: command-line options override `[tool.precast.check]` in pyproject.toml.

Invariants: `LintSettings` is a frozen value that can be sent to another process; the nearest
pyproject.toml above the first path that has the table decides for the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from precast_lint.selecting.pins import oldest_torch
from precast_lint.selecting.registry import expand

__all__ = ["LintSettings", "load"]

_KEYS = {
    "select",
    "extend-select",
    "ignore",
    "exclude",
    "per-file-ignores",
    "min-torch",
    "unsafe-fixes",
}


@dataclass(frozen=True)
class LintSettings:
    """The selected rules, and the fixes that may be applied.

    Attributes:
        codes: the selected rules.
        min_torch: the oldest PyTorch that the code supports; None: every current version.
        unsafe_fixes: True to apply fixes that may change results.
        exclude: patterns of paths that are not checked.
        per_file_ignores: pairs of a pattern and the codes that are not reported there.
        root: the folder that patterns are relative to.
    """

    codes: frozenset[str] = field(default_factory=lambda: expand(["ALL"]))
    min_torch: str | None = None
    unsafe_fixes: bool = False
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, frozenset[str]], ...] = ()
    root: str = "."

    def codes_for(self, filename: str) -> frozenset[str]:
        """Return the rules for one file."""
        codes = self.codes
        for pattern, ignored in self.per_file_ignores:
            if matches(filename, pattern, self.root):
                codes -= ignored
        return codes

    def excludes(self, path: Path) -> bool:
        """Return True if a pattern excludes a file or folder."""
        return any(matches(str(path), pattern, self.root) for pattern in self.exclude)


def matches(filename: str, pattern: str, root: str) -> bool:
    """Return True if a pattern matches a path, its name, or a folder that contains it."""
    path = Path(filename).absolute()
    try:
        relative = path.relative_to(Path(root).absolute())
    except ValueError:
        relative = path
    spelled = [relative.as_posix(), path.as_posix(), *relative.parts]
    spelled += [parent.as_posix() for parent in relative.parents]
    return any(fnmatch(text, pattern.rstrip("/")) for text in spelled)


def load(start: Path | None, requests: dict[str, Any]) -> LintSettings:
    """Return the settings for a run over a path.

    Args:
        start: the first path to check; None: do not read pyproject.toml.
        requests: options: select, extend_select, ignore (lists of codes, names or prefixes), exclude, min_torch,
            unsafe_fixes; None or empty means not set.

    Raises:
        ValueError: pyproject.toml or an option is invalid.
    """
    path, document = _pyproject(start) if start is not None else (None, {})
    table = _table(path, document) if path else {}
    option = {key.replace("-", "_"): value for key, value in table.items()}
    option |= {key: value for key, value in requests.items() if value not in (None, (), [])}
    min_torch = option.get("min_torch") or (oldest_torch(start) if start is not None else None)
    if min_torch is not None:
        _checked_version(min_torch)
    settings = LintSettings(
        min_torch=min_torch,
        unsafe_fixes=bool(option.get("unsafe_fixes", False)),
        exclude=tuple(option.get("exclude", ())),
        per_file_ignores=tuple(
            (pattern, expand(codes))
            for pattern, codes in option.get("per_file_ignores", {}).items()
        ),
        root=str(path.parent if path else Path()),
    )
    selected = expand(option["select"]) if "select" in option else settings.codes
    selected |= expand(option.get("extend_select", ()))
    return replace(settings, codes=selected - expand(option.get("ignore", ())))


def _pyproject(start: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the nearest pyproject.toml with the table `tool.precast.check`, else the nearest one."""
    nearest: tuple[Path | None, dict[str, Any]] = None, {}
    for folder in [start.absolute(), *start.absolute().parents]:
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        import tomllib

        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        if "check" in document.get("tool", {}).get("precast", {}):
            return path, document
        nearest = nearest if nearest[0] else (path, document)
    return nearest


def _table(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    table = document.get("tool", {}).get("precast", {}).get("check", {})
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise ValueError(
            f"{path}: [tool.precast.check] has no setting {', '.join(unknown)}; it has {', '.join(sorted(_KEYS))}"
        )
    return dict(table)


def _checked_version(text: str) -> None:
    from precast_lint.model import version

    try:
        version(text)
    except ValueError:
        raise ValueError(f"min-torch: expected a version such as 2.4, got {text!r}") from None
