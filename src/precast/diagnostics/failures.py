"""A guard around the code of watchers: their exceptions are counted, and never reach the watched program.

Invariants:

- exceptions of the program itself are not caught: the guard contains only the watcher's code;
- a watcher's code calls no ``__torch_function__`` of the program;
- the stored data is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

from precast import _torch
from precast._internal.display import plural

__all__ = ["Failures"]

T = TypeVar("T")

_MOST_CAUSES: Final = 64
_MOST_NAMED: Final = 3
_MOST_LETTERS: Final = 100


class Failures:
    """The exceptions of a watcher's code, by subject and text."""

    def __init__(self) -> None:
        self._causes: Counter[tuple[str, str]] = Counter()
        self.total = 0

    def call(self, subject: object, function: Callable[..., T], *args: Any) -> T | None:
        """Return ``function(*args)``; count an exception by the text of `subject`, and return None."""
        try:
            return function(*args)
        except Exception as error:
            self._add(str(subject), error)
            return None

    def call_unseen(self, subject: object, function: Callable[..., T], *args: Any) -> T | None:
        """Do the same as `call`, without calls of the ``__torch_function__`` of the program's tensors."""
        with _torch.without_torch_function():
            return self.call(subject, function, *args)

    def caller(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the method to call the watcher with, for an operation with these arguments."""
        return self.call_unseen if _torch.calls_torch_function(args, kwargs) else self.call

    def notes(self, noun: str, text: str) -> list[str]:
        """Return a sentence with the commonest causes, as "3 calls were not seen: ..."; none without exceptions."""
        return [f"{plural(self.total, noun)} {text}: {self.examples()}."] if self.total else []

    def examples(self) -> str:
        """Return the commonest causes as text."""
        causes = self._causes.most_common(_MOST_NAMED)
        return "; ".join(f"{subject}: {error}" for (subject, error), _ in causes)

    def _add(self, subject: str, error: Exception) -> None:
        self.total += 1
        line = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_LETTERS]
        if len(self._causes) < _MOST_CAUSES or (subject, line) in self._causes:
            self._causes[subject, line] += 1
