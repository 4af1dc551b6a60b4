"""What a kernel tells a watcher of the call that it runs: how, and why not otherwise.

Invariants:

- a remark is made only while somebody watches, and read once, by the watcher of the call in whose thread it was made;
- a kernel makes it last of all, when what it calls has ended: the last remark in a thread is then the call's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from precast.engine.entry_point import watchers

__all__ = ["remark", "take_remark"]


class _Here(threading.local):
    said = ""


_here = _Here()


def remark(say: Callable[[], str]) -> None:
    """Notes what `say` gives, if somebody watches."""
    if watchers:
        _here.said = say()


def take_remark() -> str:
    """What this thread's kernel has said since it was asked last; empty for nothing."""
    said, _here.said = _here.said, ""
    return said
