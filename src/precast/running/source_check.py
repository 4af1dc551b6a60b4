"""Findings of precast-lint on the files of a program that has run.

precast does not import the checker. It runs `precast check`, a command that precast-lint adds through the entry point
group `precast.commands`, in a separate process.

Invariants: without precast-lint no process is started; the checker has a time limit, gets no signal of the program's,
and writes no file; if it fails, there are no findings.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from precast._internal.display import shown_path
from precast.report.schema import Finding, FindingCost, FindingLocation

__all__ = ["SourceCheck", "installed_folders"]

_LIMIT: Final = 30.0  # seconds; on a busy machine the checker needs more than 10
_POLL: Final = 0.02
_SEEN: Final = {"AMP203": "scaled gradients clipped", "AMP301": "backward in region"}
"""Rules whose findings a run also sees, and the kind of finding that it then has."""


class SourceCheck:
    """A check of the files of the program that runs in this process.

    Create it before the program starts, as the program may change the environment and the current folder.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = Path.cwd()

    def findings(self, others: Iterable[Finding], is_hurried: Callable[[], bool]) -> list[Finding]:
        """Return the findings of precast-lint, without those that `others` has for the same lines.

        There are none if `is_hurried` returns True, as the process must end at once then.
        """
        files = [*map(str, _files_of_program())]
        places = {(each.kind, _position(each.where.source)) for each in others}
        if not (files and _is_installed()):
            return []
        try:
            findings = [self._read(plain) for plain in self._check(files, is_hurried)]
        except (OSError, ValueError, TypeError, KeyError):  # no process, or not the format
            return []
        return [f for f in findings if (_SEEN.get(f.kind), f.where.source) not in places]

    def _check(self, files: list[str], is_hurried: Callable[[], bool]) -> list[Any]:
        command = [sys.executable, "-P", "-m", "precast", "check", "--output-format", "json"]
        command += ["--exit-zero", "--", *files]
        # A file, as a pipe that is not read fills up; a new session, as Ctrl-C is not meant for the checker.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                until = time.monotonic() + _LIMIT
                while process.poll() is None:
                    if time.monotonic() > until or is_hurried():
                        return []
                    time.sleep(_POLL)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            output.seek(0)
            answer: list[Any] = json.loads(output.read())
        return answer

    def _read(self, plain: Any) -> Finding:
        file, code = shown_path(plain["filename"], self._folder), str(plain["code"])
        place = f"{file}:{plain['location']['row']}"
        fix = plain["fix"]
        advice = f"{fix['message']}: `precast check --fix` shows and applies it. " if fix else ""
        return Finding(
            kind=code,
            title=f"{plain['message']} (`{place}`)",
            cost=FindingCost(),
            suggestion=f"{advice}`precast check --explain {code}` explains the finding.",
            policy=None,
            where=FindingLocation(source=place),
            severity=plain["severity"],
        )


def _position(source: str | None) -> str:
    """Return "file:line" of "file:line in function"."""
    return (source or "").partition(" in ")[0]


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return bool(entry_points(group="precast.commands", name="check"))


def installed_folders() -> tuple[str, ...]:
    """Return the folders, with a slash, in which no file is one of the program's: of Python, packages, precast."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folders = [own, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [sys.prefix] if sys.prefix != sys.base_prefix else []
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _files_of_program() -> list[Path]:
    """Return the source files of `__main__` and of imported modules that are not installed packages."""
    installed = installed_folders()
    files: dict[Path, None] = {}
    for module in list(sys.modules.values()):
        with contextlib.suppress(Exception):  # a module may be an object of any kind
            path = os.path.realpath(str(module.__file__))
            if path.endswith(".py") and os.path.isfile(path) and not path.startswith(installed):
                files[Path(path)] = None
    return list(files)
