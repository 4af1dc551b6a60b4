"""The output files of a run: checked before the program starts, and replaced by others if they cannot be written.

Invariants: a file that cannot be written is an error before the program starts, as far as this can be checked; a report
is not lost if a folder is removed during the run; each of several processes writes its own files, and the merged files
hold the data of all processes.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from precast._internal.atomic_write import foreign_file_error, is_no_file

__all__ = ["OutputFiles", "Rank", "rank_from_environment"]


@dataclass(frozen=True)
class Rank:
    """The number of this process and the number of processes; `number` is None for a single process."""

    number: int | None = None
    of: int = 1


def rank_from_environment() -> Rank:
    """Return the rank that torchrun sets in the environment of the processes that it starts."""
    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (number.isdecimal() and of.isdecimal()):
        return Rank()
    return Rank(int(number), int(of))


@dataclass(frozen=True)
class OutputFiles:
    """The files that one process writes."""

    report: Path | None
    """The page; the merged page of several processes."""
    json: Path | None
    """The document, likewise."""
    rank: Rank

    @property
    def own_report(self) -> Path | None:
        """This process's page."""
        return self._of(self.rank.number, self.report)

    @property
    def own_json(self) -> Path | None:
        """This process's document, to be merged with those of other processes."""
        return self._of(self.rank.number, self._document)

    def check(self) -> None:
        """Make the folders, try to write there, and remove the files that this rank wrote in an earlier run.

        Raises:
            ValueError: a file cannot be written, or both files have the same path.
        """
        if self.report is not None and self.report == self.json:
            raise ValueError(
                f"--report and --json are both {self.report}; expected two different files"
            )
        own = [path for path in (self.own_report, self.own_json) if path is not None]
        for path in [path for path in (self.report, self.json) if path is not None] + own:
            _try(path)
        if self.rank.of > 1:
            for path in own:
                path.unlink(missing_ok=True)

    def documents_of_ranks(self) -> list[Path]:
        """Return the existing documents of this process and the others, by rank."""
        paths = (self._of(number, self._document) for number in range(self.rank.of))
        return [path for path in paths if path is not None and path.exists()]

    def elsewhere(self) -> OutputFiles:
        """Return files in a new temporary folder, to be used if these cannot be written."""
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
    """Raise a `ValueError` unless a file can be written at `path`. An existing file is not changed."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
    advice = ""
    try:
        if error := foreign_file_error(path, "--report or --json"):
            raise ValueError(error)
        advice = ". Nothing was run; name another place with --report or --json"
        if not (is_no_file(path) and os.access(path, os.W_OK)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"\0" * 4096)
                file.flush()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}{advice}") from error
