"""torch.compile's cache on disk: a process never gets what another compiled under another policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import precast
from precast import engine

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
assert str(torch.compiler.config.cache_key_tag).startswith(tag)
"""


def run(policy: str, where: str, folder: Path, tag: str = "") -> list[str]:
    """The result's dtype in a process of its own, and how often its compiler's cache had the graph."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-c", PROGRAM, policy, where, tag]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("where", ["outside", "inside", "installed"])
def test_another_policy_in_another_process(where: str, tmp_path: Path) -> None:
    again = "0" if where == "inside" else "1"  # PyTorch keeps no graph that has a region inside
    assert run("torch", where, tmp_path) == ["torch.bfloat16", "0"]
    assert run("other", where, tmp_path) == ["torch.float32", "0"]
    assert run("torch", where, tmp_path) == ["torch.bfloat16", again]
    assert run("other", where, tmp_path) == ["torch.float32", again]


def test_pytorchs_policy_shares_with_pytorch_and_a_users_tag_still_counts(tmp_path: Path) -> None:
    assert run("none", "outside", tmp_path) == ["torch.bfloat16", "0"]
    assert run("torch", "outside", tmp_path) == ["torch.bfloat16", "1"]
    assert run("torch", "outside", tmp_path, "mine") == ["torch.bfloat16", "0"]
    assert run("other", "outside", tmp_path, "mine") == ["torch.float32", "0"]
    assert run("other", "outside", tmp_path, "mine") == ["torch.float32", "1"]


def test_the_tag_says_the_policies_in_force_and_is_taken_off_again() -> None:
    engine.unregister()
    other = precast.Policy.load("torch").replace(name="other", ops={"mm": "fp32"})
    before = torch.compiler.config.cache_key_tag
    with precast.autocast("cpu", policy=other):
        tag = torch.compiler.config.cache_key_tag
        assert other.fingerprint in str(tag)
        assert other.fingerprint in f"{tag}"
    assert str(tag) == before
    with precast.install(other):
        assert other.fingerprint in str(tag)
    assert torch.compiler.config.cache_key_tag == before
    assert type(torch.compiler.config.cache_key_tag) is str
