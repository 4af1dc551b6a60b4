"""The effect of a policy on a model, as a tree (`precast explain --model`), also in one traced call (`--example`).

Invariants:

- nothing is printed here; the functions return a renderable object, or plain values for JSON;
- numbered siblings that are equal, including their children, share one line;
- the call of an example does not change the model: no gradients or hooks remain, and training mode is restored.
  PyTorch's random numbers continue as if there had been no call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree
from torch import nn
from torch.backends import mha

from precast._internal.display import plural
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.tracing.tracer import trace
from precast.errors import PrecastError
from precast.policy.module_plan import Plan, PlannedModule, outwards, plan
from precast.policy.policy import Policy, Precision
from precast.report.schema import OperationRow

__all__ = ["ModelReport", "arguments", "explain_model"]

_LOWER = "the region's dtype"
_EXAMPLE_LEGEND = (
    "Each module is shown with the operations that the example ran in it, by the dtype of their results. The model ran "
    "in evaluation mode, without gradients and without PyTorch's fused transformer kernels."
)
_MOST_NAMES = 4  # operations of one dtype, or modules of one pattern, that a line names
_Ran = dict[str, dict[str, list[str]]]
"""Maps a module's name to dtypes, and each dtype to the operations with such results, those with a rule first."""


@dataclass(frozen=True)
class ModelReport:
    """A plan and, with an example, the operations of each module."""

    plan: Plan
    ran: _Ran | None
    """The operations of an example in each module; None without an example."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "policy": self.plan.policy.name,
            "modules": [self._row(module) for module in self.plan.modules],
            "matches": {pattern: list(names) for pattern, names in self.plan.matches.items()},
            "unmatched": list(self.plan.unmatched),
        }

    def render(self) -> RenderableType:
        """Return the plan as a tree, with warnings for patterns without a match."""
        head = f"{self.plan.modules[0].kind} with the policy {self.plan.policy.name!r}"
        complaints = [Text(f"Warning: {text}", "yellow") for text in self.plan.complaints()]
        legend = [] if self.ran is None else [Text(_EXAMPLE_LEGEND)]
        matches = [Text(_match_line(*item)) for item in self.plan.matches.items() if item[1]]
        blocks: list[list[RenderableType]] = [
            [Text(head), *legend],
            [_branch(self._tree())],
            [*matches],
            [*complaints],
        ]
        spaced = [line for block in blocks if block for line in (Text(), *block)]
        return Group(*spaced[1:])

    def _tree(self) -> _ModuleNode:
        nodes: dict[str, _ModuleNode] = {}
        for module in self.plan.modules:
            parent = next((outer for outer in outwards(module.name) if outer in nodes), "")
            label = module.name.removeprefix(f"{parent}.") if parent else module.name
            ran = {} if self.ran is None else self.ran.get(module.name, {})
            nodes[module.name] = _ModuleNode(label, _line(module, ran))
            if module.name:
                nodes[parent].children.append(nodes[module.name])
        for node in reversed(nodes.values()):  # children before their parents
            node.children = _merge_equal(node.children)
        return nodes[""]

    def _row(self, module: PlannedModule) -> dict[str, Any]:
        return {
            "name": module.name,
            "type": module.kind,
            "precision": module.inside.precision,
            **({} if self.ran is None else {"ran": self.ran.get(module.name, {})}),
            "ops": {key: str(entry.rule) for key, entry in module.inside.ops.items()},
            "pattern": module.pattern,
            "rule": None if module.rule is None else str(module.rule),
            "reason": None if module.rule is None else module.rule.reason,
        }


def explain_model(model: nn.Module, policy: Policy, *examples: Any) -> ModelReport:
    """Explain the module rules of a policy for a model and, with an example, the operations of each module.

    Raises:
        PolicyError: the rules cannot be carried out.
        PrecastError: the model fails on the example.
    """
    ran = _ran_in(model, policy, *examples) if examples else None
    return ModelReport(plan(model, policy), ran)


# --- the tree ---


@dataclass
class _ModuleNode:
    """A node of the tree: a module, or several equal ones."""

    label: str
    line: Text
    """The text behind the label."""
    children: list[_ModuleNode] = field(default_factory=list)


def _merge_equal(nodes: list[_ModuleNode]) -> list[_ModuleNode]:
    """Return the nodes, with each sequence of equal numbered nodes merged into one."""
    runs: list[list[_ModuleNode]] = []
    for node in nodes:
        if runs and _follows(node, runs[-1][-1]):
            runs[-1].append(node)
        else:
            runs.append([node])
    return [
        replace(run[0], label=f"{run[0].label}-{run[-1].label}") if len(run) > 1 else run[0]
        for run in runs
    ]


def _follows(node: _ModuleNode, before: _ModuleNode) -> bool:
    if not (node.label.isdecimal() and before.label.isdecimal()):
        return False
    is_equal = node.line == before.line and node.children == before.children
    return is_equal and int(node.label) == int(before.label) + 1


def _branch(node: _ModuleNode, tree: Tree | None = None) -> Tree:
    line = Text.assemble((node.label or "model", "bold"), node.line)
    branch = Tree(line) if tree is None else tree.add(line)
    for child in node.children:
        _branch(child, branch)
    return branch


def _line(module: PlannedModule, ran: dict[str, list[str]]) -> Text:
    line = Text(f" {module.kind}").append(_operations_text(ran), "cyan")
    if module.rule is None:
        precision = module.inside.precision
        return line if precision == "lower" else line.append(f" {precision}", "dim")
    is_lower, text = module.rule.dtype is Precision.LOWER, str(module.rule)
    line.append(f" {text.replace('lower', _LOWER, 1) if is_lower else text}", "green")
    reason = f": {module.rule.reason}" if module.rule.reason else ""
    return line.append(f" by {module.pattern!r}{reason}")


def _operations_text(ran: dict[str, list[str]]) -> str:
    parts = [f"{_operation_names(ops)} in {dtype}" for dtype, ops in ran.items()]
    return f" ({'; '.join(parts)})" if parts else ""


def _operation_names(ops: list[str]) -> str:
    more = f" and {len(ops) - _MOST_NAMES} more" if len(ops) > _MOST_NAMES else ""
    return ", ".join(ops[:_MOST_NAMES]) + more


def _match_line(pattern: str, names: tuple[str, ...]) -> str:
    shown = ", ".join(name or "the model" for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"{pattern!r} matches {plural(len(names), 'module')}: {shown}{more}"


# --- the operations of an example ---


def _ran_in(model: nn.Module, policy: Policy, example: Any) -> _Ran:
    """Return the operations of each module in a call of the model in evaluation mode, in a region with the policy."""
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


def _by_module(rows: list[OperationRow]) -> _Ran:
    ran: _Ran = {}
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
