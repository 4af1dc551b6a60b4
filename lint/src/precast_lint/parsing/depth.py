"""Limits on nesting: on deeply nested text, LibCST's parser overflows the stack and ends the process.

Invariant: `guard` accepts only text that Python's parser accepts. That parser needs a tenth of the time of LibCST's.
"""

from __future__ import annotations

import ast
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate

__all__ = ["deeper", "guard"]

_BRACKETS = 200  # as in Python's tokenizer
_LEVELS = 1000  # calls: Python's parser allows a text three times as many levels
_FRAMES = 30_000  # ten for each level
_STEP = {ord(ch): step for chars, step in (("([{", 1), (")]}", -1)) for ch in chars}
_OTHERS = bytes(set(range(256)) - _STEP.keys())


def guard(code: str) -> None:
    """Lets pass what can be parsed.

    Raises:
        RecursionError: it is nested too deeply.
    """
    try:
        with _limit(_depth() + _LEVELS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (RecursionError, MemoryError):
        raise RecursionError("it is nested too deeply") from None
    except (SyntaxError, ValueError):  # of another Python, perhaps: its brackets are what is known
        brackets = code.encode("utf-8", "replace").translate(None, _OTHERS)
        if max(accumulate(_STEP[ch] for ch in brackets), default=0) > _BRACKETS:
            raise RecursionError("it is nested too deeply") from None


def deeper() -> AbstractContextManager[None]:
    """Raise the recursion limit so that recursive functions can walk any text that passes `guard`."""
    return _limit(max(sys.getrecursionlimit(), _depth() + _FRAMES))


def _depth() -> int:
    return sum(1 for _ in traceback.walk_stack(None))


@contextmanager
def _limit(frames: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
