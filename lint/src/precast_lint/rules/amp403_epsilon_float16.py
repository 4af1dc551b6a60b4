"""AMP403: an epsilon that float16 rounds to zero."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.regions import regions_around
from precast_lint.meaning.tensors import constant, is_half, operation
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_HALF_STEP = 2.0**-25  # half of float16's smallest number: what is smaller is rounded to zero


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each sum with such an epsilon, and each clamp to it."""
    for node in source.all(cst.BinaryOperation):
        if isinstance(node.operator, cst.Add):
            for epsilon, other in ((node.right, node.left), (node.left, node.right)):
                if _vanishes(source, epsilon) and is_half(source, other):
                    yield source.find(RULE, epsilon)
    for update in source.all(cst.AugAssign):
        is_sum = isinstance(update.operator, cst.AddAssign) and _vanishes(source, update.value)
        if is_sum and is_half(source, update.target):
            yield source.find(RULE, update.value)
    for call in source.all(cst.Call):
        found = operation(source, call, "clamp", "clamp_", "clamp_min", "clamp_min_", "add", "add_")
        if found is None:
            continue
        value = found.get("min" if found.name.startswith("clamp") else "other", 0)
        if found.name in ("add", "add_") and "alpha" in found.keywords:
            continue
        if value is not None and _vanishes(source, value) and is_half(source, found.operand):
            yield source.find(RULE, value)
    yield from _limits(source)


def _limits(source: Source) -> Iterator[Finding]:
    """`torch.maximum(x, torch.tensor(1e-9))`; `normalize(x, eps=1e-12)` behind regions, where the norm is float16."""
    for call in source.all(cst.Call):
        found = operation(source, call, "maximum", "max", "normalize")
        if found is None or (found.is_method and found.name == "normalize"):
            continue
        if found.name == "normalize":
            value = found.get("eps", 2)
            if any(regions_around(source, call)):
                continue
        else:
            value = _number_in(source, found.get("other", 0))
        if value is not None and _vanishes(source, value) and is_half(source, found.operand):
            yield source.find(RULE, value)


def _number_in(source: Source, node: Node | None) -> Node | None:
    """The number in `torch.tensor(1e-9)`, which takes the dtype of the tensor beside it."""
    if not isinstance(node, cst.Call) or source.origin(node.func) != "torch.tensor":
        return None
    given = Arguments.of(node)
    is_plain = len(given.positional) == 1 and "dtype" not in given.keywords and not given.starred
    return given.positional[0] if is_plain else None


def _vanishes(source: Source, node: Node) -> bool:
    value = constant(source, node)
    return value is not None and 0 < value <= _HALF_STEP


VALID = (
    Case("""
        import torch

        class Norm:
            def __init__(self, n, half):
                self.var = torch.ones(n, dtype=torch.float16)
                if not half:
                    self.var = torch.ones(n)

            def scale(self, x):
                h = x.half()
                h += 1e-4
                n = h / torch.max(h.norm(), torch.tensor(1e-9, dtype=torch.float32).view(1))
                return n + 1 / (self.var + 1e-9) + h / (h.norm() + torch.finfo(torch.float32).eps)
    """),
    Case(
        """
        import torch

        def unit(x, eps=1e-8):
            return x / (x.norm() + eps)

        def safe(x, eps=1e-8):
            return x / (x.norm() + eps)

        y = unit(x.half()) + unit(x)
        with torch.autocast("cuda", dtype=torch.float16):
            z = safe(x.half())
        """,
        note="Not all that the function gets is float16; in a region a norm is float32.",
    ),
    Case("""
        import torch
        from dataclasses import dataclass

        @dataclass
        class Config:
            eps: float = 1e-8
            low: float = 1e-8

        def scale(x, config: Config, eps=1e-8):
            h = x.half()
            return h / (h.norm() + eps) + 1 / (h + config.eps)

        scale(a, Config(eps=1e-3), eps=1e-4)
        scale(b, Config(eps=1e-4), 1e-3)
    """),
    Case("""
        import torch

        h = x.half()
        with torch.autocast("cuda", dtype=torch.float16):
            z = torch.nn.functional.normalize(h, eps=1e-12)
            u = torch.exp(h) + 1e-12
        w = torch.sum(h, dtype=torch.float32) + 1e-9
        c = torch.maximum(h, torch.full_like(h, 1e-3)) + torch.add(h, 1e-9, alpha=1000)
    """),
    Case("""
        import torch

        x = x / (x.norm() + 1e-8)
    """),
    Case("""
        import torch

        y = x.half()
        z = y / (y.float().norm() + 1e-12)
        w = y / (y.abs() + 1e-7)
    """),
    Case(
        """
        import torch

        model = model.half()
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
        """,
        note="An optimizer's eps is none of this rule's business.",
    ),
    Case(
        """
        import torch

        with torch.autocast("cuda", dtype=torch.float16):
            y = torch.softmax(a @ b, -1) + 1e-9
        """,
        note="A softmax is float32 in a region.",
    ),
    Case("""
        import torch

        def scale(x, low):
            if low:
                x = x.half()
            return x + 1e-9
    """),
    Case("""
        import torch

        def rms(h):
            half = h.to(torch.float16)
            variance = half.float().pow(2).mean(-1, keepdim=True)
            with torch.autocast("cuda"):
                other = half.pow(2) + 1e-8
            return half * torch.rsqrt(variance + 1e-8), other
    """),
)

