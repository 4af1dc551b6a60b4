"""Chapter 9 of `examples/` is right: spellings, and the old program before and after."""

from __future__ import annotations

import importlib
import re

import pytest

NAMES = importlib.import_module("09_names")
FIX = importlib.import_module("09_fix")


@pytest.mark.parametrize(
    ("spelling", "since"), NAMES.SPELLINGS, ids=[s for s, _ in NAMES.SPELLINGS]
)
def test_old_spellings_are_deprecated_and_new_ones_work(spelling: str, since: str) -> None:
    old = not spelling.startswith(" ")
    assert NAMES.works(spelling) == ("deprecated" if old else "yes")
    assert (since == "2.11") == ("precast" in spelling)


def test_the_old_program_is_fixed_and_computes_what_it_did() -> None:
    before = FIX.OLD_PROGRAM.read_text(encoding="utf-8")
    after = FIX.fixed(FIX.OLD_PROGRAM)
    runs = [FIX.run(text) for text in (before, after)]
    assert [run.warnings for run in runs] == [5, 0]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses[-1] < runs[0].losses[0]
    assert re.search(r"torch\.(cuda|cpu)\.amp|cuda\.amp", after) is None
    assert len(FIX.changed(before, after)) == 6
