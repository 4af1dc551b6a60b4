"""Every name under which PyTorch exports what the rules are about is known as what it is."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from precast_lint.parsing.names import canonical
from precast_lint.rules.amp010_removed_name import PACKAGES

DOCUMENTED = tuple(
    f"{module}.{name}"
    for module in ("torch.amp", "torch.cuda.amp", "torch.cpu.amp")
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
    if hasattr(importlib.import_module(module), name)
)


def _object(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _exports(module: types.ModuleType, name: str) -> bool:
    """Return True if a module offers a name to others; without `__all__` only packages do."""
    return name in getattr(module, "__all__", vars(module) if hasattr(module, "__path__") else ())


@pytest.mark.parametrize("documented", DOCUMENTED)
def test_an_alias_of_pytorchs_is_known_as_what_it_stands_for(documented: str) -> None:
    expected = _object(documented)
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch"]
    aliases = {
        f"{module.__name__}.{name}"
        for module in modules
        if isinstance(module, types.ModuleType) and module.__name__.startswith("torch")
        for name, value in list(vars(module).items())
        if value is expected and _exports(module, name)
    }
    assert documented in aliases
    public = {a for a in aliases if not any(part.startswith("_") for part in a.split("."))}
    assert {canonical(alias) for alias in public} == {documented}


def test_the_newest_names_are_there() -> None:
    assert canonical("torch.GradScaler") == "torch.amp.GradScaler"
    assert torch.GradScaler is torch.amp.GradScaler


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_of_amp_is_known(package: str) -> None:
    module = importlib.import_module(package)
    names = {name for name in vars(module) if not name.startswith("_")}
    assert names <= PACKAGES[package]
