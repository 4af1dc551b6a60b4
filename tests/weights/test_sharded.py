"""Sharded weights of FSDP2 and tensor parallelism in the optimizer's step: programs of two and four processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.weights.sharded_cases import CASES

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)


def start(processes: int, folder: Path) -> list[dict[str, str]]:
    """What the cases raised in each process."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.weights.sharded_cases"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(folder)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"{rank}.json" for rank in range(processes)]
    assert all(file.exists() for file in files), "".join(said)[-3000:]
    return [json.loads(file.read_text()) for file in files]


def test_in_two_and_four_processes(tmp_path: Path) -> None:
    """One test, as a process takes seconds to start; those of four load what those of two have saved."""
    for processes in (2, 4):
        names = [name for name, (size, _) in CASES.items() if size == processes]
        for rank, found in enumerate(start(processes, tmp_path / str(processes))):
            raised = [f"{name}, rank {rank}: {error}" for name, error in found.items() if error]
            assert not raised, raised[0]
            assert list(found) == names
