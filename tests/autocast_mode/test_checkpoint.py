"""A checkpointed function runs again in the region that it first ran in, wherever backward is called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import precast
from precast import Policy
from precast._torch import VERSION

OTHER = Policy.load("torch").replace(name="other", ops={"linear": "fp32", "gelu": "lower"})
LIKE_CUDA = Policy.load("torch").retarget("cpu", like="cuda")
DEFAULT = Policy.load("default")
KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
ROWS = torch.arange(3)


def block(x: Tensor, weight: Tensor) -> Tensor:
    return F.softmax(F.gelu(F.linear(x, weight)) * 3, -1)


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    return x.index_add(0, ROWS, F.linear(x, weight))


def islands(x: Tensor, weight: Tensor) -> Tensor:
    with precast.disable():
        x = F.linear(x.float(), weight)
    with torch.autocast("cpu", torch.float16):
        return F.linear(x, weight)


def gradients(
    forward: Callable[[Tensor, Tensor], Tensor],
    *regions: Any,
    inside: bool = False,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, generator=draw).requires_grad_()
    weight = Parameter(torch.randn(4, 4, generator=draw))
    with regions[0]:
        result = forward(x, weight)
        if len(regions) > 1:
            with regions[1]:
                result = forward(result, weight)
        loss = result.float().square().sum()
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs)) and not any(t.isnan().any() for t in ours)


@KINDS
@pytest.mark.parametrize("policy", [OTHER, LIKE_CUDA, DEFAULT], ids=lambda p: p.name)
@pytest.mark.parametrize("function", [block, islands])
def test_what_runs_again_runs_in_the_policy_of_its_region(
    function: Any, policy: Policy, reentrant: bool
) -> None:
    again = partial(checkpoint, function, use_reentrant=reentrant)
    plain = gradients(function, precast.autocast("cpu", policy=policy))
    assert same(gradients(again, precast.autocast("cpu", policy=policy)), plain)


@KINDS
def test_what_runs_again_promotes_mixed_dtypes(reentrant: bool) -> None:
    again = partial(checkpoint, mixed, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="must have the same"):
        gradients(again, torch.autocast("cpu"))
    assert same(
        gradients(again, precast.autocast("cpu")), gradients(mixed, precast.autocast("cpu"))
    )


@KINDS
def test_each_checkpoint_keeps_its_own_region(reentrant: bool) -> None:
    again = partial(checkpoint, block, use_reentrant=reentrant)

    def both(forward: Any) -> list[Tensor]:
        inner = precast.autocast("cpu", torch.float16, policy=OTHER)
        return gradients(forward, precast.autocast("cpu"), inner)

    assert same(both(again), both(block))


@KINDS
def test_a_region_around_backward_changes_nothing(reentrant: bool) -> None:
    again = partial(checkpoint, block, use_reentrant=reentrant)

    def backward(loss: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):  # what is not run again runs as autocast says
            loss.backward()

    def here(forward: Any) -> list[Tensor]:
        region = precast.autocast("cpu", policy=OTHER)
        return gradients(forward, region, inside=True, backward=backward)

    assert same(here(again), here(block))


@KINDS
def test_backward_in_another_thread(reentrant: bool) -> None:
    again = partial(checkpoint, block, use_reentrant=reentrant)

    def backward(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    region = precast.autocast("cpu", policy=OTHER)
    ours = gradients(again, region, backward=backward)
    assert same(ours, gradients(block, region, backward=backward))


@KINDS
def test_without_a_region_of_ours_a_checkpoint_is_left_alone(reentrant: bool) -> None:
    functions = []

    def seen(x: Tensor, weight: Tensor) -> Tensor:
        functions.append(precast.engine.thread_state.thread_state("cpu").state.bound_policy)
        return block(x, weight)

    again = partial(checkpoint, seen, use_reentrant=reentrant)
    with precast.autocast("cpu"):
        pass
    assert same(gradients(again, torch.autocast("cpu")), gradients(block, torch.autocast("cpu")))
    assert functions == [None, None]


SAVED = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "casts": [torch.ops.aten._to_copy.default],
    "nothing": [],
}


def selective(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, SAVED[name])
    once = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    return lambda x, weight: once(once(x, weight), weight)


@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpoints_may_share_a_weight(saved: str) -> None:
    if (
        VERSION >= (2, 13) or saved == "casts"
    ):  # before, PyTorch did it right but where casts are saved
        with pytest.raises(RuntimeError, match="not found in storage"):
            gradients(selective(saved), torch.autocast("cpu"))
    for policy in ("torch", "default", OTHER):
        for inside in (False, True):
            region = precast.autocast("cpu", policy=policy)
            ours = gradients(selective(saved), region, inside=inside)
            uncached = precast.autocast("cpu", cache_enabled=False, policy=policy)
            twice = gradients(lambda x, w: block(block(x, w), w), uncached, inside=inside)
            assert same(ours, twice)


@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpoints_with_a_weight_used_before(saved: str) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return selective(saved)(F.linear(x, weight), weight)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return block(block(F.linear(x, weight), weight), weight)

    region = precast.autocast("cpu", cache_enabled=False)
    assert same(gradients(forward, precast.autocast("cpu")), gradients(plain, region))


@pytest.mark.parametrize("saved", SAVED)
def test_selective_checkpoints_with_a_frozen_weight(saved: str) -> None:
    frozen = Parameter(torch.eye(4), requires_grad=False)

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x, frozen), weight), frozen)

    contexts = partial(create_selective_checkpoint_contexts, SAVED[saved])
    again = partial(checkpoint, twice, use_reentrant=False, context_fn=contexts)
    assert same(
        gradients(again, precast.autocast("cpu")), gradients(twice, precast.autocast("cpu"))
    )
