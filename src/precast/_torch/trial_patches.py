"""The patches of PyTorch in the processes of `precast try`: backward passes, regions, scalers, seeds, batches, files.

Invariant: a patch lasts until the process ends, as the process runs one trial and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from precast._torch.patches import enter_region, exit_region, replace_names, replace_regions

__all__ = [
    "around_backward",
    "change_seeds",
    "disable_scalers",
    "hook_before_others",
    "instances_of",
    "multiply_batches",
    "on_region_entry",
    "redirect_files",
]

Stop = Callable[[], object]


def around_backward(act: Callable[[Callable[[Any], None], Any, Any], None]) -> Stop:
    """Run each backward pass as ``act(run, roots, gradients)``, where ``run(gradients)`` runs it.

    A pass that creates a graph of its own is left as it is.
    """
    backward = torch.autograd.backward

    @wraps(backward)
    def wrapper(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        def run(gradients: Any) -> None:
            backward(tensors, gradients, retain_graph, create_graph, **kwargs)

        if create_graph or torch.compiler.is_compiling():
            run(grad_tensors)
        else:
            act(run, tensors, grad_tensors)

    return replace_names("torch.autograd", backward=wrapper)


def on_region_entry(listener: Callable[[torch.dtype], bool], own: type[Any]) -> Stop:
    """Call ``listener(dtype)`` before an enabled region is entered; False from it disables the region.

    The flag of PyTorch's regions is private (2.13). `own` is the class of precast's.
    """
    enter_own = own.__enter__

    @wraps(torch.autocast.__enter__)
    def enter(region: Any) -> Any:
        if region._enabled and not listener(region.fast_dtype):
            region._enabled = False
        return enter_region(region)

    @wraps(enter_own)
    def enter_of_precast(region: Any) -> Any:
        if getattr(region, "enabled", False) and not listener(region.fast_dtype):
            region.enabled = False
        return enter_own(region)

    own.__enter__ = enter_of_precast
    return replace_regions(enter, exit_region)


def disable_scalers(own: Any) -> Stop:
    """Create each gradient scaler of PyTorch's, and of the class of precast's, as with ``enabled=False``."""

    def disabled(plain: Any) -> Any:
        def create(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args[:5], **{**kwargs, "enabled": False})

        return wraps(plain)(create)

    own.__init__ = disabled(own.__init__)
    plain = vars(torch.amp.GradScaler)["__init__"]
    return replace_names("torch.amp:GradScaler", __init__=disabled(plain))


def instances_of(kind: type[Any]) -> list[Any]:
    """Return the objects of a class that exist."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def multiply_batches(factor: int) -> Stop:
    """Multiply the batch size of new data loaders."""
    from torch.utils.data import DataLoader

    plain = DataLoader.__init__

    @wraps(plain)
    def create(
        self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **more: Any
    ) -> None:
        is_plain = batch_size is not None and more.get("batch_sampler") is None
        plain(self, dataset, factor * (batch_size or 0) if is_plain else batch_size, *args, **more)

    return replace_names("torch.utils.data:DataLoader", __init__=create)


def hook_before_others(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Call ``hook(gradient)`` before the tensor's other hooks, which run in the order of a private dict (2.13)."""
    handle: Any = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)


def change_seeds(change: Callable[[int], int]) -> Stop:
    """Pass the seeds that the program sets through `change`."""
    plain = torch.manual_seed

    @wraps(plain)
    def manual_seed(seed: Any) -> torch.Generator:
        return plain(change(int(seed)))

    stops = [replace_names(owner, manual_seed=manual_seed) for owner in ("torch", "torch.random")]
    return lambda: [stop() for stop in stops]


def redirect_files(redirected: Callable[..., Callable[..., Any]]) -> Stop:
    """Replace `torch.save` and `torch.load`, which open paths in C++, by ``redirected(function, uses, names)``."""
    save = redirected(torch.save, (None, "replace"), ("obj", "f"))
    load = redirected(torch.load, ("read",), ("f",))
    return replace_names("torch", save=save, load=load)
