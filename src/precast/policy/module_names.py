"""Names of modules and parameters as the program wrote them, without what PyTorch's wrappers add to them.

Invariants:

- plans, attachments, traces, monitors, scalers and reports all take their names from this file;
- `DataParallel`, `DistributedDataParallel`, `torch.compile`, FSDP, checkpoint wrappers and `AveragedModel` leave no
  trace in a name; FSDP2 (`fully_shard`) changes no name to begin with;
- a parametrized weight has its own name, `head.weight`, although PyTorch keeps it as
  `head.parametrizations.weight.original`; where a parametrization keeps several tensors, they are
  `head.weight_original0` and so on, so that what stands before the last dot is always the module;
- a child that the program itself calls `module` keeps that name;
- no two parameters share a name: if they would, the second one keeps its full path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.swa_utils import AveragedModel

__all__ = [
    "modules_by_name",
    "name_of_each",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "named_tensors",
    "names_in",
    "unwrapped",
]

_WRAPPED: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The names under which `torch.compile`, checkpoint wrappers and FSDP keep the module that they wrap."""
_WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
"""Wrappers that keep what they wrap under the name `module`, which programs also give to modules of their own."""
_PARAMETRIZED: Final = ".parametrizations."
"""What stands between a module's name and that of its parametrized tensor."""


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its names, after those that contain it; a wrapper shares the name of what it wraps."""
    return [(name, module) for name, _, module in _walked(model)]


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under each of its names; a name that a wrapper shares stands for what is wrapped."""
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
    given: set[str] = set()
    for around, path, module in _walked(model):
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                name = _parameter_name(around, module, own)
                name = _joined(path, own) if name in given else name
                known.add(id(parameter))
                given.add(name)
                yield name, parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer under each name of its module."""
    for around, _, module in _walked(model):
        for own, buffer in module.named_buffers(recurse=False):
            yield _joined(around, own), buffer


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer under each of the names that a state dict gives it."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def names_in(model: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    """``id`` of each of `parameters` that belongs to `model` -> its name there."""
    wanted = set(map(id, parameters))
    return {id(p): name for name, p in named_parameters(model) if id(p) in wanted}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers, or `module` itself where it is no wrapper."""
    while True:
        inner = [child for name, child in module.named_children() if _wraps(module, name)]
        if not inner:
            return module
        module = inner[0]


def _walked(model: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """Name, PyTorch's own path and module, for each path."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {"": ""}
    for path in modules:
        if path:
            parent, _, child = path.rpartition(".")
            around = names[parent]
            names[path] = around if _wraps(modules[parent], child) else _joined(around, child)
    return [(names[path], path, module) for path, module in modules.items()]


def _wraps(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _WRAPPERS))


def _parameter_name(around: str, module: nn.Module, own: str) -> str:
    if not isinstance(module, ParametrizationList):
        return _joined(around, own)
    owner, _, tensor = f".{around}".rpartition(_PARAMETRIZED)
    name = _joined(owner.removeprefix("."), tensor)
    return name if own == "original" else f"{name}_{own}"


def _joined(around: str, name: str) -> str:
    return f"{around}.{name}" if around else name
