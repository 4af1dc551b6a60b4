"""All attributes of PyTorch's modules and classes, to find those that are replaced.

Invariants:

- nothing here imports precast: what PyTorch is before that can be compared with what it is afterwards;
- functions, classes and settings are compared, by identity; what else PyTorch keeps in variables of its modules and
  classes (numbers, caches) is its own.
"""

from __future__ import annotations

import pkgutil
import sys
import types
from typing import Any

__all__ = ["Key", "TorchAttributes", "key_of"]

Key = tuple[str, str]
"""(owner, name); an owner is "module" or "module:class"."""

_ABSENT = object()


class TorchAttributes:
    """The attributes of all loaded modules of PyTorch and of their classes, and their settings."""

    def __init__(self) -> None:
        modules = {
            name: vars(module)
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == "torch" and type(module) is not type(None)
        }
        self._owners: dict[str, Any] = dict(modules)
        for names in modules.values():
            for kind in list(names.values()):
                if issubclass(type(kind), type) and kind.__module__.partition(".")[0] == "torch":
                    self._owners[_of_class(kind)] = vars(kind)
        self._before = self._read()

    def changed(self) -> set[Key]:
        """Yield the attributes that are another object now, or are new in an owner that existed."""
        now = self._read()
        return {
            key
            for key in self._before.keys() | now.keys()
            if self._before.get(key, _ABSENT) is not now.get(key, _ABSENT)
        }

    def _read(self) -> dict[Key, Any]:
        return {
            (owner, name): value
            for owner, names in self._owners.items()
            for name, value in (*names.items(), *_settings(names))
            if _is_compared(value)
        }


def _settings(names: Any) -> list[tuple[str, Any]]:
    """The settings that hold for all threads, whatever a program sets, where a module has settings."""
    known = names.get("_config")
    entries = known.items() if isinstance(known, dict) else ()
    return [(k, _Setting.of(e)) for k, e in entries if hasattr(e, "env_value_force")]


class _Setting:
    """Makes one object of each value of a setting, so that settings are compared by identity, too."""

    _known: dict[tuple[int, int], tuple[Any, _Setting]] = {}  # noqa: RUF012 -- for all of them

    @classmethod
    def of(cls, entry: Any) -> _Setting:
        values = entry.env_value_force, entry.default
        return cls._known.setdefault((id(values[0]), id(values[1])), (values, cls()))[1]


def _is_compared(value: Any) -> bool:
    kind = type(value)  # not `isinstance`, which asks a value for its class: a deprecated one warns
    if issubclass(
        kind, types.ModuleType
    ):  # one that is imported later is a new attribute of its parent
        return False
    return callable(value) or issubclass(kind, (staticmethod, classmethod, property, _Setting))


def key_of(owner: str) -> str | None:
    """Return the name in `TorchAttributes` of an owner in precast's list of patches; None if this PyTorch has none."""
    try:
        value = pkgutil.resolve_name(owner)
    except AttributeError:
        return None
    return _of_class(value) if isinstance(value, type) else str(value.__name__)


def _of_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
