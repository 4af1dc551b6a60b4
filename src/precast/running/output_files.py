"""Where a run's report goes: checked before the program starts, and another place if it cannot be written in the end.

Invariants: a file that cannot be written is refused before the program starts, as far as that can be known then; the
results of hours are not lost because a folder went away meanwhile; each process of several writes files of its own, and
the merged files hold what all processes have written.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from precast._internal.atomic_write import NOT_OURS, is_no_file, is_not_ours

__all__ = ["OutputFiles", "Rank", "rank_from_environment"]


@dataclass(frozen=True)
class Rank:
    """Which process this is, and of how many; `number` is None for a process that is alone."""

    number: int | None = None
    of: int = 1


def rank_from_environment() -> Rank:
    """The rank that torchrun tells the processes that it starts."""
    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (number.isdecimal() and of.isdecimal()):
        return Rank()
    return Rank(int(number), int(of))


@dataclass(frozen=True)
class OutputFiles:
    """The files that one process writes.

    Attributes:
        report: the page, or None where none is wanted; the merged one if there are several processes.
        json: the document, likewise.
        rank: which process this is.
    """

    report: Path | None
    json: Path | None
    rank: Rank

    @property
    def own_report(self) -> Path | None:
        """This process's page."""
        return self._of(self.rank.number, self.report)

    @property
    def own_json(self) -> Path | None:
        """This process's document: among several each writes one, to be merged."""
        return self._of(self.rank.number, self._document)

    def check(self) -> None:
        """Makes the folders, tries to write there, and removes what this rank left there in an earlier run.

        Raises:
            ValueError: a file cannot be written, or both have one name.
        """
        if self.report is not None and self.report == self.json:
            raise ValueError(f"--report and --json are both {self.report}; give each its own name")
        own = [path for path in (self.own_report, self.own_json) if path is not None]
        for path in [path for path in (self.report, self.json) if path is not None] + own:
            _try(path)
        if self.rank.of > 1:
            for path in own:
                path.unlink(missing_ok=True)

    def documents_of_ranks(self) -> list[Path]:
        """The documents that are there, of this process and the others, by rank."""
        paths = (self._of(number, self._document) for number in range(self.rank.of))
        return [path for path in paths if path is not None and path.exists()]

    def elsewhere(self) -> OutputFiles:
        """Files in a new folder, for what cannot be written where it was asked for.

        Raises:
            OSError: no folder can be made either.
        """
        folder = Path(tempfile.mkdtemp(prefix="precast-"))
        report = self.report.name if self.report else "precast-report.html"
        json = self.json.name if self.json else "precast.json"
        return OutputFiles(folder / report, folder / json, Rank())

    @property
    def _document(self) -> Path | None:
        if self.json is None and self.report is not None and self.rank.of > 1:
            return self.report.with_suffix(".json")
        return self.json

    def _of(self, rank: int | None, path: Path | None) -> Path | None:
        if path is None or self.rank.of == 1:
            return path
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _try(path: Path) -> None:
    """Raises a `ValueError` unless a file can be made at `path`; what is there stays as it is."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
    advice = ""
    try:
        if is_not_ours(path):
            raise ValueError(
                f"cannot write {path}: {NOT_OURS}. Nothing was run; name another file with --report or --json, or move "
                "that one away"
            )
        advice = ". Nothing was run; name another place with --report or --json"
        if not (is_no_file(path) and os.access(path, os.W_OK)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"\0" * 4096)
                file.flush()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}{advice}") from error
