"""Arguments that are missing, in the wrong place or without effect, and regions that are not entered (AMP1xx)."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from tests.lint.mutation.names import REGIONS, device, without_device
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
)


def _arguments(text: str) -> tuple[cst.Arg, ...]:
    call = expr(f"f({text})")
    assert isinstance(call, cst.Call)
    return tuple(call.args)


def with_keyword(call: cst.Call, name: str, text: str) -> cst.Call:
    """The call with another value of a keyword."""
    rest = tuple(
        a.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        for a in call.args
        if not (a.keyword and a.keyword.value == name)
    )
    return call.with_changes(args=(*rest, *_arguments(f"{name}={text}")))


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
