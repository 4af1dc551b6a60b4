"""AMP311: a tensor of lower precision that leaves its region for something that can't take it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.callers import regions_of_callers
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.low_values import casts_modules, is_float32, lowered_by
from precast_lint.meaning.regions import regions, regions_around
from precast_lint.meaning.tensors import starts_with_layer
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_NO_KERNEL_NAMES = "cholesky|det|inverse|logdet|pinverse|qr|quantile|slogdet|svd"
_DECOMPOSITIONS = re.compile(
    r"torch\.linalg\.(cholesky(_ex)?|det|eig|eigh|eigvals|eigvalsh|inv|inv_ex|lstsq|lu|lu_factor|matrix_rank|pinv|qr|"
    rf"slogdet|solve|solve_triangular|svd|svdvals)|torch\.({_NO_KERNEL_NAMES}|nanquantile)"
)
_METHODS = re.compile(_NO_KERNEL_NAMES)
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
_PRODUCT_METHODS = re.compile("mm|matmul|bmm|mv")
_ARRAYS = ("numpy.asarray", "numpy.array", "numpy.ascontiguousarray")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such use."""
    if not regions(source):
        return
    for use in (*source.all(cst.BinaryOperation), *source.all(cst.Call)):
        for operand, message in _refused(source, use):
            is_numpy = message is _NO_NUMPY
            is_inside = any(regions_around(source, use))
            if (is_inside and not is_numpy) or is_tried(source, use):
                continue
            # A region gives float32 for some of the operations that keep the dtype behind it.
            found = lowered_by(source, operand, keeps=not is_inside)
            if found is None or (is_numpy and found[1].dtype != "torch.bfloat16"):
                continue
            if any(regions_of_callers(source, use)):
                continue
            tensor = found[0]
            fix = source.fix("Cast it", source.after(tensor, ".float()"), unsafe=True)
            yield source.find(RULE, tensor, message, fix)


def _refused(source: Source, use: Node) -> Iterator[tuple[Node, str]]:
    """The operands of an operation that must not be of lower precision, each with what is said if it is."""
    if isinstance(use, cst.BinaryOperation):
        if isinstance(use.operator, cst.MatrixMultiply):
            yield from _of_product(source, [use.left, use.right])
        return
    if not isinstance(use, cst.Call) or any(arg.star for arg in use.args):
        return
    values: list[Node] = [arg.value for arg in use.args]
    origin = source.origin(use.func)
    if origin is not None:
        if _PRODUCTS.fullmatch(origin):
            yield from _of_product(source, values)
        elif values and _DECOMPOSITIONS.fullmatch(origin):
            yield values[0], _NO_KERNEL
        elif values and origin in _ARRAYS:
            yield values[0], _NO_NUMPY
    elif values and starts_with_layer(source, use.func):
        if not casts_modules(source):
            yield values[0], _NO_MIX
    elif isinstance(use.func, cst.Attribute):
        yield from _of_method(source, use.func, values)


def _of_method(
    source: Source, method: cst.Attribute, values: list[Node]
) -> Iterator[tuple[Node, str]]:
    name, owner = method.attr.value, method.value
    if name == "numpy":
        yield owner, _NO_NUMPY
    elif _METHODS.fullmatch(name):
        yield owner, _NO_KERNEL
    elif _PRODUCT_METHODS.fullmatch(name) and len(values) == 1:
        yield from _of_product(source, [owner, *values])


def _of_product(source: Source, operands: list[Node]) -> Iterator[tuple[Node, str]]:
    """The operands of a product of which another one is float32."""
    for operand in operands:
        others = [other for other in operands if other is not operand]
        if any(is_float32(source, other) for other in others):
            yield operand, _NO_PRODUCT


