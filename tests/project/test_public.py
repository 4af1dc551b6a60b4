"""The public names and their signatures: a change here is a change for every user."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import precast

NAMES = [
    "Attachment",
    "Conversion",
    "Entry",
    "GradScaler",
    "Installation",
    "LossScalers",
    "ModuleRule",
    "Monitor",
    "Policy",
    "Precision",
    "Recording",
    "Reduction",
    "Regions",
    "Resolution",
    "Rule",
    "RunDifference",
    "Setting",
    "Trace",
    "TuningOptions",
    "TuningProgress",
    "TuningResult",
    "__version__",
    "attach",
    "autocast",
    "check_same",
    "compare",
    "compare_settings",
    "conversion_report",
    "convert",
    "current_precision",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "errors",
    "events",
    "export",
    "fsdp",
    "install",
    "load_converted",
    "monitor",
    "observe",
    "optim",
    "record",
    "trace",
    "tune",
]
MODULES = precast, precast.events, precast.errors, precast.fsdp, precast.optim
OBJECTS = [
    value
    for module in MODULES
    for value in (getattr(module, name) for name in module.__all__)
    if callable(value)
]
"""Every public function and class."""
BY_FUNCTIONS = (
    precast.Attachment,
    precast.Installation,
    precast.Monitor,
    precast.Recording,
    precast.Regions,
    precast.RunDifference,
    precast.Trace,
    precast.events.SavedTrace,
    precast.optim.Bfloat16Weights,
)
"""Classes whose objects functions create: programs do not call them."""


def test_the_public_names_are_these() -> None:
    assert precast.__all__ == dir(precast) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_can_be_imported_and_is_documented(name: str) -> None:
    assert name in dir(precast)
    value = getattr(precast, name)
    if name != "__version__":
        docstring = vars(value)["__doc__"] if isinstance(value, type) else value.__doc__
        assert docstring
        assert docstring.split("\n")[0].endswith((".", ":"))


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: value.__name__)
def test_what_a_public_name_offers_is_documented(value: Any) -> None:
    assert inspect.getdoc(value)
    for name, member in _members(value):
        assert inspect.getdoc(member), f"{value.__name__}.{name}"


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: value.__name__)
def test_every_type_in_a_public_signature_can_be_imported(value: Any) -> None:
    """The import is from precast or one of its public modules, without knowing the place of the definition."""
    public = [each for each in OBJECTS if isinstance(each, type)]
    signatures = {value.__name__: _hints(value)}
    for name, member in _members(value):
        signatures[f"{value.__name__}.{name}"] = _hints(member)
    for where, hints in signatures.items():
        for kind in hints:
            if kind.__module__.partition(".")[0] == "precast":
                assert kind in public, f"{where}: {kind.__module__}.{kind.__qualname__}"


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, also those of its bases in precast."""
    for base in inspect.getmro(value) if isinstance(value, type) else ():
        if not base.__module__.startswith("precast"):
            continue
        for name, member in vars(base).items():
            is_member = callable(member) or isinstance(
                member, property | classmethod | staticmethod | functools.cached_property
            )
            if is_member and not name.startswith("_"):
                yield name, member


def _hints(value: Any) -> set[type]:
    """The classes in the annotations of a function, of a property, or of a class and its `__init__`."""
    # imported for type checkers alone
    names = {
        "Tensor": Tensor,
        "nn": nn,
        "Optimizer": Optimizer,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
    }
    if isinstance(value, type):
        fields = typing.get_type_hints(value, localns=names)
        public = [hint for name, hint in fields.items() if not name.startswith("_")]
        if "__init__" in vars(value) and not is_dataclass(value) and value not in BY_FUNCTIONS:
            public += typing.get_type_hints(vars(value)["__init__"], localns=names).values()
        return set().union(*map(_classes, public))
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    value = inspect.unwrap(value)
    return set().union(*map(_classes, typing.get_type_hints(value, localns=names).values()))


def _classes(hint: Any) -> set[type]:
    inner = [each for part in typing.get_args(hint) for each in _flat(part)]
    own = {hint} if isinstance(hint, type) and not typing.get_args(hint) else set()
    return own.union(*map(_classes, inner))


def _flat(part: Any) -> list[Any]:
    """The parts of a list of arguments, as in `Callable[[int], str]`."""
    return list(part) if isinstance(part, list) else [part]


def test_other_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'precast' has no attribute 'nothing'"):
        _ = precast.nothing


SCALER = {
    "reduce_found_inf": None,
    "min_scale": None,
    "max_scale": None,
    "max_consecutive_skips": None,
    "max_nonfinite_losses": None,
    "restore_buffers": None,
    "on_diagnosis": "raise",
    "history": 100,
}


# --- drop-ins: what is written for PyTorch's binds to the same parameters here ---


@pytest.mark.parametrize(
    ("ours", "theirs", "added"),
    [
        (precast.autocast, torch.autocast, {"policy": None}),
        (precast.GradScaler, torch.amp.GradScaler, SCALER),
        (precast.custom_fwd, torch.amp.custom_fwd, {}),
        (precast.custom_bwd, torch.amp.custom_bwd, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_drop_in_has_torchs_signature(
    ours: Callable[..., Any], theirs: Callable[..., Any], added: dict[str, Any]
) -> None:
    """Same names, order, kinds and defaults; what is added is keyword-only and has a default."""
    mine, expected = _parameters(ours), _parameters(theirs)
    extra = {name: mine.pop(name) for name in list(mine) if name not in expected}
    assert {name: p.default for name, p in extra.items()} == added
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extra.values())
    assert [(n, p.kind) for n, p in mine.items()] == [(n, p.kind) for n, p in expected.items()]
    for name, parameter in expected.items():
        if name != "device_type":  # required in both; precast says what to write when it is missing
            assert mine[name].default == parameter.default, name


def test_the_device_type_is_required() -> None:
    for call in (precast.autocast, precast.custom_fwd, precast.custom_bwd):
        with pytest.raises(TypeError, match="device type"):
            call()


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)
