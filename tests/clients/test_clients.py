"""Programs of other libraries' users compute the same under `precast.install()` as without it, bit for bit.

They need the libraries of the extra `test-clients`: `make test-clients` installs them, and runs these tests.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast.engine.registration import ENGINES, use_engine
from precast.policy.policy import Policy, Rule, expanded_rules
from tests.clients.clients import CASES
from tests.clients.outcome import Outcome, differences, not_finite, steps_in
from tests.support.pages import blocks

ROOT = Path(__file__).parents[2]

# What the libraries warn of is theirs to repair; warnings of precast's are errors here too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
for library in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(library, reason="`make test-clients` runs these tests")


@functools.cache
def by_torch(case: str) -> Outcome:
    client, dtype = CASES[case]
    return client.run(dtype)


@functools.cache
def in_float32(case: str) -> Outcome:
    return CASES[case][0].run(None)


def by_precast(case: str, engine: str) -> Outcome:
    client, dtype = CASES[case]
    with use_engine(engine), precast.install("torch"):
        return client.run(dtype)


@pytest.mark.parametrize("case", CASES)
def test_a_client_computes_the_same_when_precast_is_installed(
    case: str, record_property: Callable[[str, Any], None]
) -> None:
    theirs = by_torch(case)
    differ = {engine: differences(by_precast(case, engine), theirs) for engine in ENGINES}
    record_property("client", _row(case, theirs, differ))
    assert not_finite(theirs) == []
    assert differ == {engine: [] for engine in ENGINES}


def _row(case: str, theirs: Outcome, differ: dict[str, list[str]]) -> dict[str, Any]:
    client, dtype = CASES[case]
    return {
        "library": client.library,
        "version": version(client.library),
        "what": client.what,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": steps_in(theirs),
        "tensors": len(theirs),
        "engines": list(differ),
        "identical": not any(differ.values()),
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_imported_after_precast_was_installed_compute_the_same(
    engine: str, tmp_path: Path
) -> None:
    saved = tmp_path / "outcomes.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.clients.installed_first", str(saved)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PRECAST_ENGINE": engine},
    )
    result = torch.load(saved)
    differ = {case: differences(result[case], by_torch(case)) for case in CASES}
    assert differ == {case: [] for case in CASES}


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    [example] = [
        text
        for _, text in blocks(ROOT / "docs" / "usage.md", "python")
        if text.startswith("# not run: needs the libraries of the extra test-clients")
    ]
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path)


# --- what the comparison rests on ---


@pytest.mark.parametrize("case", CASES)
def test_a_client_computes_the_same_twice_without_precast(case: str) -> None:
    client, dtype = CASES[case]
    assert differences(client.run(dtype), by_torch(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_mixed_precision_is_seen_in_what_a_client_computes(case: str) -> None:
    assert differences(in_float32(case), by_torch(case))


@pytest.mark.parametrize("case", CASES)
def test_a_client_runs_in_the_policy_that_is_installed(case: str) -> None:
    client, dtype = CASES[case]
    with precast.install(_lowers_nothing()):
        ours = client.run(dtype)
    assert set(differences(ours, in_float32(case))) <= {"scale"}  # of the scaler, off in float32


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(", float16")])
def test_a_client_in_float16_steps_with_precasts_scaler(case: str) -> None:
    steps: list[object] = []
    with precast.observe(steps.append):
        by_precast(case, "native")
    assert steps


@functools.cache
def _lowers_nothing() -> Policy:
    policy = Policy.load("torch")
    lowered = [
        n for n, entry in expanded_rules(policy, "cpu")[0].items() if entry.rule is Rule.LOWER
    ]
    return policy.replace(name="lowers nothing", ops=dict.fromkeys(lowered, "fp32"))
