"""The ways in which programs change a weight outside of the graph, or have its copies made anew.

Each takes the weight, and returns what stands in its place from then on, or None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["FUSED", "UNCOUNTED", "WRITES"]


def _in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


def _through_a_view(weight: Tensor) -> None:
    with torch.no_grad():
        weight[1:3].add_(0.5)


def _through_the_detached(weight: Tensor) -> None:
    weight.detach().copy_(weight.detach().flip(0))


def _in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(0.5)


def _by_foreach(weight: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_add_([weight], 0.25)


def _initialized(weight: Tensor) -> None:
    nn.init.constant_(weight, 0.125)


def _other_data(weight: Tensor) -> None:
    weight.data = weight.detach() + 1


def _other_data_twice(weight: Tensor) -> None:
    weight.data = weight.data * 2
    weight.data = weight.data * 0.25


def _toggled(weight: Tensor) -> None:
    weight.requires_grad_(not weight.requires_grad)


def _loaded(weight: Tensor) -> None:
    if isinstance(weight, nn.Parameter):
        holder = nn.Module()
        holder.weight = weight
        holder.load_state_dict({"weight": weight.detach() - 1})


def _optimized(weight: Tensor) -> None:
    if weight.requires_grad and not torch.is_inference_mode_enabled():
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, foreach=True).step()


def _optimized_by_adam(weight: Tensor) -> None:
    if weight.grad is not None and not torch.is_inference_mode_enabled():
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()


def _no_gradient(weight: Tensor) -> None:
    weight.grad = None


def _replaced(weight: Tensor) -> Tensor:
    return nn.Parameter(weight.detach() * 2)


def _cleared(weight: Tensor) -> None:
    torch.clear_autocast_cache()


def _through_data(weight: Tensor) -> None:
    weight.data.mul_(0.75)


WRITES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "in place": _in_place,
    "through a view": _through_a_view,
    "through the detached": _through_the_detached,
    "in inference mode": _in_inference_mode,
    "foreach": _by_foreach,
    "init": _initialized,
    "other data": _other_data,
    "other data, twice": _other_data_twice,
    "requires_grad": _toggled,
    "load_state_dict": _loaded,
    "SGD": _optimized,
    "AdamW": _optimized_by_adam,
    "no gradient": _no_gradient,
    "replaced": _replaced,
    "through data": _through_data,
    "the cache cleared": _cleared,
}
"""Name -> a write."""

UNCOUNTED = frozenset({"through data"})
"""The writes that leave no trace on the weight but its contents."""

FUSED = frozenset({"AdamW"})
"""The writes that move no version counter, and that precast hears of all the same."""
