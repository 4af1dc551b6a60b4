"""The float8 rules on a device: a kernel or an emulation, the reason, and the speed of a layer relative to bfloat16.

Invariants:

- the existence of a kernel, and its reason, come from the rules themselves (`support_of`); its speed is measured alone,
  with the functions that the rules call;
- a ratio compares the best times of a linear layer's forward and backward, both timed in turns, with its float32 weight
  cast or quantised each time, as in training;
- the CPU is measured on one thread.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from precast.diagnostics.hardware.machine import (
    DtypeReport,
    compared,
    linear_layer,
    one_thread,
    times,
)
from precast.engine.float8_kernels import RECIPES
from precast.weights.float8.linear import linear, recipe_for_device
from precast.weights.float8.support import ProductMethod, Support, reason_unsupported, support_of

__all__ = ["RULES", "Float8Report", "float8_on"]

RULES: Final = ("float8", "float8_rowwise", "float8_hp_grad")
"""The measured rules; `float8_pow2` takes as long as `float8`."""
_SIDES: Final = {"cpu": 256, "accelerator": 4096}
_ROUNDS: Final = 7


@dataclass(frozen=True)
class Float8Report:
    """The report on the float8 rules on one device."""

    device: str
    """As in `str(torch.device)`."""
    method: str
    """"kernel", "emulated" or "none"."""
    reason: str
    """The reason for the kernel or the emulation."""
    side: int = 0
    """Rows, inputs and outputs of the measured layer; 0 without a measurement."""
    speeds: tuple[DtypeReport, ...] = ()
    """The linear layer under each rule, beside bfloat16."""

    @property
    def diagnosis(self) -> str:
        """A sentence on the use of the rules on this device."""
        if self.method == "none":
            return f"{self.device} cannot run the float8 rules: {self.reason}."
        failed = next((speed for speed in self.speeds if speed.error is not None), None)
        if failed is not None:
            return f"PyTorch refuses the rule {failed.dtype} on {self.device} ({self.reason}): {failed.error}."
        ratios = ", ".join(
            f"{s.dtype} {times(s.ratio)}" for s in self.speeds if s.ratio is not None
        )
        layer = f"a linear layer of {self.side}x{self.side} runs at {ratios} of bfloat16's speed"
        if self.method == ProductMethod.EMULATED.value:
            return (
                f"{self.device} emulates float8, as {self.reason}: {layer}. The rules show here what a model loses, "
                "and save no time."
            )
        return f"{self.device} has a float8 kernel ({self.reason}): {layer}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; times are in seconds, ratios are relative to bfloat16's speed."""
        return {
            "device": self.device,
            "method": self.method,
            "reason": self.reason,
            "side": self.side,
            "speeds": [asdict(speed) | {"ratio": speed.ratio} for speed in self.speeds],
            "diagnosis": self.diagnosis,
        }


def float8_on(device: torch.device) -> Float8Report:
    """Report on a device, with a measurement of a second or less."""
    reason = reason_unsupported(device.type)
    if reason is not None:
        return Float8Report(str(device), "none", reason)
    support = support_of(device)
    side = _SIDES["cpu" if device.type == "cpu" else "accelerator"]
    with one_thread():
        speeds = tuple(_speed(rule, device, side, support) for rule in RULES)
    return Float8Report(str(device), support.method.value, support.reason, side, speeds)


def _speed(rule: str, device: torch.device, side: int, support: Support) -> DtypeReport:
    recipes = {name.value: recipe for name, recipe in RECIPES.items()}
    recipe = recipe_for_device(recipes[rule], support.without_negative_zero)
    ours, plain = (
        linear_layer(device, side, product, torch.bfloat16)
        for product in (
            lambda x, w: linear(x, w, recipe, support.method),
            lambda x, w: functional.linear(x, w.to(torch.bfloat16)),
        )
    )
    return compared(device, rule, ours, plain, _ROUNDS)
