"""Python objects that a command names: `package.module:path`, imported and, if it is a factory, called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from precast.errors import PrecastError

__all__ = ["load_example", "load_model", "load_named", "load_object"]


def load_model(where: str) -> nn.Module:
    """Return the model of `package.module:factory`; the factory may be a class, or a model itself."""
    model = load_object(where)
    if not isinstance(model, nn.Module):
        raise PrecastError(f"{where}: expected a torch.nn.Module, got {type(model).__name__}")
    return model


def load_object(where: str) -> Any:
    """Return the result of `package.module:factory`; a model itself is not called."""
    form = "MODULE:FACTORY, as in my_package.models:build"
    return load_named(where, "the model", form, lambda target: not isinstance(target, nn.Module))


def load_example(where: str) -> Any:
    """Return the example input `package.module:name`: a value, or the result of a function, as `load_named`."""
    form = "MODULE:NAME, as in my_package.models:example"
    return load_named(where, "the example", form, callable)


def load_named(where: str, what: str, form: str, is_called: Callable[[Any], bool]) -> Any:
    """Return the object of `module:path`, or its result if `is_called` returns True for it.

    `what` is the object's name in messages, and `form` the expected form of `where`.

    Raises:
        ValueError: the object does not exist.
        PrecastError: it fails.
    """
    module_name, colon, path = where.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{what} is {where!r}; write {form}")
    # As with `python -m`, modules in the current folder can be imported; for an installed command they cannot.
    sys.path.insert(0, "")
    try:
        target = _attribute(_import(module_name), path, where)
        return _call(target, where) if is_called(target) else target
    finally:
        sys.path.remove("")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ValueError(f"there is no module {missing!r} to import") from error
        raise PrecastError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _attribute(module: Any, path: str, where: str) -> Any:
    target = module
    for name in path.split("."):
        if not hasattr(target, name):
            place = getattr(target, "__name__", target)
            raise ValueError(f"{where}: there is no {name!r} in {place}")
        target = getattr(target, name)
    return target


def _call(factory: Any, where: str) -> Any:
    if not callable(factory):
        kind = type(factory).__name__
        raise ValueError(f"{where} is of type {kind}; name a function that makes a model")
    try:
        return factory()
    except Exception as error:
        raise PrecastError(f"{where}() failed: {type(error).__name__}: {error}") from error
