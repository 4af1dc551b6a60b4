"""The float8 rules on a device: a kernel or an emulation, the reason, and the speed of a linear layer.

Invariants:

- the existence of a kernel, and its reason, come from the rules themselves (`support_of`); its speed is measured alone,
  with the functions that the rules call;
- the float32 weight is cast or quantised in each run, as in training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch.nn import functional

from precast.diagnostics.hardware.machine import DtypeReport, compared, linear_layer, one_thread
from precast.engine.float8_kernels import RECIPES
from precast.weights.float8.linear import linear, recipe_for_device
from precast.weights.float8.support import ProductMethod, Support, reason_unsupported, support_of

__all__ = ["RULES", "measure_rules"]

RULES: Final = ("float8", "float8_rowwise", "float8_hp_grad")
"""The measured rules; `float8_pow2` takes as long as `float8`."""
_SIDES: Final = {"cpu": 256, "accelerator": 4096}
_ROUNDS: Final = 7


def measure_rules(device: torch.device) -> tuple[str, list[DtypeReport]]:
    """Return a sentence on the float8 rules on a device, and their speeds, in a second or less."""
    reason = reason_unsupported(device.type)
    if reason is not None:
        return f"{device} cannot run the float8 rules: {reason}.", []
    support = support_of(device)
    side = _SIDES["cpu" if device.type == "cpu" else "accelerator"]
    with one_thread():
        reports = [_measure(rule, device, side, support) for rule in RULES]
    if support.method is ProductMethod.EMULATED:
        text = f"{device} emulates float8, as {support.reason}: the rules show what a model loses, and save no time."
    else:
        text = f"{device} has a float8 kernel ({support.reason})."
    return text, reports


def _measure(rule: str, device: torch.device, side: int, support: Support) -> DtypeReport:
    recipes = {name.value: recipe for name, recipe in RECIPES.items()}
    recipe = recipe_for_device(recipes[rule], support.without_negative_zero)
    ours = linear_layer(
        device, side, lambda x, w: linear(x, w, recipe, support.method), torch.bfloat16
    )
    float32 = linear_layer(device, side, functional.linear, torch.float32)
    report = compared(device, rule, ours, float32, _ROUNDS)
    return replace(report, method=support.method.value if report.error is None else "unsupported")
