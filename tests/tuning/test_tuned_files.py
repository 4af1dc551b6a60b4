"""A file that a search has written works as it is wherever a policy is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import precast
from precast.tuning.training import TrainingTask
from tests.tuning import planted
from tests.tuning.test_tuner import tune

TRAIN = """
import torch
from tests.tuning import planted

case = planted.CASES["overflow"]
given = planted.workload(case, 1)
optimizer = torch.optim.SGD(given.model.parameters(), lr=0.01)
for batch in given.batches:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = given.step(given.model, batch)
    assert loss.isfinite(), "the planted module overflows in float16"
print("trained")
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a policy that holds back what overflows in float16."""
    case = planted.CASES["overflow"]
    given = planted.workload(case, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingTask, "steps", (8, 12))
        found = tune(given.model, given.step, given.batches, candidates=[case.low])
    assert planted.is_held_back(found.policy, case)
    path = tmp_path_factory.mktemp("tuned") / "tuned.toml"
    found.save(path, page=False)
    return path


def network() -> tuple[nn.Module, torch.Tensor]:
    given = planted.workload(planted.CASES["overflow"], 1)
    return given.model.eval(), given.batches[0][0]


def in_a_region(policy: str | Path) -> torch.Tensor:
    model, x = network()
    with (
        precast.attach(model, policy),
        torch.no_grad(),
        precast.autocast("cpu", dtype=torch.float16),
    ):
        return model(x)


def test_attach(path: Path) -> None:
    assert in_a_region(path).isfinite().all()
    assert not in_a_region("default").isfinite().all()


def test_convert(path: Path) -> None:
    model, x = network()
    converted = precast.convert(model, path, torch.float16, example=x)
    assert torch.equal(converted(x), in_a_region(path))


def test_export(path: Path) -> None:
    model, x = network()
    try:
        program = precast.export(model, (x,), policy=path, dtype=torch.float16)
    except precast.errors.ExportError as error:
        pytest.fail(str(error))
    assert torch.equal(program.module()(x), in_a_region(path))


def test_run(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for policy, is_trained in ((str(path), True), ("default", False)):
        done = subprocess.run(
            [sys.executable, "-m", "precast", "run", "--policy", policy, str(script)],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "OMP_NUM_THREADS": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("trained" in done.stdout) is is_trained, done.stderr[-2000:]
