"""A compiled step follows the number of threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS = """
import os
import torch
from precast.optim import bfloat16_weights

torch.set_num_threads(1)
layer = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
handle = bfloat16_weights(layer, optimizer)
layer.weight.grad = torch.ones_like(layer.weight)

for _ in range(3):
    optimizer.step()
torch.set_num_threads(3)
before = len(os.listdir("/proc/self/task"))
optimizer.step()
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux lists them")
def test_a_step_compiled_for_one_thread_uses_those_that_there_are_later() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after == before + 2
