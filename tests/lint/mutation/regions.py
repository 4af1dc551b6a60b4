"""What is done inside a region and should not be, or behind it (AMP3xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.misuse import with_keyword
from tests.lint.mutation.names import REGIONS, device
from tests.lint.mutation.protocol import scaler_of
from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    Body,
    assigned,
    assignment,
    blocks,
    calls,
    expr,
    indented,
    lines,
    made,
    method,
    nodes,
    path,
    replaced,
    source,
    stmt,
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
                    gone = dict.fromkeys(more)
                    yield replaced(module, {**gone, region: _longer(region, more)})


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
            found = made(last)
            is_theirs = found is not None and path(found[1].func) in _LOSSES
            if is_theirs and len(_body(region)) == 2 and is_torchs:
                assert isinstance(region.body, cst.IndentedBlock)
                shorter = region.body.with_changes(body=_body(region)[:-1])
                for loss in _lowered(module, found[1]):
                    outside = last.deep_replace(found[1], loss)
                    yield replaced(module, {region: [region.with_changes(body=shorter), outside]})


@mutates("AMP304")
def half_by_hand(module: cst.Module) -> Iterator[cst.Module]:
    if not any(method(line, "step") for line in lines(module)) or not any(calls(module, *REGIONS)):
        return  # without a region it is AMP316 that says so
    casts = ("half()", "bfloat16()", "to(torch.float16)", "to(dtype=torch.bfloat16)")
    for line in lines(module):
        found = assigned(line)
        if found and found[0] in ("model", "self.model"):
            for cast in casts:
                yield replaced(module, {found[1]: expr(f"{source(found[1])}.{cast}")})
                yield replaced(module, {line: [line, *stmt(f"{found[0]}.{cast}\n")]})


@mutates("AMP305")
def binary_cross_entropy(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, "F.binary_cross_entropy_with_logits"):
        first, *rest = call.args
        inputs = first.with_changes(value=expr(f"torch.sigmoid({source(first.value)})"))
        plain = call.with_changes(func=expr("F.binary_cross_entropy"), args=[inputs, *rest])
        yield replaced(module, {call: plain})
        by_path = plain.with_changes(func=expr("torch.nn.functional.binary_cross_entropy"))
        yield replaced(module, {call: by_path})
    for call in calls(module, "nn.BCEWithLogitsLoss"):
        yield replaced(module, {call: call.with_changes(func=expr("nn.BCELoss"))})


def _without_decorators(node: cst.FunctionDef, *gone: str) -> cst.FunctionDef:
    kept = [d for d in node.decorators if not any(name in source(d) for name in gone)]
    return node.with_changes(decorators=kept)


@mutates("AMP306")
def no_custom_fwd(module: cst.Module) -> Iterator[cst.Module]:
    found = [
        node
        for node in nodes(module)
        if isinstance(node, cst.FunctionDef) and "custom_" in "".join(map(source, node.decorators))
    ]
    if found:
        yield replaced(module, {n: _without_decorators(n, "custom_") for n in found})


@mutates("AMP307")
def custom_bwd_alone(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if (
            isinstance(node, cst.FunctionDef)
            and node.name.value == "forward"
            and "custom_fwd" in "".join(map(source, node.decorators))
        ):
            yield replaced(module, {node: _without_decorators(node, "custom_fwd")})


@mutates("AMP313")
def custom_fwd_on_backward(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, "custom_bwd"):
        yield replaced(module, {call: call.with_changes(func=expr("custom_fwd"))})


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


@mutates("AMP315")
def stale_weights(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if isinstance(node, cst.For) and any(method(line, "step") for line in node.body.body):
            for _, region in _regions(node.body.body):
                inner = [
                    part
                    for line in node.body.body
                    for part in (_body(region) if line is region else [line])
                ]
                loop = node.with_changes(body=indented(inner))
                yield replaced(module, {node: region.with_changes(body=indented([loop]))})


@mutates("AMP316")
def trained_in_16_bits(module: cst.Module) -> Iterator[cst.Module]:
    if "optim" not in source(module) or "autocast" in source(module):
        return  # beside a region it is AMP304 that says so
    for line in lines(module):
        found = assigned(line)
        for cast in ("bfloat16()", "half()", "to(torch.bfloat16)", "to(dtype=torch.bfloat16)"):
            if found and found[0] == "model":
                yield replaced(module, {found[1]: expr(f"{source(found[1])}.{cast}")})
                yield replaced(module, {line: [line, *stmt(f"model.{cast}\n")]})


@mutates("AMP317")
def float16_on_cpu(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        if device(call) == "cpu":
            yield replaced(module, {call: with_keyword(call, "dtype", "torch.float16")})


@mutates("AMP308")
def custom_fwd_without_ctx(module: cst.Module) -> Iterator[cst.Module]:
    decorator = cst.Decorator(expr('torch.amp.custom_fwd(device_type="cuda")'))
    for node in nodes(module):
        if isinstance(node, cst.ClassDef) and any("Module" in source(b) for b in node.bases):
            for function in node.body.body:
                if isinstance(function, cst.FunctionDef) and function.name.value == "forward":
                    new = function.with_changes(decorators=[decorator])
                    yield replaced(module, {function: new})
        if isinstance(node, cst.FunctionDef) and node.name.value == "forward":
            params = node.params.params
            if params[0].name.value == "ctx" and "custom_fwd" in "".join(
                map(source, node.decorators)
            ):
                setup = stmt(
                    "@staticmethod\ndef setup_context(ctx, inputs, output):\n    ctx.save_for_backward(*inputs)\n"
                )
                assert isinstance(node.body, cst.IndentedBlock)
                new = node.with_changes(
                    params=node.params.with_changes(params=params[1:]),
                    body=node.body.with_changes(
                        body=[s for s in node.body.body if "ctx" not in source(s)]
                    ),
                )
                yield replaced(module, {node: [new, *setup]})


@mutates("AMP309")
def threads(module: cst.Module) -> Iterator[cst.Module]:
    if "import threading" not in source(module):
        for line in lines(module):
            found = assigned(line)
            if (
                found
                and found[0] == "model"
                and "bfloat16" in source(module)
                and "step" in source(module)
            ):
                wrapped = stmt("model = torch.nn.DataParallel(model)\n")
                yield replaced(module, {line: [line, *wrapped]})
        return
    for function in nodes(module):
        if isinstance(function, cst.FunctionDef):
            [region] = [n for n in function.body.body if isinstance(n, cst.With)]
            plain = region.with_changes(items=[cst.WithItem(expr("torch.no_grad()"))])
            news: dict[cst.CSTNode, list[cst.CSTNode] | cst.CSTNode] = {region: plain}
            for block in blocks(module):
                begin = [s for s in block if method(s, "start")]
                if begin:
                    item = cst.WithItem(expr('torch.autocast("cuda", dtype=torch.float16)'))
                    news[begin[0]] = cst.With(items=[item], body=indented([begin[0]]))
            yield replaced(module, news)


@mutates("AMP310")
def uncast_in_island(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if isinstance(node, cst.With) and "enabled=False" in source(node.items[0]):
            for call in nodes(node):
                if isinstance(call, cst.Call) and source(call) == "hidden.float()":
                    yield replaced(module, {call: expr("hidden")})


@mutates("AMP311")
def lower_escapes(module: cst.Module) -> Iterator[cst.Module]:
    if "torch.mm" not in source(module):
        return
    for call in nodes(module):
        if isinstance(call, cst.Call) and source(call) == "product.float()":
            yield replaced(module, {call: expr("product")})


@mutates("AMP312")
def in_place(module: cst.Module) -> Iterator[cst.Module]:
    before = assignment(module, "b")
    for line in lines(module):
        found = made(line)
        if before and found and path(found[1].func) in ("torch.mm", "torch.addmm", "torch.matmul"):
            name, call = found
            empty = stmt(f'{name} = torch.empty(8, 8, device="cuda")\n')
            new = stmt(source(with_keyword(call, "out", name)) + "\n")
            yield replaced(module, {line: new, before: [before, *empty]})
            if path(call.func) == "torch.addmm":
                yield replaced(module, {line: stmt(f"c.addmm_(a, b)\n{name} = c\n")})


__all__ = ["device", "scaler_of", "with_imports"]
