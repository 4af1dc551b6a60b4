"""Has several processes do the same at the same time: the first one says what, and gets the answers of all.

Invariants:
- every process does what is asked in the same order, so collectives of the program meet each other;
- an error or Ctrl-C in one process ends the work in all of them, each with an error that names the rank: at once where
  the others wait for the next question, and after `_GRACE` seconds where they are stuck in a collective of the program;
- only collectives of `torch.distributed` are used, in groups of their own.
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from precast.errors import TuningError

__all__ = ["Ranks", "are_several"]

_GRACE: Final = 5.0
"""So many seconds a process may need to notice itself that another one has failed."""
_PATIENCE: Final = 300.0
"""So many seconds a process that is done waits for the others, before it counts as stuck."""
_TIMEOUT: Final = datetime.timedelta(hours=12)
"""Of a question: the first process may think long before it asks the next one."""
_GOODBYE: Final = 5.0
"""Seconds that the last words of the others are waited for."""
_POLLED: Final = 0.2
_TWICE: Final = 1.0
"""Seconds after which another Ctrl-C is another wish."""

THREAD_NAME: Final = "precast.tune"

Do = Callable[[str, tuple[Any, ...]], Any]


def are_several() -> bool:
    """Whether this process is one of several that work together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass
class _Reply:
    """What one process answers."""

    value: Any = None
    error: str = ""
    interrupted: bool = False


