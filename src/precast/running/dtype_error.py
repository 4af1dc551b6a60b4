"""Advice on an operation that ended the program with an error about dtypes: whether another policy runs it.

The operation's arguments still exist in the frames of the traceback. It is run again on copies of them: under PyTorch's
policy, where it must fail with the same message, then under the policy `default`, where it must succeed.

Invariants: code of the program is not run again. There is no advice on an operation whose arguments
are results of calls, or objects of classes other than those of PyTorch and Python.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal import cures
from precast._internal.pytree import map_tensors
from precast.autocast_mode.region import autocast

__all__ = ["advice_on", "record_regions"]

_REGION: Final = "_precast_region"
_POLICY: Final = "default"
_FUNCTION: Final = types.BuiltinFunctionType  # a method of a tensor is one, too
_PLAIN: Final = {
    *(Tensor, torch.nn.Parameter, torch.dtype, torch.device, _FUNCTION),
    *(bool, int, float, complex, str, slice),
}


def record_regions() -> Callable[[], None]:
    """Record the device and dtype of a PyTorch region in each error that leaves it. The result stops this."""

    def record(error: BaseException, device: str, dtype: torch.dtype) -> None:
        if isinstance(error, RuntimeError) and not hasattr(error, _REGION):
            setattr(error, _REGION, (device, dtype))

    return _torch.on_region_error(record)


def advice_on(error: BaseException | None) -> str | None:
    """Return a sentence on the policy that runs the operation which raised `error`; None if there is none."""
    where = getattr(error, _REGION, None)
    if error is None or where is None or error.__traceback__ is None:
        return None
    device, dtype = where
    try:
        operation = _failed_operation(error.__traceback__)
        if operation is None or _outcome(operation, device, dtype, "torch") != str(error):
            return None
        if _outcome(operation, device, dtype, _POLICY) is not None:
            return None
    except (AttributeError, RuntimeError, StopIteration, SyntaxError):  # no source, no memory
        return None
    return cures.DEFAULT_POLICY()


class _Operation:
    """An operation, as an expression or an assignment, and the values of the names in it."""

    def __init__(self, code: types.CodeType, values: dict[str, Any]) -> None:
        self.code, self.values = code, values

    def run(self) -> None:
        """Run it on copies of its tensors."""
        copies: dict[int, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.detach().clone())

        values = {name: map_tensors(value, copy) for name, value in self.values.items()}
        exec(self.code, {"__builtins__": {}}, values)


def _outcome(operation: _Operation, device: str, dtype: torch.dtype, policy: str) -> str | None:
    """Return the message of the error that the operation raises under a policy; None if it raises none."""
    with torch.no_grad(), autocast(device, dtype=dtype, policy=policy):
        try:
            operation.run()
        except Exception as error:
            return str(error)
    return None


def _failed_operation(traceback: TracebackType) -> _Operation | None:
    """Return the operation that the innermost frame was running."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    positions = next(itertools.islice(frame.f_code.co_positions(), traceback.tb_lasti // 2, None))
    if None in positions:
        return None
    tree = ast.parse(textwrap.dedent("".join(linecache.getlines(frame.f_code.co_filename))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Subscript) and _position(target) == positions:
                return _operation(node, frame)
        elif isinstance(node, ast.Call | ast.BinOp) and _position(node) == positions:
            return _operation(ast.Expr(node), frame)
    return None


def _position(node: Any) -> tuple[Any, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _operation(statement: ast.stmt, frame: FrameType) -> _Operation | None:
    """Return the operation of a statement, in which each variable has a new name."""
    reader = _Reader(frame)
    statement = reader.visit(statement)
    if reader.is_refused:
        return None
    module = ast.fix_missing_locations(ast.Module([statement], []))
    return _Operation(compile(module, "<precast>", "exec"), reader.values)


def _is_plain(value: Any) -> bool:
    """Return True for tensors, plain values and functions of PyTorch: they have no method defined by the program."""
    if type(value) in {list, tuple}:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or value is None or value is Ellipsis


class _Reader(ast.NodeTransformer):
    """Replaces variables and their attributes by names of values; refuses calls but for the outermost."""

    def __init__(self, frame: FrameType) -> None:
        self.values: dict[str, Any] = {}
        self.is_refused = False
        self._frame = frame
        self._has_call = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if self._has_call:
            self.is_refused = True
            return node
        self._has_call = True
        value = self._read(function)
        if not isinstance(value, _FUNCTION):
            self.is_refused = True
            return node
        owner = getattr(value, "__self__", None)
        if isinstance(function, ast.Attribute) and isinstance(owner, Tensor):
            function.value = self._named(owner)
        else:
            node.func = self._named(value)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._named(self._read(node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._named(self._read(node))

    def _read(self, node: ast.expr) -> Any:
        """Return the value of a variable, or of an attribute of one."""
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            self.is_refused = True
            return None
        frame = self._frame
        spaces = (frame.f_locals, frame.f_globals, frame.f_builtins)
        value = next(space[node.id] for space in spaces if node.id in space)
        for name in reversed(names):
            value = getattr(value, name)
        return value

    def _named(self, value: Any) -> ast.Name:
        self.is_refused |= not _is_plain(value)
        name = f"v{len(self.values)}"
        self.values[name] = value
        return ast.Name(name, ast.Load())
