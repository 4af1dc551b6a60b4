"""The arguments of a call as a rule wants them: by position or keyword, with their text."""

from __future__ import annotations

from dataclasses import dataclass

from precast_lint.parsing.syntax import Node, cst

__all__ = ["Arguments"]


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        positional: the values given by position.
        keywords: those given by keyword.
        starred: whether there is a `*args` or `**kwargs`: then nothing about the others is certain.
    """

    positional: tuple[Node, ...]
    keywords: dict[str, Node]
    starred: bool

    @classmethod
    def of(cls, call: cst.Call) -> Arguments:
        """The arguments of a call."""
        plain = [arg for arg in call.args if not arg.star]
        return cls(
            positional=tuple(arg.value for arg in plain if arg.keyword is None),
            keywords={arg.keyword.value: arg.value for arg in plain if arg.keyword is not None},
            starred=len(plain) < len(call.args),
        )

    def get(self, name: str, position: int | None = None) -> Node | None:
        """The value of a parameter, given by keyword or at its position."""
        if name in self.keywords:
            return self.keywords[name]
        if position is not None and position < len(self.positional):
            return self.positional[position]
        return None
