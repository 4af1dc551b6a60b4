"""Planted faults are named: the module, the operation and the kind, against a sound run of another process.

An ordinary run draws a few faults. `PRECAST_PLANTED_FAULTS=200` plants that many.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from precast.comparison.comparing import compare
from precast.comparison.difference import Cause, Kind
from tests.comparison import faults
from tests.comparison.faults import FAULTS, Planted, program_of
from tests.comparison.networks import NETWORKS

COUNT = int(os.environ.get("PRECAST_PLANTED_FAULTS", "12"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have the same order in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _record_sound_runs(folder: Path, networks: set[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.comparison.faults",
        str(folder),
        *sorted(networks),
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def _is_named(cause: Cause | None, truth: Planted) -> bool:
    if cause is None or cause.kind not in truth.kinds:
        return False
    names = {cause.operation, cause.operation.partition(".")[0].rstrip("_")}
    in_place = not truth.modules or cause.module in truth.modules
    return in_place and (not truth.operations or not names.isdisjoint(truth.operations))


def test_faults_are_named(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seed = random.randrange(1 << 30)
    cases = list(faults.cases(seed, COUNT))
    _record_sound_runs(tmp_path, {network for network, _, _ in cases})
    missed = []
    for network, name, place in cases:
        fault = FAULTS[name]
        program = program_of(network, in_region=fault.needs_region)
        truth = fault.plant(program, place)
        faults.run(program, tmp_path / "fault.run")
        sound = faults.sound_file(tmp_path, network, in_region=fault.needs_region)
        difference = compare(sound, tmp_path / "fault.run")
        assert not difference.equal, (network, name, place)
        if not _is_named(difference.cause, truth):
            missed.append((network, name, place, difference.cause))
    record_property("cases", len(cases) - len(missed))
    print(f"{len(cases) - len(missed)} of {len(cases)} causes named, seed {seed}", missed)
    assert len(missed) <= 0.05 * len(cases), missed


def test_no_cause_is_invented_in_equal_runs(tmp_path: Path) -> None:
    networks = list(NETWORKS) if COUNT >= 200 else random.sample(list(NETWORKS), 2)
    _record_sound_runs(tmp_path, set(networks))
    for pair in range(max(2, COUNT // 4)):
        network = networks[pair % len(networks)]
        in_region = pair % 2 == 1 and network != "rnn"
        faults.run(program_of(network, in_region=in_region), tmp_path / "again.run")
        sound = faults.sound_file(tmp_path, network, in_region=in_region)
        difference = compare(sound, tmp_path / "again.run")
        assert difference.equal, (network, difference.first_bit)
        assert difference.cause is None
        assert difference.distance == 0.0


@pytest.mark.parametrize(
    ("network", "place"), [("decoder", ""), ("moe", ""), ("decoder", "blocks.0.attention.qkv")]
)
def test_another_order_of_summation_is_rounding(network: str, place: str, tmp_path: Path) -> None:
    faults.run(program_of(network), tmp_path / "a.run")
    program = program_of(network)
    dense = faults.FAULTS["stale copy"].places(program)
    place = place or random.choice([each for each in dense if each != "gate"])
    program.model.get_submodule(place).parts = 4  # type: ignore[assignment]
    faults.run(program, tmp_path / "b.run")
    cause = compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert (cause.kind, cause.module) == ("order", place)
    assert "rounding" in cause.difference
    assert "within" in cause.difference


def test_faults_are_of_all_documented_kinds() -> None:
    assert len(FAULTS) >= 20
    program = {name: program_of(name) for name in NETWORKS}
    named: set[str] = set()
    for fault in FAULTS.values():
        network = next((n for n, p in program.items() if fault.places(p)), None)
        if network is not None:
            fresh = program_of(network, in_region=fault.needs_region)
            named |= set(fault.plant(fresh, fault.places(fresh)[0]).kinds)
    assert set(get_args(Kind)) - named <= {"order", "rank", "unknown"}
