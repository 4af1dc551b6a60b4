"""The rule of a policy for one operation, with the reason (`precast explain OP`). Nothing is printed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from precast.errors import PolicyError
from precast.policy.policy import Policy, Resolution
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
        }

    def render(self) -> RenderableType:
        """Return the rule and its reason for each requested device type."""
        inside = "" if self.module is None else f" in {self.module!r}"
        lines: list[RenderableType] = []
        for device, overloads in self.devices.items():
            for name, resolution in overloads.items():
                rule = Text(f"{name} on {device}{inside}: ")
                reason = Padding(Text(resolution.reason), (0, 0, 0, 2))
                lines += [rule.append(str(resolution.rule), "bold"), reason]
        return Group(*lines)


def explain_operation(
    operation: str, policy: Policy, devices: tuple[str, ...], module: str | None = None
) -> OperationReport:
    """Explain the rules of a policy for one operation, in a module of a name.

    Raises:
        PolicyError: the operation or device type does not exist; the message has similar names.
    """
    resolutions = {device: _resolutions(operation, policy, device, module) for device in devices}
    return OperationReport(policy.name, operation, module, resolutions)


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
