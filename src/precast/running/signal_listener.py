"""Detection of fatal signals while an operation runs and the main thread cannot handle them.

Python runs a handler between two lines of Python, so a program in a matrix product of a minute would end a minute late.
But Python's C handler writes the number of each signal into a pipe at once, and a thread here reads that pipe.

Invariants: `threading` does not know the thread, and it does not run while the process forks, of which Python warns. A
program that sets another pipe (`signal.set_wakeup_fd`, as asyncio does) replaces this one, and sees none before.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

__all__ = ["SignalListener", "die_of"]

_GRACE = 0.1  # seconds in which the main thread may handle the signal itself
_STOP = b"\0"  # no signal has this number


class SignalListener:
    """Calls ``on_signal(number)`` in a separate thread for each signal that Python handles.

    Create it in the main thread.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._process = os.getpid()
        self._thread: int | None = None
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._set = signal.set_wakeup_fd
        before = self._set(self._in, warn_on_full_buffer=False)
        self._is_alone = before == -1
        if not self._is_alone:  # a program that embeds Python has set one
            self._set(before)
            return
        os.register_at_fork(before=self._stop, after_in_child=self._leave)
        self._hide()

    def listen(self) -> None:
        """Start the thread if it does not run. Called at each step, as the thread ends when the process forks."""
        if self._thread is None and self._is_alone and os.getpid() == self._process:
            self._thread = 0
            _thread.start_new_thread(self._read, ())

    def _read(self) -> None:
        self._thread = _thread.get_native_id()
        while _STOP not in (numbers := os.read(self._out, 64)):
            for number in numbers:
                time.sleep(_GRACE)
                self._on_signal(number)

    def _stop(self) -> None:
        """End the thread before a fork, and wait until the system no longer counts it."""
        if not self._thread or os.getpid() != self._process:
            return
        os.write(self._in, _STOP)
        here, until = f"/proc/self/task/{self._thread}", time.monotonic() + 1.0
        while os.path.exists(here) and time.monotonic() < until:
            time.sleep(0.0002)
        self._thread = None

    def _leave(self) -> None:
        """Stop writing signals into the parent's pipe, in a child process."""
        with contextlib.suppress(
            ValueError
        ):  # the main thread of the child was not that of its parent
            if self._set(-1) != self._in:
                self._is_alone = False

    def _hide(self) -> None:
        """Hide the pipe: `signal.set_wakeup_fd` returns -1 for it, and sets it in place of -1."""
        set_, ours = self._set, self._in

        @functools.wraps(set_)
        def set_wakeup_fd(fd: int, **how: Any) -> int:
            is_ours = fd == -1 and os.getpid() == self._process
            before = set_(ours, warn_on_full_buffer=False) if is_ours else set_(fd, **how)
            return -1 if before == ours else before

        signal.set_wakeup_fd = set_wakeup_fd


def die_of(number: int) -> None:
    """End the process by a signal, from any thread. `signal.signal` can be called in the main thread only."""
    import ctypes

    reset = ctypes.pythonapi.PyOS_setsig
    reset.argtypes, reset.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    reset(number, None)  # the default
    os.kill(os.getpid(), number)
