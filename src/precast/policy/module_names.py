"""Names of modules and parameters as the model was written: without what PyTorch's wrappers put before them.

Invariants: the one answer for all who name something: plans, traces, monitors, scalers and reports. A child that the
program itself calls `module` keeps its name: that word is left out only where a wrapper of PyTorch's says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

__all__ = ["modules_by_name", "name_of_each", "named_modules", "named_parameters", "names_in"]

_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What `torch.compile` and the wrappers for checkpoints and for FSDP call the module that they stand for."""
_WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
"""Those that call it `module`, as programs call modules of their own, too."""


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its names, each after those that it is in; a wrapper has the name of what it wraps."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {"": ""}
    for path in modules:
        if path:
            parent, _, child = path.rpartition(".")
            around = names[parent]
            names[path] = around if _wraps(modules[parent], child) else _joined(around, child)
    return [(names[path], module) for path, module in modules.items()]


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under each of its names; of a wrapper and what it stands for, which share a name, the latter."""
    return dict(named_modules(model))


def name_of_each(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, under the first of its names."""
    known: dict[int, tuple[str, nn.Module]] = {}
    for name, module in named_modules(model):
        known.setdefault(id(module), (name, module))
    return list(known.values())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, under the first of its names."""
    known: set[int] = set()
    for around, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                known.add(id(parameter))
                yield _joined(around, name), parameter


def names_in(model: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    """``id`` of each of `parameters` that is one of `model`'s -> its name there."""
    wanted = set(map(id, parameters))
    return {id(p): name for name, p in named_parameters(model) if id(p) in wanted}


def _wraps(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _WRAPPERS))


def _joined(around: str, name: str) -> str:
    return f"{around}.{name}" if around else name
