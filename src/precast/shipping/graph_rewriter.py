"""Rewriting of an exported graph, with a policy's casts as nodes and without regions.

`torch.export` records operations above the autocast keys: a graph exported in a region has the operations of the
program, but no casts. Here every operation runs once more, on fake tensors, in the policy's kernel, and the operations
of that kernel are written into a new graph.

Invariants:

- each region applies to its part of the graph, also inside branches and loops; the new graph has no regions;
- an operation that the policy does not change keeps its node;
- an operation without a rule is replaced by the operations that it calls if one of those has a rule, and only then;
  these are recorded in the regions in force, where their values have their final dtypes;
- a cast of a value is not reused after the graph writes the value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._internal import cures
from precast._internal.display import dtype_name
from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.autocast_mode.region import policy_of_region
from precast.engine import reference_kernels
from precast.engine.operation import is_eligible
from precast.engine.operator_kinds import kind_of
from precast.errors import ExportError
from precast.policy.policy import Policy, Rule
from precast.policy.rows import PRODUCT_OPERATIONS
from precast.shipping import dtype_errors
from precast.shipping.graph_nodes import (
    CAST,
    INLINED,
    dtypes_of,
    filled,
    layout_of,
    placeholders,
    retyped,
    value_of,
    writes,
)
from precast.shipping.graph_policy import (
    Precisions,
    RegionState,
    acting_region,
    in_regions,
    treatment,
    written_operation,
)

__all__ = ["GraphRewriter"]

_aten: Final = torch.ops.aten
_COPIED: Final = ("nn_module_stack", "stack_trace", "source_fn_stack", "from_node", "custom")
"""The metadata that a cast gets from the node of the program that needs it."""


def _unsafe_chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    size = tensor.shape[dim]
    return _aten.unsafe_split.Tensor(tensor, max(1, (size + chunks - 1) // chunks), dim)


_PRODUCTS: Final = (_aten.linear.default, _aten.matmul.default)
_LSTM: Final = _aten.mkldnn_rnn_layer.default
_LOWERED: Final = (Rule.LOWER, Rule.LOWER_OUT_FP32)
_WITHOUT_SYMBOLS: Final = {_aten.unsafe_chunk.default: _unsafe_chunk}
"""Fake versions of operations that PyTorch implements in C++ for static sizes only (2.13)."""


class GraphRewriter:
    """Writes one graph; each graph of a branch or loop inside it gets a separate object.

    `inputs` are the inputs of the old graph; `values` are their fake values, if they have changed.
    """

    def __init__(
        self, fake_mode: Any, inputs: Sequence[fx.Node], values: Sequence[Any] | None = None
    ) -> None:
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        """The bodies of the new graph's branches and loops."""
        self._fake_mode = fake_mode
        self.changes = 0
        """The number of operations that were changed."""
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._untouched: set[object] = set()
        """Composite operations, with the kinds of their arguments, that call no operation with a rule."""
        self._env: dict[fx.Node, Any] = {}
        self._trained: set[Any] = set()
        """Nodes whose tensors require a gradient in the model: weights, their views and casts."""
        values = [node.meta.get("val") for node in inputs] if values is None else values
        for node, value in zip(inputs, values, strict=True):
            new = self.graph.placeholder(node.name)
            # The signature uses this name; a graph would rename `input`.
            new.name = new.target = node.name
            new.meta = {**node.meta, "val": value}
            if isinstance(value, Tensor) and value.requires_grad:
                self._trained.add(new)
            self._env[node] = new

    def write(self, graph: fx.Graph, owner: fx.GraphModule, precisions: Precisions) -> Any:
        """Write all operations of a graph, whose inputs exist already; return its results as nodes of the new graph.

        `owner` has the bodies of its branches and loops; `precisions` is the state of the regions where it begins.
        """
        result: Any = None
        for node in graph.nodes:
            if node.op == "output":
                result = self.new(node.args[0])
            elif node.op == "get_attr":
                self._env[node] = getattr(owner, str(node.target))
            elif node.op == "call_function":
                self._env[node] = self._call(node, precisions)
        return result

    def new(self, old: Any) -> Any:
        """Return an argument with old nodes replaced by new ones."""
        return map_arg(old, self._env.__getitem__)

    def _call(self, node: fx.Node, precisions: Precisions) -> Any:
        if node.target is operator.getitem:
            return self._item(node)
        name = _torch.higher_order_name(node.target)
        if name in INLINED:
            return self._inlined(node, INLINED[name], precisions)
        if name is not None:
            return self._branch_or_loop(node, precisions)
        if isinstance(node.target, OpOverload):
            return self._operation(node, node.target, precisions)
        return self._copy_node(node)

    def _item(self, node: fx.Node) -> Any:
        whole, index = self.new(node.args)
        if isinstance(whole, (tuple, list)):
            return whole[index]
        new = self.graph.create_node("call_function", node.target, (whole, index), name=node.name)
        new.meta = {**node.meta, "val": whole.meta["val"][index]}
        new.meta.pop("tensor_meta", None)
        if whole in self._trained:
            self._trained.add(new)
        return new

    # Operations

    def _operation(self, node: fx.Node, overload: OpOverload, precisions: Precisions) -> Any:
        if overload is _torch.DTYPE_CHECK:
            return self._dtype_check(node)
        args, kwargs = filled(self.new((node.args, node.kwargs)))
        here = acting_region(precisions, (args, kwargs))
        if here is None:
            return self._copy_node(node)
        writer = _OperationWriter(self, node)
        planned = treatment(here, overload, writer.run)
        writer.writes_all = planned.rule in PRODUCT_OPERATIONS
        kernel, op = planned.kernel, written_operation(here, overload, writer.run)
        is_lstm = overload is _LSTM and planned.rule in _LOWERED and planned.retries
        if is_lstm and dtype_errors.is_refused(overload, args, kwargs, here.dtype):
            kernel = reference_kernels.kernel_for(Rule.FP32, op)  # on this processor
        if planned.retries and planned.mixes(here, (args, kwargs)):
            # Unchanged, or in the widest dtype if it would raise an error.
            if kernel is not None:
                writer.finds_errors = True
                kernel = reference_kernels.with_promotion(op, planned.rule, kernel)
            elif (error := dtype_errors.error_of(overload, args, kwargs)) is not None:
                retry = reference_kernels.retry_promoted
                with writer:
                    return writer.nodes(retry(op, error, args, kwargs, planned.rule))
        elif kernel is None and _torch.selects_operations_by_value(overload):
            _check_writable(here, overload, (args, kwargs))
        if kernel is None:
            return self._write_composite(node, overload, precisions)
        with writer:
            return writer.nodes(kernel(None, args, kwargs))

    def _write_composite(self, node: fx.Node, overload: OpOverload, precisions: Precisions) -> Any:
        """Write an operation without a rule; if rules act on the operations that it calls, write these instead."""
        if not _torch.has_composite_kernel(overload):
            return self._copy_node(node)
        # The kinds of the arguments decide if rules act on the operations that it calls.
        leaves = _torch.tree_leaves(filled(self.new((node.args, node.kwargs))))
        kinds = [(v.dtype, v.dim()) if isinstance(v, Tensor) else repr(v) for v in leaves]
        key = overload, tuple(kinds)
        recording = None
        if key not in self._untouched:
            recording = self._recorded_composite(node, overload, precisions)
        if recording is not None:
            graph, operands = recording
            length, changes = len(self.graph.nodes), self.changes
            casts, env = dict(self._casts), dict(self._env)
            self._env.update(zip(placeholders(graph.graph), operands, strict=True))
            result = self.write(graph.graph, graph, precisions)
            self._env = env
            if self.changes != changes:
                return result
            self._casts = casts
            for new in list(self.graph.nodes)[: length - 1 : -1]:
                self.graph.erase_node(new)
        self._untouched.add(key)
        return self._copy_node(node)

    def _recorded_composite(
        self, node: fx.Node, overload: OpOverload, precisions: Precisions
    ) -> tuple[fx.GraphModule, list[Any]] | None:
        """Return the graph of the operations that a composite operation calls, and the nodes of its inputs.

        It is recorded in the regions in force, because some operations choose the next ones by the dtypes that casts
        have given their values.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = _torch.tree_flatten(self.new((node.args, node.kwargs)))
        operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

        def calls(*inputs: Any) -> Any:
            rest = iter(inputs)
            filled = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            args, kwargs = _torch.tree_unflatten(filled, spec)
            return _torch.run_composite(overload, args, kwargs)

        fake = _torch.fake_tensor_context(self._fake_mode)
        with in_regions(precisions), dtype_errors.fake_as_real(), fake:
            record = make_fx(calls, _WITHOUT_SYMBOLS, pre_dispatch=True)
            traced = record(*[leaf.meta["val"] for leaf in operands])
        traced.graph.eliminate_dead_code()
        for inner in traced.graph.nodes:
            inner.meta |= {key: node.meta[key] for key in _COPIED if key in node.meta}
        if any(inner.op == "get_attr" for inner in traced.graph.nodes):
            raise ExportError(f"{overload} creates constants, which this graph cannot contain")
        called = {inner.target for inner in traced.graph.nodes}
        return None if overload in called else (traced, operands)

    def _copy_node(self, node: fx.Node) -> fx.Node:
        """Write a node unchanged, with the new arguments."""
        args, kwargs = self.new((node.args, node.kwargs))
        return self.add(node.target, args, kwargs, node, recorded=self._has_same_dtypes(node))

    def _dtype_check(self, node: fx.Node) -> fx.Node:
        """Write a check of a tensor's dtype with its new dtype; strict export records some dtypes without casts."""
        (source, *rest), kwargs = self.new((node.args, node.kwargs))
        if kwargs.get("dtype") is not None:
            kwargs = {**kwargs, "dtype": source.meta["val"].dtype}
        new = self.graph.create_node("call_function", node.target, (source, *rest), kwargs)
        new.meta = {**node.meta}
        return new

    def add(
        self, target: Any, args: Any, kwargs: Any, place: fx.Node, *, recorded: bool = False
    ) -> fx.Node:
        """Write one call in place of a node of the old graph; if `recorded`, with the fake value of `place`."""
        if target in _PRODUCTS and not kwargs:
            folded = self._folded_product(target, args, place)
            if folded is not None:
                return folded
        new = self.graph.create_node("call_function", target, args, kwargs, name=place.name)
        new.meta = {**place.meta}
        if not recorded:
            try:
                new.meta["val"] = self._value_of(new, place)
            except BaseException:  # a policy that promotes writes it again, in other dtypes
                self.graph.erase_node(new)
                raise
            new.meta.pop("tensor_meta", None)
        if target is not place.target:
            new.meta.pop("unbacked_bindings", None)
        if writes(new):
            self._casts.clear()
        if args and isinstance(args[0], fx.Node) and args[0] in self._trained and _is_view(new):
            self._trained.add(new)
        return new

    def _folded_product(self, target: Any, args: Any, place: fx.Node) -> fx.Node | None:
        """Write a product with a folded batch if PyTorch folds it because a weight requires a gradient (2.13).

        No weight of a program requires one. PyTorch folds the batch of a contiguous factor, too, with the same bits.
        """
        other, weight, *bias = args
        is_left = weight not in self._trained
        if is_left:
            other, weight = weight, other
        value, dims = other.meta["val"], weight.meta["val"].dim()
        if weight not in self._trained or value.dim() < 3 or dims > 2:
            return None
        is_swapped = is_left and dims == 2
        if not is_swapped and _is_foldable(value.mT if is_left else value):
            return None
        self.changes += 1

        def write(operation: Any, *args: Any) -> fx.Node:
            return self.add(operation, args, {}, place)

        rows = write(_aten.contiguous.default, write(_aten.mT.default, other) if is_left else other)
        if is_swapped or target is _aten.linear.default:
            weight = write(_aten.t.default, weight)
        product = write(_aten.matmul.default, rows, weight)
        if is_swapped:
            return write(_aten.contiguous.default, write(_aten.mT.default, product))
        return write(_aten.add.Tensor, product, *bias) if any(bias) else product

    def _value_of(self, new: fx.Node, place: fx.Node) -> Any:
        args, kwargs = filled((new.args, new.kwargs))
        real = None
        if isinstance(new.target, OpOverload) and dtype_errors.is_mixed((args, kwargs)):
            real = dtype_errors.result_on_zeros(new.target, args, kwargs)
        with _torch.fake_tensor_context(self._fake_mode):
            value = new.target(*args, **kwargs)  # type: ignore[operator]
            if real is not None and not isinstance(real, RuntimeError):  # the program will raise it
                value = retyped(value, real)  # some fake results have other dtypes (2.13)
        if new.target is place.target and place.meta.get("unbacked_bindings"):
            # Sizes that depend on data have names already: only the dtype is new.
            return retyped(place.meta.get("val"), value)
        return value

    def _has_same_dtypes(self, node: fx.Node) -> bool:
        """Return True if the recorded value of a node without a rule is still valid: its arguments' dtypes are equal.

        Where strict export records a region inside the model, the recorded dtypes are those without the region.
        """
        if "val" not in node.meta:
            return True
        if _torch.has_composite_kernel(node.target) and not node.meta.get("unbacked_bindings"):
            return False
        old = node.all_input_nodes
        return all(
            dtypes_of(each) == dtypes_of(self._env[each]) for each in old if each.op != "get_attr"
        )

    def cast(self, source: fx.Node, dtype: torch.dtype, place: fx.Node) -> fx.Node:
        """Return the node that casts a value; repeated casts share one node until something writes."""
        self.changes += 1
        existing = self._casts.get((source, dtype))
        if existing is not None:
            return existing
        name = f"{source.name}_{dtype_name(dtype)}"
        new = self.graph.create_node("call_function", CAST, (source, dtype), name=name)
        new.meta = {key: place.meta[key] for key in _COPIED if key in place.meta}
        with _torch.fake_tensor_context(self._fake_mode):
            new.meta["val"] = source.meta["val"].to(dtype)
        self._casts[source, dtype] = new
        # Regions keep the cast of a whole weight.
        if source in self._trained and source.op == "placeholder":
            self._trained.add(new)
        return new

    # Regions, branches and loops

    def _inlined(self, node: fx.Node, position: int, precisions: Precisions) -> Any:
        """Write the body of a region, or of another operator with one body, in place of the operator."""
        args = self.new(node.args)
        body = args[position]
        if position == INLINED["wrap_with_autocast"]:
            precisions = _inside_region(precisions, *args[:4])
            self.changes += 1
        operands = [arg for arg in args[position + 1 :] if not isinstance(arg, (str, type(None)))]
        inputs = placeholders(body.graph)
        operands = operands[len(operands) - len(inputs) :]
        env = dict(self._env)
        self._env.update(zip(inputs, operands, strict=True))
        result = self.write(body.graph, body, precisions)
        self._env = env
        return result

    def _branch_or_loop(self, node: fx.Node, precisions: Precisions) -> fx.Node:
        layout = layout_of(node)
        args, kwargs = self.new((node.args, node.kwargs))
        operands = dict(enumerate(self.new(layout.changing)))
        operands |= dict(enumerate(self.new(layout.fixed), layout.before))
        replaced: dict[int, fx.Node] = {}
        result: Any = None
        for body in (self._env[each] for each in layout.bodies):
            inputs = placeholders(body.graph)
            values = [each.meta.get("val") for each in inputs]
            for index, operand in operands.items():
                if isinstance(operand, fx.Node):
                    values[index] = retyped(values[index], value_of(operand))
            writer = GraphRewriter(self._fake_mode, inputs, values)
            result = writer.write(body.graph, body, precisions)
            writer.graph.output(result)
            writer.graph.lint()
            name = f"body_{len(self.modules)}"
            self.modules[name] = fx.GraphModule(dict(writer.modules), writer.graph)
            replaced[id(body)] = self.graph.get_attr(name)
        new_args = tuple(replaced.get(id(arg), arg) for arg in args)
        new = self.graph.create_node("call_function", node.target, new_args, kwargs, name=node.name)
        new.meta = {**node.meta}
        if replaced:
            new.meta["val"] = retyped(node.meta["val"], map_arg(result, value_of))
        self._casts.clear()
        return new


