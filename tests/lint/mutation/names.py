"""Names that are deprecated, or removed, in the place of the right ones (AMP0xx)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    assignment,
    call_of,
    calls,
    expr,
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

REGIONS = ("torch.autocast", "torch.amp.autocast")
SCALERS = ("torch.amp.GradScaler", "torch.GradScaler")


def device(call: cst.Call) -> str | None:
    """The device type that a call names first, or by keyword."""
    for i, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword else None
        is_it = name in ("device_type", "device") or (name is None and i == 0)
        if is_it and isinstance(arg.value, cst.SimpleString):
            value = arg.value.evaluated_value
            return value if isinstance(value, str) else None
    return None


def without_device(call: cst.Call) -> tuple[cst.Arg, ...]:
    """The other arguments."""
    rest = [
        arg
        for i, arg in enumerate(call.args)
        if not (
            (arg.keyword is None and i == 0)
            or (arg.keyword and arg.keyword.value in ("device_type", "device"))
        )
    ]
    return tuple(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in rest)


def old(call: cst.Call, name: str) -> cst.Call:
    """The call of a deprecated name, which has no device."""
    return call.with_changes(func=expr(name), args=without_device(call))


@mutates("AMP001")
def old_autocast(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        # A program that asks for PyTorch's version may take the old name where that is the one there is.
        if device(call) == "cuda" and "Version" not in source(module):
            yield replaced(module, {call: old(call, "torch.cuda.amp.autocast")})
            yield replaced(module, {call: old(call, "torch.cuda.amp.autocast_mode.autocast")})


@mutates("AMP002")
def old_cpu_autocast(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        if device(call) == "cpu":
            yield replaced(module, {call: old(call, "torch.cpu.amp.autocast")})


@mutates("AMP003")
def old_scaler(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *SCALERS):
        if device(call) == "cuda" and "Version" not in source(module):
            yield replaced(module, {call: old(call, "torch.cuda.amp.GradScaler")})
            yield replaced(module, {call: old(call, "torch.cuda.amp.grad_scaler.GradScaler")})


@mutates("AMP004", "AMP005")
def old_custom_functions(module: cst.Module) -> Iterator[cst.Module]:
    for line in lines(module):
        if source(line).strip() == "from torch.amp import custom_bwd, custom_fwd":
            news: dict[Any, Any] = {c: c.func for c in calls(module, "custom_fwd", "custom_bwd")}
            news[line] = stmt("from torch.cuda.amp import custom_bwd, custom_fwd\n")
            yield replaced(module, news)


@mutates("AMP004")
def old_custom_functions_by_path(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, "custom_fwd", "custom_bwd"):
        yield replaced(module, {call: expr(f"torch.cuda.amp.{path(call.func)}")})


@mutates("AMP005")
def old_imports(module: cst.Module) -> Iterator[cst.Module]:
    regions = [c for c in calls(module, *REGIONS) if device(c) == "cuda"]
    scalers = [c for c in calls(module, *SCALERS) if device(c) == "cuda"]
    if "Version" in source(module):
        return
    if regions:
        news: dict[cst.CSTNode, cst.CSTNode] = {c: old(c, "autocast") for c in regions}
        yield with_imports(replaced(module, news), "from torch.cuda.amp import autocast\n")
        news = {c: old(c, "region") for c in regions}
        yield with_imports(
            replaced(module, news), "from torch.cuda.amp import autocast as region\n"
        )
    if scalers:
        news = {c: old(c, "GradScaler") for c in scalers}
        yield with_imports(replaced(module, news), "from torch.cuda.amp import GradScaler\n")
    both = {
        **{c: old(c, "amp.autocast") for c in regions},
        **{c: old(c, "amp.GradScaler") for c in scalers},
    }
    if both:
        yield with_imports(replaced(module, both), "from torch.cuda import amp\n")
        yield with_imports(replaced(module, both), "import torch.cuda.amp as amp\n")


@mutates("AMP006")
def old_classes(module: cst.Module) -> Iterator[cst.Module]:
    for line in lines(module):
        result = made(line)
        if result is None or "Version" in source(module):
            continue
        name, call = result
        if path(call.func) in SCALERS and device(call) == "cuda":
            maker = "torch.cuda.amp.GradScaler"
            again = source(old(call, "make"))
            yield replaced(module, {line: stmt(f"make = {maker}\n{name} = {again}\n")})
            partial = source(old(call, f"functools.partial({maker})"))
            yield with_imports(
                replaced(module, {line: stmt(f"{name} = {partial}\n")}), "import functools\n"
            )
            if "." not in name:
                yield replaced(module, {line: stmt(f"{name}: {maker} = {source(call)}\n")})
    for node in nodes(module):
        if isinstance(node, cst.Attribute) and path(node) == "torch.amp.GradScaler":
            around = [c for c in calls(module, "isinstance") if c.args[1].value is node]
            if around:
                yield replaced(module, {node: expr("torch.cuda.amp.GradScaler")})
        if isinstance(node, cst.Param) and node.name.value == "scaler" and node.annotation is None:
            note = cst.Annotation(expr("torch.cuda.amp.GradScaler"))
            yield replaced(module, {node: node.with_changes(annotation=note)})


_OLD_STATE = {
    ("torch.get_autocast_dtype", "cuda"): "torch.get_autocast_gpu_dtype",
    ("torch.get_autocast_dtype", "cpu"): "torch.get_autocast_cpu_dtype",
    ("torch.is_autocast_enabled", "cpu"): "torch.is_autocast_cpu_enabled",
    ("torch.set_autocast_dtype", "cuda"): "torch.set_autocast_gpu_dtype",
    ("torch.set_autocast_dtype", "cpu"): "torch.set_autocast_cpu_dtype",
    ("torch.set_autocast_enabled", "cpu"): "torch.set_autocast_cpu_enabled",
}


@mutates("AMP008")
def old_state_functions(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *{name for name, _ in _OLD_STATE}):
        new = _OLD_STATE.get((path(call.func) or "", device(call) or ""))
        if new is not None and "Version" not in source(module):
            yield replaced(module, {call: old(call, new)})


@mutates("AMP009")
def apex(module: cst.Module) -> Iterator[cst.Module]:
    """Apex in the place of PyTorch's regions and scaler: a file that has both offers a choice."""
    scaler = assignment(module, "scaler")
    if scaler is None or "get_scale" in source(module):
        return
    initialized = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
    news: dict[Any, Any] = {scaler: stmt(initialized)}
    for node in nodes(module):
        if isinstance(node, cst.With) and any(_is_region(item) for item in node.items):
            kept = [i.with_changes(comma=_NO_COMMA) for i in node.items if not _is_region(i)]
            news[node] = node.with_changes(items=kept) if kept else node.body.body
    for line in lines(module):
        backward, step = method(line, "backward"), method(line, "step")
        if backward is not None and backward[0].startswith("scaler.scale("):
            loss = backward[0].removeprefix("scaler.scale(").removesuffix(")")
            text = f"with amp.scale_loss({loss}, optimizer) as scaled:\n    scaled.backward()\n"
            news[line] = stmt(text)
        elif step is not None and step[0] == "scaler":
            news[line] = stmt(f"{source(step[1].args[0].value)}.step()\n")
        elif any((method(line, name) or ("",))[0] == "scaler" for name in ("unscale_", "update")):
            news[line] = None
    if "amp.scale_loss" in source(made_of := replaced(module, news)):
        yield with_imports(made_of, "from apex import amp\n")


_NO_COMMA = cst.MaybeSentinel.DEFAULT


def _is_region(item: cst.WithItem) -> bool:
    return isinstance(item.item, cst.Call) and path(item.item.func) in REGIONS


@mutates("AMP010")
def removed_names(module: cst.Module) -> Iterator[cst.Module]:
    body = list(module.body)
    if not any(source(line).strip() == "import torch" for line in body):
        return
    uses = {
        "from torch._six import inf\n": "print(inf)\n",
        "from torch._six import string_classes\n": 'print(isinstance("a", string_classes))\n',
        "from torch.cuda.amp.autocast_mode import _cast\n": "print(_cast(torch.ones(1), torch.float16))\n",
        "from torch.cuda.amp.grad_scaler import _refresh_per_optimizer_state\n": (
            "print(_refresh_per_optimizer_state())\n"
        ),
    }
    for text, use in uses.items():
        yield with_imports(module.with_changes(body=[*body, *stmt(use)]), text)
        yield with_imports(module, text)


__all__ = ["REGIONS", "SCALERS", "call_of", "device", "without_device"]
