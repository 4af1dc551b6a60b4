"""A compiled step is called below what the compiler puts around it, and gives the same bits wherever that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from precast._torch import record_kernel
from precast.optim import bfloat16_weights, step_program

BF16 = torch.bfloat16
COUNT = 1009


def steps(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int]]
) -> tuple[Any, nn.ParameterList]:
    """Train with steps that are compiled anew. Return the programs and the weights, one of which is a transpose."""
    programs: dict[Any, step_program.StepProgram] = {}
    monkeypatch.setattr(step_program, "_programs", programs)
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    model[0].data = model[0].data.t().contiguous().t()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    bfloat16_weights(model, optimizer)
    for _ in range(5):  # the first step is the optimizer's own
        for p in model:
            p.grad = torch.randn(p.shape).to(BF16).as_strided(p.shape, p.stride())
        optimizer.step()
    return programs, model


def test_a_step_has_the_bits_of_the_program_that_is_called_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(128, 130), (131, 127), (16411, 1)]
    made, model = steps(monkeypatch, shapes)
    monkeypatch.setattr(step_program, "record_kernel", lambda *_: None)
    others, other = steps(monkeypatch, shapes)
    assert [program.is_kernel for program in made.values()] == [True]
    assert [program.is_kernel for program in others.values()] == [False]
    assert all(map(torch.equal, model, other))


def test_a_kernel_that_gives_other_bits_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        kernel = record_kernel(*arguments)
        assert kernel is not None
        swapped = {number: number for number in kernel.order} | {0: 1, 1: 0}
        return kernel._replace(order=tuple(swapped[number] for number in kernel.order))

    monkeypatch.setattr(step_program, "record_kernel", wrong)
    made, _ = steps(monkeypatch, [(128, 130)])
    assert [program.is_kernel for program in made.values()] == [False]


def adds(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def normalizes(x: Tensor, y: Tensor) -> None:
    x.div_(y.sum())


@pytest.mark.parametrize(("function", "is_known"), [(adds, True), (normalizes, False)])
def test_what_is_more_than_one_kernel_over_what_it_is_given_is_not_known(
    function: Callable[[Tensor, Tensor], None], is_known: bool
) -> None:
    run = torch.compile(function, dynamic=True, fullgraph=True)
    rows = [torch.ones(COUNT), torch.ones(COUNT)]
    for row in rows:
        torch._dynamo.mark_dynamic(row, 0)
    run(*rows)
    kernel = record_kernel(run, rows, COUNT)
    assert (kernel is not None) is is_known
    if kernel is not None:
        x, y = torch.ones(3, 7), torch.full((3, 7), 2.0)
        kernel((x, y), 21)
        assert torch.equal(x, torch.full((3, 7), 3.0))


def test_what_is_not_compiled_has_no_kernel() -> None:
    rows = [torch.ones(COUNT), torch.ones(COUNT)]
    assert record_kernel(adds, rows, COUNT) is None
    assert torch.equal(rows[0], torch.full((COUNT,), 2.0))


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
