"""Checkpoints: both kinds, nested, sequential, selective; with dropout, early stop and determinism checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.conformance.compare import assert_same, differentiate, in_both_dtypes, refused
from tests.conformance.systems import MakeRegion, System, on_all_systems

Forward = Callable[["World"], Any]
KINDS = {"reentrant": True, "not reentrant": False}


class World:
    """A block that is run again, and a layer after it; the block's weights are used twice in a forward."""

    def __init__(self, region: MakeRegion) -> None:
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5), nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.x = torch.randn(3, 4, requires_grad=True)
        self.region = region

    def leaves(self) -> list[Tensor]:
        return [self.x, *self.block.parameters(), *self.last.parameters()]


def _plain(w: World, reentrant: bool) -> Any:
    return w.last(checkpoint(w.block, w.x, use_reentrant=reentrant))


def _twice(w: World, reentrant: bool) -> Any:
    once = partial(checkpoint, w.block, use_reentrant=reentrant)
    return w.last(once(once(w.x)))


def _weights_used_before(w: World, reentrant: bool) -> Any:
    return w.last(checkpoint(w.block, w.block(w.x), use_reentrant=reentrant)) + w.block(w.x)


def _nested(w: World, reentrant: bool) -> Any:
    def outer(x: Tensor) -> Tensor:
        inner = checkpoint(w.block, x, use_reentrant=reentrant)
        return w.last(F.gelu(inner))  # type: ignore[no-any-return]

    return checkpoint(outer, w.x, use_reentrant=reentrant)


def _sequential(w: World, reentrant: bool) -> Any:
    return checkpoint_sequential(w.block, 2, w.x, use_reentrant=reentrant)


def _no_random_state(w: World, reentrant: bool) -> Any:
    w.block.eval()
    return checkpoint(w.block, w.x, use_reentrant=reentrant, preserve_rng_state=False)


def _island(w: World, reentrant: bool) -> Any:
    def block(x: Tensor) -> Tensor:
        with w.region("cpu", enabled=False):
            x = w.last(x.float())
        with w.region("cpu", dtype=torch.bfloat16):
            return w.block(x)  # type: ignore[no-any-return]

    return checkpoint(block, w.x, use_reentrant=reentrant)


def _mixed_results(w: World, reentrant: bool) -> Any:
    def block(x: Tensor, factor: float, nothing: None) -> Any:
        return w.block(x) * factor, x.detach(), nothing, "text"

    return checkpoint(block, w.x, 2.0, None, use_reentrant=reentrant)


def _late(w: World, reentrant: bool) -> Any:
    with set_checkpoint_early_stop(False):
        return _twice(w, reentrant)


def _checked(w: World, reentrant: bool) -> Any:
    checks = {} if reentrant else {"determinism_check": "default"}
    return checkpoint(w.block, w.x, use_reentrant=reentrant, **checks)


def _frozen(w: World, reentrant: bool) -> Any:
    w.last.requires_grad_(False)
    return checkpoint(nn.Sequential(w.last, w.block, w.last), w.x, use_reentrant=reentrant)


FORWARDS: dict[str, Callable[[World, bool], Any]] = {
    "one": _plain,
    "two of one block": _twice,
    "weights used before": _weights_used_before,
    "nested": _nested,
    "sequential": _sequential,
    "random state not kept": _no_random_state,
    "regions inside": _island,
    "results of many types": _mixed_results,
    "no early stop": _late,
    "determinism checked": _checked,
    "frozen weights": _frozen,
}


SELECTED: dict[str, Any] = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "activations": [torch.ops.aten.gelu.default],
    "casts": [torch.ops.aten._to_copy.default],
    "nothing": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
}


def _selective(w: World, name: str) -> Any:
    """Of weights that are used once: PyTorch's cache breaks those that share one, says docs/differences.md."""
    contexts = partial(create_selective_checkpoint_contexts, SELECTED[name])
    return w.last(checkpoint(w.block, w.x, use_reentrant=False, context_fn=contexts))


CASES: dict[str, Forward] = {
    f"{name}, {kind}": partial(forward, reentrant=KINDS[kind])
    for name, forward in FORWARDS.items()
    for kind in KINDS
} | {f"selective, {name}": partial(_selective, name=name) for name in SELECTED}


@in_both_dtypes
@pytest.mark.parametrize("name", CASES)
@on_all_systems
def test_checkpoints(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, _with_backward_everywhere, name, dtype)


def _with_backward_everywhere(region: MakeRegion, name: str, dtype: torch.dtype) -> Any:
    return {where: _run(CASES[name], where, region, dtype) for where in BACKWARDS}


BACKWARDS = ("after", "inside", "in an island", "in another thread")


def _run(forward: Forward, where: str, region: MakeRegion, dtype: torch.dtype) -> Any:
    world, gradients = World(region), []

    def backward() -> None:
        gradients.append(refused(lambda: differentiate(results, world.leaves())))

    with region("cpu", dtype=dtype):
        results = forward(world)
        if where == "inside":
            backward()
        if where == "in an island":
            with region("cpu", enabled=False):
                backward()
    if where == "after":
        backward()
    if where == "in another thread":
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    [result] = gradients
    assert isinstance(result, list), result
    return results, result
