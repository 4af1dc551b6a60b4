"""Float8 rules under DDP and FSDP2 in two processes on gloo: they train what one process without a wrapper trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.float8.two_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "".join(said)[-3000:]
