"""Mistakes with regions: code inside that belongs outside, or the reverse (AMP3xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.names import REGIONS, device
from tests.lint.mutation.protocol import scaler_of
from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    Body,
    assignment,
    blocks,
    calls,
    expr,
    made,
    method,
    nodes,
    path,
    replaced,
    source,
    with_imports,
)


def _regions(block: Body) -> Iterator[tuple[int, cst.With]]:
    """The regions of a block that are on and compute gradients, with their index."""
    for i, line in enumerate(block):
        if isinstance(line, cst.With) and len(line.items) == 1:
            call = line.items[0].item
            is_region = isinstance(call, cst.Call) and path(call.func) in REGIONS
            if is_region and "enabled=False" not in source(call):
                yield i, line


def _body(line: cst.With) -> Body:
    assert isinstance(line.body, cst.IndentedBlock)
    return line.body.body


def _longer(region: cst.With, more: Body) -> cst.With:
    assert isinstance(region.body, cst.IndentedBlock)
    return region.with_changes(body=region.body.with_changes(body=[*region.body.body, *more]))


@mutates("AMP301")
def backward_inside(module: cst.Module) -> Iterator[cst.Module]:
    for block in blocks(module):
        for i, region in _regions(block):
            for j in range(i + 1, len(block)):
                if method(block[j], "backward"):
                    more = block[i + 1 : j + 1]
                    reference = dict.fromkeys(more)
                    yield replaced(module, {**reference, region: _longer(region, more)})


@mutates("AMP302")
def step_inside(module: cst.Module) -> Iterator[cst.Module]:
    for block in blocks(module):
        for i, region in _regions(block):
            steps = [j for j in range(i + 1, len(block)) if method(block[j], "step")]
            if steps and any(method(line, "backward") for line in block):
                more = block[i + 1 : steps[-1] + 1]
                yield replaced(module, {**dict.fromkeys(more), region: _longer(region, more)})
                rest = block[i + 1 :]
                yield replaced(module, {**dict.fromkeys(rest), region: _longer(region, rest)})


_LOSSES = ("F.cross_entropy", "criterion", "self.criterion", "F.mse_loss")


def _lowered(module: cst.Module, loss: cst.Call) -> Iterator[cst.Call]:
    """A loss that runs in 16 bits behind a region: a mean of squares only with a 16-bit target."""
    if "nn.MSELoss()" not in source(module) and path(loss.func) != "F.mse_loss":
        yield loss
        return
    output, target = loss.args[0], loss.args[1]
    name = source(output.value)
    for cast in ("bfloat16()", f"to({name}.dtype)", f"type_as({name})"):
        lowered = target.with_changes(value=expr(f"({source(target.value)}).{cast}"))
        yield loss.with_changes(args=[output, lowered, *loss.args[2:]])


@mutates("AMP303")
def loss_outside(module: cst.Module) -> Iterator[cst.Module]:
    is_torchs = any(
        name in source(module)
        for name in ("nn.CrossEntropyLoss()", "nn.MSELoss()", "import functional as F")
    )
    for block in blocks(module):
        for _, region in _regions(block):
            last = _body(region)[-1]
            result = made(last)
            is_theirs = result is not None and path(result[1].func) in _LOSSES
            if is_theirs and len(_body(region)) == 2 and is_torchs:
                assert isinstance(region.body, cst.IndentedBlock)
                shorter = region.body.with_changes(body=_body(region)[:-1])
                for loss in _lowered(module, result[1]):
                    outside = last.deep_replace(result[1], loss)
                    yield replaced(module, {region: [region.with_changes(body=shorter), outside]})


@mutates("AMP314")
def checkpoint_without_region(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, "torch.is_autocast_enabled"):
        around = [
            node
            for node in nodes(module)
            if isinstance(node, cst.With) and "set_grad_enabled" in source(node.items[0])
        ]
        if around and around[0].items[1:]:
            plain = [cst.WithItem(expr("torch.enable_grad()"))]
            kept = assignment(module, "ctx.enabled")
            yield replaced(module, {around[0]: around[0].with_changes(items=plain), kept: None})
            assert call is not None


__all__ = ["device", "scaler_of", "with_imports"]
