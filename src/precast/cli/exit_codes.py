"""The exit codes of all commands. docs/api/names.md has them as a table."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The exit code of a command. That of `precast run` is the program's, if the program was started."""

    YES = (
        0,
        "done, and the answer is yes: no findings, no differences, a policy that is proven or holds",
    )
    NO = 1, "failed, or the answer is no: findings, differences, a policy that does not hold"
    USAGE = 2, "the command was written wrongly, and nothing was run or changed"
    UNDECIDED = 4, "`tune`: the measurements do not decide the answer"

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Create a code with its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member
