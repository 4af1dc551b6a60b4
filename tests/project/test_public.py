"""The public names and their signatures: a change here is a change for every user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast
from precast.attachment.attachment import Attachment
from precast.diagnostics.numerics.monitoring import Monitor
from precast.policy.rows import Rule

NAMES = [
    "BrokenModelError",
    "GradScaler",
    "HealthEvent",
    "LossScalers",
    "NonfiniteOrigin",
    "OperationNote",
    "Policy",
    "PolicyError",
    "PrecastError",
    "ScalerDiagnosis",
    "StepEvent",
    "Trace",
    "TuningOptions",
    "TuningResult",
    "__version__",
    "attach",
    "autocast",
    "convert",
    "current",
    "custom_bwd",
    "custom_fwd",
    "disable",
    "errors",
    "export",
    "install",
    "load",
    "monitor",
    "observe",
    "optim",
    "trace",
    "tune",
    "uninstall",
]

ELSEWHERE = [
    Attachment,
    Monitor,
    Rule,
    *(getattr(precast.errors, name) for name in precast.errors.__all__),
    *(getattr(precast.optim, name) for name in precast.optim.__all__),
]
"""What a program meets, and seldom names."""


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


@pytest.mark.parametrize(
    "value",
    [
        *(getattr(precast, n) for n in NAMES if n not in ("__version__", "errors", "optim")),
        *ELSEWHERE,
    ],
    ids=lambda value: value.__name__,
)
def test_what_a_public_name_offers_is_documented(value: Any) -> None:
    assert inspect.getdoc(value)
    members = {n: m for n, m in vars(value).items() if not n.startswith("_")}
    for member, found in members.items():
        if callable(found) or isinstance(found, property | classmethod | staticmethod):
            assert inspect.getdoc(found), f"{value.__name__}.{member}"


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
