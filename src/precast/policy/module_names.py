"""Names of modules and parameters as in the program, without the components that PyTorch's wrappers add.

Invariants:

- plans, attachments, traces, monitors, scalers and reports all take their names from this file;
- `DataParallel`, `DistributedDataParallel`, `torch.compile`, FSDP, checkpoint wrappers and `AveragedModel` add nothing
  to names; FSDP2 (`fully_shard`) does not change names;
- a parametrized weight keeps its name, `head.weight`, although PyTorch stores it as
  `head.parametrizations.weight.original`; a parametrization with several tensors has `head.weight_original0` and so
  on, so the text before the last dot is always the module;
- a child that the program itself calls `module` keeps that name;
- no two parameters share a name: the second one would keep its full path.
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
"""The names under which `torch.compile`, checkpoint wrappers and FSDP store the module that they wrap."""
_WRAPPERS: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
"""Wrappers that store their module under the name `module`, which programs use for their own modules, too."""
_PARAMETRIZED: Final = ".parametrizations."
"""The text between a module's name and that of its parametrized tensor."""


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module under each of its names, after those that contain it; a wrapper has its module's name."""
    return [(name, module) for name, _, module in _walked(model)]


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module under each of its names; a name that a wrapper shares refers to the wrapped module."""
    return dict(named_modules(model))


def name_of_each(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once, under the first of its names."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, module in named_modules(model):
        first.setdefault(id(module), (name, module))
    return list(first.values())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter once, under the first of its names."""
    visited: set[int] = set()
    names: set[str] = set()
    for module_name, path, module in _walked(model):
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in visited:
                name = _parameter_name(module_name, module, own)
                name = _joined(path, own) if name in names else name
                visited.add(id(parameter))
                names.add(name)
                yield name, parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every buffer under each name of its module."""
    for module_name, _, module in _walked(model):
        for own, buffer in module.named_buffers(recurse=False):
            yield _joined(module_name, own), buffer


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer under each of its names in a state dict."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def names_in(model: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    """Return a mapping from ``id`` to the name in `model` for each of `parameters` that belongs to it."""
    ids = set(map(id, parameters))
    return {id(p): name for name, p in named_parameters(model) if id(p) in ids}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers, or `module` itself if it is not a wrapper."""
    while True:
        inner = [child for name, child in module.named_children() if _wraps(module, name)]
        if not inner:
            return module
        module = inner[0]


def _walked(model: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """Return name, PyTorch's own path and module, for each path."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {"": ""}
    for path in modules:
        if path:
            parent, _, child = path.rpartition(".")
            outer = names[parent]
            names[path] = outer if _wraps(modules[parent], child) else _joined(outer, child)
    return [(names[path], path, module) for path, module in modules.items()]


def _wraps(parent: nn.Module, child: str) -> bool:
    return child in _WRAPPED or (child == "module" and isinstance(parent, _WRAPPERS))


def _parameter_name(outer: str, module: nn.Module, own: str) -> str:
    if not isinstance(module, ParametrizationList):
        return _joined(outer, own)
    owner, _, tensor = f".{outer}".rpartition(_PARAMETRIZED)
    name = _joined(owner.removeprefix("."), tensor)
    return name if own == "original" else f"{name}_{own}"


def _joined(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name
