"""torch.compile's cache on disk: a process never gets what another compiled under another policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import precast
from torch._dynamo.utils import counters

torch.set_num_threads(1)
other = precast.Policy.load("torch").replace(name="other", ops={"mm": "fp32"})
policy = {"other": other, "none": None}.get(sys.argv[1], sys.argv[1])
where, tag = sys.argv[2:4]
torch.compiler.config.cache_key_tag = tag

def product(a):
    return torch.mm(a, a)

def inside(a):
    with precast.autocast("cpu", policy=policy):
        return torch.mm(a, a)

a = torch.ones(2, 2)
if where == "inside":
    result = torch.compile(inside, backend="inductor", fullgraph=True)(a)
elif where == "installed":
    precast.install(policy)
    with torch.autocast("cpu"):
        result = torch.compile(product, backend="inductor")(a)
else:
    with precast.autocast("cpu", policy=policy) if policy else torch.autocast("cpu"):
        result = torch.compile(product, backend="inductor")(a)
print(result.dtype, counters["aot_autograd"]["autograd_cache_hit"])
assert not tag or str(torch.compiler.config.cache_key_tag).startswith(tag)
"""


def run(policy: str, where: str, folder: Path, tag: str = "") -> list[str]:
    """The result's dtype in a process of its own, and how often its compiler's cache had the graph."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-c", PROGRAM, policy, where, tag]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_region_around(tmp_path: Path) -> None:
    assert run("none", "outside", tmp_path) == ["torch.bfloat16", "0"]
    assert run("torch", "outside", tmp_path) == ["torch.bfloat16", "1"]  # it is PyTorch's policy
    assert run("other", "outside", tmp_path) == ["torch.float32", "0"]
    assert run("other", "outside", tmp_path) == ["torch.float32", "1"]
    assert run("other", "outside", tmp_path, "a user's tag") == ["torch.float32", "0"]


@pytest.mark.parametrize("where", ["inside", "installed"])
def test_a_region_inside_and_an_installed_policy(where: str, tmp_path: Path) -> None:
    assert run("torch", where, tmp_path) == ["torch.bfloat16", "0"]
    assert run("other", where, tmp_path) == ["torch.float32", "0"]