VALID = (
    Case("""
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = a @ b
            h.softmax(-1).cpu().numpy(), torch.exp(h).numpy(), h.float().numpy()
            p = torch.softmax(h, -1)
            p.cpu().numpy()
        with torch.autocast("cuda", dtype=torch.float16):
            k = a @ b
            k.cpu().numpy()
    """),
    Case("""
        import torch
        from torch import nn

        class Plain(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.proj, self.norm = nn.Linear(d, d), nn.LayerNorm(d)

            def forward(self, x):
                return self.norm(self.proj(x))

        class Wide(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.proj = nn.Linear(d, d)

            def forward(self, x):
                with torch.autocast("cuda", enabled=False):
                    return self.proj(x.float())

        one, other, own = Plain(8).cuda(), Wide(8).cuda(), Wide(8).cuda().forward
        with torch.autocast("cuda", dtype=torch.bfloat16):
            a, b, c = one(x), other(x), own(x)
            d = one(x)
            e = other(x)
        d.cpu().numpy(), e.cpu().numpy(), a.cpu().numpy()
    """),
    Case("""
        import numpy as np
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
                self.head = nn.Linear(3, 3)
                self.low = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))

            def features(self, x):
                with torch.autocast("cuda"):
                    h = self.body(x)
                    s = self.head(x)
                other = s.to(self.low.dtype) @ self.low
                return self.head(h), s @ torch.randn(3, 3, dtype=s.dtype), (1.0 / s), np.asarray(s)

            def inner(self, x):
                with torch.autocast("cuda"):
                    h = self.head(x)
                return self.head(h)

            def forward(self, x):
                with torch.autocast("cuda"):
                    return self.inner(x)
    """),
    Case(
        """
        import torch
        from torch import nn

        model, head = nn.Linear(2, 2), nn.Linear(2, 2)
        head.half()
        with torch.autocast("cuda"):
            z = model(x)
            p = torch.softmax(z, -1)
            r = 1.0 / (x @ y)
        y = head(z)
        p @ torch.rand(2, 2), r @ torch.rand(2, 2)
        """,
        note="The layer is cast, and softmax and a reciprocal are float32.",
    ),
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
        import numpy as np
        import torch
        import torch.nn.functional as F

        weights = torch.load("head.pt", weights_only=True)
        found = []
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for chunk in chunks:
                hidden = torch.relu(F.linear(chunk, weights["w"], weights["b"]))
                out = F.linear(hidden, weights["v"])
                found.append(out.cpu().numpy())
                np.asarray(hidden[0])
        """,
        """
        import numpy as np
        import torch
        import torch.nn.functional as F

        weights = torch.load("head.pt", weights_only=True)
        found = []
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for chunk in chunks:
                hidden = torch.relu(F.linear(chunk, weights["w"], weights["b"]))
                out = F.linear(hidden, weights["v"])
                found.append(out.float().cpu().numpy())
                np.asarray(hidden.float()[0])
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch
        from torch import nn

        class Graph(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.lin = nn.Linear(n, n)
                self.register_buffer("near", torch.eye(n))

            def forward(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    h = self.lin(x)
                return torch.mm(self.near, h)

        def directions(x):
            with torch.autocast("cuda"):
                gram = torch.matmul(x.t(), x)
            gram = gram / x.size(0)
            return torch.linalg.eigh(gram / x.shape[1])
    """,
        """
        import torch
        from torch import nn

        class Graph(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.lin = nn.Linear(n, n)
                self.register_buffer("near", torch.eye(n))

            def forward(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    h = self.lin(x)
                return torch.mm(self.near, h.float())

        def directions(x):
            with torch.autocast("cuda"):
                gram = torch.matmul(x.t(), x)
            gram = gram / x.size(0)
            return torch.linalg.eigh(gram.float() / x.shape[1])
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch
        from torch import nn

        class Embedder(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.bag, self.proj = nn.EmbeddingBag(d, d), nn.Linear(d, d)

            def forward(self, ids):
                return self.proj(self.bag(ids)).squeeze(1)

        class Service:
            def __init__(self, d):
                self.model = Embedder(d).cuda().eval()

            def encode(self, ids):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    vectors = self.model(ids.cuda())
                return vectors.cpu().numpy()

        def predict(model, loader):
            for x in loader:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = model(x.cuda())
                yield logits.cpu().numpy()

        model = Embedder(8).cuda()
        predict(model, loader)
        """,
        """
        import torch
        from torch import nn

        class Embedder(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.bag, self.proj = nn.EmbeddingBag(d, d), nn.Linear(d, d)

            def forward(self, ids):
                return self.proj(self.bag(ids)).squeeze(1)

        class Service:
            def __init__(self, d):
                self.model = Embedder(d).cuda().eval()

            def encode(self, ids):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    vectors = self.model(ids.cuda())
                return vectors.float().cpu().numpy()

        def predict(model, loader):
            for x in loader:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = model(x.cuda())
                yield logits.float().cpu().numpy()

        model = Embedder(8).cuda()
        predict(model, loader)
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import numpy as np
        import torch
        import torch.nn.functional as F
        from torch import nn

        class Head(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(d, d), nn.ReLU())
                self.out = nn.Sequential(nn.Linear(d, d), nn.ReLU())
                self.centers = nn.Parameter(torch.empty(d, d) * 0.02)
                self.table = nn.Embedding(d, d)

            @torch.autocast("cuda", dtype=torch.bfloat16)
            def features(self, x):
                return self.body(x).mean(1)

            def forward(self, x, y):
                h = self.features(x)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    s = x @ y
                    self.s = x @ y
                sims = s.softmax(-1) @ self.centers.t()
                low = F.relu(s * 0.5)
                low.mm(self.table.weight.T)
                self.s @ y.float()
                return self.out(h), self.out(low), np.asarray(s[0]), s.qr()
        """,
        """
        import numpy as np
        import torch
        import torch.nn.functional as F
        from torch import nn

        class Head(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(d, d), nn.ReLU())
                self.out = nn.Sequential(nn.Linear(d, d), nn.ReLU())
                self.centers = nn.Parameter(torch.empty(d, d) * 0.02)
                self.table = nn.Embedding(d, d)

            @torch.autocast("cuda", dtype=torch.bfloat16)
            def features(self, x):
                return self.body(x).mean(1)

            def forward(self, x, y):
                h = self.features(x)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    s = x @ y
                    self.s = x @ y
                sims = s.float().softmax(-1) @ self.centers.t()
                low = F.relu(s * 0.5)
                low.float().mm(self.table.weight.T)
                self.s.float() @ y.float()
                return self.out(h.float()), self.out(low.float()), np.asarray(s.float()[0]), s.float().qr()
        """,
        unsafe=True,
        count=7,
    ),
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
        "What a product of matrices gave in a region, used by `.numpy()` there or behind it (bfloat16), or behind it "
        "by a decomposition in `torch.linalg`, or by a layer with float32 weights."
    ),
    why="A region casts operands, not results: what it computed stays in lower precision, and each of these raises.",
    fine="The layer's weights are in the same lower precision.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