INVALID = (
    Case(
        """
        import torch

        def unit(x, eps=1e-8):
            return x / (x.norm() + eps)

        def scale(x):
            h = x.half()
            h *= 2
            return unit(h) + h / (-h[0].T + 1e-9) + torch.log(h.flip(0) + 1e-10)
        """,
        count=3,
        note="A function that gets a float16 tensor, and parts of one.",
    ),
    Case(
        """
        import torch
        from dataclasses import dataclass

        @dataclass
        class Config:
            eps: float = 1e-8

        class Norm:
            def __init__(self, config: Config, n):
                self.eps = config.eps
                self.var = torch.ones(n, dtype=torch.float16)

            def scale(self, x):
                h = x.half().abs()
                h += 1e-9
                g = h / torch.max(h.norm(), torch.tensor(1e-9, device=h.device))
                return g / (h.norm() + torch.finfo(torch.float32).tiny) + 1 / (self.var + 1e-9)
        """,
        count=4,
        note="In place, as a limit of float32, beside an attribute.",
    ),
    Case("""
        import torch
        from dataclasses import dataclass

        @dataclass
        class Config:
            eps: float = 1e-8

        class Norm(torch.nn.Module):
            def __init__(self, config: Config):
                super().__init__()
                self.eps = config.eps

            def forward(self, x):
                return x.half() / (x.half().norm() + self.eps)
    """),
    Case(
        """
        import torch
        from dataclasses import dataclass

        @dataclass
        class Config:
            eps: float = 1e-8

        class RMSNorm(torch.nn.Module):
            def __init__(self, d, eps: float = 1e-8):
                super().__init__()
                self.eps = eps

            def forward(self, x, config: Config):
                x = x.to(torch.float16)
                y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
                return y / (y.amax() + config.eps)

        norm = RMSNorm(8)

        @torch.autocast("cuda", dtype=torch.float16)
        def cosine(a, b):
            c = torch.bmm(a, b)
            return c / (torch.abs(c) + 1e-8) + c / (c.max() + 1e-9)

        def entropy(logits):
            p = torch.softmax(logits.half(), -1)
            n = torch.nn.functional.normalize(p, dim=-1, eps=1e-12)
            return (p + 1e-10).log(), torch.maximum(p, torch.tensor(1e-9))
        """,
        count=7,
    ),
    Case("""
        import torch

        y = x.half()
        z = 1.0 / (y + 1e-8)
    """),
    Case("""
        import torch

        EPS = 1e-12
        y = x.to(torch.float16).abs().clamp(min=EPS)
    """),
    Case("""
        import torch

        with torch.autocast("cuda", dtype=torch.float16):
            scores = torch.matmul(q, k)
            z = v / (scores + 1e-8)
    """),
    Case(
        """
        import torch

        layer = torch.nn.Linear(4, 4)

        def share(x):
            with torch.autocast("cuda", dtype=torch.float16):
                h = layer(x)
            return h / (h.sum(-1, keepdim=True) + 1e-9)
        """,
    ),
    Case("""
        import torch

        def rms(h):
            half = h.to(torch.float16)
            variance = half.pow(2).mean(-1, keepdim=True)
            return half * torch.rsqrt(variance + 1e-8)
    """),
)

RULE = Rule(
    code="AMP403",
    name="epsilon-below-float16",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="float16 rounds this to zero: its smallest number is 6e-8",
    what="A number up to 3e-8 that is added to a float16 tensor, or is the lower limit of its `clamp`.",
    why="An epsilon is there so that nothing is divided by zero. In float16 it is zero itself.",
    fine="Zero is no problem there.",
    words=tuple(
        f"torch {dtype} {number}"
        for dtype in ("half(", "torch.half", "float16", "autocast")
        for number in ("e-8", "e-08", "e-9", "e-09", "e-1", ".tiny", ".smallest_normal")
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
