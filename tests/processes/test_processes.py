"""Real programs of 1, 2 and 4 processes, started with torchrun on gloo; with NCCL where there are GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from precast.errors import ScalerError
from precast.grad_scaler.distributed import Reduction, check_same, chosen_for
from tests.processes.cases import CASES

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)

ROOT = Path(__file__).parents[2]
SECONDS = 240  # starting PyTorch four times on two cores takes 20
SIZES = (2, 4)

Found = dict[str, Any]
Runs = Callable[[int], list[Found]]


def start(size: int, folder: Path, *, nccl: bool = False) -> list[Found]:
    """What each rank found, the first rank first."""
    command = ["--standalone", "--nproc-per-node", str(size), "-m", "tests.processes.cases"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PRECAST_TEST_NCCL": str(int(nccl))}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, str(folder)],
        cwd=ROOT,
        env=environment,
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of all cases by the number of processes; the first with two, which saves what others load."""
    folder = tmp_path_factory.mktemp("processes")
    done: dict[int, list[Found]] = {}

    def run(size: int) -> list[Found]:
        for each in dict.fromkeys((2, size)):
            if each not in done:
                done[each] = start(each, folder / str(each))
        return done[size]

    return run


def of(runs: Runs, size: int, name: str) -> list[Any]:
    """What a case returned in each rank."""
    found = [rank[name] for rank in runs(size)]
    errors = [f["error"] for f in found if isinstance(f, dict) and "error" in f]
    assert not errors, errors[0]
    return found


def test_every_case_is_looked_at() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in text for name in CASES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "offender"),
    [
        ("fsdp", "first.bias"),
        ("fsdp_mixed", "first.bias"),
        ("tensor_parallelism", "first.bias"),
        ("ddp_with_a_reduction", "first.bias"),
    ],
)
def test_all_ranks_skip_together_and_know_whose_gradient_it_was(
    runs: Runs, size: int, name: str, offender: str
) -> None:
    ranks = of(runs, size, name)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["steps"] == [
        [False, True, 1024.0, []],
        [True, False, 512.0, [f"rank {size - 1}: {offender}"]],
        [False, True, 512.0, []],
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_is_sharded_by_its_policy_trains_as_in_one_process(
    runs: Runs, size: int
) -> None:
    """Bit for bit with two; the sum of four gradients has another order."""
    wide, low = "torch.float32", "torch.bfloat16"
    for rank in of(runs, size, "sharded_by_policy"):
        assert rank["equal"] or size > 2
        assert rank["dtypes"] == {
            "embedding": wide,
            "router": wide,
            "blocks.0.norm": wide,
            "blocks.0.up": low,
            "blocks.0.down": wide,
            "blocks.1.up": low,
            "experts": low,
            "odd_experts": wide,
            "input": low,
            "buffer": wide,
        }


@pytest.mark.parametrize("size", SIZES)
def test_ddp_decides_alike_without_a_reduction(runs: Runs, size: int) -> None:
    assert of(runs, size, "ddp_alone") == [{"skipped": True, "scale": 512.0}] * size


@pytest.mark.parametrize("size", SIZES)
def test_stages_with_parameters_of_their_own_skip_together(runs: Runs, size: int) -> None:
    ranks = of(runs, size, "stages_of_a_pipeline")
    assert all(rank == ranks[0] for rank in ranks)
    bad = ["rank 1: group 0, parameter 0", "rank 1: group 0, parameter 1"]
    for number, (first, moved, second, stayed, third, last) in enumerate(ranks[0]):
        assert (first, second) == ([False, 64.0, [], True], [True, 32.0, bad, False])
        assert third == [False, 32.0, [], True]
        assert (moved, stayed, last) == (True, False, number > 0), "no gradient on rank 0"


@pytest.mark.parametrize("size", SIZES)
def test_one_bad_loss_is_everybodys_verdict(runs: Runs, size: int) -> None:
    name = "one_bad_loss_is_everybodys_verdict"
    for reason, names in of(runs, size, name):
        assert reason == "loss"
        assert names[0] == "rank 1: group 0, parameter 0"


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_find_the_same_first_scale(runs: Runs, size: int) -> None:
    """The largest gradient is 1, of rank 0: half of what brings it near 65504."""
    assert of(runs, size, "the_first_scale") == [2.0**14] * size


@pytest.mark.parametrize("size", SIZES)
def test_groups_that_are_added_decide_too(runs: Runs, size: int) -> None:
    assert of(runs, size, "parameters_that_are_spread_come_later") == [32.0] * size


@pytest.mark.parametrize("size", SIZES)
def test_losses_apart_keep_gradients_that_are_in_buckets(runs: Runs, size: int) -> None:
    assert of(runs, size, "losses_apart_and_buckets") == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_one_of_several_losses_is_everybodys_verdict(runs: Runs, size: int) -> None:
    ranks = of(runs, size, "one_of_the_losses_is_bad_in_one_process")
    bad = ["rank 1: group 0, parameter 0", "rank 1: group 0, parameter 1"]
    assert ranks == [["loss", bad]] * size


@pytest.mark.parametrize("size", SIZES)
def test_the_rank_whose_settings_differ_is_named(runs: Runs, size: int) -> None:
    for errors in of(runs, size, "settings_that_differ"):
        assert len(errors) == 2
        assert f"scaler growth_interval is 7 on rank {size - 1} and 2000 on the first" in errors[0]
        assert "policy is Policy torch" in errors[1]
        assert f"on rank {size - 1} and Policy default" in errors[1]


@pytest.mark.parametrize("size", SIZES)
def test_accumulating_without_synchronising_is_the_same_attached(runs: Runs, size: int) -> None:
    ranks = of(runs, size, "accumulation_without_synchronising")
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0]["same"]


