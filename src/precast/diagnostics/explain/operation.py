"""The rule of a policy for one operation, and those of the presets (`precast explain OP`).

Nothing is printed here. PyTorch's rule is that of the policy `torch`, which tests compare with PyTorch's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from precast.errors import PolicyError
from precast.policy.policy import DEVICE_TYPES, Policy, Resolution, Rule
from precast.policy.rows import canonical, covered_overloads, exact_key, short, split

__all__ = ["OperationReport", "explain_operation"]


@dataclass(frozen=True)
class OperationReport:
    """The rules of a policy for one operation."""

    policy: str
    """The name of the policy."""
    operation: str
    """The operation, as the user spelled it."""
    module: str | None
    """The name of the module around it, or None."""
    devices: dict[str, dict[str, Resolution]]
    """Maps a device type to overloads, or to the operation if all overloads are equal, and these to rule and reason."""
    presets: dict[str, dict[str, dict[str, str]]]
    """Maps a preset to device types, overloads or the operation as in `devices`, and rules."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "policy": self.policy,
            "operation": self.operation,
            "module": self.module,
            "devices": {
                device: {name: {"rule": str(r.rule), "reason": r.reason} for name, r in o.items()}
                for device, o in self.devices.items()
            },
            "pytorch": self.presets["torch"],
            "presets": self.presets,
        }

    def render(self) -> RenderableType:
        """Return the rule and its reason for each requested device type, then those of other policies."""
        inside = "" if self.module is None else f" in {self.module!r}"
        lines: list[RenderableType] = []
        for device, overloads in self.devices.items():
            for name, resolution in overloads.items():
                rule = Text(f"{name} on {device}{inside}: ")
                reason = Padding(Text(resolution.reason), (0, 0, 0, 2))
                lines += [rule.append(str(resolution.rule), "bold"), reason]
        lines += [Text(), Text("By preset and device")]
        lines += [Padding(Text(line), (0, 0, 0, 2)) for line in self._by_preset()]
        return Group(*lines)

    def _by_preset(self) -> Iterator[str]:
        pytorchs = self.presets["torch"]
        yield f"torch (PyTorch's own): {_grouped(pytorchs)}"
        for name, devices in self.presets.items():
            if name != "torch":
                yield f"{name}: {'the same' if devices == pytorchs else _grouped(devices)}"


def explain_operation(
    operation: str, policy: Policy, devices: tuple[str, ...], module: str | None = None
) -> OperationReport:
    """Explain the rules of a policy for one operation.

    Args:
        operation: the operation, as a policy spells it.
        policy: the policy.
        devices: device types.
        module: the name of the module around the operation.

    Raises:
        PolicyError: the operation or device type does not exist; the message has similar names.
    """
    resolutions = {device: _resolutions(operation, policy, device, module) for device in devices}
    torch_first = sorted(Policy.presets(), key=lambda name: (name != "torch", name))
    presets = {name: _rules(operation, Policy.load(name)) for name in torch_first}
    return OperationReport(policy.name, operation, module, resolutions, presets)


def _resolutions(
    operation: str, policy: Policy, device: str, module: str | None
) -> dict[str, Resolution]:
    """Return the resolution of each overload; one under the operation's name if all are equal."""
    try:
        return {operation: policy.resolve(operation, device, module)}
    except PolicyError:
        key, overload = split(canonical(operation))
        names = covered_overloads(key)
        if overload is not None or not names:
            raise
    exact = [short(exact_key(key, name)) for name in names]
    return {name: policy.resolve(name, device, module) for name in exact}


def _rules(operation: str, policy: Policy) -> dict[str, dict[str, str]]:
    """Return the rules on the device types on which the operation has one."""
    rules = {}
    for device in DEVICE_TYPES:
        resolutions = _resolutions(operation, policy, device, None)
        if any(r.rule is not Rule.KEEP for r in resolutions.values()):
            rules[device] = {name: str(r.rule) for name, r in resolutions.items()}
    return rules


def _grouped(devices: dict[str, dict[str, str]]) -> str:
    """Return the rules in words: "fp32 on cuda, mps; keep elsewhere"."""
    where: dict[str, list[str]] = {}
    for device, rules in devices.items():
        several = len(rules) > 1
        text = ", ".join(f"{n} {r}" if several else r for n, r in rules.items() if r != "keep")
        where.setdefault(text, []).append(device)
    parts = [f"{text} on {', '.join(names)}" for text, names in where.items()]
    return "; ".join([*parts, "keep elsewhere" if parts else "keep everywhere"])
