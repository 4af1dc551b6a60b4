"""The exit codes of all commands. docs/api/names.md has their meanings."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The exit code of a command. That of `precast run` is the program's, if the program was started."""

    YES = 0
    NO = 1
    USAGE = 2
    KEEP = 3
    UNDECIDED = 4
