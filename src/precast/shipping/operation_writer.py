"""Writes into a graph what a policy's kernel does with one operation: the operations that it calls, and its casts.

Invariants:

- a kernel that runs under a writer gets values without numbers, each of which belongs to a node of the new graph;
- what is asked of an operation beside that, such as which dtype its result has, is not written;
- a kernel that computes by operations of its own, as those of the float8 rules do, has each of them written.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.errors import ExportError
from precast.shipping import dtype_errors

__all__ = ["OperationWriter"]

_COPY: Final = torch.ops.aten.copy_.default
_SIZE: Final = torch.ops.aten.sym_size.int


class _Rewriter(Protocol):
    """The graph that is written."""

    def new(self, old: Any) -> Any: ...
    def add(self, target: Any, args: Any, kwargs: Any, place: fx.Node) -> fx.Node: ...
    def cast(self, source: fx.Node, dtype: torch.dtype, place: fx.Node) -> fx.Node: ...
    def changed(self) -> None: ...


class OperationWriter(_torch.DispatchMode):
    """Writes what a kernel does with one operation: the operations that it calls, and its casts."""

    def __init__(self, rewriter: _Rewriter, place: fx.Node) -> None:
        super().__init__()
        self.finds_errors = False
        """Whether an operation on mixed dtypes is tried on real tensors, so that what it refuses is an error here."""
        self.writes_all = False
        """Whether the kernel computes by operations of its own, each of which is written."""
        self._rewriter = rewriter
        self._place = place
        self._runs = False
        self._nodes: dict[int, tuple[fx.Node, Any]] = {}
        """`id` of a value -> its node; with the value, so that no other gets its `id`."""
        self._args = rewriter.new((place.args, place.kwargs))
        map_arg(self._args, self._know)

    def _know(self, node: fx.Node) -> fx.Node:
        self._nodes[id(node.meta["val"])] = node, node.meta["val"]
        return node

    def run(self, overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Writes an operation, and returns its result."""
        if (
            self.finds_errors
            and len({t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}) > 1
        ):
            self._runs = True
            try:
                error = dtype_errors.error_of(overload, args, kwargs)
            finally:
                self._runs = False
            if error is not None:
                raise error
        new_args = tuple(self.nodes(arg) for arg in args)
        new_kwargs = {name: self.nodes(value) for name, value in kwargs.items()}
        if overload is not self._place.target or (new_args, new_kwargs) != self._args:
            self._rewriter.changed()
        return self._write(overload, new_args, new_kwargs).meta["val"]

    def nodes(self, value: Any) -> Any:
        """The nodes in the place of values, in any nesting of tuples and lists."""
        known = self._nodes.get(id(value))
        if known is not None:
            return known[0]
        if isinstance(value, (tuple, list)):
            return (
                type(value)(map(self.nodes, value))
                if type(value) in (tuple, list)
                else tuple(map(self.nodes, value))
            )
        assert not isinstance(value, Tensor), "a value that no node has"
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _size(self, size: torch.SymInt) -> Any:
        """The node of a size that changes, read from a value that has it."""
        for node, value in list(self._nodes.values()):
            if isinstance(value, Tensor):
                for dim, its in enumerate(value.shape):
                    if isinstance(its, torch.SymInt) and str(its) == str(size):
                        return self._write(_SIZE, (node, dim), {})
        raise ExportError(f"no value of the graph has the size {size}")

    def _write(self, overload: Any, args: Any, kwargs: Any) -> fx.Node:
        self._runs = True
        try:
            node = self._rewriter.add(overload, args, kwargs, self._place)
        finally:
            self._runs = False
        return self._know(node)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._runs and func is _torch.COPY_IN_DTYPE:
            assert set(kwargs) == {"dtype"}, kwargs
            self._runs = True
            try:
                node = self._rewriter.cast(self.nodes(args[0]), kwargs["dtype"], self._place)
            finally:
                self._runs = False
            self._know(node)
            return node.meta["val"]
        if not self._runs and func is _COPY:
            return self._write(func, tuple(self.nodes(arg) for arg in args), {}).meta["val"]
        if not self._runs and self.writes_all and func.namespace != "prim":  # which reads a device
            self._rewriter.changed()
            new_kwargs = {name: self.nodes(value) for name, value in kwargs.items()}
            new_args = tuple(self.nodes(arg) for arg in args)
            return self._write(func, new_args, new_kwargs).meta["val"]
        return func(*args, **kwargs)
