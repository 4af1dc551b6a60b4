"""Events reach the observers of their own thread, and cost nothing without one."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from precast._internal.events import OperationNote, emit, is_observed, observe

NOTE = OperationNote("mse_loss", "cpu", "ran in float32")


def test_an_observer_gets_events_until_its_with_ends() -> None:
    seen: list[Any] = []
    emit(NOTE)
    assert not is_observed()
    with observe(seen.append):
        assert is_observed()
        emit(NOTE)
    emit(NOTE)
    assert seen == [NOTE]
    assert not is_observed()


def test_observers_nest_and_the_outermost_hears_first() -> None:
    seen: list[tuple[str, Any]] = []
    with observe(lambda e: seen.append(("outer", e))), observe(lambda e: seen.append(("inner", e))):
        emit(1)
    assert seen == [("outer", 1), ("inner", 1)]


def test_observers_that_end_out_of_order_do_not_end_each_other() -> None:
    first: list[Any] = []
    second: list[Any] = []
    a, b = observe(first.append), observe(second.append)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    emit(1)
    b.__exit__(None, None, None)
    assert (first, second) == ([], [1])
    assert not is_observed()


def test_an_exception_ends_the_observation() -> None:
    with pytest.raises(KeyError), observe(lambda event: None):
        raise KeyError
    assert not is_observed()


def test_an_observers_exception_is_the_callers() -> None:
    def refuse(event: object) -> None:
        raise RuntimeError("enough")

    with observe(refuse), pytest.raises(RuntimeError, match="enough"):
        emit(NOTE)


def test_other_threads_are_not_is_observed() -> None:
    seen: list[Any] = []
    with observe(seen.append):
        thread = threading.Thread(target=emit, args=(NOTE,))
        thread.start()
        thread.join()
    assert seen == []


def test_events_do_not_import_torch() -> None:
    code = "import sys, precast._internal.events; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
