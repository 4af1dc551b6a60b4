"""The end of a program: detect it, write the report, and let the program end as it would without precast.

Invariants: however this process ends, `finish` is called once if Python still runs, as the last action of the process:
after the program's threads and its exit functions. The parent process sees the exit code, the signal and the output on
stderr that it would see without precast. No report is written where a segmentation fault,
SIGKILL or `os.exec...` ends the process, because Python does not run then.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
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

from precast.running.signal_listener import SignalListener, die_of

__all__ = ["ExitStatus", "ExitWatcher", "Interrupted", "error_text", "exit_now"]

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_FATAL: Final = [signal.Signals[n] for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
_MOST_FOR_A_REPORT: Final = 5.0  # seconds, if a signal arrives during an operation
_INTERRUPTED: Final = 128 + signal.SIGINT
_DEFECTS: Final = (AssertionError, AttributeError, KeyError, NameError, TypeError)


class Interrupted(BaseException):
    """Ctrl-C ended the program. Its traceback has been printed; the process must still die of SIGINT."""


@dataclass(frozen=True)
class ExitStatus:
    """The end of the program, in the terms of `schema.Run`."""

    how: Literal["ended", "exit", "exception", "interrupted"] = "ended"
    code: int = 0
    message: str | None = None


class ExitWatcher:
    """Detects the end of this process and calls `finish` once. Create it before the program starts."""

    def __init__(self, finish: Callable[[ExitStatus], None]) -> None:
        self._finish: Callable[[ExitStatus], None] | None = finish
        self._ending = ExitStatus()
        self._process = os.getpid()
        self._lock = threading.RLock()
        atexit.register(self._end)  # first registered, last called
        os.register_at_fork(after_in_child=self._forget)
        self.is_dying = False
        """True while a signal ends the process."""
        self._finisher: int | None = None
        """The thread that runs `finish`."""
        self._pending: int | None = None
        """The signal that arrived while `finish` ran."""
        self._hear_signals()
        self.listener = SignalListener(self._on_signal)
        exit_now = os._exit

        @functools.wraps(exit_now)
        def _exit(status: int) -> NoReturn:
            if os.getpid() == self._process:
                self._ending = ExitStatus("exit", status, f"os._exit({status})")
                self._end()
            exit_now(status)

        os._exit = _exit

    def run(self, program: Callable[[], None]) -> None:
        """Run the program.

        Raises:
            SystemExit: the program raised it, or failed; then `sys.excepthook` has printed the exception.
            Interrupted: Ctrl-C ended the program; the traceback has been printed.
        """
        try:
            program()
        except SystemExit as exit:
            self._ending = _of_exit(exit)
            raise
        except BaseException as error:
            interrupted = type(error) is KeyboardInterrupt  # of a subclass, Python does not die
            how: Literal["interrupted", "exception"] = "interrupted" if interrupted else "exception"
            self._ending = ExitStatus(how, _INTERRUPTED if interrupted else 1, error_text(error))
            _print(error)
            if interrupted:
                raise Interrupted from None
            raise SystemExit(1) from None

    def _end(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is None:
                return
            self._finisher = threading.get_ident()
            try:
                finish(self._ending)
            finally:
                self._finisher = None
            if self._pending is not None:
                die_of(self._pending)
            if self._ending.code == _INTERRUPTED:
                _die_of_an_interrupt()

    def _forget(self) -> None:
        """Stop watching, in a child process after a fork."""
        self._finish = None
        for number in _FATAL:
            if signal.getsignal(number) is signal.SIG_DFL:  # also for `_die`: see `getsignal` below
                signal.signal(number, signal.SIG_DFL)

    def _hear_signals(self) -> None:
        """Handle the fatal signals. The handlers are hidden, as programs look for one before they set their own."""
        get, set_ = signal.getsignal, signal.signal
        ours, self._get = self._die, get

        def visible(handler: Any) -> Any:
            return signal.SIG_DFL if handler == ours else handler

        @functools.wraps(get)
        def getsignal(signalnum: int) -> Any:
            return visible(get(signalnum))

        @functools.wraps(set_)
        def setsignal(signalnum: int, handler: Any) -> Any:
            return visible(set_(signalnum, handler))

        for number in _FATAL:
            if get(number) is signal.SIG_DFL:
                set_(number, ours)
        signal.getsignal, signal.signal = getsignal, setsignal

    def _on_signal(self, number: int) -> None:
        """End the program from the listener's thread, as the main thread may be inside an operation."""
        if number not in _FATAL or self.is_dying or signal.getsignal(number) is not signal.SIG_DFL:
            return  # the program or the main thread handles it
        if self._get(number) == self._die:
            _thread.start_new_thread(_die_late, (number,))
            self._die(number, None)

    def _die(self, number: int, _frame: FrameType | None) -> None:
        self.is_dying = True
        if self._finisher == threading.get_ident():  # this thread is writing the report
            self._pending = number
            with contextlib.suppress(RuntimeError):  # no thread can start while Python ends (3.12)
                _thread.start_new_thread(_die_late, (number,))
            return
        self._ending = ExitStatus("interrupted", 128 + number, signal.Signals(number).name)
        try:
            self._end()
        finally:
            die_of(number)


def exit_now(code: int) -> NoReturn:
    """End this process without exit functions of the program; an `ExitWatcher` still finishes."""
    os._exit(code)


def _die_late(number: int) -> None:
    """End the process after a few seconds, with or without a report."""
    time.sleep(_MOST_FOR_A_REPORT)
    die_of(number)


def _die_of_an_interrupt() -> None:
    """Make Python die of SIGINT at its end, as after an interrupt that nothing caught.

    Python remembers the interrupt for the source text that it ran last, which may be one of precast (Python 3.11).
    """
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return


def _of_exit(exit: SystemExit) -> ExitStatus:
    if exit.code is None or isinstance(exit.code, int):
        return ExitStatus("exit", (exit.code or 0) & 0xFF)
    return ExitStatus("exit", 1, str(exit.code))


def error_text(error: BaseException) -> str:
    """Return the class and the message of an exception, also of one that cannot be printed."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot be printed)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _print(error: BaseException) -> None:
    """Print an exception as Python prints an uncaught one, without precast's frames."""
    chain = [error]
    for each in chain:  # grows meanwhile
        each.__traceback__ = _of_the_program(each, each.__traceback__)
        inner = (each.__cause__, each.__context__)
        chain += [e for e in inner if e is not None and not any(e is other for other in chain)]
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, sys.last_traceback)


def _of_the_program(error: BaseException, traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without precast's frames, unless the error is a defect of precast.

    Frames between one of precast's and an operation of PyTorch, or the program's module, are removed too.
    """
    frames: list[TracebackType] = []
    whole, is_ours, is_hidden = traceback, False, False
    while traceback is not None:
        frame = traceback.tb_frame
        is_ours = frame.f_code.co_filename.startswith((_PACKAGE + os.sep, "<precast"))
        leads_on = frame.f_globals.get("__name__") in {"torch._ops", "runpy"}
        is_hidden = is_ours or (is_hidden and leads_on)
        frames += [] if is_hidden else [traceback]
        traceback = traceback.tb_next
    if is_ours and isinstance(error, _DEFECTS):
        return whole
    for outer, inner in itertools.pairwise([*frames, None]):
        if outer is not None:
            outer.tb_next = inner
    return frames[0] if frames else None
