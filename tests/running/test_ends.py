"""How a process ends that has used precast: as without it, with nothing printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

ATTACHED = """
import torch, precast
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
attachment = precast.attach(model)
with precast.autocast("cpu"):
    model(torch.ones(2, 256)).sum().backward()
optimizer.step()
"""

LONGER_THAN_OUR_MODULES = "torch.kept = [model, optimizer]"
"""What PyTorch's own module keeps lives until Python has emptied the modules that were loaded after it."""


def run(program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kept", ["", LONGER_THAN_OUR_MODULES], ids=["", "kept"])
def test_a_model_that_is_attached_to_the_end(kept: str) -> None:
    assert run(ATTACHED + kept) == (0, "", "")


THREADS = """
import threading, torch, precast

def work():
    with precast.autocast("cpu"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

for _ in range(30):
    threading.Thread(target=work).start()
"""


def test_threads_that_used_a_region_until_the_end() -> None:
    """For the system a thread ends later than for Python, and gives back then what it has lent."""
    assert [run(THREADS) for _ in range(3)] == [(0, "", "")] * 3
