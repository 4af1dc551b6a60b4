"""What every attribute of PyTorch's modules and classes is, to find out which ones were replaced.

Invariants:

- nothing here imports precast: what PyTorch is before that can be compared with what it is afterwards;
- an attribute is compared by identity. What PyTorch keeps in variables of its modules (numbers, caches) is no function
  or class, and is not looked at.
"""

from __future__ import annotations

import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["Attributes", "attributes", "changed", "owner_key"]

Key = tuple[str, str]
Attributes = dict[Key, Any]
"""(owner, name) -> value; an owner is "module" or "module:class"."""

_ABSENT = object()


def attributes() -> Attributes:
    """Of all modules of PyTorch that are loaded, their classes, and their settings."""
    found: Attributes = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            found |= {(name, key): value for key, value in _of_module(module)}
            for kind in list(vars(module).values()) if hasattr(module, "__dict__") else ():
                if isinstance(kind, type) and kind.__module__.partition(".")[0] == "torch":
                    found |= {(_key_of_class(kind), key): v for key, v in vars(kind).items()}
    return found


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    for key, value in list(getattr(module, "__dict__", {}).items()):
        if callable(value) and not isinstance(value, types.ModuleType):
            yield key, value
    settings = getattr(module, "__dict__", {}).get("_config")
    if isinstance(settings, dict):
        for key, entry in settings.items():
            if hasattr(
                entry, "env_value_force"
            ):  # it holds for all threads, whatever a program sets
                yield key, entry.env_value_force


def changed(before: Attributes, after: Attributes) -> set[Key]:
    """What is another object, or is gone, or is new in an owner that was there."""
    owners = {owner for owner, _ in before}
    keys = before.keys() | {key for key in after if key[0] in owners}
    return {key for key in keys if before.get(key, _ABSENT) is not after.get(key, _ABSENT)}


def owner_key(owner: str) -> str | None:
    """How `attributes` spells an owner of `PATCHES`; None where this PyTorch has none."""
    try:
        value = pkgutil.resolve_name(owner)
    except AttributeError:
        return None
    return _key_of_class(value) if isinstance(value, type) else value.__name__


def _key_of_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
