"""The patches of PyTorch in the processes of `precast try`: backward passes, entries of regions, seeds and files.

Invariant: a patch lasts until the process ends, as the process runs one trial and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from precast._torch.patches import enter_region, exit_region, replace_names, replace_regions

__all__ = [
    "around_backward",
    "change_seeds",
    "disable_scaler",
    "hook_before_others",
    "on_region_entry",
    "redirect_files",
]

Stop = Callable[[], None]


def around_backward(act: Callable[[Callable[[Any], None], Any, Any], None]) -> Stop:
    """Run each backward pass as ``act(run, roots, gradients)``, where ``run(gradients)`` runs it.

    A pass that creates a graph of its own is left as it is. Returns a function that ends it.
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


def on_region_entry(listener: Callable[[torch.dtype], bool]) -> Stop:
    """Call ``listener(dtype)`` before an enabled region of PyTorch's is entered; False from it disables the region.

    Returns a function that ends it. The flag of a region is private (2.13).
    """

    @wraps(torch.autocast.__enter__)
    def enter(region: Any) -> Any:
        if region._enabled and not listener(region.fast_dtype):
            region._enabled = False
        return enter_region(region)

    return replace_regions(enter, exit_region)


def disable_scaler(scaler: Any) -> None:
    """Make a gradient scaler of PyTorch's do nothing, as one that was created with ``enabled=False`` (2.13)."""
    scaler._enabled = False


def hook_before_others(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Call ``hook(gradient)`` before the tensor's other hooks, which run in the order of a private dict (2.13)."""
    handle: Any = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)


def change_seeds(change: Callable[[int], int]) -> Stop:
    """Pass the seeds that the program sets through `change`; return a function that ends that."""
    plain = torch.manual_seed

    @wraps(plain)
    def manual_seed(seed: Any) -> torch.Generator:
        return plain(change(int(seed)))

    stops = [replace_names(owner, manual_seed=manual_seed) for owner in ("torch", "torch.random")]
    return lambda: [stop() for stop in stops][-1]


def redirect_files(for_writing: Callable[[Any], Any], for_reading: Callable[[Any], Any]) -> Stop:
    """Pass the files of `torch.save` and `torch.load` through functions: PyTorch opens paths in C++.

    Returns a function that ends it.
    """
    save, load = torch.save, torch.load

    @wraps(save)
    def save_elsewhere(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, for_writing(f), *args, **kwargs)

    @wraps(load)
    def load_from_there(f: Any, *args: Any, **kwargs: Any) -> Any:
        return load(for_reading(f), *args, **kwargs)

    return replace_names("torch", save=save_elsewhere, load=load_from_there)
