"""Steps of the scaler's protocol that are left out, doubled or in the wrong order (AMP2xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.misuse import with_keyword
from tests.lint.mutation.names import REGIONS, SCALERS
from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    Body,
    assigned,
    blocks,
    calls,
    expr,
    inside,
    lines,
    method,
    moved,
    names,
    nodes,
    path,
    replaced,
    source,
    stmt,
    with_imports,
)

Line = cst.CSTNode
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def scaler_of(module: cst.Module) -> str | None:
    """The name of the one scaler that is on."""
    for line in lines(module):
        result = assigned(line)
        is_one = result and isinstance(result[1], cst.Call) and path(result[1].func) in SCALERS
        if result and is_one and "Version" not in source(module):
            return result[0]
    return None


def _is(line: Line, scaler: str, name: str) -> bool:
    result = method(line, name)
    return result is not None and result[0] == scaler


def _scaled_backward(line: Line, scaler: str) -> cst.Call | None:
    """`scaler.scale(...)` in `scaler.scale(...).backward()`."""
    result = method(line, "backward")
    if result is None or not result[0].startswith(f"{scaler}.scale("):
        return None
    assert isinstance(result[1].func, cst.Attribute)
    call = result[1].func.value
    return call if isinstance(call, cst.Call) else None


def _steps(block: Body, scaler: str) -> list[Line]:
    return [line for line in block if _is(line, scaler, "step")]


def _clips(line: Line) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and any(
        isinstance(n, cst.Call) and (path(n.func) or "").endswith(_CLIPS) for n in nodes(line)
    )


def _loops(tree: cst.CSTNode) -> Iterator[cst.For]:
    for node in nodes(tree):
        if isinstance(node, cst.For):
            yield node


@mutates("AMP201")
def no_scaler(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    text = source(module)
    if scaler is None or "float16" not in text or "get_scale" in text or "adversar" in text:
        return
    news: dict[cst.CSTNode, list[cst.CSTNode] | cst.CSTNode | None] = {}
    for line in lines(module):
        result = assigned(line)
        scale = _scaled_backward(line, scaler)
        step = method(line, "step")
        if result and result[0] == scaler:
            news[line] = None
        elif scale is not None:
            news[scale] = scale.args[0].value
        elif step and step[0] == scaler:
            news[line] = stmt(f"{source(step[1].args[0].value)}.step()\n")
        elif any(_is(line, scaler, name) for name in ("unscale_", "update")):
            news[line] = None
    for node in nodes(module):
        if isinstance(node, cst.DictElement) and source(node.value).startswith(f"{scaler}."):
            news[node] = None
    yield replaced(module, news)


@mutates("AMP202")
def scaler_for_bfloat16(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    result = list(calls(module, *REGIONS))
    scales = [n for n in nodes(module) if scaler and source(n) == f"{scaler}.scale"]
    if scales and result:
        news = {call: with_keyword(call, "dtype", "torch.bfloat16") for call in result}
        yield replaced(module, news)


@mutates("AMP203")
def clipped_while_scaled(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    if scaler is None:
        return
    for block in blocks(module):
        unscales = [line for line in block if _is(line, scaler, "unscale_")]
        clips = [line for line in block if _clips(line)]
        steps = _steps(block, scaler)
        if unscales and clips:
            yield replaced(module, {unscales[0]: None})
            yield moved(module, unscales[0], after=clips[0])
            norms = (
                "norm = sum(p.grad.norm() for p in PARAMETERS)\nif norm > 100:\n    print(norm)\n"
            )
            call = next(c for c in nodes(clips[0]) if isinstance(c, cst.Call))
            norms = norms.replace("PARAMETERS", source(call.args[0].value))
            yield replaced(module, {unscales[0]: None, clips[0]: stmt(norms)})
            value = expr(f"torch.nn.utils.clip_grad_value_({source(call.args[0].value)}, 1.0)")
            yield replaced(module, {unscales[0]: None, call: value})
        elif steps and len(steps) == 1 and not clips:
            step = method(steps[0], "step")
            assert step is not None
            groups = source(step[1].args[0].value)
            clip = f"torch.nn.utils.clip_grad_norm_({groups}.param_groups[0]['params'], 1.0)\n"
            if any(_scaled_backward(line, scaler) is not None for line in block):
                yield replaced(module, {steps[0]: [*stmt(clip), steps[0]]})


@mutates("AMP205")
def steps_scaled(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    for block in blocks(module) if scaler else ():
        for line in _steps(block, scaler or ""):
            step = method(line, "step")
            assert step is not None
            plain = stmt(f"{source(step[1].args[0].value)}.step()\n")
            yield replaced(module, {line: [line, *plain]})
            yield replaced(module, {line: [*plain, line]})
            if not any(_is(other, scaler or "", "unscale_") for other in block):
                yield replaced(module, {line: plain})  # what is unscaled may be stepped with


@mutates("AMP208")
def unscaled_twice(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    if scaler is None:
        return
    for block in blocks(module):
        for line in block:
            if _is(line, scaler, "unscale_"):
                yield replaced(module, {line: [line, line]})
                after = [other for other in block if _clips(other)]
                if after:
                    yield replaced(module, {after[0]: [after[0], line]})
    for loop in _loops(module):
        for branch in loop.body.body:
            if isinstance(branch, cst.If):
                for line in lines(branch):
                    if _is(line, scaler, "unscale_"):
                        yield replaced(module, {line: None, branch: [line, _without(branch, line)]})


def _without(outer: cst.CSTNode, line: cst.CSTNode) -> cst.CSTNode:
    done = outer.deep_remove(line)
    assert isinstance(done, cst.CSTNode)
    return done


@mutates("AMP209")
def made_in_loop(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    for block in blocks(module) if scaler else ():
        for line in block:
            result = assigned(line)
            if result and result[0] == scaler and isinstance(result[1], cst.Call):
                for loop in _loops(module):
                    has_step = any(_is(inner, scaler or "", "step") for inner in lines(loop))
                    if has_step and "." not in (scaler or ""):
                        yield moved(module, line, before=loop.body.body[0])


@mutates("AMP210")
def checkpoint_without(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    for node in nodes(module):
        if isinstance(node, cst.DictElement) and scaler and source(node.value).startswith(scaler):
            yield replaced(module, {node: None})


@mutates("AMP212")
def update_between(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    for block in blocks(module) if scaler else ():
        steps = _steps(block, scaler or "")
        updates = [line for line in block if _is(line, scaler or "", "update")]
        backwards = [line for line in block if _scaled_backward(line, scaler or "") is not None]
        if len(steps) == 2 and len(updates) == 1 and len(backwards) == 1:
            yield replaced(module, {steps[0]: [steps[0], updates[0]]})


@mutates("AMP214")
def scheduler_goes_on(module: cst.Module) -> Iterator[cst.Module]:
    scaler = scaler_of(module)
    for block in blocks(module) if scaler else ():
        asks = [
            line
            for line in block
            if isinstance(line, cst.If)
            and any(method(i, "step") for i in lines(line))
            and "get_scale" in source(line.test)
        ]
        reads = [line for line in block if assigned(line) and "get_scale" in source(line)]
        if asks and reads:
            assert isinstance(asks[0], cst.If)
            step = next(iter(lines(asks[0])))
            yield replaced(module, {asks[0]: step, reads[0]: None})
            first = _steps(block, scaler or "")[0]
            yield replaced(module, {asks[0]: None, reads[0]: None, first: [step, first]})
    for loop in _loops(module):
        steps = [s for s in loop.body.body if scaler and _is(s, scaler, "update")]
        steppers = [s for s in loop.body.body if scaler and _is(s, scaler, "step")]
        if steps and len(steppers) == 1 and "scheduler" not in source(module):
            result = method(steppers[0], "step")
            assert result is not None
            optimizer = source(result[1].args[0].value)
            owner = "self." if optimizer.startswith("self.") else ""
            made = (
                f"{owner}scheduler = torch.optim.lr_scheduler.CosineAnnealingLR({optimizer}, 100)\n"
            )
            after = {steps[0]: [steps[0], *stmt(f"{owner}scheduler.step()\n")]}
            for line in lines(module):
                value = assigned(line)
                is_near = owner or not any(
                    inside(f, loop) and not inside(f, line)
                    for f in nodes(module)
                    if isinstance(f, cst.FunctionDef)
                )
                if value and value[0] == optimizer and is_near:
                    yield replaced(module, {**after, line: [line, *stmt(made)]})


__all__ = ["inside", "names", "scaler_of", "with_imports"]
