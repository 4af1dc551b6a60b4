"""`precast run` names the policy `default` after an error about dtypes, where that policy runs the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from precast.running.dtype_error import advice_on, record_regions
from tests.running.test_run import RUN, assert_alike, both, ended, start, write

CALLS: list[int] = []


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    stop = record_regions()
    yield
    stop()
    CALLS.clear()


def index_add(x: Tensor, y: Tensor) -> None:
    index = torch.tensor([0])
    x.index_add_(dim=0, index=index, source=y[:1])


def part_of(y: Tensor) -> Tensor:
    CALLS.append(1)
    return y[:1]


def index_add_of_a_result(x: Tensor, y: Tensor) -> None:
    x.index_add_(0, torch.tensor([0]), part_of(y))


def assign(x: Tensor, y: Tensor) -> None:
    mask = x > 0
    x[mask] = y[mask]


def assign_a_variable(x: Tensor, y: Tensor) -> None:
    mask = x > 0
    part = y[mask]
    x[mask] = part


class Holder:
    x: Tensor
    y: Tensor

    def __getitem__(self, key: int) -> Tensor:
        CALLS.append(1)
        return self.y[key]


def dot_of_attributes(x: Tensor, y: Tensor) -> None:
    holder = Holder()
    holder.x, holder.y = x[0], y[0]
    torch.dot(holder.x, holder.y)


def dot_of_items(x: Tensor, y: Tensor) -> None:
    holder, row = Holder(), x[0]
    holder.y = y
    torch.dot(row, holder[0])


def wrong_shapes(x: Tensor, y: Tensor) -> None:
    CALLS.append(1)
    torch.mm(x, y)


def own_error(x: Tensor, y: Tensor) -> None:
    CALLS.append(1)
    raise RuntimeError(f"expected dtypes that are the same, got {x.dtype} and {y.dtype}")


def own_function(x: Tensor, y: Tensor) -> None:
    own_error(x, y)


def error_of(operation: Callable[[Tensor, Tensor], None], region: Any) -> BaseException:
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError) as caught, region:
        operation(x, torch.nn.functional.linear(x, torch.ones(3, 3)).bfloat16())
    return caught.value


@pytest.mark.parametrize("operation", [index_add, assign, assign_a_variable, dot_of_attributes])
def test_an_operation_that_the_default_policy_runs_is_named(
    operation: Callable[[Tensor, Tensor], None],
) -> None:
    error = error_of(operation, torch.autocast("cpu", dtype=torch.bfloat16))
    advice = advice_on(error)
    assert advice is not None
    assert "--policy default" in advice
    assert advice_on(error) == advice, "the arguments were not written"


@pytest.mark.parametrize(
    ("operation", "region"),
    [
        (wrong_shapes, torch.autocast("cpu", dtype=torch.bfloat16)),  # fails under any policy
        (own_function, torch.autocast("cpu", dtype=torch.bfloat16)),  # code of the program
        (index_add_of_a_result, torch.autocast("cpu", dtype=torch.bfloat16)),
        (dot_of_items, torch.autocast("cpu", dtype=torch.bfloat16)),
        (assign_a_variable, torch.autocast("cpu", enabled=False)),
        (assign_a_variable, torch.no_grad()),  # in no region
    ],
)
def test_nothing_is_said_where_it_was_not_tried_or_does_not_help(
    operation: Callable[[Tensor, Tensor], None], region: Any
) -> None:
    error = error_of(operation, region)
    calls = len(CALLS)
    assert advice_on(error) is None
    assert len(CALLS) == calls, "code of the program ran again"


def test_no_error_has_no_advice() -> None:
    assert advice_on(None) is None
    assert advice_on(RuntimeError("same dtype")) is None


@pytest.mark.trial("DEFAULT_POLICY")
def test_the_advice_is_right_and_the_program_ends_as_without_precast(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import torch
        net, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, y, index = torch.zeros(3, 4), net(x), torch.arange(3)
            print(out.index_add_(0, index, y).dtype)
        """,
    )
    plain, run = both(tmp_path, "program.py")
    assert_alike(plain, run)
    assert plain.code == 1
    text = " ".join(" ".join(run.ours).split())
    assert "the operation that failed runs with --policy default" in text
    done = ended(start([*RUN, "--policy", "default", "program.py"], tmp_path), tmp_path)
    assert (done.code, done.stdout) == (0, "torch.float32\n")
