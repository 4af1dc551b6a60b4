"""Arguments that are missing, in the wrong place or without effect, and regions that are not entered (AMP1xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.names import REGIONS, SCALERS, device, without_device
from tests.lint.mutation.registry import mutates
from tests.lint.mutation.trees import (
    calls,
    expr,
    lines,
    nodes,
    path,
    renamed,
    replaced,
    source,
    start_of_code,
    stmt,
    with_imports,
)


def _arguments(text: str) -> tuple[cst.Arg, ...]:
    call = expr(f"f({text})")
    assert isinstance(call, cst.Call)
    return tuple(call.args)


def _keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((a for a in call.args if a.keyword and a.keyword.value == name), None)


def with_keyword(call: cst.Call, name: str, text: str) -> cst.Call:
    """The call with another value of a keyword."""
    rest = tuple(
        a.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        for a in call.args
        if not (a.keyword and a.keyword.value == name)
    )
    return call.with_changes(args=(*rest, *_arguments(f"{name}={text}")))


@mutates("AMP101")
def no_device(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        if device(call):
            yield replaced(module, {call: call.with_changes(args=without_device(call))})
            flag = call.with_changes(args=_arguments("True"))
            yield replaced(module, {call: flag})
    for call in calls(module, "torch.get_autocast_dtype"):
        yield replaced(module, {call: call.with_changes(args=())})


@mutates("AMP102")
def flag_for_dtype(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        name = device(call)
        if name and not _keyword(call, "enabled"):
            for value in ("True", "False", '"float16"', "16"):
                new = call.with_changes(args=_arguments(f'"{name}", {value}'))
                yield replaced(module, {call: new})
            yield replaced(module, {call: with_keyword(call, "dtype", '"float16"')})


@mutates("AMP103")
def bare_decorators(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if isinstance(node, cst.Decorator) and isinstance(node.decorator, cst.Call):
            call = node.decorator
            if path(call.func) in REGIONS:
                yield replaced(module, {call: call.func})
                yield replaced(module, {call: expr("torch.cuda.amp.autocast")})


@mutates("AMP104")
def device_for_type(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS, "torch.get_autocast_dtype", "torch.is_autocast_enabled"):
        name = device(call)
        if not name:
            continue
        rest = without_device(call)
        values = [f'torch.device("{name}")']
        if path(call.func) in REGIONS:
            values.append(f'"{name}:0"')
        for value in values:
            yield replaced(module, {call: call.with_changes(args=(*_arguments(value), *rest))})
        named = replaced(module, {call: call.with_changes(args=(*_arguments("where"), *rest))})
        at = start_of_code(named)
        body = [*named.body[:at], *stmt(f'where = torch.device("{name}")\n'), *named.body[at:]]
        yield named.with_changes(body=body)


@mutates("AMP105")
def custom_functions_without_device(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if isinstance(node, cst.Decorator) and isinstance(node.decorator, cst.Call):
            call = node.decorator
            if path(call.func) in ("custom_fwd", "custom_bwd"):
                yield replaced(module, {call: call.func})
                yield replaced(module, {call: call.with_changes(args=())})


@mutates("AMP106")
def new_arguments(module: cst.Module) -> Iterator[cst.Module]:
    if "Version" in source(module):
        return
    for call in calls(module, *REGIONS, *SCALERS):
        if device(call) != "cuda":
            continue
        name = "GradScaler" if path(call.func) in SCALERS else "autocast"
        word = "device" if name == "GradScaler" else "device_type"
        rest = without_device(call)
        func = expr(f"torch.cuda.amp.{name}")
        for value in ('"cuda"', f'{word}="cuda"'):
            new = call.with_changes(func=func, args=(*_arguments(value), *rest))
            yield replaced(module, {call: new})
            imported = replaced(module, {call: new.with_changes(func=expr(name))})
            yield with_imports(imported, f"from torch.cuda.amp import {name}\n")


@mutates("AMP107")
def scaler_slot(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *SCALERS):
        if device(call):
            for value in ("1024.0", "2**16", "True", "False", '"cuda", True', '"cuda", False'):
                new = call.with_changes(args=_arguments(value))
                yield replaced(module, {call: new})


@mutates("AMP108")
def class_as_module(module: cst.Module) -> Iterator[cst.Module]:
    for name, used in (("autocast", REGIONS), ("GradScaler", SCALERS)):
        found = list(calls(module, *used))
        if not found or "Version" in source(module):
            continue
        yield with_imports(module, f"import torch.amp.{name}\n")
        news = {c: c.with_changes(func=expr("Made")) for c in found}
        yield with_imports(replaced(module, news), f"import torch.amp.{name} as Made\n")
        old = [c for c in found if device(c) == "cuda"]
        news = {
            c: c.with_changes(func=expr(f"torch.cuda.amp.{name}"), args=without_device(c))
            for c in old
        }
        if old:
            yield with_imports(replaced(module, news), f"import torch.cuda.amp.{name}\n")


@mutates("AMP109")
def wrong_guards(module: cst.Module) -> Iterator[cst.Module]:
    lower = {"2.3": "2.0", "2.4": "1.13"}
    for call in calls(module, "Version"):
        value = call.args[0].value
        if isinstance(value, cst.SimpleString):
            number = str(value.evaluated_value)
            yield replaced(module, {value: expr(f'"{lower[number]}"')})
    for node in nodes(module):
        if isinstance(node, cst.Comparison):
            right = node.comparisons[0].comparator
            if isinstance(right, cst.Call) and path(right.func) == "Version":
                text = expr(f"str(torch.__version__) >= {source(right.args[0].value)}")
                yield replaced(module, {node: text})
            if isinstance(right, cst.Tuple):
                yield replaced(module, {right: expr("(1, 8)")})
                yield replaced(module, {node: expr('str(torch.__version__) > "1.10"')})


@mutates("AMP110")
def enabled_without_device(module: cst.Module) -> Iterator[cst.Module]:
    for node in nodes(module):
        if isinstance(node, cst.With) and any(
            device(c) == "cpu" for i in node.items for c in calls(i, *REGIONS)
        ):
            for call in calls(node, "torch.is_autocast_enabled"):
                yield replaced(module, {call: call.with_changes(args=())})


@mutates("AMP111")
def full_precision_on_cpu(module: cst.Module) -> Iterator[cst.Module]:
    for call in calls(module, *REGIONS):
        if device(call) == "cpu":
            for dtype in ("torch.float32", "torch.float64", "torch.float", "torch.double"):
                yield replaced(module, {call: with_keyword(call, "dtype", dtype)})


def _withs(module: cst.Module) -> Iterator[tuple[cst.With, cst.Call]]:
    """The statements that enter one region alone."""
    for node in nodes(module):
        if isinstance(node, cst.With) and len(node.items) == 1:
            item = node.items[0].item
            if (
                isinstance(item, cst.Call)
                and path(item.func) in REGIONS
                and not node.items[0].asname
            ):
                yield node, item


@mutates("AMP112")
def entered_twice(module: cst.Module) -> Iterator[cst.Module]:
    for node, call in _withs(module):
        again = node.with_changes(items=[cst.WithItem(expr("region"))])
        outer = cst.With(items=[cst.WithItem(expr("region"))], body=cst.IndentedBlock([again]))
        made = stmt(f"region = {source(call)}\n")
        yield replaced(module, {node: [*made, outer]})
    for function in nodes(module):
        if isinstance(function, cst.FunctionDef) and any(
            isinstance(d.decorator, cst.Call) and path(d.decorator.func) in REGIONS
            for d in function.decorators
        ):
            first = function.params.params[-1].name.value
            is_method = function.params.params[0].name.value == "self"
            name = f"self.{function.name.value}" if is_method else function.name.value
            guard = stmt(f"if {first}.ndim > 2:\n    return {name}({first}[0])\n")
            block = function.body
            assert isinstance(block, cst.IndentedBlock)
            new = function.with_changes(body=block.with_changes(body=[*guard, *block.body]))
            yield replaced(module, {function: new})


@mutates("AMP113")
def never_entered(module: cst.Module) -> Iterator[cst.Module]:
    for node, call in _withs(module):
        assert isinstance(node.body, cst.IndentedBlock)
        yield replaced(module, {node: [*stmt(source(call) + "\n"), *node.body.body]})
    for both in nodes(module):
        if isinstance(both, cst.With) and len(both.items) == 2:
            text = " and ".join(source(item.item) for item in both.items)
            yield replaced(module, {both: both.with_changes(items=[cst.WithItem(expr(text))])})
    for node, call in _withs(module):
        in_function = any(
            isinstance(f, cst.FunctionDef) and any(n is node for n in nodes(f))
            for f in nodes(module)
        )
        if in_function:  # a name of a module may be for others
            assert isinstance(node.body, cst.IndentedBlock)
            yield replaced(module, {node: [*stmt(f"region = {source(call)}\n"), *node.body.body]})


__all__ = ["lines", "renamed", "with_keyword"]
