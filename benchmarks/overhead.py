"""What a call, and a region, costs under precast beside torch.autocast, in microseconds.

PyTorch's side of each round runs with every kernel of ours off the dispatcher, so that its figure is PyTorch's own.
Tensors are tiny (8x8): what is left is overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from benchmarks.interleave import Comparison, Variant, compare
from precast.engine import registration

__all__ = ["run"]

ROUNDS = 21
CALLS = 2000


def run(*, rounds: int = ROUNDS, calls: int = CALLS) -> Iterator[dict[str, Any]]:
    """One row a case: microseconds under torch.autocast, under precast, and their difference."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other would be measured, not overhead
    for kind, name, work in _operations():
        for policy in ("torch", "default"):
            yield _row(kind, name, policy, _in_regions(work, policy, rounds, calls))
    for name, theirs, ours in _entries():
        variants = {
            "torch": Variant(theirs, before=registration.unregister),
            "precast": Variant(ours),
        }
        yield _row("region", name, "default", compare(variants, rounds=rounds, calls=calls))
    yield from _growth(rounds, calls)


def _operations() -> Iterator[tuple[str, str, Callable[[], object]]]:
    x, x16 = torch.randn(8, 8), torch.randn(8, 8).bfloat16()
    weight, bias = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    image = torch.randn(1, 2, 4, 4).bfloat16()
    kernel = torch.nn.Parameter(torch.randn(2, 2, 1, 1))
    index = torch.tensor([0])
    yield "no rule", "relu", lambda: F.relu(x)
    yield "no rule", "add", lambda: x + x
    yield "rule, no weight", "trace", lambda: torch.trace(x16)
    yield "rule, no weight", "mse_loss", lambda: F.mse_loss(x16, x16)
    yield "promoted by default", "index_add", lambda: torch.index_add(x, 0, index, x[:1])
    yield "takes weights, has none", "matmul", lambda: torch.matmul(x16, x16)
    yield "with a weight", "linear", lambda: F.linear(x16, weight, bias)
    yield "with a weight", "linear, no bias", lambda: F.linear(x16, weight)
    yield "with a weight", "matmul", lambda: torch.matmul(x16, weight)
    yield "with a weight", "conv2d", lambda: F.conv2d(image, kernel)


def _in_regions(work: Callable[[], object], policy: str, rounds: int, calls: int) -> Comparison:
    """`work` inside one open region of each kind."""
    chosen = precast.Policy.load(policy)
    return compare(
        {
            "torch": _inside(lambda: torch.autocast("cpu"), work, first=registration.unregister),
            "precast": _inside(lambda: precast.autocast("cpu", policy=chosen), work),
        },
        rounds=rounds,
        calls=calls,
    )


def _inside(
    region: Callable[[], Any],
    work: Callable[[], object],
    first: Callable[[], object] = lambda: None,
) -> Variant:
    stack = ExitStack()

    def enter() -> None:
        first()
        stack.enter_context(region())

    return Variant(work, before=enter, after=stack.close)


def _entries() -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    kept_theirs, kept_ours = torch.autocast("cpu"), precast.autocast("cpu")

    def enter(make: Callable[[], Any]) -> Callable[[], None]:
        def work() -> None:
            with make():
                pass

        return work

    yield (
        "enter and leave, new",
        enter(lambda: torch.autocast("cpu")),
        enter(lambda: precast.autocast("cpu")),
    )
    yield "enter and leave, kept", enter(lambda: kept_theirs), enter(lambda: kept_ours)


def _growth(rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """`linear` with a weight, as the policy gets more rows and the regions more levels."""
    x = torch.randn(8, 8).bfloat16()
    weight = torch.nn.Parameter(torch.randn(8, 8))
    default = precast.Policy.load("default")
    library = torch.library.Library("precast_bench", "DEF")
    policies = {f"{n} more rows": default.replace(ops=_rows(library, n)) for n in (0, 100, 1000)}
    sized = {
        name: _inside(_entering(policy), _linear(x, weight)) for name, policy in policies.items()
    }
    yield _growth_row("size of the policy", compare(sized, rounds=rounds, calls=calls))
    nested = {
        f"{depth} regions": _inside(_entering(default, depth), _linear(x, weight))
        for depth in (1, 10, 100)
    }
    yield _growth_row("nested regions", compare(nested, rounds=rounds, calls=calls))


def _linear(x: Tensor, weight: Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, weight)


def _rows(library: torch.library.Library, count: int) -> dict[str, object]:
    """Rules for `count` custom operations, which are defined first."""
    names = [f"op{count}_{i}" for i in range(count)]
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    return {f"precast_bench::{name}": "lower" for name in names}


def _entering(policy: precast.Policy, depth: int = 1) -> Callable[[], ExitStack]:
    def enter() -> ExitStack:
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(precast.autocast("cpu", policy=policy))
            return stack.pop_all()

    return enter


def _row(kind: str, name: str, policy: str, result: Comparison) -> dict[str, Any]:
    difference, spread = result.difference("precast", "torch")
    return {
        "benchmark": "overhead",
        "kind": kind,
        "case": name,
        "policy": policy,
        **result.as_dict(),
        "difference_us": difference * 1e6,
        "difference_iqr_us": spread * 1e6,
    }


def _growth_row(kind: str, result: Comparison) -> dict[str, Any]:
    first = next(iter(result.rounds))
    return {
        "benchmark": "growth",
        "kind": kind,
        "case": "linear with a weight",
        **result.as_dict(),
        "ratio_to_first": {name: result.ratio(name, first)[0] for name in result.rounds},
    }
