"""How a program ends, and that it ends as it would without us.

Invariants: in whatever way this process ends, as long as Python still runs, `finish` is called once, as the last thing
that it does: after the program's threads and its own exit functions. What the program's parent sees (exit code, signal,
what is on stderr before) is what it would have seen. A segmentation fault, SIGKILL and `os.exec...` end a process
without a word.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, Literal, NoReturn

from precast.cli.run.signal_listener import SignalListener, die_of

__all__ = ["ExitStatus", "ExitWatcher", "Interrupted"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FATAL: Final = [signal.Signals[n] for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
_MOST_FOR_A_REPORT: Final = 5.0  # seconds, where a signal comes in the midst of an operation
_INTERRUPTED: Final = 128 + signal.SIGINT
_DEFECTS: Final = (AssertionError, AttributeError, KeyError, NameError, TypeError)


class Interrupted(BaseException):
    """Ctrl-C ended the program, and its traceback is printed: what is left is to die of SIGINT, as Python does."""


@dataclass(frozen=True)
class ExitStatus:
    """How it ended, in the words of the document."""

    how: Literal["ended", "exit", "exception", "interrupted"] = "ended"
    code: int = 0
    message: str | None = None


class ExitWatcher:
    """Sees the end of this process coming, by every way there is; made before the program starts.

    Args:
        finish: called with the ending, once.
    """

    def __init__(self, finish: Callable[[ExitStatus], None]) -> None:
        self._finish: Callable[[ExitStatus], None] | None = finish
        self._ending = ExitStatus()
        self._process = os.getpid()
        self._lock = threading.RLock()
        atexit.register(self._end)  # first registered, last called
        os.register_at_fork(after_in_child=self._forget)
        self._dying = False
        self._hear_signals()
        self.listener = SignalListener(self._heard)
        exit_now = os._exit

        @functools.wraps(exit_now)
        def _exit(status: int) -> NoReturn:
            if os.getpid() == self._process:
                self._ending = ExitStatus("exit", status, f"os._exit({status})")
                self._end()
            exit_now(status)

        os._exit = _exit

    def run(self, program: Callable[[], None]) -> None:
        """Runs the program.

        Raises:
            SystemExit: the program did, or failed; what was raised is printed then, by `sys.excepthook`.
            Interrupted: by Ctrl-C; printed as well.
        """
        try:
            program()
        except SystemExit as exit:
            self._ending = _of_exit(exit)
            raise
        except BaseException as error:
            interrupted = type(error) is KeyboardInterrupt  # of a subclass, Python does not die
            how: Literal["interrupted", "exception"] = "interrupted" if interrupted else "exception"
            self._ending = ExitStatus(how, _INTERRUPTED if interrupted else 1, _said(error))
            _print(error)
            if interrupted:
                raise Interrupted from None
            raise SystemExit(1) from None

    def _end(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish(self._ending)
                if self._ending.code == _INTERRUPTED:
                    _die_of_an_interrupt()

    def _forget(self) -> None:
        """In a process that was forked off: it ends as it likes."""
        self._finish = None
        for number in _FATAL:
            if signal.getsignal(number) is signal.SIG_DFL:  # ours counts as that, see below
                signal.signal(number, signal.SIG_DFL)

    def _hear_signals(self) -> None:
        """Programs look whether somebody handles a signal before they do, so ours are not to be seen."""
        get, set_ = signal.getsignal, signal.signal
        ours, self._get = self._die, get

        def seen(handler: Any) -> Any:
            return signal.SIG_DFL if handler == ours else handler

        @functools.wraps(get)
        def getsignal(signalnum: int) -> Any:
            return seen(get(signalnum))

        @functools.wraps(set_)
        def setsignal(signalnum: int, handler: Any) -> Any:
            return seen(set_(signalnum, handler))

        for number in _FATAL:
            if get(number) is signal.SIG_DFL:
                set_(number, ours)
        signal.getsignal, signal.signal = getsignal, setsignal

    def _heard(self, number: int) -> None:
        """In the listener's thread: the main one may be in the midst of an operation, and the program ends now."""
        if number not in _FATAL or self._dying or signal.getsignal(number) is not signal.SIG_DFL:
            return  # it is the program's to handle, or the main thread does
        if self._get(number) == self._die:
            _thread.start_new_thread(_die_late, (number,))
            self._die(number, None)

    def _die(self, number: int, _frame: FrameType | None) -> None:
        self._dying = True
        self._ending = ExitStatus("interrupted", 128 + number, signal.Signals(number).name)
        try:
            self._end()
        finally:
            die_of(number)


def _die_late(number: int) -> None:
    """Ends the process in some seconds if no report is written by then."""
    time.sleep(_MOST_FOR_A_REPORT)
    die_of(number)


def _die_of_an_interrupt() -> None:
    """Has Python die of SIGINT when all is over, as it does where nobody caught an interrupt.

    It remembers that for the last text that was run as a program, and we may have run some since (Python 3.11).
    """
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return


def _of_exit(exit: SystemExit) -> ExitStatus:
    if exit.code is None or isinstance(exit.code, int):
        return ExitStatus("exit", (exit.code or 0) & 0xFF, None)
    return ExitStatus("exit", 1, str(exit.code))


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _print(error: BaseException) -> None:
    """As Python does with what nobody caught, without our frames."""
    for each in _chain(error):
        each.__traceback__ = _of_the_program(each, each.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, sys.last_traceback)


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and all that it was raised from or while handling."""
    found = [error]
    for each in found:
        inner = (each.__cause__, each.__context__)
        found += [e for e in inner if e is not None and not any(e is f for f in found)]
    return found


def _of_the_program(error: BaseException, traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of precast's, unless it is precast that is broken."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    if frames and _is_ours(frames[-1]) and isinstance(error, _DEFECTS):
        return frames[0]
    ours = list(itertools.accumulate(frames, _goes_on_in_ours, initial=False))[1:]
    kept = [frame for frame, is_ours in zip(frames, ours, strict=True) if not is_ours]
    for frame, inner in itertools.pairwise([*kept, None]):
        if frame is not None:
            frame.tb_next = inner
    return kept[0] if kept else None


def _goes_on_in_ours(outer_is_ours: bool, traceback: TracebackType) -> bool:
    """Whether a frame is ours, or the way from one of ours to an operation of PyTorch's or to the program's module."""
    module = traceback.tb_frame.f_globals.get("__name__")
    return (outer_is_ours and module in {"torch._ops", "runpy"}) or _is_ours(traceback)


def _is_ours(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename.startswith((_PACKAGE + os.sep, "<precast"))
