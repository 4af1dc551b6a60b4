"""`precast explain --model`: what a policy means for a model, as a tree.

Invariants: nothing is printed here, the functions return what a console prints or plain values for JSON; siblings that
are numbered and alike, with all that is in them, are one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree
from torch import nn
from torch.nn.parameter import is_lazy

from precast.diagnostics.explain.example import Ran, ran_in
from precast.errors import PrecastError
from precast.policy.module_names import modules_by_name
from precast.policy.module_plan import Plan, PlannedModule, outwards, plan
from precast.policy.module_rules import Inside
from precast.policy.policy import ModuleRule, Policy, Precision

__all__ = ["ModelReport", "explain_model", "load_example", "load_model"]

_LOWER = "the region's dtype"
_DEVICES = ("cpu", "cuda")
_WORDS = {
    "lower": _LOWER,
    "keep": "its inputs' dtype",
    "promote": "the widest of its dtypes",
}
_KNOWN = (
    "Behind modules of torch.nn: what their operation runs in, in a region. Of others only a run can tell: give an "
    "example input, with --example, or use precast run."
)
_RAN = (
    "Behind each module: the operations that the example ran in it, by the dtype of their results. The model was in "
    "evaluation mode, without gradients and without PyTorch's fused transformer kernels."
)
_MOST = 4  # operations of one dtype that a line of the tree names
_OPERATIONS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Embedding: "embedding",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Softmax: "softmax.int",
    nn.LogSoftmax: "log_softmax.int",
    nn.CrossEntropyLoss: "cross_entropy_loss",
}
"""What modules of exactly these types call."""


def load_model(where: str) -> nn.Module:
    """The model that `package.module:factory` makes; also a class, or a model itself, in place of the factory.

    Raises:
        ValueError: there is no such thing.
        PrecastError: it is there, and fails.
    """
    named = _place(where, "the model", "MODULE:FACTORY, as in my_package.models:build")
    with _importable_from_here():
        made = _found(_import(named[0]), named[1], where)
        if not isinstance(made, nn.Module):
            made = _call(made, where)
    if not isinstance(made, nn.Module):
        raise PrecastError(f"{where} made a {type(made).__name__}, which is no torch.nn.Module")
    return made


def load_example(where: str) -> Any:
    """The example input `package.module:name`: a value, or what a function of that name gives.

    Raises:
        ValueError: there is no such thing.
        PrecastError: it is there, and fails.
    """
    named = _place(where, "the example", "MODULE:NAME, as in my_package.models:example")
    with _importable_from_here():
        found = _found(_import(named[0]), named[1], where)
        return _call(found, where) if callable(found) else found


def _place(where: str, what: str, form: str) -> tuple[str, str]:
    """The module and the path in it that `module:path` names."""
    module_name, colon, path = where.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{what} is {where!r}; write {form}")
    return module_name, path


@dataclass(frozen=True)
class ModelReport:
    """A plan, with the number of parameters in each module, and what the operation of each known one runs in.

    Attributes:
        operations: name of a module -> its operation -> device type -> what that runs in, in a region. Of modules
            whose type is known, that is one of `torch.nn`'s own; what others compute is not known without a run.
        ran: what an example ran in each module; None without an example.
    """

    plan: Plan
    parameters: dict[str, int]
    operations: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    ran: Ran | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "policy": self.plan.policy.name,
            "modules": [self._row(module) for module in self.plan.modules],
            "unmatched": list(self.plan.unmatched),
        }

    def render(self) -> RenderableType:
        """The plan as a tree, and what matches nothing."""
        root = _tree_of(self)
        parameters = f"{self.parameters['']:,} parameters, counted below at each module"
        head = f"{root.module.kind} with the policy {self.plan.policy.name!r}; {parameters}"
        complaints = [Text(f"Warning: {text}", "yellow") for text in self.plan.complaints()]
        return Group(
            Text(head),
            Text(_KNOWN if self.ran is None else _RAN),
            Text(),
            _branch(root),
            *([Text()] if complaints else []),
            *complaints,
        )

    def _row(self, module: PlannedModule) -> dict[str, Any]:
        return {
            "name": module.name,
            "type": module.kind,
            "parameters": self.parameters[module.name],
            "precision": module.inside.precision,
            "operations": self.operations.get(module.name, {}),
            **({} if self.ran is None else {"ran": self.ran.get(module.name, {})}),
            "ops": {key: str(entry.rule) for key, entry in module.inside.ops.items()},
            "pattern": module.pattern,
            "rule": None if module.rule is None else str(module.rule),
            "reason": None if module.rule is None else module.rule.reason,
        }


def explain_model(model: nn.Module, policy: Policy, *examples: Any) -> ModelReport:
    """What the module rules of a policy mean for a model, and with an example what each module ran.

    Raises:
        PolicyError: they cannot be carried out.
        PrecastError: the model fails on the example.
    """
    modules = modules_by_name(model)
    counts = {name: _numbers_in(module) for name, module in modules.items()}
    planned = plan(model, policy)
    insides = {module.name: module.inside for module in planned.modules}
    known = {
        name: {op: {device: _runs_in(policy, insides[name], op, device) for device in _DEVICES}}
        for name, module in modules.items()
        if name in insides and (op := _OPERATIONS.get(type(module)))
    }
    ran = ran_in(model, policy, *examples) if examples else None
    return ModelReport(planned, counts, known, ran)


def _runs_in(policy: Policy, inside: Inside, op: str, device: str) -> str:
    """What an operation runs in, in a region on a device type."""
    if not inside.enabled:
        return "float32"
    rule = str(policy.replace(ops=inside.ops).resolve(op, device).rule)
    if rule == "lower" and inside.dtype:
        return str(inside.dtype)
    return "float32" if rule.startswith("fp32") else _WORDS.get(rule, rule)


@contextmanager
def _importable_from_here() -> Iterator[None]:
    """Modules in the current folder can be imported, as with `python -m`; for an installed command they cannot."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name!r} to import") from error
        raise PrecastError(f"importing {name} failed: {error}") from error
    except Exception as error:
        raise PrecastError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _found(module: Any, path: str, where: str) -> Any:
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(
                f"{where}: there is no {name!r} in {getattr(found, '__name__', found)}"
            )
        found = getattr(found, name)
    return found


