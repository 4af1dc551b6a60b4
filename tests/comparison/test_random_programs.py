"""Random programs compute the same bits while a recording for `precast compare` is open.

PyTorch itself computes a few operations otherwise under any dispatch mode, as `svdvals`. A program that a mode without
effect changes is not compared. An ordinary run draws a few programs; `PRECAST_PLANTED_FAULTS=200` draws more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import precast
from tests.conformance.programs.compare import difference
from tests.conformance.programs.draw import cases
from tests.conformance.programs.run import run
from tests.conftest import PROGRAMS_SEED

PROGRAMS = 100 if int(os.environ.get("PRECAST_PLANTED_FAULTS", "12")) >= 200 else 10


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_recording_changes_no_bit_of_a_random_program(
    tmp_path: Path, record_property: Any
) -> None:
    count = 0
    for case in cases(PROGRAMS, PROGRAMS_SEED):
        plain = run(*case, precast.autocast)
        with _Nothing():
            under_a_mode = run(*case, precast.autocast)
        if difference(under_a_mode, plain) is not None:
            continue
        for level in ("operations", "modules"):
            with precast.record(tmp_path / "a.run", level=level, split=2):  # type: ignore[arg-type]
                observation = run(*case, precast.autocast)
            assert difference(observation, plain) is None, (PROGRAMS_SEED, case)
        count += 1
    assert count > PROGRAMS / 2
    record_property("cases", count)
