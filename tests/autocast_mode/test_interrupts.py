"""Ctrl-C at any moment of a region's entry and exit leaves this thread as it was before the region."""

from __future__ import annotations

import _thread
import dis
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import precast
from precast.engine.thread_state import regions

PACKAGE = str(Path(precast.__file__).parent)
Region = Callable[[], AbstractContextManager[Any]]
REGIONS: dict[str, Region] = {
    "plain": lambda: precast.autocast("cpu"),
    "another dtype, no cache": lambda: precast.autocast("cpu", torch.float16, cache_enabled=False),
    "a policy": lambda: precast.autocast("cpu", policy="torch"),
    "disabled": lambda: precast.autocast("cpu", enabled=False),
    "everywhere off": precast.disable,
    "captured": precast.current_precision,
}


def _state() -> tuple[object, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        len(regions.records),
        len(regions.groups),
        regions.guard_id,
        depth,
    )


_LOOKS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
"""The instructions after which CPython looks whether Ctrl-C was pressed, beside the start of most functions."""


class _Interrupt:
    """Raises KeyboardInterrupt at the n-th place in precast where CPython handles signals."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.place: tuple[str, int] | None = None
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        looks = event == "call" and _handles_signals_at_start(frame.f_code)
        if event == "opcode":
            looks = self.before.get(frame) in _LOOKS
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        self.left -= looks
        if looks and self.left == 0:
            self.place = frame.f_code.co_name, frame.f_lineno
            raise KeyboardInterrupt
        return self


def _handles_signals_at_start(code: CodeType) -> bool:
    resume = next(each for each in dis.get_instructions(code) if each.opname == "RESUME")
    return resume.arg is not None and resume.arg < 2


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in another"])
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_that_is_interrupted_leaves_nothing_behind(name: str, nested: bool) -> None:
    region = REGIONS[name]
    outer: Region = (lambda: precast.autocast("cpu")) if nested else precast.current_precision
    interrupted = 0
    with outer():
        with region():
            pass  # what is made once is made
        before = _state()
        for number in itertools.count(1):
            interrupt = _Interrupt(number)
            kept = sys.gettrace()
            try:
                sys.settrace(interrupt)
                with region():
                    pass
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(kept)
            assert _state() == before, interrupt.place
            if interrupt.place is None:
                break
    assert interrupted > 10


class _PressesCtrlC:
    """An object whose negation is one instruction that presses Ctrl-C and does not look at signals."""

    __neg__ = staticmethod(_thread.interrupt_main)


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize("name", REGIONS)
def test_ctrl_c_at_the_start_of_an_exit_leaves_nothing_behind(name: str) -> None:
    before, region, presses = _state(), REGIONS[name](), _PressesCtrlC()
    with pytest.raises(KeyboardInterrupt):
        with region:
            _ = -presses  # type: ignore[operator]
    assert _state() == before
