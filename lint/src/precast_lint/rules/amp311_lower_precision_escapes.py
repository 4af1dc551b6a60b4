"""AMP311: a tensor of lower precision that leaves its region for something that can't take it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.lowered import consumer, lowered_reads
from precast_lint.meaning.regions import Region, regions_around
from precast_lint.meaning.tensors import LAYERS, value_of
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_DECOMPOSITIONS = re.compile(
    r"torch\.linalg\.(cholesky|det|eig|eigh|eigvals|eigvalsh|inv|lstsq|pinv|qr|slogdet|solve|svd|svdvals)|"
    r"torch\.(inverse|cholesky|svd|det|logdet|pinverse)"
)
_NO_NUMPY = "NumPy has no bfloat16: this raises; cast it with `.float()` before"
_NO_KERNEL = (
    "this operation has no lower precision: it raises; cast the tensor with `.float()` before"
)
_NO_MIX = "behind the region the layer's float32 weights and this tensor don't go together; cast it with `.float()`"

_NO_PRODUCT = (
    "behind the region a product of this tensor and a float32 one raises; cast it with `.float()`"
)
_PRODUCTS = re.compile(
    r"torch\.(mm|matmul|bmm|addmm|baddbmm|mv|einsum|nn\.functional\.(linear|conv[123]d))"
)
_PARAMETERS = ("torch.nn.Parameter", "torch.nn.parameter.Parameter")
_MAKERS = {"torch.rand", "torch.randn", "torch.zeros", "torch.ones", "torch.eye"}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such use."""
    for name, made in lowered_reads(source):
        if any(regions_around(source, name)) or is_tried(source, name):
            continue
        message = _refused(source, name, made)
        if message is not None:
            fix = source.fix("Cast it", source.after(name, ".float()"), unsafe=True)
            yield source.find(RULE, name, message, fix)


def _refused(source: Source, name: Node, made: Region) -> str | None:
    parent, _ = consumer(source, name)
    call = source.parents.get(parent)
    if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.MatrixMultiply):
        other = parent.right if parent.left is name else parent.left
        return _NO_PRODUCT if _is_float32(source, other) else None
    if not isinstance(call, cst.Call):
        return None
    if _PRODUCTS.fullmatch(source.origin(call.func) or ""):
        others = [arg.value for arg in call.args if arg is not parent]
        return _NO_PRODUCT if any(_is_float32(source, other) for other in others) else None
    if isinstance(parent, cst.Attribute) and parent.attr.value == "numpy" and call.func is parent:
        return _NO_NUMPY if made.dtype == "torch.bfloat16" else None
    if not isinstance(parent, cst.Arg) or call.args[0] is not parent:
        return None
    if _DECOMPOSITIONS.fullmatch(source.origin(call.func) or ""):
        return _NO_KERNEL
    return _NO_MIX if LAYERS.match(source.instance(call.func) or "") else None


def _is_float32(source: Source, node: Node) -> bool:
    """Whether a tensor is float32 for certain: `x.float()`, or one that was made without a dtype."""
    call = source.values.constructed(node) if isinstance(node, cst.Attribute) else None
    call = call or value_of(source, node)
    if isinstance(call, cst.Call) and source.origin(call.func) in _PARAMETERS and call.args:
        call = call.args[0].value
    if not isinstance(call, cst.Call) or any(regions_around(source, call)):
        return False
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "float":
        return source.origin(call.func) is None and not call.args
    names = {arg.keyword.value for arg in call.args if arg.keyword}
    return source.origin(call.func) in _MAKERS and "dtype" not in names


VALID = (
    Case("""
        import torch

        with torch.autocast("cuda"):
            h = a @ b
            torch.linalg.norm(h)
        h.float().cpu().numpy()
        torch.linalg.svd(h.float())
        h.cpu().numpy()
    """),
    Case(
        """
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
            p = torch.softmax(a @ b, -1)
        out.cpu().numpy()
        p.cpu().numpy()
        """,
        note="What a model returns is not known, and softmax gives float32 on CUDA.",
    ),
    Case("""
        import torch

        def f(a, b, amp):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                h = a @ b
            if not amp:
                h = torch.zeros(3)
            return h.numpy()
    """),
    Case("""
        import torch

        fc = torch.nn.Linear(8, 8)
        with torch.autocast("cuda", enabled=False):
            h = a @ b
        fc(h)
    """),
)

INVALID = (
    Case(
        """
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = a @ b
        scores = h.detach().cpu().numpy()
        """,
        """
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = a @ b
        scores = h.float().detach().cpu().numpy()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        head = torch.nn.Linear(8, 2)

        def f(a, b):
            with torch.autocast("cpu"):
                h = torch.bmm(a, b)
            return head(h), torch.linalg.svd(h.flatten(0, 1))
        """,
        """
        import torch

        head = torch.nn.Linear(8, 2)

        def f(a, b):
            with torch.autocast("cpu"):
                h = torch.bmm(a, b)
            return head(h.float()), torch.linalg.svd(h.float().flatten(0, 1))
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch

        a, b, d = (torch.rand((8, 8), device="cuda") for _ in range(3))
        left = torch.rand((8, 8), device="cuda")
        with torch.autocast("cuda"):
            e = torch.mm(a, b)
        f = torch.mm(left, e)
        """,
        """
        import torch

        a, b, d = (torch.rand((8, 8), device="cuda") for _ in range(3))
        left = torch.rand((8, 8), device="cuda")
        with torch.autocast("cuda"):
            e = torch.mm(a, b)
        f = torch.mm(left, e.float())
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP311",
    name="lower-precision-escapes",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="this tensor is in lower precision, which this use does not take; cast it with `.float()`",
    what=(
        "What a product of matrices gave in a region, used behind it: by `.numpy()` (bfloat16), by a decomposition in "
        "`torch.linalg`, or by a layer with float32 weights."
    ),
    why="A region casts operands, not results: what it computed stays in lower precision, and each of these raises.",
    fine="The layer's weights are in the same lower precision.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
