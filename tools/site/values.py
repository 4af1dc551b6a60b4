"""A Griffe extension: the API shows a default that has a name by its value, and no bases that are internal.

Invariants: what is written as a value stays as it is written, `2.0**16`; so does what has no short value.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import griffe

import precast

__all__ = ["Values"]

_REQUIRED: Final = "(required)"
"""The default in a signature that PyTorch has and precast does not: the argument is required."""
_PLAIN: Final = {int, float, str, bool, type(None)}


class Values(griffe.Extension):
    """Replaces the names of defaults, and leaves out bases that nobody can import from precast."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Is called with each class that is read."""
        cls.bases = [base for base in cls.bases if not _is_internal(base)]

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Is called with each function that is read."""
        for each in (func, *(func.overloads or ())):
            for parameter in each.parameters:
                if isinstance(parameter.default, griffe.ExprName | griffe.ExprAttribute):
                    parameter.default = _shown(func.module.path, parameter.default)


def _shown(module: str, name: griffe.Expr) -> str | griffe.Expr | None:
    """The value of a name in a module as text; None where it stands for no default at all."""
    try:
        value: Any = importlib.import_module(module)
        for part in str(name).split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):  # of a library that is not there; one of Python's own
        return name
    if value == _REQUIRED:
        return None
    return repr(value) if type(value) in _PLAIN else name


def _is_internal(base: str | griffe.Expr) -> bool:
    path = base if isinstance(base, str) else base.canonical_path
    is_ours = path.startswith("precast.") and not path.startswith("precast.errors.")
    return is_ours and path.rpartition(".")[2] not in precast.__all__
