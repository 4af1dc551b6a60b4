"""AMP402: the logarithm of a softmax, of a sigmoid, or of a sum of exponentials."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.functions import called_forward, called_function
from precast_lint.meaning.tensors import TensorOperation, constant, modules_in, operation, value_of
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.scopes import elements
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.propagated import has_no_grad

__all__ = ["RULE"]

_SEARCHES = re.compile(r"beam|search|generate|translate|viterbi", re.IGNORECASE)
_SEARCHERS = re.compile(r"beam|search|tracker|predictor", re.IGNORECASE)
_MODULES = {
    "torch.nn.Softmax": "softmax",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_PICKS = (
    "gather",
    "index_select",
    "select",
    "squeeze",
    "unsqueeze",
    "transpose",
    "view",
    "reshape",
    "flatten",
)
_STEPS = 6  # parts of parts
_DEEP = 3  # functions that call one another
_MANY = 6  # values, one of each call or `return`
_LOGARITHMS = ("log", "log1p", "log2", "log10")
_TOTALS = ("sum", "mean")
# Autocast runs all of them in float32, and `logsigmoid` not.
_BETTER = {
    "softmax": "log_softmax",
    "sigmoid": "-softplus(-x)",
    **dict.fromkeys(_TOTALS, "logsumexp"),
}


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each `log` of them, direct or through a name."""
    for call in source.all(cst.Call):
        log = operation(source, call, *_LOGARITHMS)
        if log is None or log.positional or log.keywords:
            continue
        result = _complement(source, log) if log.name != "log2" else None
        if result is None and log.name != "log1p":
            result = _found(source, log)
        if result is None or _is_meant(source, call, result[1]) or _only_ranks(source, call):
            continue
        name, better = result
        yield source.find(RULE, call, RULE.message.format(old=name, new=better))


def _found(source: Source, log: TensorOperation) -> tuple[str, str] | None:
    inner = operation(source, value_of(source, log.operand), *_BETTER)
    if inner is not None and inner.name in _TOTALS:
        is_it = _is_of_exponentials(source, inner)
        return (inner.name, "logsumexp") if is_it else None
    name = inner.name if inner is not None else _probabilities(source, log.operand)
    return (name, _BETTER[name]) if name is not None else None


def _complement(source: Source, log: TensorOperation) -> tuple[str, str] | None:
    """Return the names for `torch.log(1 - torch.sigmoid(x))` and `torch.log1p(-torch.sigmoid(x))`."""
    node = value_of(source, log.operand)
    other: Node | None = None
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Subtract):
        is_one = log.name != "log1p" and constant(source, node.left) == 1
        other = node.right if is_one else None
    elif isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        other = node.expression if log.name == "log1p" else None
    if other is None or _probabilities(source, other) != "sigmoid":
        return None
    return "1 - sigmoid", "-softplus(x)"


def _probabilities(source: Source, node: Node, depth: int = _DEEP) -> str | None:
    """Return `softmax` or `sigmoid` if an expression is a result of that operation, or a part of it.

    `torch.softmax(x, 1).gather(1, y).squeeze(1)`, `p[:, 0]`, a result of a function or module of this file, and a
    parameter that gets such a value in all calls of this file.
    """
    for _ in range(_STEPS):
        node = value_of(source, node)
        shape = operation(source, node, *_PICKS)
        if shape is not None:
            node = shape.operand
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            break
    result = operation(source, node, "softmax", "sigmoid")
    if result is not None:
        return result.name
    if depth == 0:
        return None
    if isinstance(node, cst.Name):
        return _of_all(source, _given(source, node), depth)
    if isinstance(node, cst.Attribute):
        stored = source.values.sources(node)
        values = [value for value, note in stored if note is None and value is not None]
        return _of_all(source, values, depth) if len(values) == len(stored) == 1 else None
    if not isinstance(node, cst.Call):
        return None
    module = _called_module(source, node)
    return module if module is not None else _of_all(source, _returned(source, node), depth)


def _of_all(source: Source, values: list[Node], depth: int) -> str | None:
    names = {_probabilities(source, value, depth - 1) for value in values[:_MANY]}
    return names.pop() if len(names) == 1 and len(values) <= _MANY else None


def _returned(source: Source, call: cst.Call) -> list[Node]:
    function = called_forward(source, call) or called_function(source, call)
    return returned_by(function) if function is not None and not function.decorators else []