class Ranks:
    """All processes of the program's group."""

    def __init__(self, do: Do) -> None:
        """Meets the other processes, all of which have to come here.

        Args:
            do: does what is asked, by its name and arguments, in this process.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._do = do
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._alarm = _Alarm(self.rank, self.size)
        self._own: BaseException | None = None
        """What this process has raised itself."""
        self.interrupted = False

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Has all processes do something; returns what each of them found. For the first process alone.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed in one of them. All have done it nevertheless.
            TuningError: one of them has failed; the first process raises its own error, if it had one.
        """
        replies = self._exchange((name, args))
        for rank, reply in enumerate(replies):
            if reply.error:
                self._raise(f"rank {rank} failed: {reply.error}")
        if any(reply.interrupted for reply in replies):
            raise KeyboardInterrupt
        return [reply.value for reply in replies]

    def lead(self, work: Callable[[], Any]) -> Any:
        """Runs what asks, and has the others return what it returns. For the first process."""
        with self._watched():
            try:
                found = work()
            except BaseException as error:
                self._say(("fail", f"rank 0 failed: {type(error).__name__}: {error}"))
                raise
            self._say(("end", found))
            return found

    def follow(self) -> Any:
        """Does what is asked, until the end; returns what the first process found. For all others.

        Raises:
            TuningError: another process has failed. Where this one did, it is its own error.
        """
        with self._watched():
            while True:
                kind, what = self._hear()
                if kind == "end":
                    return what
                if kind == "fail":
                    self._raise(what)
                self._answer(what)

    def _exchange(self, question: tuple[str, tuple[Any, ...]]) -> list[_Reply]:
        self._say(("ask", question))
        return self._answer(question)

    def _answer(self, question: tuple[str, tuple[Any, ...]]) -> list[_Reply]:
        """Does what is asked and tells the first process, which gets all answers."""
        replies: list[Any] = [None] * self.size if self.rank == 0 else []
        reply = _Reply()
        with self._alarm.working():
            try:
                reply.value = self._do(*question)
            except BaseException as error:  # also Ctrl-C, where there is no handler of ours
                self._own = error
                reply.error = f"{type(error).__name__}: {error}"
                self._alarm.ring()
        reply.interrupted, self.interrupted = self.interrupted, False
        with self._alarm.waiting():
            self._over_network(
                lambda: dist.gather_object(reply, replies or None, dst=0, group=self._group)
            )
        return replies

    def _say(self, what: tuple[str, Any]) -> None:
        self._over_network(lambda: dist.broadcast_object_list([what], src=0, group=self._group))

    def _hear(self) -> tuple[str, Any]:
        heard: list[Any] = [None]
        self._over_network(lambda: dist.broadcast_object_list(heard, src=0, group=self._group))
        return heard[0]  # type: ignore[no-any-return]

    def _over_network(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except Exception as error:
            if self._own is not None:
                raise self._own from None
            raise TuningError(
                f"rank {self.rank} has lost the other processes of the search, of which one has ended: {error}"
            ) from error

    def _raise(self, said: str) -> NoReturn:
        """Raises what this process has raised itself, or else an error that says which one has failed."""
        if self._own is not None:
            raise self._own
        raise TuningError(f"{said}. So the search has ended in all processes")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Takes Ctrl-C as a wish to end after what is being done; a second one ends this process as usual."""
        before: Any = None
        is_main = threading.current_thread() is threading.main_thread()

        pressed_at = -math.inf

        def pressed(_number: int, _frame: Any) -> None:
            nonlocal pressed_at
            if (
                time.monotonic() - pressed_at > _TWICE
            ):  # torchrun passes on what the terminal sends too
                if pressed_at > 0:
                    raise KeyboardInterrupt
                pressed_at = time.monotonic()
            self.interrupted = True

        if is_main:
            before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)
            self._alarm.close()


class _Alarm:
    """Tells the others of an error while they may be stuck in a collective of the program, and ends them if they are.

    A process that waits in a collective of gloo cannot be woken, so what is stuck ends with a message.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._busy_since = 0.0
        """Since when this process does what was asked; 0 while it does not."""
        self._idle_since = 0.0
        """Since when it has done it, and waits for the others; 0 while it does not."""
        self._number = 0
        """How many questions this process has begun to answer, which is the same in all."""
        self._failed_at = 0
        """The number of the question at which another one has failed."""
        self._rung_at = 0.0
        self._ended = threading.Event()
        self._sent: list[Any] = []
        """What `isend` gave: a message that has not left yet is lost with it, so it lives until the other has it."""
        self._threads = [
            threading.Thread(target=work, name=THREAD_NAME, daemon=True)
            for work in (self._watch, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def ring(self) -> None:
        """Tells the others that this process has failed at the question that it answers."""
        self._send(float(self._number))

    def close(self) -> None:
        """Ends the watch in all processes, each of which has to come here."""
        if not self._ended.is_set():
            self._send(0.0)
            self._ended.set()
            for thread in self._threads:
                thread.join(_GOODBYE)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what was asked."""
        self._number += 1
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the time in which this process waits for others that do the same."""
        self._idle_since = time.monotonic()
        try:
            yield
        finally:
            self._idle_since = 0.0

    def _send(self, value: float) -> None:
        for other in self._others:
            with suppress(Exception):  # it has ended
                told = torch.full((1,), value, dtype=torch.float64)
                self._sent.append(dist.isend(told, dst=other, group=self._group))

    def _listen(self) -> None:
        """Notes what others tell, until each has said that it ends and knows that this one does."""
        left = set(self._others)
        told = torch.zeros(1, dtype=torch.float64)
        with suppress(Exception):  # one of them has ended without a word
            while left:
                other = dist.recv(told, group=self._group)
                if told.item():
                    self._failed_at, self._rung_at = int(told.item()), time.monotonic()
                else:
                    left.discard(other)
            self._ended.wait()
            for sent in self._sent:
                sent.wait()

    def _watch(self) -> None:
        while not self._ended.wait(_POLLED):
            now = time.monotonic()
            is_stuck = self._busy_since and self._failed_at == self._number
            if is_stuck and now - self._rung_at > _GRACE:
                self._stop("another one has failed, and this one waits for it")
            if self._idle_since and now - self._idle_since > _PATIENCE:
                self._stop(f"the others have not followed for {_PATIENCE:.0f} s")

    def _stop(self, why: str) -> NoReturn:
        print(
            f"precast.tune: rank {self._rank} ends: {why}. The error of the rank that has failed says why.",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGTERM)  # which needs no Python, if the program has no handler
        time.sleep(_GRACE)
        os.abort()
