"""Formulas that lose digits or overflow (AMP4xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    assigned,
    expr,
    lines,
    nodes,
    path,
    replaced,
    source,
    stmt,
)


def _softmaxes(module: cst.Module) -> Iterator[tuple[cst.Call, str, str]]:
    """The calls of softmax with what they normalise, and its dimension."""
    for node in nodes(module):
        if isinstance(node, cst.Call):
            if path(node.func) == "torch.softmax":
                yield node, source(node.args[0].value), source(node.args[1].value)
            elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "softmax":
                yield node, source(node.func.value), source(node.args[0].value)


@mutates("AMP401")
def softmax_by_hand(module: cst.Module) -> Iterator[cst.Module]:
    for call, value, dim in _softmaxes(module):
        if not value.isidentifier():
            continue
        total = f"sum(dim={dim}, keepdim=True)"
        for by_hand in (
            f"torch.exp({value}) / torch.exp({value}).{total}",
            f"{value}.exp() / {value}.exp().{total}",
            f"torch.exp({value}) / torch.sum(torch.exp({value}), dim={dim}, keepdim=True)",
        ):
            yield replaced(module, {call: expr(f"({by_hand})")})
        for line in lines(module):
            if any(node is call for node in nodes(line)):
                made = stmt(f"powers = torch.exp({value})\n")
                new = line.deep_replace(call, expr(f"(powers / powers.{total})"))
                assert isinstance(new, cst.CSTNode)
                yield replaced(module, {line: [*made, new]})


@mutates("AMP402")
def log_of_softmax(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if not isinstance(node, cst.Call):
            continue
        name = path(node.func) or ""
        if name in ("F.log_softmax", "torch.log_softmax"):
            value = source(node.args[0].value)
            for text in (
                f"torch.log(torch.softmax({value}, dim=-1))",
                f"{value}.softmax(dim=-1).log()",
                f"torch.softmax({value}, -1).log()",
            ):
                yield replaced(module, {node: expr(text)})
            for line in lines(module):
                if any(inner is node for inner in nodes(line)):
                    made = stmt(f"shares = torch.softmax({value}, dim=-1)\n")
                    new = line.deep_replace(node, expr("torch.log(shares)"))
                    assert isinstance(new, cst.CSTNode)
                    yield replaced(module, {line: [*made, new]})
        elif name == "F.logsigmoid":
            value = source(node.args[0].value)
            yield replaced(module, {node: expr(f"torch.log(torch.sigmoid({value}))")})
            yield replaced(module, {node: expr(f"{value}.sigmoid().log()")})
        elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "logsumexp":
            value = source(node.func.value)
            yield replaced(module, {node: expr(f"{value}.exp().sum(-1).log()")})
            yield replaced(module, {node: expr(f"torch.log(torch.exp({value}).sum(-1))")})


@mutates("AMP403")
def epsilon_too_small(module: cst.Module) -> Iterator[cst.Module]:
    if ".half()" not in source(module):
        return
    for node in nodes(module):
        if isinstance(node, cst.Float) and node.value == "1e-6":
            for new in ("1e-8", "1e-12", "1e-10"):
                yield replaced(module, {node: expr(new)})


@mutates("AMP404")
def mask_too_large(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value == "masked_fill"
        ):
            value = node.args[1].value
            for new in ("-1e9", "-1e30", "-100000.0", "torch.finfo(torch.float32).min"):
                yield replaced(module, {value: expr(new)})


@mutates("AMP405")
def positions_in_16_bits(module: cst.Module) -> Iterator[cst.Module]:
    for line in lines(module):
        if source(line).strip() == "import torch":
            for text in (
                "torch.arange(4096, dtype=torch.bfloat16)",
                "torch.arange(4096).bfloat16()",
                "torch.randint(0, 1000, (8,)).to(torch.bfloat16)",
            ):
                yield replaced(module, {line: [line, *stmt(f"positions = {text}\n")]})


__all__ = ["assigned"]
