"""The cost of a call and of a region under precast beside torch.autocast, in microseconds; and memory left by regions.

Invariants:
    - PyTorch's side of each round runs with every kernel of ours off the dispatcher, so that its figure is PyTorch's
      own. Tensors are tiny (8x8): what is left is overhead.
    - Every row says which engine ran. A process measures one of them: where the compiled engine has been loaded, its
      kernels stand above the Python ones, and the reference engine would be measured with them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from benchmarks.interleave import Comparison, Variant, compare
from benchmarks.shared_process import WEIGHTS, call, network
from precast.engine import registration

__all__ = ["MANY_REGIONS", "POLICIES", "run"]

ROUNDS = 21
CALLS = 2000
POLICIES = ("torch", "default")
MANY_REGIONS = 100_000


class _Operation(NamedTuple):
    """A call to time, under both policies or under some of them.

    `by_torch` is what somebody writes who has only torch.autocast, where that raises on the call itself.
    """

    kind: str
    case: str
    call: Callable[[], object]
    policies: tuple[str, ...] = POLICIES
    by_torch: Callable[[], object] | None = None


def run(
    *, rounds: int = ROUNDS, calls: int = CALLS, regions: int = MANY_REGIONS
) -> Iterator[dict[str, Any]]:
    """Measures calls, regions, how both grow, and what `regions` of them leave in memory.

    Args:
        rounds: rounds of each comparison.
        calls: calls of each variant in a round.
        regions: how many are entered and left before memory is looked at again.

    Returns:
        One row a case: microseconds under torch.autocast, under precast, and their difference and ratio; for growth the
        ratio to the first size; for memory the bytes that stayed.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other would be measured, not overhead
    engine = {"engine": registration.engine()}
    for row in _rows(rounds, calls, regions):
        yield row | engine


def _rows(rounds: int, calls: int, regions: int) -> Iterator[dict[str, Any]]:
    for operation in _operations():
        for policy in operation.policies:
            result = _in_regions(operation, policy, rounds, calls)
            yield _row(operation.kind, operation.case, policy, result)
    for name, theirs, ours in _entries():
        variants = {
            "torch": Variant(theirs, before=registration.unregister),
            "precast": Variant(ours),
        }
        yield _row("region", name, "default", compare(variants, rounds=rounds, calls=calls))
    yield from _growth(rounds, calls)
    yield from _memory(regions)


def _operations() -> Iterator[_Operation]:
    x, x16 = torch.randn(8, 8), torch.randn(8, 8).bfloat16()
    weight, bias = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    image = torch.randn(1, 2, 4, 4).bfloat16()
    kernel = torch.nn.Parameter(torch.randn(2, 2, 1, 1))
    index, row16 = torch.tensor([0]), x16[:1]
    yield _Operation("no rule", "relu", lambda: F.relu(x))
    yield _Operation("no rule", "add", lambda: x + x)
    yield _Operation("rule, no weight", "trace", lambda: torch.trace(x16))
    yield _Operation("rule, no weight", "mse_loss", lambda: F.mse_loss(x16, x16))
    yield _Operation(
        "promoted by default", "index_add", lambda: torch.index_add(x, 0, index, x[:1])
    )
    yield _Operation("dtypes mixed", "cat", lambda: torch.cat((x16, x)))
    yield _Operation(
        "dtypes mixed",
        "index_add",
        lambda: torch.index_add(x, 0, index, row16),
        ("default",),
        lambda: torch.index_add(x, 0, index, row16.float()),
    )
    yield _Operation("takes weights, has none", "matmul", lambda: torch.matmul(x16, x16))
    yield _Operation("with a weight", "linear", lambda: F.linear(x16, weight, bias))
    yield _Operation("with a weight", "linear, no bias", lambda: F.linear(x16, weight))
    yield _Operation("with a weight", "matmul", lambda: torch.matmul(x16, weight))
    yield _Operation("with a weight", "conv2d", lambda: F.conv2d(image, kernel))
    yield _Operation("refused in 16 bits", "quantile", lambda: torch.quantile(x, 0.5))
    yield _Operation(
        "refused in 16 bits",
        "fft_rfft",
        lambda: torch.fft.rfft(x16),
        ("default",),
        lambda: torch.fft.rfft(x16.float()),
    )
    experts, ends = torch.randn(2, 8, 8), torch.tensor([4, 8], dtype=torch.int32)
    yield _Operation(
        "products of experts",
        "grouped_mm",
        lambda: F.grouped_mm(x16, experts, offs=ends),
        ("default",),
        lambda: F.grouped_mm(x16, experts.bfloat16(), offs=ends),
    )


