"""Random programs of the conformance tests, exported, give the bits that they give in a region, or are refused by name.

A run of the tests draws its programs from a seed that it prints: the same seed in `PRECAST_PROGRAMS_SEED` draws them
again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import PROGRAMS_SEED
from tests.shipping.programs import outcomes, refusal

PROGRAMS = 12


@pytest.mark.parametrize("part", range(2))
def test_random_programs_exported(part: int, record_property: Any) -> None:
    seed, equal = PROGRAMS_SEED + part, 0
    for case, found in outcomes(PROGRAMS, seed):
        said = f"PRECAST_PROGRAMS_SEED={PROGRAMS_SEED}, part {part}\n{found}\n{case!r}"
        assert found.kind in {"equal", "refused"}, said
        assert found.kind == "equal" or refusal(found), said
        equal += found.kind == "equal"
    assert equal >= PROGRAMS // 4, "most programs can be exported"
    record_property("cases", equal)
