"""The rule of a policy for one operation, those of other policies, and an example (`precast explain OP`).

Invariants: nothing is printed here; PyTorch's rule is that of the policy `torch`, which tests compare with PyTorch's
own kernels; an example is shown only after a run, with its actual result.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from precast import _torch
from precast.autocast_mode.region import autocast
from precast.errors import PolicyError
from precast.policy import preset_files
from precast.policy.policy import DEVICE_TYPES, Policy, Resolution, Rule
from precast.policy.rows import canonical, covered_overloads, exact_key, short, split

__all__ = ["OperationReport", "explain_operation"]

_WIDTH: Final = 76  # of a line
_SHAPES: Final = ((2, 2), (1, 2, 2), (1, 1, 4, 4), (2,), (1, 1, 2, 4, 4))


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
    example: tuple[str, str]
    """Some lines of Python, with `torch` and `precast` imported, and their output."""

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
            "example": {"code": self.example[0], "prints": self.example[1]},
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
        code, prints = self.example
        lines += [Text(), Text("Example")]
        lines += [Text(f"  {line}") for line in (*code.splitlines(), f"# prints {prints}")]
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
    return OperationReport(
        policy.name, operation, module, resolutions, presets, _example(operation, policy, devices)
    )


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
    """`fp32 on cuda, mps; keep elsewhere`."""
    where: dict[str, list[str]] = {}
    for device, rules in devices.items():
        several = len(rules) > 1
        text = ", ".join(f"{n} {r}" if several else r for n, r in rules.items() if r != "keep")
        where.setdefault(text, []).append(device)
    parts = [f"{text} on {', '.join(names)}" for text, names in where.items()]
    return "; ".join([*parts, "keep elsewhere" if parts else "keep everywhere"])


# --- the example ---


def _example(operation: str, policy: Policy, devices: tuple[str, ...]) -> tuple[str, str]:
    """Return a call of the operation in a region, if one runs on this machine; else PyTorch's rule."""
    with_rule = _rules(operation, policy)
    like = next((device for device in devices if device in with_rule), devices[0])
    name, resolution = next(iter(_resolutions(operation, policy, like, None).items()))
    if preset_files.is_preset(policy.name) and resolution.rule is not Rule.BANNED:
        chosen = policy if like == "cpu" else policy.retarget("cpu", like=like)
        for x, call in _calls(name, resolution.rule):
            dtype = _ran(x, call, chosen)
            if dtype is not None:
                return _program(policy, like, x, call), dtype
    pytorchs = _resolutions(operation, Policy.load("torch"), like, None)
    name = next(iter(pytorchs))
    code = f'policy = precast.Policy.load("torch")\nprint(policy.resolve("{name}", "{like}").rule)'
    return code, str(pytorchs[name].rule)


def _program(policy: Policy, like: str, x: str, call: str) -> str:
    lines, named = [f"x = {x}"], "" if policy.name == "default" else f', policy="{policy.name}"'
    if like != "cpu":
        loaded = f'precast.Policy.load("{policy.name}")'
        lines.append(f'policy = {loaded}.retarget("cpu", like="{like}")')
        named = ", policy=policy"
    region, call = f'with precast.autocast("cpu"{named}):', f"print({call}.dtype)"
    short_enough = len(region) + len(call) < _WIDTH
    return "\n".join([*lines, f"{region} {call}" if short_enough else f"{region}\n    {call}"])


def _calls(name: str, rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield tensors of several shapes, and calls of the public function or operator that may accept them."""
    key, overload = split(canonical(name))
    schemas = _torch.operator_overloads(key)
    schema = schemas.get("" if overload in {None, "default"} else str(overload))
    schema = schema or next(iter(schemas.values()), None)
    plain = short(key)
    if schema is None or plain.startswith("_") or plain.endswith("_") or "::" in plain:
        return
    arguments = [a for a in schema.arguments if not a.has_default_value() and not a.is_out]
    dtype = "" if rule in {Rule.LOWER, Rule.PROMOTE} else ", dtype=torch.bfloat16"
    for function in _spelled(plain):
        for shape in _SHAPES:
            texts = [_argument(a, shape, rule, i) for i, a in enumerate(arguments)]
            if None not in texts:
                sizes = ", ".join(map(str, shape))
                yield f"torch.ones({sizes}{dtype})", f"{function}({', '.join(map(str, texts))})"


def _spelled(name: str) -> Iterator[str]:
    """Yield the possible Python names of an operation."""
    for module in (torch, torch.nn.functional):
        if hasattr(module, name):
            yield f"{module.__name__}.{name}"
    for home in ("linalg", "fft"):
        if name.startswith(f"{home}_"):
            yield f"torch.{home}.{name.removeprefix(f'{home}_')}"
    yield f"torch.ops.aten.{name}"


def _argument(argument: Any, shape: tuple[int, ...], rule: Rule, place: int) -> str | None:
    """Return the text of an argument: `x` for a tensor; for promotion, later tensors have another dtype."""
    other = "x.bfloat16()" if rule is Rule.PROMOTE else "x"
    values = {"Tensor": other if place else "x", "List[Tensor]": f"[x, {other}]"}
    values |= {"Optional[Tensor]": values["Tensor"], "List[int]": f"[{shape[-1]}]", "bool": "False"}
    values |= {"int": "0" if argument.name == "dim" else "1", "number": "1", "float": "1.0"}
    return values.get(str(argument.type))


def _ran(x: str, call: str, policy: Policy) -> str | None:
    """Return the dtype of a call's result in a region; None if it fails."""
    with contextlib.suppress(Exception), warnings.catch_warnings(), autocast("cpu", policy=policy):
        warnings.simplefilter("ignore")
        result = eval(call, {"torch": torch, "x": eval(x, {"torch": torch})})
        if isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
            return str(result.dtype)
    return None
