"""A cache of findings by the contents and name of a file, the settings, and the version of the rules.

Invariants: a cache that cannot be read or written is no error; the file is replaced in one step; if there are too many
entries, those that the run did not use are dropped.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from precast_lint.running.report import Reported
from precast_lint.selecting.settings import LintSettings
from precast_lint.version import __version__

__all__ = ["Cache"]

_MOST = 20_000


class Cache:
    """The findings of earlier runs in a folder; without a folder nothing is cached."""

    def __init__(self, folder: Path | None, settings: LintSettings) -> None:
        self.path = folder / "check.json" if folder else None
        self._settings = settings
        self._new: dict[str, list[dict[str, Any]]] = {}

    @cached_property
    def _salt(self) -> bytes:
        return f"{_fingerprint()}\0{_described(self._settings)}\0".encode()

    @cached_property
    def _old(self) -> dict[str, list[dict[str, Any]]]:
        import json

        if self.path is not None:
            with suppress(OSError, ValueError):
                return dict(json.loads(self.path.read_text(encoding="utf-8")))
        return {}

    def key(self, filename: str, data: bytes) -> str:
        """Return the cache key of a file's contents."""
        import hashlib

        return hashlib.sha256(
            self._salt + filename.encode("utf-8", "replace") + b"\0" + data
        ).hexdigest()

    def get(self, key: str) -> list[Reported] | None:
        """Return the cached findings, or None."""
        rows = self._old.get(key)
        if rows is None:
            return None
        try:
            results = [Reported(**row) for row in rows]
        except TypeError:
            return None
        self._new[key] = rows
        return results

    def put(self, key: str, results: list[Reported]) -> None:
        """Store the findings of a file."""
        self._new[key] = [finding.to_dict() for finding in results]

    def save(self) -> None:
        """Write the cache, if it has new entries."""
        if self.path is None or not self._new or self._new.keys() <= self._old.keys():
            return
        rows = self._old | self._new if len(self._old) < _MOST else self._new
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            ignore = self.path.parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
            import json

            from precast_lint.running import whole_file

            whole_file.write(self.path, json.dumps(rows).encode())


def _described(settings: LintSettings) -> str:
    parts: list[Any] = [sorted(settings.codes), settings.min_torch]
    parts += [(pattern, sorted(codes)) for pattern, codes in settings.per_file_ignores]
    return repr(parts)


@cache
def _fingerprint() -> str:
    """Return this version with the times and sizes of the package's files."""
    import hashlib

    folder = Path(__file__).parents[1]
    stats = [(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(folder.rglob("*.py"))]
    return f"{__version__} {hashlib.sha256(repr(stats).encode()).hexdigest()}"
