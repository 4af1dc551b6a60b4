"""The operations of each module in one traced call of a model (`precast explain --model --example`).

Invariants: the call does not change the model: no gradients or hooks remain, and training mode is restored. PyTorch's
random numbers continue as if there had been no call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.backends import mha

from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.tracing.tracer import trace
from precast.errors import PrecastError
from precast.policy.policy import Policy
from precast.report.schema import OperationRow

__all__ = ["Ran", "arguments", "ran_in"]

Ran = dict[str, dict[str, list[str]]]
"""Maps a module's name to dtypes, and each dtype to the operations with such results, those with a rule first."""


def ran_in(model: nn.Module, policy: Policy, example: Any) -> Ran:
    """Return the operations of each module in one call of the model, in evaluation mode, in a region with the policy.

    Args:
        model: the model; its device is that of its first parameter, or else the CPU.
        policy: the policy of the region and of the model's modules.
        example: the model's arguments as a tuple, its keyword arguments as a dict, or its only argument.

    Raises:
        PrecastError: the model fails on the example.
        PolicyError: the policy's module rules cannot be carried out.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    args, kwargs = arguments(example)
    devices = [] if device.type in {"cpu", "meta"} else [device]
    with warnings.catch_warnings(
        action="ignore"
    ):  # the report itself lists patterns without a match
        attachment = attach(model, policy, hold=False)
    with (
        attachment,
        _evaluating(model),
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.no_grad(),
        trace(model) as traced,
        autocast(device.type, policy=policy),
    ):
        try:
            model(*args, **kwargs)
        except Exception as error:
            raise PrecastError(
                f"the model failed on the example: {type(error).__name__}: {error}"
            ) from error
    return _by_module(traced.rows)


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and disable the fused kernels of transformers, which do not call modules."""
    training = [module for module in model.modules() if module.training]
    is_fused = mha.get_fastpath_enabled()
    model.eval()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(is_fused)
        for module in training:
            module.training = True


def _by_module(rows: list[OperationRow]) -> Ran:
    ran: Ran = {}
    for row in sorted(
        rows, key=lambda row: (min(row.output, default=""), row.rule is None, row.op)
    ):
        dtype = next((each for each in row.output if "float" in each), None)
        if row.module is None or dtype is None or not row.inputs:  # nothing was computed
            continue
        operations = ran.setdefault(row.module, {}).setdefault(dtype, [])
        if row.op not in operations:
            operations.append(row.op)
    return ran
