"""Ctrl-C at any moment of a region's entry and exit leaves this thread as it was before the region."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch

import precast
from precast.autocast_mode import region as region_file
from precast.engine.thread_state import regions

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
"""The instructions after which CPython looks whether Ctrl-C was pressed, beside the start of a function."""


class _Interrupt:
    """Raises KeyboardInterrupt where CPython does so: after the n-th call or turn of a loop in `region.py`."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.place: tuple[str, int] | None = None
        self.before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != region_file.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            looks = self.before.get(frame) in _LOOKS
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= looks
            if looks and self.left == 0:
                self.place = frame.f_code.co_name, frame.f_lineno
                raise KeyboardInterrupt
        return self


def _places(region: Region) -> Iterator[int]:
    """1, 2, 3 ... until a run is through before it is interrupted."""
    number = 0
    while True:
        number += 1
        yield number


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
        for number in _places(region):
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