def _call(factory: Any, where: str) -> Any:
    if not callable(factory):
        raise ValueError(
            f"{where} is of type {type(factory).__name__}; name a function that makes a model"
        )
    try:
        return factory()
    except Exception as error:
        raise PrecastError(f"{where}() failed: {type(error).__name__}: {error}") from error


def _numbers_in(module: nn.Module) -> int:
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())


# --- the tree ---


@dataclass
class _Node:
    """A module, or several that are alike."""

    label: str
    module: PlannedModule
    parameters: int
    operations: dict[str, dict[str, str]] = field(default_factory=dict)
    ran: dict[str, list[str]] | None = None
    children: list[_Node] = field(default_factory=list)

    @property
    def likeness(self) -> tuple[object, ...]:
        """What makes two nodes alike, whatever they are called."""
        module = self.module
        plan = (module.kind, module.rule, module.pattern, module.inside.precision)
        said = (*plan, self.parameters, repr(self.operations), repr(self.ran))
        below = tuple((child.label, child.likeness) for child in self.children)
        return *said, repr(module.inside.state), below


def _tree_of(report: ModelReport) -> _Node:
    nodes: dict[str, _Node] = {}
    for module in report.plan.modules:
        parent = next((outer for outer in outwards(module.name) if outer in nodes), "")
        label = module.name.removeprefix(f"{parent}.") if parent else module.name
        nodes[module.name] = _Node(
            label,
            module,
            report.parameters[module.name],
            report.operations.get(module.name, {}),
            None if report.ran is None else report.ran.get(module.name, {}),
        )
        if module.name:
            nodes[parent].children.append(nodes[module.name])
    return _collapsed(nodes[""])


def _collapsed(node: _Node) -> _Node:
    node.children = list(_runs([_collapsed(child) for child in node.children]))
    return node


def _runs(nodes: list[_Node]) -> Iterator[_Node]:
    """The nodes, with one for each run of numbered ones that are alike."""
    start = 0
    while start < len(nodes):
        end = start + 1
        while end < len(nodes) and _follows(nodes[end], nodes[end - 1]):
            end += 1
        first, last = nodes[start], nodes[end - 1]
        if first is not last:
            label = f"{first.label}-{last.label}"
            first = replace(first, label=label)
        yield first
        start = end


def _follows(node: _Node, before: _Node) -> bool:
    numbered = node.label.isdecimal() and before.label.isdecimal()
    return (
        numbered and int(node.label) == int(before.label) + 1 and node.likeness == before.likeness
    )


def _branch(node: _Node, tree: Tree | None = None) -> Tree:
    line = _line(node)
    branch = Tree(line) if tree is None else tree.add(line)
    for child in node.children:
        _branch(child, branch)
    return branch


def _line(node: _Node) -> Text:
    module = node.module
    line = Text(node.label or "model", "bold").append(f" {module.kind}", "not bold")
    if node.parameters:
        each = " each" if "-" in node.label and node.label[0].isdecimal() else ""
        line.append(f" {_short(node.parameters)}{each}", "not bold dim")
    line.append(_behind(node), "not bold cyan")
    if module.rule is None:
        precision = module.inside.precision
        return line if precision == "lower" else line.append(f" {precision}", "not bold dim")
    line.append(f" {_said(module.rule)}", "not bold green")
    reason = f": {module.rule.reason}" if module.rule.reason else ""
    return line.append(f" by {module.pattern!r}{reason}", "not bold")


def _behind(node: _Node) -> str:
    """What the module's operations run in; with an example, what they ran in."""
    if node.ran is None:
        known = node.operations.items()
        return "".join(f" ({op} in {_by_device(devices)})" for op, devices in known)
    if not node.ran:
        return (
            " (no floating-point operation in the example)"
            if node.parameters and not node.children
            else ""
        )
    return f" ({'; '.join(f'{_named(ops)} in {dtype}' for dtype, ops in node.ran.items())})"


def _named(ops: list[str]) -> str:
    more = f" and {len(ops) - _MOST} more" if len(ops) > _MOST else ""
    return ", ".join(ops[:_MOST]) + more


def _by_device(devices: dict[str, str]) -> str:
    """One dtype, or `float32 on cuda, ...` where devices differ."""
    if len(set(devices.values())) == 1:
        return next(iter(devices.values()))
    return ", ".join(f"{dtype} on {device}" for device, dtype in devices.items())


def _said(rule: ModuleRule) -> str:
    return str(rule).replace("lower", _LOWER, 1) if rule.dtype is Precision.LOWER else str(rule)


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
