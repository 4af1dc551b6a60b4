"""Regions: results bit for bit as PyTorch's, flags that are right whatever happens inside."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import precast
from tests.attack.scenarios import scenario
from tests.attack.tools import DTYPES, equal, flags


def _shape() -> tuple[int, int]:
    return random.randint(1, 9), random.randint(1, 9)


def _pair() -> tuple[Tensor, Tensor]:
    rows, columns = _shape()
    return torch.randn(rows, columns), torch.randn(columns, rows + 1)


OPERATIONS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]] = {
    "a matrix product": lambda: (torch.mm, _pair()),
    "a linear layer": lambda: (
        F.linear,
        (torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)),
    ),
    "a convolution": lambda: (
        lambda x, w: F.conv2d(x, w, padding=1),
        (torch.randn(1, 2, 5, 6), torch.randn(3, 2, 3, 3)),
    ),
    "attention": lambda: (
        F.scaled_dot_product_attention,
        tuple(torch.randn(1, 2, 4, 8) for _ in range(3)),
    ),
    "einsum": lambda: (lambda a, b: torch.einsum("ij,jk->ik", a, b), _pair()),
    "a loss": lambda: (F.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))),
    "a recurrent cell": lambda: (
        lambda x, h, w, u: torch.tanh(x @ w + h @ u),
        (torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 3), torch.randn(3, 3)),
    ),
    "a concatenation of two dtypes": lambda: (
        lambda a, b: torch.cat([a, b.bfloat16()]),
        (torch.randn(2, 3), torch.randn(1, 3)),
    ),
    "a sum of products": lambda: (
        torch.addmm,
        (torch.randn(3, 4), torch.randn(3, 2), torch.randn(2, 4)),
    ),
    "a norm": lambda: (lambda x: F.layer_norm(x, x.shape[-1:]), (torch.randn(3, 7),)),
}


def _as_pytorch(make: Callable[[], Any], dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        function, arguments = make()
        results = []
        for region in (torch.autocast, precast.autocast):
            inputs = [t.clone().requires_grad_() for t in arguments]
            with region("cpu", dtype=dtype):
                out = function(*inputs)
            out.float().sum().backward()
            results.append([out.detach(), *[t.grad for t in inputs]])
        equal(results[1], results[0])

    return run


for _name, _make in OPERATIONS.items():
    for _of, _dtype in DTYPES.items():
        scenario(
            "regions",
            f"{_name} in {_of}, its result and its gradients are those of torch.autocast, bit for bit",
            "plain PyTorch",
            name=f"{_name} in {_of}",
        )(_as_pytorch(_make, _dtype))


@scenario(
    "regions", "a long product in bfloat16 is as near to float64 as its 8 bits allow", "float64"
)
def products_near_float64() -> None:
    a, b = torch.rand(64, 512) + 0.5, torch.rand(512, 64) + 0.5
    with precast.autocast("cpu", dtype=torch.bfloat16):
        result = a @ b
    exact = a.double() @ b.double()
    assert ((result.double() - exact).abs() / exact).max() < 2**-6


@scenario("regions", "what a rule keeps in float32 is as near to float64 as float32 is", "float64")
def float32_where_a_rule_says_so() -> None:
    policy = precast.Policy.load("default").replace(ops={"matmul": "fp32"})
    a, b = torch.rand(9, 300) + 0.5, torch.rand(300, 9) + 0.5
    with precast.autocast("cpu", policy=policy):
        result = a @ b
    exact = a.double() @ b.double()
    assert ((result.double() - exact).abs() / exact).max() < 1e-5


@scenario(
    "regions",
    "a nest of regions that is drawn restores PyTorch's flags at each exit",
    "plain PyTorch",
)
def drawn_nests() -> None:
    def nest(depth: int) -> None:
        before = flags()
        region = precast.autocast(
            "cpu",
            dtype=random.choice(list(DTYPES.values())),
            enabled=random.random() < 0.7,
            cache_enabled=random.choice([None, True, False]),
            policy=random.choice([None, "torch", "default", "lean"]),
        )
        twin = torch.autocast("cpu", region.fast_dtype, region.enabled, region.cache_enabled)
        with twin:
            expected = flags()[:2]
        try:
            with region:
                assert flags()[:2] == expected
                if depth:
                    nest(depth - 1)
                if random.random() < 0.3:
                    raise KeyError
        except KeyError:
            pass
        assert flags() == before

    for _ in range(30):
        nest(random.randint(0, 6))


@scenario("regions", "Ctrl-C at a random moment leaves no region behind", "plain PyTorch")
def ctrl_c_at_random_moments() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = flags()
    signal.signal(signal.SIGALRM, stop)
    for _ in range(150):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
            while True:
                with precast.autocast("cpu"), precast.autocast("cpu", policy="torch"):
                    F.linear(x, weight)
        except KeyboardInterrupt:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert flags() == before


@scenario(
    "regions", "one object that is entered by recursion restores what each entry found", "by hand"
)
def one_object_by_recursion() -> None:
    region = precast.autocast("cpu", dtype=torch.bfloat16)

    def enter(depth: int) -> None:
        before = flags()
        with region:
            assert torch.is_autocast_enabled("cpu")
            if depth:
                enter(depth - 1)
        assert flags() == before

    enter(random.randint(2, 20))


@scenario("regions", "a decorated generator's caller is never in its region", "by hand")
def callers_of_generators() -> None:
    @precast.autocast("cpu")
    def steps() -> Iterator[bool]:
        while True:
            yield torch.is_autocast_enabled("cpu")

    several = [steps() for _ in range(3)]
    for _ in range(20):
        assert next(random.choice(several)) is True
        assert not torch.is_autocast_enabled("cpu")


@scenario("regions", "tasks of asyncio that take turns do not see each other's regions", "by hand")
def tasks_that_take_turns() -> None:
    async def task(dtype: torch.dtype) -> None:
        @precast.autocast("cpu", dtype=dtype)
        async def inside() -> None:
            for _ in range(10):
                assert torch.get_autocast_dtype("cpu") is dtype
                assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is dtype
                await asyncio.sleep(0)

        await inside()

    async def both() -> None:
        await asyncio.gather(*(task(dtype) for dtype in (*DTYPES.values(), *DTYPES.values())))

    asyncio.run(both())
    assert not torch.is_autocast_enabled("cpu")


@scenario(
    "regions", "regions that end in another order than they began leave nothing behind", "by hand"
)
def regions_out_of_order() -> None:
    import warnings

    warnings.simplefilter("ignore")
    before = flags()
    for order in itertools.permutations(range(3)):
        regions = [
            precast.autocast("cpu", dtype=d, cache_enabled=False) for d in (*DTYPES.values(), None)
        ]
        for region in regions:
            region.__enter__()
        for number in order:
            regions[number].__exit__(None, None, None)
        assert flags() == before


@scenario(
    "regions",
    "an operation that fails for a reason of its own runs once under mixed=promote",
    "by hand",
)
def a_failing_operation_runs_once() -> None:
    ran = []

    @torch.library.custom_op("attack::fails", mutates_args=())
    def fails(x: Tensor, y: Tensor) -> Tensor:
        ran.append(1)
        raise RuntimeError("the disk is full")

    policy = precast.Policy.load("default").replace(ops={"attack::fails": "promote"})
    for inputs in ((torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(2).bfloat16())):
        ran.clear()
        with precast.autocast("cpu", policy=policy):
            with contextlib.suppress(RuntimeError):
                fails(*inputs)
        assert len(ran) == 1, f"it ran {len(ran)} times"


@scenario(
    "regions",
    "an operation that writes and then fails has written once under mixed=promote",
    "by hand",
)
def a_failing_write_happens_once() -> None:
    @torch.library.custom_op("attack::adds", mutates_args={"x"})
    def adds(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        raise RuntimeError("expected scalar type Float but found BFloat16")

    policy = precast.Policy.load("default").replace(ops={"attack::adds": "promote"})
    x = torch.zeros(2)
    with precast.autocast("cpu", policy=policy):
        with contextlib.suppress(RuntimeError):
            adds(x, torch.ones(2).bfloat16())
    equal(x, torch.ones(2))


@scenario(
    "regions", "mixed dtypes run in the widest of them, as when they are cast by hand", "by hand"
)
def the_widest_dtype() -> None:
    for _ in range(20):
        kinds = random.choices([torch.float64, torch.float32, torch.bfloat16], k=2)
        a, b = (torch.randn(3).to(kind) for kind in kinds)
        wide = torch.promote_types(*kinds)
        with precast.autocast("cpu", policy="default"):
            result = torch.dot(a, b)
        equal(result, torch.dot(a.to(wide), b.to(wide)))


@scenario("regions", "a checkpoint in a region gives the gradients of none", "plain PyTorch")
def checkpoints_of_both_kinds() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    result = []
    for kind in (None, True, False):
        leaf = weight.clone().requires_grad_()

        def forward(t: Tensor, leaf: Tensor = leaf) -> Tensor:
            return torch.tanh(t @ leaf) @ leaf

        inputs = x.clone().requires_grad_()
        with precast.autocast("cpu", policy="default"):
            out = (
                forward(inputs) if kind is None else checkpoint(forward, inputs, use_reentrant=kind)
            )
        out.float().sum().backward()
        result.append([out.detach(), leaf.grad, inputs.grad])
    equal(result[1:], [result[0]] * 2)


@scenario("regions", "regions and policies survive pickling and copying", "by hand")
def pickled_policies() -> None:
    policy = precast.Policy.load("default").replace(ops={"matmul": "fp32"})
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), copy.copy(policy)):
        assert other == policy
        with precast.autocast("cpu", policy=other):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.float32


@scenario(
    "regions", "an entry and an exit of a region leave no object behind", "by hand", quick=False
)
def a_hundred_thousand_regions() -> None:
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def some(count: int) -> None:
        for _ in range(count):
            with precast.autocast("cpu"):
                F.linear(x, weight)

    some(1000)
    before = sys.getallocatedblocks()
    some(20_000)
    assert sys.getallocatedblocks() - before < 2000
    assert time.monotonic() > 0


@scenario(
    "regions", "views, strides and storages of results are those of torch.autocast", "plain PyTorch"
)
def layouts_of_results() -> None:
    for _ in range(10):
        a, b = torch.randn(2, 3, 4), torch.randn(4, 5)
        a = random.choice([a, a.transpose(0, 1), a[::2], a.flip(0)])
        result = []
        for region in (torch.autocast, precast.autocast):
            with region("cpu"):
                out = torch.matmul(a, b)
            result.append((out.stride(), out.is_contiguous(), out.shape))
        assert result[0] == result[1]
