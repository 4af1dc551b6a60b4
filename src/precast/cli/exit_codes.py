"""The exit codes of all commands. docs/api/names.md has them as a table."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The exit code of a command. That of `precast run` is the program's, if the program was started."""

    YES = 0
    NO = 1
    USAGE = 2
    KEEP = 3
    UNDECIDED = 4

    @property
    def meaning(self) -> str:
        """The meaning, for a table."""
        return _MEANINGS[self]


_MEANINGS: Final = {
    ExitCode.YES: "done, and the answer is yes: no findings, no differences, a policy that is proven or holds",
    ExitCode.NO: "failed, or the answer is no: findings, differences, a policy that does not hold",
    ExitCode.USAGE: "the command was written wrongly, and nothing was run or changed",
    ExitCode.KEEP: "`try`: mixed precision is neither faster nor smaller here, or does not learn",
    ExitCode.UNDECIDED: "`try`, `tune`: the measurements do not decide the answer",
}
