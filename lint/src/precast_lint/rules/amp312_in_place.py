"""AMP312: products of matrices in place or with out=, which no region casts."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import runs_in_region
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_NAMES = (
    "mm",
    "matmul",
    "bmm",
    "mv",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "addr",
    "chain_matmul",
)
_OUT = tuple(f"torch.{name}" for name in (*_NAMES, "linalg.multi_dot"))
_IN_PLACE = ("addmm_", "addmv_", "addbmm_", "baddbmm_", "addr_")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such call in a region."""
    for call, arguments in source.calls(*_OUT):
        if "out" in arguments.keywords and runs_in_region(source, call):
            yield source.find(RULE, call)
    for call, owner, _ in source.methods(*_IN_PLACE):
        if not _is_module(source, owner) and runs_in_region(source, call):
            yield source.find(RULE, call)


def _is_module(source: Source, node: Node) -> bool:
    return isinstance(node, (cst.Name, cst.Attribute)) and source.names.path(node) is not None


VALID = (
    Case(
        """
        import torch
        from torch import nn

        class Scores(nn.Module):
            def forward(self, q, k):
                torch.bmm(q, k, out=self.scores)
                return self.scores

        class Plain(Scores):
            def forward(self, q, k):
                return torch.bmm(q, k)

        def run(module, q, k):
            with torch.autocast("cuda"):
                return module(q, k)

        run(Plain(), q, k)
        run(unknown(), q, k)
        Scores()(q, k)
        """,
        note="What runs in the region is another class, or not known.",
    ),
    Case("""
        import torch

        with torch.autocast("cuda"):
            y = torch.mm(a, b)
            y += torch.addmm(c, a, b)
            torch.add(a, b, out=y)
        torch.mm(a, b, out=y)
    """),
    Case("""
        import torch

        with torch.autocast("cuda", enabled=False):
            y.addmm_(a, b)
    """),
)

INVALID = (
    Case(
        """
        import torch
        from torch import nn

        class Scores(nn.Module):
            def forward(self, q, k):
                torch.bmm(q, k.transpose(1, 2), out=self.scores)
                return self.scores.softmax(-1)

        class Plain(Scores):
            def forward(self, q, k):
                return torch.bmm(q, k.transpose(1, 2)).softmax(-1)

        class Other(nn.Module):
            def forward(self, q, k):
                return q.addmm_(q, k)

        @torch.inference_mode()
        def run(module, q, k):
            with torch.autocast("cuda"):
                return module(q, k)

        for kind in (Plain, Scores):
            run(kind().cuda().eval(), q, k)
        other = Other()
        other(q, k)
        with torch.autocast("cuda"):
            other(q, k)
        """,
        count=1,
        note="One of several modules that a function gets; `other` runs outside of the region, too.",
    ),
    Case("""
        import torch

        def add(total, a, b):
            total.addmm_(a, b)

        def run(total, a, b):
            with torch.autocast("cuda"):
                add(total, a, b)
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            torch.mm(a, b, out=y)
            y.addmm_(a, b)
    """),
)

RULE = Rule(
    code="AMP312",
    name="in-place-product",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="a region does not cast what is in place or has `out=`: it runs in the dtypes it gets",
    what="A product of matrices with `out=`, or in place, inside a region.",
    why=(
        "Autocast leaves these alone, for the dtype of the result is given. With float32 tensors they gain nothing "
        "from the region; with tensors of different dtypes, which the region gives, they raise."
    ),
    fine="The dtypes are as they should be.",
    words=("autocast out=", *(f"autocast .{name}(" for name in _IN_PLACE)),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
