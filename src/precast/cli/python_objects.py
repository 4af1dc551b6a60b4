"""Python objects that a command names: `package.module:path`, imported and, if it is a factory, called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from precast.errors import PrecastError

__all__ = ["load_example", "load_model", "load_named", "load_object"]


def load_model(reference: str) -> nn.Module:
    """Return the model of `package.module:factory`; the factory may also be a class or the model itself."""
    model = load_object(reference)
    if not isinstance(model, nn.Module):
        raise PrecastError(f"{reference}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def load_object(reference: str) -> Any:
    """Return the result of `package.module:factory`, or the object itself if it is a model."""
    expected = "MODULE:FACTORY, as in my_package.models:build"
    return load_named(
        reference, "the model", expected, lambda target: not isinstance(target, nn.Module)
    )


def load_example(reference: str) -> Any:
    """Return the example input of `package.module:name`, which is a value or a function that returns one."""
    expected = "MODULE:NAME, as in my_package.models:example"
    return load_named(reference, "the example", expected, callable)


def load_named(
    reference: str, purpose: str, expected: str, is_called: Callable[[Any], bool]
) -> Any:
    """Return the object of `module:path`, or the result of a call of it if `is_called(object)` is True.

    `purpose` and `expected` are for messages: the use of the object, and the form of `reference`.

    Raises:
        ValueError: the object does not exist.
        PrecastError: the import or the call raises an error.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{purpose}: expected {expected}, got {reference!r}")
    # As with `python -m`, the module may be in the current folder, which an installed command does not search.
    sys.path.insert(0, "")
    try:
        target = _attribute(_import(module_name), path, reference)
        return _call(target, reference) if is_called(target) else target
    finally:
        sys.path.remove("")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ValueError(f"no module named {missing!r}") from error
        raise PrecastError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _attribute(module: Any, path: str, reference: str) -> Any:
    target = module
    for name in path.split("."):
        if not hasattr(target, name):
            owner = getattr(target, "__name__", target)
            raise ValueError(f"{reference}: {owner} has no attribute {name!r}")
        target = getattr(target, name)
    return target


def _call(factory: Any, reference: str) -> Any:
    if not callable(factory):
        kind = type(factory).__name__
        raise ValueError(f"{reference}: expected a function that returns a model, got {kind}")
    try:
        return factory()
    except Exception as error:
        raise PrecastError(f"{reference}() failed: {type(error).__name__}: {error}") from error
