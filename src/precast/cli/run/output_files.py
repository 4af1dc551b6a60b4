"""Where a run's report goes: looked at before the program starts, and found anew if it cannot be written in the end.

Invariants: what cannot be written is known before the program starts, as far as anybody can know; what was computed for
hours is not lost because a folder went away meanwhile; each process of several writes files of its own, and what
is merged holds all that are there.
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
    """Which process this is, of how many; `number` is None for one that is alone."""

    number: int | None = None
    of: int = 1


def rank_from_environment() -> Rank:
    """As torchrun says it to the processes that it starts."""
    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (number.isdecimal() and of.isdecimal()):
        return Rank()
    return Rank(int(number), int(of))


@dataclass(frozen=True)
class OutputFiles:
    """The files of one process.

    Attributes:
        report: the page, or None where none is wanted; for several processes the merged one.
        json: the document, likewise.
        rank: of this process.
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
        """Makes the folders, tries to write there, and takes away what this rank left the last time.

        Raises:
            ValueError: it cannot be written, or two files have one name.
        """
        if self.report is not None and self.report == self.json:
            raise ValueError(f"--report and --json are both {self.report}; give each its own name")
        for path in (self.report, self.json, self.own_report, self.own_json):
            if path is not None:
                _try(path)
        if self.rank.of > 1:
            for own in (self.own_report, self.own_json):
                if own is not None:
                    own.unlink(missing_ok=True)

    def documents_of_ranks(self) -> list[Path]:
        """The documents that are there, of this process and the others, by rank."""
        paths = (self._of(number, self._document) for number in range(self.rank.of))
        return [path for path in paths if path is not None and path.exists()]

    def elsewhere(self) -> OutputFiles:
        """OutputFiles in a new folder, for what cannot be written where it was asked for.

        Raises:
            OSError: there is no other place either.
        """
        folder = Path(tempfile.mkdtemp(prefix="precast-"))
        report = folder / (self.report.name if self.report else "precast-report.html")
        return OutputFiles(
            report, folder / (self.json.name if self.json else "precast.json"), Rank()
        )

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
    """Whether a file can be made there; what is there stays as it is."""
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        if is_not_ours(path):
            raise ValueError(
                f"cannot write {path}: {NOT_OURS}. Nothing was run; name another file with --report or --json, or move "
                "that one away"
            )
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    if is_no_file(path) and os.access(path, os.W_OK):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        because = error.strerror or error
        raise ValueError(
            f"cannot write {path}: {because}. Nothing was run; name another place with --report or --json"
        ) from error
