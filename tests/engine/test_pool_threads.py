"""Threads of PyTorch's own: they work for a thread that is in a region, and must run its policy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter

import precast
from precast import Policy, _torch
from precast.engine.thread_state import regions
from tests.support.installed import uninstall_all

OTHER = Policy.load("torch").replace(name="other", ops={"mm": "fp32"})
DEPTH = 70  # autograd goes on in a thread of its own where backward has called itself 60 times


def deep_backward(work: Callable[[], Any]) -> list[Any]:
    """Calls `work` in the innermost of many backward passes inside each other; gives what it found, and its thread."""
    found: list[Any] = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.depth:
                with torch.enable_grad():
                    inner = Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)
                inner.backward()
            else:
                found.extend([threading.get_ident(), work()])
            return gradient, None

    Deep.apply(torch.ones(1, requires_grad=True), DEPTH).backward()
    assert found[0] != threading.get_ident(), "the pool thread was not reached"
    return found[1:]


def installed() -> AbstractContextManager[Any]:
    precast.install(OTHER)
    return torch.autocast("cpu")


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "precast": lambda: precast.autocast("cpu", policy=OTHER),
    "installed": installed,
}


@pytest.mark.parametrize("region", REGIONS)
def test_backward_in_a_pool_thread_runs_the_policy(region: str) -> None:
    a = torch.randn(3, 3)

    def products() -> list[torch.dtype]:
        dtypes = [torch.mm(a, a).dtype, F.linear(a, a).dtype]
        with torch.autocast("cpu", enabled=False):
            return [*dtypes, F.linear(a, a).dtype]

    try:
        with REGIONS[region]():
            [found] = deep_backward(products)
        assert found == [torch.float32, torch.bfloat16, torch.float32]
        with torch.autocast("cpu"):
            uninstall_all()
            [found] = deep_backward(products)
        assert found == [torch.bfloat16, torch.bfloat16, torch.float32]
    finally:
        uninstall_all()


@pytest.mark.parametrize("policy", ["torch", "default", OTHER])
def test_a_pool_thread_keeps_no_copies_of_weights(policy: Policy | str) -> None:
    layer = Linear(3, 3)

    def use() -> int:
        layer(torch.ones(1, 3))
        return len(regions.cache)

    with precast.install(policy), torch.autocast("cpu"):
        assert deep_backward(use) == [0]
        assert use() == 2


def test_a_program_that_clears_pytorchs_cache_clears_precasts() -> None:
    weight, x = Parameter(torch.ones(4, 4)), torch.ones(1, 4)
    with precast.autocast("cpu"):
        F.linear(x, weight)
        weight.data.zero_()  # no version counter sees this
        torch.clear_autocast_cache()
        assert F.linear(x, weight).abs().max() == 0


def test_what_is_lent_is_held_once_and_let_go() -> None:
    """Up to 2.11 PyTorch gives back a reference that it never took."""
    lent = Policy("lent", {})
    before = sys.getrefcount(lent)
    for _ in range(3):
        _torch.set_inherited_tls("precast test", lent)
        assert sys.getrefcount(lent) == before + 1
        assert _torch.inherited_tls("precast test") is lent
        _torch.set_inherited_tls("precast test", None)
        assert sys.getrefcount(lent) == before
