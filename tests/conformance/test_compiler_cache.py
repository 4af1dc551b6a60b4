"""torch.compile's cache on disk: a process never gets what another compiled under another policy.

Each run is a process of its own, forked from one that has loaded PyTorch and its compiler and compiled nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import os
import sys
import torch
import torch._inductor.compile_fx
import precast
from torch._dynamo.utils import counters

torch.set_num_threads(1)
other = precast.Policy.load("torch").replace(name="other", ops={"mm": "fp32"})

def product(a):
    return torch.mm(a, a)

def run(name, where, tag):
    policy = {"other": other, "none": None}.get(name, name)
    torch.compiler.config.cache_key_tag = tag

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
    print(result.dtype, counters["aot_autograd"]["autograd_cache_hit"], flush=True)
    assert not tag or str(torch.compiler.config.cache_key_tag).startswith(tag)

for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        run(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, arguments
"""


RUNS = {
    "a region around": [
        ("none", "outside", "around"),
        ("torch", "outside", "around"),  # it is PyTorch's policy
        ("other", "outside", "around"),
        ("other", "outside", "around"),
        ("other", "outside", "around, another tag"),
    ],
    "a region inside": [("torch", "inside", "inside"), ("other", "inside", "inside")],
    "an installed policy": [
        ("torch", "installed", "installed"),
        ("other", "installed", "installed"),
    ],
    "no tag of a user's": [("torch", "outside", ""), ("other", "outside", "")],
}
"""A run: a policy's name, the place of the region, and the user's tag of the cache.

The tags keep the groups apart, as folders would; the kernels, which are in no group's key, are compiled once.
"""

Found = tuple[str, int]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """The dtype of each run's result, and how often its compiler's cache had the graph."""
    runs = [run for group in RUNS.values() for run in group]
    folder = str(tmp_path_factory.mktemp("inductor"))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-c", PROGRAM, json.dumps(runs)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (line.split() for line in done.stdout.splitlines())
    results = ((dtype.removeprefix("torch."), int(hits)) for dtype, hits in lines)
    return {name: [next(results) for _ in group] for name, group in RUNS.items()}


def test_a_region_around(found: dict[str, list[Found]]) -> None:
    theirs, ours, *others = found["a region around"]
    assert [theirs, ours] == [("bfloat16", 0), ("bfloat16", 1)]
    assert others == [("float32", 0), ("float32", 1), ("float32", 0)]


@pytest.mark.parametrize("where", ["a region inside", "an installed policy", "no tag of a user's"])
def test_another_policy_is_compiled_anew(where: str, found: dict[str, list[Found]]) -> None:
    assert found[where] == [("bfloat16", 0), ("float32", 0)]