def _given(source: Source, name: cst.Name) -> list[Node]:
    """Return the arguments for a parameter in this file, or the value of a name in `probs, value = model(x)`."""
    binding = source.names.only_binding(name)
    if binding is None:
        return []
    if binding.kind == "param":
        arguments = source.values.call_arguments.for_parameter(binding)
        entries = [value for value in arguments if value is not None]
        return entries if len(entries) == len(arguments) else []
    element = source.parents.get(binding.node)
    line = source.parents.get(element) if isinstance(element, cst.Element) else None
    target = source.parents.get(line) if isinstance(line, cst.Tuple) else None
    assign = source.parents.get(target) if isinstance(target, cst.AssignTarget) else None
    if not isinstance(assign, cst.Assign) or not isinstance(assign.value, cst.Call):
        return []
    assert isinstance(line, cst.Tuple)
    place = next(i for i, one in enumerate(line.elements) if one is element)
    results = [
        elements(value, len(line.elements))[place] for value in _returned(source, assign.value)
    ]
    parts = [value for value in results if value is not None]
    return parts if len(parts) == len(results) else []


def _called_module(source: Source, call: cst.Call) -> str | None:
    """Return the last operation of a module: `nn.Softmax(-1)`, or the last module of `nn.Sequential(...)`."""
    inner = modules_in(source, call.func)
    last: Node = inner[-1] if inner else call.func
    return _MODULES.get(source.instance(last) or "")


def _is_meant(source: Source, call: Node, better: str) -> bool:
    """Return True if the better function is here, or the expression is a reference for comparison."""
    for outer in source.around(call):
        name = ""
        if isinstance(outer, cst.FunctionDef):
            name = outer.name.value
        elif isinstance(outer, cst.Arg) and outer.keyword is not None:
            name = outer.keyword.value
        names = ("logsigmoid", "log_sigmoid") if "softplus" in better else (better,)
        if any(one in name for one in (*names, "reference")):
            return True
    return False


def _only_ranks(source: Source, call: Node) -> bool:
    """Return True if scores are only compared: there `-inf` is correct."""
    for outer in source.around(call):
        if isinstance(outer, (cst.FunctionDef, cst.ClassDef)):
            searches = _SEARCHES if isinstance(outer, cst.FunctionDef) else _SEARCHERS
            if searches.search(outer.name.value):
                return True
    return has_no_grad(source, call)


def _is_of_exponentials(source: Source, total: TensorOperation) -> bool:
    """Return True for a sum of `exp(x)` if nothing, for example a maximum, is subtracted in x.

    Exponents in a mean are often bounded, as negative distances on a sphere are, so x has to be a plain name there.
    """
    power = operation(source, value_of(source, total.operand), "exp")
    if power is None:
        return False
    exponent = value_of(source, power.operand)
    if total.name == "mean":
        return isinstance(exponent, cst.Name)
    return not _is_shifted(exponent)


def _is_shifted(exponent: Node) -> bool:
    if not isinstance(exponent, cst.BinaryOperation):
        return False
    if isinstance(exponent.operator, cst.Subtract):
        return True
    scales = isinstance(exponent.operator, (cst.Multiply, cst.Divide))
    return scales and (_is_shifted(exponent.left) or _is_shifted(exponent.right))


RULE = LintRule(
    code="AMP402",
    name="log-of-softmax",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="the logarithm of `{old}` can be -inf or inf without need: use `{new}`",
    what="The logarithm of a softmax, of a sigmoid, of one minus a sigmoid, or of a sum or mean of exponentials.",
    why=(
        "A probability below 6e-8 is zero in float16, below 1e-45 in float32, and its logarithm -inf; gradients become "
        "NaN. `log_softmax`, `-softplus(-x)` and `logsumexp` compute the same value without that, and in float32 in a "
        "region; `logsigmoid` computes it in 16 bits there."
    ),
    fine="The probabilities are always far from zero.",
    words=(
        *(
            f"torch {log} {inner}"
            for log in ("log(", "log2(", "log10(")
            for inner in ("softmax(", "Softmax(", "sigmoid(", "Sigmoid(", "exp( sum(", "exp( mean(")
        ),
        *("torch log1p( sigmoid(", "torch log1p( Sigmoid("),
    ),
    check=check,
    example="""
 import torch

-y = torch.log(torch.softmax(x, dim=1))
+y = torch.log_softmax(x, dim=1)
""",
)
