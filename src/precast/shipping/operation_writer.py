"""Writing of one operation into a graph as a policy's kernel runs it: the operations that it calls, and its casts.

Invariants:

- a kernel that runs under a writer gets fake values, each of which belongs to a node of the new graph;
- other queries of an operation, such as the dtype of its result, are not written;
- if a kernel consists of other operations, as those of the float8 rules do, each of them is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._torch import OpOverload
from precast.errors import ExportError
from precast.shipping import dtype_errors

__all__ = ["OperationWriter"]

_COPY: Final = torch.ops.aten.copy_.default
_SIZE: Final = torch.ops.aten.sym_size.int


class _Rewriter(Protocol):
    """The graph that is being written."""

    def new(self, old: Any) -> Any: ...
    def add(self, target: Any, args: Any, kwargs: Any, place: fx.Node) -> fx.Node: ...
    def cast(self, source: fx.Node, dtype: torch.dtype, place: fx.Node) -> fx.Node: ...
    def changed(self) -> None: ...


class OperationWriter(_torch.DispatchMode):
    """A dispatch mode that writes the operations and casts of a kernel."""

    def __init__(self, rewriter: _Rewriter, place: fx.Node) -> None:
        super().__init__()
        self.finds_errors = False
        """If True, an operation on mixed dtypes is tried on real tensors, to raise the errors that it would raise."""
        self.writes_all = False
        """If True, the kernel consists of other operations, each of which is written."""
        self._rewriter = rewriter
        self._place = place
        self._runs = False
        self._nodes: dict[int, tuple[fx.Node, Any]] = {}
        """Maps `id` of a value to its node, and to the value itself, so that its `id` is not reused."""
        self._args = rewriter.new((place.args, place.kwargs))
        map_arg(self._args, self._register)

    def _register(self, node: fx.Node) -> fx.Node:
        self._nodes[id(node.meta["val"])] = node, node.meta["val"]
        return node

    def run(self, overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write an operation, and return its result."""
        if self.finds_errors and dtype_errors.is_mixed((args, kwargs)):
            with self._running():
                error = dtype_errors.error_of(overload, args, kwargs)
            if error is not None:
                raise error
        call = self._call(args, kwargs)
        if overload is not self._place.target or call != self._args:
            self._rewriter.changed()
        return self._write(overload, *call)

    def _call(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        new_kwargs = {name: self.nodes(value) for name, value in kwargs.items()}
        return tuple(map(self.nodes, args)), new_kwargs

    def nodes(self, value: Any) -> Any:
        """Return the nodes of values, in any nesting of tuples and lists."""
        entry = self._nodes.get(id(value))
        if entry is not None:
            return entry[0]
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)(map(self.nodes, value))
        assert not isinstance(value, Tensor), "a value without a node"
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _size(self, size: torch.SymInt) -> Any:
        """Return the node of a dynamic size, read from a value that has it."""
        for node, value in list(self._nodes.values()):
            if isinstance(value, Tensor):
                for dim, other in enumerate(value.shape):
                    if isinstance(other, torch.SymInt) and str(other) == str(size):
                        with self._running():
                            return self._rewriter.add(_SIZE, (node, dim), {}, self._place)
        raise ExportError(f"no value of the graph has the size {size}")

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run operations in a block without writing them."""
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def _write(self, overload: Any, args: Any, kwargs: Any) -> Any:
        with self._running():
            node = self._rewriter.add(overload, args, kwargs, self._place)
        return self._register(node).meta["val"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._runs:
            return func(*args, **kwargs)
        if func is _torch.COPY_IN_DTYPE:
            assert set(kwargs) == {"dtype"}, kwargs
            with self._running():
                node = self._rewriter.cast(self.nodes(args[0]), kwargs["dtype"], self._place)
            return self._register(node).meta["val"]
        if func is _COPY:
            return self._write(func, *self._call(args, kwargs))
        if self.writes_all and func.namespace != "prim":  # prim: reads a device
            self._rewriter.changed()
            return self._write(func, *self._call(args, kwargs))
        return func(*args, **kwargs)