def _in_regions(operation: _Operation, policy: str, rounds: int, calls: int) -> Comparison:
    """The call inside one open region of each kind."""
    chosen, by_torch = precast.Policy.load(policy), operation.by_torch or operation.call
    return compare(
        {
            "torch": _inside(
                lambda: torch.autocast("cpu"), by_torch, first=registration.unregister
            ),
            "precast": _inside(lambda: precast.autocast("cpu", policy=chosen), operation.call),
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
    policies = {f"{n} more rows": default.replace(ops=_rules(library, n)) for n in (0, 100, 1000)}
    sized = {
        name: _inside(_entering(policy), _linear(x, weight)) for name, policy in policies.items()
    }
    yield _growth_row("size of the policy", compare(sized, rounds=rounds, calls=calls))
    rules = {
        rule: _inside(
            _entering(default.replace(name=rule, ops={"linear": rule})), _linear(x, weight)
        )
        for rule in ("fp32", "lower", "lower_out_fp32")
    }
    yield _growth_row("rule of the operation", compare(rules, rounds=rounds, calls=calls))
    nested = {
        f"{depth} regions": _inside(_entering(default, depth), _linear(x, weight))
        for depth in (1, 10, 100)
    }
    yield _growth_row("nested regions", compare(nested, rounds=rounds, calls=calls))
    attached = {f"{weights} weights": _entering_beside(weights) for weights in WEIGHTS}
    entries = compare(attached, rounds=rounds, calls=calls)
    yield _growth_row("attached weights", entries) | {"case": "enter and leave"}


def _entering_beside(weights: int) -> Variant:
    """Return the entry and exit of a region, while a model of so many weights is attached."""
    model, x, stack = network(weights, 32), torch.randn(1, 32), ExitStack()

    def enter() -> None:
        with torch.no_grad(), precast.autocast("cpu"):
            pass

    def attach() -> None:
        stack.enter_context(precast.attach(model))
        call(model, x)

    return Variant(enter, before=attach, after=stack.close)


def _memory(regions: int) -> Iterator[dict[str, Any]]:
    """Yield the memory left by many regions, each of which casts a weight and calls `linear`."""
    x, weight = torch.randn(8, 8).bfloat16(), torch.nn.Parameter(torch.randn(8, 8))
    policy, region_object = precast.Policy.load("default"), precast.autocast("cpu")
    ways: dict[str, Callable[[], Any]] = {
        "a kept object": lambda: region_object,
        "a new object each": lambda: precast.autocast("cpu", policy=policy),
    }
    for way, region in ways.items():
        grown = _grown(partial(_use, region, x, weight), regions)
        yield {
            "benchmark": "memory",
            "kind": "regions",
            "case": way,
            "regions": regions,
            "grown_bytes": grown,
        }


def _use(region: Callable[[], Any], x: Tensor, weight: Tensor) -> None:
    with region():
        F.linear(x, weight)


def _grown(work: Callable[[], object], times: int) -> int | None:
    """The bytes by which the process has grown after `times` calls; None where the system does not tell.

    A tenth of the calls comes first, untold: the allocator takes its first pages then.
    """
    for _ in range(times // 10):
        work()
    gc.collect()
    before = _resident_bytes()
    for _ in range(times):
        work()
    gc.collect()
    after = _resident_bytes()
    return None if before is None or after is None else after - before


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _linear(x: Tensor, weight: Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, weight)


def _rules(library: torch.library.Library, count: int) -> dict[str, object]:
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
    ratio, ratio_spread = result.ratio("precast", "torch")
    return {
        "benchmark": "overhead",
        "kind": kind,
        "case": name,
        "policy": policy,
        **result.to_dict(),
        "difference_us": difference * 1e6,
        "difference_us_iqr": spread * 1e6,
        "ratio": ratio,
        "ratio_iqr": ratio_spread,
    }


def _growth_row(kind: str, result: Comparison) -> dict[str, Any]:
    first = next(iter(result.rounds))
    ratios = {name: result.ratio(name, first) for name in result.rounds}
    return {
        "benchmark": "growth",
        "kind": kind,
        "case": "linear with a weight",
        **result.to_dict(),
        "ratio_to_first": {name: ratio for name, (ratio, _) in ratios.items()},
        "ratio_to_first_iqr": {name: spread for name, (_, spread) in ratios.items()},
    }
