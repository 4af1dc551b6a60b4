"""Annotations of a call: a text from its kernel for the watcher, about how it ran and why.

Invariants:

- annotations are made only while there is a watcher, and read once, by the watcher of the call in the same thread;
- a kernel makes its annotation last, after the operations inside, so that it is the thread's most recent one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from precast.engine.entry_point import watchers

__all__ = ["annotate", "take_annotation"]


class _LastAnnotation(threading.local):
    text = ""


_last = _LastAnnotation()


def annotate(text: Callable[[], str]) -> None:
    """Record the result of `text`, if there is a watcher."""
    if watchers:
        _last.text = text()


def take_annotation() -> str:
    """Return and clear this thread's annotation; empty if there is none."""
    text, _last.text = _last.text, ""
    return text
