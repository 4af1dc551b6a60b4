"""Runs of several processes: a rank that differs alone is named, and so is a replica that has drifted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import precast
from precast.errors import ComparisonError

STEPS = 3
ROOT = Path(__file__).parents[2]
Change = Callable[[nn.Module, int, int], None]


def _run(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Change = lambda *_: None, ranks: int = 3
) -> None:
    """Train replicas as data parallelism does: each on its part of the data, with the mean of all gradients."""
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with precast.record(path, model):
            for step in range(STEPS):
                change(model, rank, step)
                torch.manual_seed(100 * step + rank)
                model(torch.randn(4, 8)).square().sum().backward()
                for number, parameter in enumerate(model.parameters()):
                    torch.manual_seed(7 * step + number)  # stands for the mean of all ranks
                    parameter.grad = torch.randn(parameter.shape)
                optimizer.step()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)


def _other_eps(model: nn.Module, rank: int, step: int) -> None:
    if rank == 1 and step == 1:
        model[1].eps = 1e-2  # type: ignore[index,union-attr]


def _drift(model: nn.Module, rank: int, step: int) -> None:
    if rank == 2 and step == 1:
        with torch.no_grad():
            model.get_parameter("0.bias").data.add_(0.1)


def test_equal_runs_of_several_ranks_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.run", "b.run"):
        _run(tmp_path / name, monkeypatch)
    difference = precast.compare(tmp_path / "a.run", tmp_path / "b.run")
    assert difference.equal
    assert difference.cause is None
    assert not difference.notes


def test_a_rank_that_differs_alone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "a.run", monkeypatch)
    _run(tmp_path / "b.run", monkeypatch, _other_eps)
    cause = precast.compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert (cause.kind, cause.rank, cause.step, cause.module) == ("rank", 1, 1, "1")
    assert "eps=1e-05 against 0.01" in cause.difference


def test_a_difference_of_all_ranks_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "a.run", monkeypatch)
    _run(tmp_path / "b.run", monkeypatch, lambda model, _, step: _other_eps(model, 1, step))
    cause = precast.compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert (cause.kind, cause.rank) == ("operation", None)


def test_a_replica_that_has_drifted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "b.run", monkeypatch, _drift)
    _run(tmp_path / "a.run", monkeypatch)
    difference = precast.compare(tmp_path / "a.run", tmp_path / "b.run")
    assert difference.cause is not None
    assert (difference.cause.kind, difference.cause.rank) == ("rank", 2)
    assert any("0.bias in rank 2 has drifted" in note for note in difference.notes)


def test_other_numbers_of_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "a.run", monkeypatch)
    for name, ranks, message in (("b", 2, "as many processes"), ("c", 1, "split=3")):
        _run(tmp_path / f"{name}.run", monkeypatch, ranks=ranks)
        with pytest.raises(ComparisonError, match=message):
            precast.compare(tmp_path / "a.run", tmp_path / f"{name}.run")
    assert precast.compare(tmp_path / "a.rank0.run", tmp_path / "b.rank0.run").equal


def _run_processes(folder: Path, name: str, ranks: int, *drifts: str) -> Path:
    """Record a training with as many processes, which exchange their gradients."""
    path = folder / f"{name}.run"
    command = [sys.executable, "-m", "tests.comparison.ranks_program", str(path)]
    meeting = str(folder / f"{name}.meeting")
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), meeting, *drifts], cwd=ROOT)
        for rank in range(ranks)
    ]
    assert [each.wait() for each in processes] == [0] * ranks
    return path


def test_two_processes_are_compared_with_one_and_with_each_other(tmp_path: Path) -> None:
    one, two = (_run_processes(tmp_path, f"{ranks}", ranks) for ranks in (1, 2))
    difference = precast.compare(one, two, bound=1e-4)
    assert difference.within_bound, difference
    assert difference.cause is None or difference.cause.kind == "order", difference
    assert {each.module for each in difference.growth} >= {"0", "3", ""}
    assert all(each.output is not None and each.weights is not None for each in difference.steps)
    drifted = _run_processes(tmp_path, "drifted", 2, "drifts")
    for other in (one, two):
        cause = precast.compare(other, drifted).cause
        assert cause is not None
        assert (cause.kind, cause.rank, cause.module) == ("rank", 1, "3" if other is one else "")
