"""AMP310: a disabled region inside another one that goes on with its tensors as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.callers import regions_of_callers
from precast_lint.meaning.functions import called_forward, followed_call
from precast_lint.meaning.low_values import SHAPES, casts_modules, lowered_by
from precast_lint.meaning.regions import Region, regions, regions_around
from precast_lint.meaning.tensors import is_lowered, operation, starts_with_layer
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["RULE"]

_DEEP = 4  # shapes of shapes
_CALLS = 3  # of functions that hand a tensor on
_OPERATIONS = re.compile(
    r"bmm|cdist|cosine_similarity|cross_entropy|cumprod|cumsum|dist|einsum|exp|l1_loss|linear|log|log10|log1p|log2|"
    r"log_softmax|logsumexp|matmul|mean|mm|mse_loss|norm|normalize|pow|prod|rsqrt|smooth_l1_loss|softmax|sqrt|std|sum|"
    r"var"
)


def check(source: Source) -> Iterator[LintFinding]:
    """Yields a finding for each operation in a disabled region on a tensor of the region around it."""
    for island in regions(source):
        if island.enabled is not False:
            continue
        for name in walk(island.body):
            if not isinstance(name, (cst.Name, cst.Attribute)):
                continue
            if not _computes(source, name) and not _is_handed_on(source, name, _CALLS):
                continue
            result = lowered_by(source, name, keeps=False)
            is_beside = (
                result is not None and result[0] is name and _is_in_island(source, name, result[1])
            )
            if is_beside or _is_of_callers(source, name, island):
                fix = source.fix("Cast it", source.after(name, ".float()"), unsafe=True)
                yield source.find(RULE, name, fix=fix)


def _is_of_callers(source: Source, name: Node, island: Region) -> bool:
    """Return True if a name is a product of matrices of a function that runs in the regions of its callers alone."""
    if not isinstance(name, cst.Name) or not isinstance(island.node, cst.With):
        return False
    if not _is_product(source, name, _DEEP):
        return False
    if [region.node for region in regions_around(source, name)] != [island.node]:
        return False
    results = regions_of_callers(source, island.node)
    return bool(results) and all(region is not None and region.enabled for region in results)


def _is_product(source: Source, name: cst.Name, depth: int) -> bool:
    """Return True if all values that a name may have are products, or shapes of some."""
    if depth == 0 or name not in source.scopes.scope_of:
        return False
    results = values_seen(source, name)
    return bool(results) and all(
        binding.kind == "assign"
        and binding.value is not None
        and source.function(binding.node) is source.function(name)
        and _is_made(source, binding.value, depth)
        for binding in results
    )


def _is_made(source: Source, value: Node, depth: int) -> bool:
    if next(regions_around(source, value), None) is None:
        return is_lowered(source, value)
    shape = operation(source, value, *SHAPES)
    operand = shape.operand if shape is not None else None
    return isinstance(operand, cst.Name) and _is_product(source, operand, depth - 1)


def _is_in_island(source: Source, node: Node, definition: Region) -> bool:
    """Return True if the regions around a node are a disabled one, and then the one that made its tensor."""
    around = list(regions_around(source, node))
    return len(around) > 1 and around[0].enabled is False and around[1] is definition


def _computes(source: Source, name: Node) -> bool:
    """Return True if a read is an operand of arithmetic, or of an operation that wants full precision."""
    parent, _ = _consumer(source, name)
    if isinstance(parent, cst.BinaryOperation):
        return True
    call: Node | None = source.parents.get(parent)
    if isinstance(parent, cst.Attribute):
        is_call = isinstance(call, cst.Call) and call.func is parent
        expected = is_call and bool(_OPERATIONS.fullmatch(parent.attr.value))
    else:
        origin = (source.origin(call.func) if isinstance(call, cst.Call) else None) or ""
        last = origin.rpartition(".")[2]
        expected = origin.startswith("torch.") and bool(_OPERATIONS.fullmatch(last))
        expected = expected or origin.startswith(("torch.fft.", "torch.linalg."))
        expected = expected or _is_layer(source, call)
    return expected and isinstance(call, cst.Call) and "dtype" not in Arguments.of(call).keywords


def _consumer(source: Source, name: Node) -> tuple[Node, Node]:
    """Return the consumer of a tensor, and the tensor that it gets: `out.detach().cpu()` for the read of `out`."""
    tensor = name
    while True:
        parent = source.parents[tensor]
        call = source.parents.get(parent)
        if not isinstance(parent, cst.Attribute) or parent.attr.value not in SHAPES:
            return parent, tensor
        if not isinstance(call, cst.Call) or call.func is not parent:
            return parent, tensor
        tensor = call


def _is_handed_on(source: Source, name: Node, depth: int) -> bool:
    """Return True if a function or a module of the file gets a tensor, and computes with it as it is."""
    arg, tensor = _consumer(source, name)
    call = source.parents.get(arg)
    if depth == 0 or not isinstance(arg, cst.Arg) or not isinstance(call, cst.Call):
        return False
    if any(one.star for one in call.args):
        return False
    result = followed_call(source, call)
    if result is not None and not result[0].decorators:
        function, argument = result
        names = [key for key, value in argument.items() if value is tensor]
    else:
        forward = called_forward(source, call)
        if forward is None:
            return False
        function, params = forward, [param.name.value for param in forward.params.params[1:]]
        plain = [one for one in call.args if one.keyword is None]
        names = [arg.keyword.value] if arg.keyword else params[plain.index(arg) :][:1]
    return any(_computes_with(source, function, param, depth) for param in names)


def _computes_with(source: Source, function: cst.FunctionDef, name: str, depth: int) -> bool:
    """Return True if a function computes with a parameter that it never gives another value."""
    scope = source.scopes.owned[function]
    if len(scope.bindings.get(name, ())) != 1:
        return False
    reads = [node for node in source.scopes.references(scope, name) if isinstance(node, cst.Name)]
    return any(
        source.function(read) is function
        and next(regions_around(source, read), None) is None
        and (_computes(source, read) or _is_handed_on(source, read, depth - 1))
        for read in reads
    )


def _is_layer(source: Source, call: Node | None) -> bool:
    """Return True if a call runs a layer, whose weights are float32."""
    is_call = isinstance(call, cst.Call) and starts_with_layer(source, call.func)
    return is_call and not casts_modules(source)


RULE = LintRule(
    code="AMP310",
    name="uncast-in-disabled-region",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="this tensor comes from the region around and is still in lower precision; cast it with `.float()`",
    what=(
        "An operation in a region with `enabled=False` on a tensor that a product of matrices gave in the region "
        "around it, without a cast."
    ),
    why=(
        "Switching autocast off casts nothing back. The operation runs in the lower precision that the region was to "
        "avoid, without the float32 that autocast would have given it; with float32 weights it raises."
    ),
    fine="Lower precision is meant.",
    words=("autocast enabled=False", "autocast False"),
    check=check,
    example="""
 import torch

 with torch.autocast("cuda"):
     h = a @ b
     with torch.autocast("cuda", enabled=False):
-        loss = torch.exp(h).sum()
+        loss = torch.exp(h.float()).sum()
""",
)
