"""Random programs compute the same bits while a recording for `precast compare` is open.

PyTorch itself computes a few operations otherwise under any dispatch mode, as `svdvals`. A program that a mode without
effect changes is not compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from tests.conformance.programs.compare import difference
from tests.conformance.programs.draw import cases
from tests.conformance.programs.run import run
from tests.conftest import PROGRAMS_SEED

PROGRAMS = 40


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["operations", "modules"])
def test_a_recording_changes_no_bit_of_a_random_program(
    level: Any, tmp_path: Path, record_property: Any
) -> None:
    compared = 0
    for number, case in enumerate(cases(PROGRAMS, PROGRAMS_SEED)):
        plain = run(*case, precast.autocast)
        with _Nothing():
            under_a_mode = run(*case, precast.autocast)
        with precast.record(tmp_path / f"{number}.run", level=level, split=2):
            recorded = run(*case, precast.autocast)
        if difference(under_a_mode, plain) is None:
            assert difference(recorded, plain) is None, (PROGRAMS_SEED, case)
            compared += 1
    assert compared > PROGRAMS / 2
    record_property("cases", compared)