@pytest.mark.parametrize("size", SIZES)
def test_clipping_sees_the_norm_over_all_processes(runs: Runs, size: int) -> None:
    assert all(of(runs, size, "clipping_is_over_all_processes"))


@pytest.mark.parametrize("size", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_in_another_number(runs: Runs, size: int) -> None:
    expected = of(runs, 2, "saved")[0]
    for found in of(runs, size, "resumed"):
        assert found[0] == expected[0] == 512.0
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            # Sums over ranks are taken in another order; Adam divides by their roots.
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_the_same_on_nccl(tmp_path: Path, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for found in start(size, tmp_path / str(size), nccl=True):
        for name in ("fsdp", "fsdp_mixed", "tensor_parallelism"):
            assert found[name]["steps"][1][0] is True, found[name]
            assert math.isclose(found[name]["steps"][1][2], 512.0)


# --- in one process ---


def test_without_a_process_group_a_reduction_says_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ScalerError, match=r"init_process_group.*torchrun"):
        Reduction()
    with pytest.raises(ScalerError, match=r"check_same\(\).*init_process_group"):
        check_same(dtype=torch.float16)
    parameter = torch.nn.Parameter(torch.ones(1))
    assert chosen_for(torch.optim.SGD([parameter], lr=0.1)) is None


def test_a_place_that_is_none_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ScalerError, match="got a str: pass process groups, device meshes"):
            Reduction("all")
        verdicts = [torch.zeros(()), torch.ones(())]
        Reduction()(verdicts)
        assert verdicts == [torch.ones(()), torch.ones(())]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("arguments", [[], ["--ddp"]], ids=["FSDP2", "DDP"])
def test_the_recipe_runs(arguments: list[str]) -> None:
    command = ["--standalone", "--nproc-per-node", "2", "examples/distributed.py", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    skipped = [line for line in done.stdout.splitlines() if "skipped: " in line]
    assert len(skipped) == 1, done.stdout
    assert "rank 1: " in skipped[0]
    assert "rank 0" not in skipped[0]
    assert "Counters(steps=8, skipped=1" in done.stdout
