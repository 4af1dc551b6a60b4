"""AMP113: a region that is created and never entered."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.guards import is_expected_to_fail, is_guarded
from precast_lint.meaning.kinds import is_tensor
from precast_lint.meaning.regions import AUTOCASTS
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted

__all__ = ["RULE"]

_ONE_OF_TWO = "`{}` enters only one of the two, not this one; separate them by a comma"
_TENSOR = "this decorates a tensor, which is computed already: decorate the function, or enter the region by `with`"
_TENSORS = (
    "argmax",
    "backward",
    "detach",
    "item",
    "mean",
    "shape",
    "softmax",
    "sum",
)  # no function has them
_MODEL = re.compile(r"(self\.)?_?(model|net|network)")  # what these give is no function
_CONTEXTS = {
    "contextlib.suppress",
    "torch.autograd.set_detect_anomaly",
    "torch.cuda.device",
    "torch.cuda.stream",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.nn.attention.sdpa_kernel",
    "torch.no_grad",
    "torch.random.fork_rng",
    "torch.set_grad_enabled",
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each region that nothing enters."""
    for decorated in _decorating(source):
        yield source.find(RULE, decorated, _TENSOR)
    for call, _ in source.calls(*AUTOCASTS):
        if is_expected_to_fail(source, call) or is_guarded(source, call):
            continue
        parent = source.parents[call]
        if isinstance(parent, cst.Expr) or (
            isinstance(parent, cst.Assign) and _is_unused(source, parent)
        ):
            yield source.find(RULE, call)
        elif _is_given_tensor(source, call):
            yield source.find(RULE, source.parents[call], _TENSOR)
        elif isinstance(parent, cst.BooleanOperation) and _is_entered(source, parent):
            yield from _one_of_two(source, parent, call)


def _is_given_tensor(source: Source, definition: cst.Call) -> bool:
    """Return True for `autocast("cuda")(x)`: the region decorates a tensor instead of a function."""
    parent = source.parents[definition]
    return (
        isinstance(parent, cst.Call) and parent.func is definition and _takes_tensor(source, parent)
    )


def _takes_tensor(source: Source, call: cst.Call) -> bool:
    """Return True if the one argument of a call is a tensor or the result of a model."""
    if len(call.args) != 1 or call.args[0].star:
        return False
    value = call.args[0].value
    is_result = (
        isinstance(value, cst.Call) and _MODEL.fullmatch(dotted(value.func) or "") is not None
    )
    return is_result or is_tensor(source, value) or _is_used_as_tensor(source, call)


def _is_used_as_tensor(source: Source, call: cst.Call) -> bool:
    """Return True if the result of a call is used as a tensor: `loss = region(...)` and `loss.backward()`."""
    parent = source.parents[call]
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in _TENSORS
    if not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
        return False
    target = parent.targets[0].target
    if not isinstance(target, cst.Name) or source.names.only_binding(target) is None:
        return False
    home = source.scopes.scope_of[target].home(target.value)
    uses = source.scopes.references(home, target.value) if home is not None else ()
    around = [source.parents[use] for use in uses]
    return any(isinstance(use, cst.Attribute) and use.attr.value in _TENSORS for use in around)


def _decorating(source: Source) -> Iterator[cst.Call]:
    """Yield the calls of regions by a name, with a tensor as the argument."""
    for call in source.all(cst.Call):
        if not isinstance(call.func, (cst.Name, cst.Attribute)):
            continue
        definition = source.values.constructor(call.func)
        is_region = isinstance(definition, cst.Call) and source.origin(definition.func) in AUTOCASTS
        if is_region and _takes_tensor(source, call) and not is_expected_to_fail(source, call):
            yield call


def _one_of_two(
    source: Source, both: cst.BooleanOperation, call: cst.Call
) -> Iterator[LintFinding]:
    """Yield a finding for the operand that is not entered: a context is true, so `and` returns its right side."""
    is_and = isinstance(both.operator, cst.And)
    left_out = both.left if is_and else both.right
    if left_out is call or _is_context(source, left_out):
        yield source.find(RULE, left_out, _ONE_OF_TWO.format("and" if is_and else "or"))


def _is_context(source: Source, node: Node) -> bool:
    """Return True if a call creates a context of PyTorch's, such as `torch.no_grad()`."""
    return isinstance(node, cst.Call) and source.origin(node.func) in _CONTEXTS


def _is_unused(source: Source, statement: cst.Assign) -> bool:
    """Return True if a local name gets the region, and nothing reads that name."""
    if len(statement.targets) != 1 or source.function(statement) is None:
        return False
    target = statement.targets[0].target
    if not isinstance(target, cst.Name):
        return False
    scope = source.scopes.scope_of[target].home(target.value)
    if scope is None or scope is source.scopes.module or scope.is_class:
        return False
    return all(
        any(binding.node is node for binding in scope.bindings[target.value])
        for node in source.scopes.references(scope, target.value)
    )


def _is_entered(source: Source, node: Node) -> bool:
    return isinstance(source.parents[node], cst.WithItem)


RULE = LintRule(
    code="AMP113",
    name="region-never-entered",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this creates a region and does not enter it: nothing runs in lower precision",
    what=(
        "A statement that only creates a region, or assigns it to a local name that nothing reads. Also `with "
        "torch.no_grad() and torch.autocast(...)`, which enters only the second, and `torch.autocast(...)(tensor)`, "
        "which needs a function instead of a tensor."
    ),
    why=(
        "Creating a region changes nothing. It has to be entered: by `with`, as a decorator, or in an `ExitStack`. "
        "`and` between two contexts does not enter both: its result is the second."
    ),
    fine="The code only tests whether the region can be created.",
    words=("autocast",),
    check=check,
    example="""
 import torch

-with torch.no_grad() and torch.autocast("cuda"):
+with torch.no_grad(), torch.autocast("cuda"):
     pass
""",
)