class _OperationWriter(_torch.DispatchMode):
    """A dispatch mode that writes the operations and casts of a kernel, which gets the fake values of nodes."""

    def __init__(self, rewriter: GraphRewriter, place: fx.Node) -> None:
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
            self._rewriter.changes += 1
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
                        call = _aten.sym_size.int, (node, dim), {}
                        with self._running():
                            return self._rewriter.add(*call, self._place)
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
        if func is _aten.copy_.default:
            return self._write(func, *self._call(args, kwargs))
        if self.writes_all and func.namespace != "prim":  # prim: reads a device
            self._rewriter.changes += 1
            return self._write(func, *self._call(args, kwargs))
        return func(*args, **kwargs)


def _is_view(node: fx.Node) -> bool:
    """Return True if the result of a node is a view of its first argument that requires a gradient as it does."""
    is_cast = dtypes_of(node)[:1] != dtypes_of(node.args[0])
    return kind_of(node.target).is_view and not is_cast and node.target is not _aten.detach.default


def _is_foldable(value: Tensor) -> bool:
    """Return True if all dimensions of a tensor but the last are one dimension of its memory."""
    pairs = zip(value.stride()[:-2], value.stride()[1:-1], value.shape[1:-1], strict=True)
    return all(outer == inner * size for outer, inner, size in pairs)


def _inside_region(
    precisions: Precisions, device: str, dtype: torch.dtype | None, enabled: bool, policy_text: Any
) -> Precisions:
    """Return the state of the regions inside a region of the graph."""
    outer = precisions.get(device)
    lower = dtype or (outer.dtype if outer else torch.get_autocast_dtype(device))
    policy = policy_of_region(policy_text) or (outer.policy if outer else Policy.load("torch"))
    return {**precisions, device: RegionState(device, lower, enabled, policy)}


def _check_writable(here: RegionState, overload: OpOverload, values: Any) -> None:
    """Refuse an operation without a rule whose kernel calls operations with rules, depending on values."""
    if any(is_eligible(tensor, here.device_type) for tensor in tensors_in(values)):
        name = overload.name().removeprefix("aten::")
        raise ExportError(
            f"{name} calls operations that the policy {here.policy.name!r} has rules for, and its values decide which: "
            f"a graph cannot contain that. {cures.EXPORT_RULE(name=name)}"
        )
