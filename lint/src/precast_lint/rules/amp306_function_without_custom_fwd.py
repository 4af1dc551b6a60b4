"""AMP306: an autograd Function that multiplies matrices, without custom_fwd, where autocast is used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.functions import CUSTOM_FWD, Method, functions
from precast_lint.meaning.regions import regions
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk

__all__ = ["RULE"]

_PRODUCTS = re.compile(
    r"torch\.(nn\.functional\.)?(matmul|mm|bmm|mv|addmm|baddbmm|einsum|linear|conv[123]d|conv_transpose[123]d)$|"
    r"torch\.nn\.grad\.conv[123]d_(input|weight)$"
)
_DECOMPOSITIONS = re.compile(
    r"torch\.(linalg\.)?(cholesky|eig|eigh|eigvals|eigvalsh|inv|inverse|lstsq|lu|pinv|pinverse|qr|solve|svd|symeig)\b"
)
_METHODS = {"matmul", "mm", "bmm", "mv"}
_OWN_CARE = {"to", "type", "type_as", "half", "float", "bfloat16", "double"}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such class in a file that uses autocast."""
    classes = list(functions(source))
    if not _uses_autocast(source, [methods for _, methods in classes]):
        return
    for node, methods in classes:
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or forward.decorators or backward.decorators:
            continue
        if "setup_context" in methods or _cares(node) or _decomposes(source, node):
            continue
        if _multiplies(source, forward) and _multiplies(source, backward):
            yield source.find(RULE, node.name)


def _uses_autocast(source: Source, classes: list[dict[str, Method]]) -> bool:
    """Whether the file has a region that may be on, or decorates another Function."""
    return any(region.enabled is not False for region in regions(source)) or any(
        method.decorator(CUSTOM_FWD) for methods in classes for method in methods.values()
    )


def _cares(node: cst.ClassDef) -> bool:
    """Whether a class casts by itself, or asks about autocast."""
    for inner in walk(node):
        if isinstance(inner, cst.Attribute):
            if inner.attr.value in _OWN_CARE or "autocast" in inner.attr.value:
                return True
            if inner.attr.value == "dtype":
                return True
        elif isinstance(inner, cst.Name) and "autocast" in inner.value:
            return True
    return False


def _decomposes(source: Source, node: cst.ClassDef) -> bool:
    """Whether it decomposes matrices, which no region does in 16 bits: it is called with float32."""
    return any(
        _DECOMPOSITIONS.match(source.origin(inner.func) or "")
        for inner in walk(node)
        if isinstance(inner, cst.Call)
    )


def _multiplies(source: Source, method: Method) -> bool:
    return any(_is_product(source, node) for node in walk(method.node.body))


def _is_product(source: Source, node: Node) -> bool:
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.operator, cst.MatrixMultiply)
    if not isinstance(node, cst.Call):
        return False
    if _PRODUCTS.match(source.origin(node.func) or ""):
        return True
    func = node.func
    return (
        isinstance(func, cst.Attribute)
        and func.attr.value in _METHODS
        and (source.origin(func) is None)
    )


VALID = (
    Case("""
        import torch

        class Linear(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad @ weight.T, x.T @ grad

        with torch.autocast("cuda"):
            Linear.apply(x, weight)
    """),
    Case(
        """
        import torch

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad @ weight.T, x.T @ grad
        """,
        note="Nothing in the file says that autocast is used.",
    ),
    Case(
        """
        import torch

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight.to(x.dtype)

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad @ weight, x.T @ grad

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        with torch.autocast("cuda"):
            pass
        """,
        note="The one casts by itself, the other multiplies no matrices.",
    ),
    Case(
        """
        import torch

        class SquareRoot(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a):
                values, vectors = torch.linalg.eigh(a)
                ctx.save_for_backward(values, vectors)
                return vectors @ values.sqrt().diag_embed() @ vectors.mT

            @staticmethod
            def backward(ctx, grad):
                values, vectors = ctx.saved_tensors
                return vectors @ (vectors.mT @ grad @ vectors / values) @ vectors.mT

        def features(model, x):
            with torch.autocast("cuda"):
                return model(x)
        """,
        note="Decompositions are computed in float32.",
    ),
)

INVALID = (
    Case("""
        import torch

        class Conv(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return torch.nn.functional.conv2d(x, w)

            @staticmethod
            def backward(ctx, g):
                x, w = ctx.saved_tensors
                return torch.nn.grad.conv2d_input(x.shape, w, g), torch.nn.grad.conv2d_weight(x, w.shape, g)

        with torch.autocast("cuda"):
            Conv.apply(x, w)
    """),
    Case("""
        import torch

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad @ weight.T, x.T @ grad

        with torch.autocast("cuda"):
            Linear.apply(x, weight)
    """),
    Case(
        """
        import torch
        from torch.amp import custom_fwd
        from torch.autograd import Function

        class Decorated(Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x):
                return x

        class Forgotten(Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return torch.nn.functional.linear(x, weight)

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad.mm(weight), grad.t().mm(x)
        """,
        note="Another class of the file is decorated.",
    ),
)

RULE = Rule(
    code="AMP306",
    name="function-without-custom-fwd",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="in a region its backward gets tensors of different dtypes; decorate it with custom_fwd and custom_bwd",
    what=(
        "An autograd Function that multiplies matrices forward and backward, has neither `custom_fwd` nor casts of its "
        "own, and stands in a file that uses autocast."
    ),
    why=(
        "In a region the products of forward run in lower precision. Backward runs without the region: the gradient "
        "has the lower precision, the saved tensors are float32, and their product raises."
    ),
    fine="The Function is only called where autocast is off, or with all of its tensors in one dtype.",
    words=("autocast Function", "custom_fwd Function"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
