"""Writes an exported graph anew, with a policy's casts as nodes and without regions.

`torch.export` records operations above the autocast keys: a graph exported in a region has the operations of the
program, and none of the casts. Here every operation is run once more, on tensors without numbers, as the kernel of the
policy would run it, and what that kernel does is written down.

Invariants:

- what a region says is in force for its part of the graph, also inside branches and loops; no region is left;
- an operation that the policy does not touch stays the node that it was;
- an operation without a rule that calls some with one is replaced by what it calls, and only then; what it calls is
  recorded in the regions in force, where its values have the dtypes that they will have;
- a value that the graph writes is never taken for what it was before.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from precast import _torch
from precast._internal.pytree import tensors_in
from precast._torch import OpOverload
from precast.autocast_mode.region import policy_said
from precast.engine import reference_kernels
from precast.engine.operation import is_eligible
from precast.errors import ExportError
from precast.shipping import dtype_errors
from precast.shipping.control_flow import INLINED, Layout, layout_of
from precast.shipping.graph_nodes import (
    CAST,
    cast_source,
    dtypes_of,
    filled,
    placeholders,
    retyped,
    value_of,
    writes,
)
from precast.shipping.graph_policy import (
    InForce,
    Precisions,
    Treatment,
    in_force_for,
    in_regions,
    treatment,
    written_operation,
)
from precast.shipping.operation_writer import OperationWriter

__all__ = ["GraphRewriter"]

_aten: Final = torch.ops.aten
_COPIED: Final = ("nn_module_stack", "stack_trace", "source_fn_stack", "from_node", "custom")
"""What a cast says of the place in the program that it comes from."""


def _unsafe_chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    size = tensor.shape[dim]
    return _aten.unsafe_split.Tensor(tensor, max(1, (size + chunks - 1) // chunks), dim)


_WITHOUT_SYMBOLS: Final = {_aten.unsafe_chunk.default: _unsafe_chunk}
"""What PyTorch computes in C++ for sizes with numbers only, although sizes without numbers would do (2.13)."""


class GraphRewriter:
    """Writes one graph; each graph of a branch or loop inside it gets an object of its own.

    Args:
        fake_mode: the mode that the graph's tensors without numbers belong to.
        inputs: the inputs of the old graph.
        values: their values, without numbers, if they are others than before.
        weights: which of them are the same at each call: parameters, buffers and constants.
    """

    def __init__(
        self,
        fake_mode: Any,
        inputs: Sequence[fx.Node],
        values: Sequence[Any] | None = None,
        weights: Sequence[bool] = (),
    ) -> None:
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        """The bodies of the new graph's branches and loops."""
        self._fake_mode = fake_mode
        self._changes = 0
        """How often an operation has been written otherwise than it was."""
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._untouched: set[object] = set()
        """Composite operations, with what they are called on, that call nothing with a rule."""
        self._env: dict[fx.Node, Any] = {}
        self._weights: set[fx.Node] = set()
        values = [node.meta.get("val") for node in inputs] if values is None else values
        for index, (node, value) in enumerate(zip(inputs, values, strict=True)):
            new = self.graph.placeholder(node.name)
            new.name = new.target = (
                node.name
            )  # a signature knows it by that; a graph would rename `input`
            new.meta = {**node.meta, "val": value}
            self._env[node] = new
            if index < len(weights) and weights[index]:
                self._weights.add(new)

    def write(self, graph: fx.Graph, owner: fx.GraphModule, precisions: Precisions) -> Any:
        """Writes all that a graph computes.

        Args:
            graph: the graph; its inputs are written already.
            owner: the module that has the bodies of its branches and loops.
            precisions: what is in force where it begins.

        Returns:
            What the graph gives back, in nodes of the new graph.
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
        """The new nodes in the place of the old ones in an argument."""
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
        return self._as_it_was(node)

    def _item(self, node: fx.Node) -> Any:
        whole, index = self.new(node.args)
        if isinstance(whole, (tuple, list)):
            return whole[index]
        new = self.graph.create_node("call_function", node.target, (whole, index), name=node.name)
        new.meta = {**node.meta, "val": whole.meta["val"][index]}
        new.meta.pop("tensor_meta", None)
        return new

    # Operations

    def _operation(self, node: fx.Node, overload: OpOverload, precisions: Precisions) -> Any:
        if overload is _torch.DTYPE_CHECK:
            return self._checked_dtype(node)
        args, kwargs = self._values(node)
        here = in_force_for(precisions, (args, kwargs))
        if here is None:
            return self._as_it_was(node)
        writer = OperationWriter(self, node)
        found = treatment(here, overload, writer.run)
        writer.writes_all = found.computes
        if found.retries and _is_mixed(here, (args, kwargs)):
            return self._retried(node, here, found, writer, precisions)
        if found.kernel is None:
            if _torch.calls_within(overload):
                _check_writable(here, overload, (args, kwargs))
            return self._what_it_calls(node, overload, precisions)
        with writer:
            return writer.nodes(found.kernel(None, args, kwargs))

    def _retried(
        self,
        node: fx.Node,
        here: InForce,
        found: Treatment,
        writer: OperationWriter,
        precisions: Precisions,
    ) -> Any:
        """Writes an operation on mixed dtypes: as it runs, or in the widest where it would raise an error."""
        overload = node.target
        assert isinstance(overload, OpOverload)
        args, kwargs = self._values(node)
        op = written_operation(here, overload, writer.run)
        if found.kernel is not None:
            writer.finds_errors = True
            kernel = reference_kernels.promoting(op, found.kernel)
            with writer:
                return writer.nodes(kernel(None, args, kwargs))
        error = dtype_errors.error_of(overload, args, kwargs)
        if error is None:
            return self._what_it_calls(node, overload, precisions)
        with writer:
            return writer.nodes(reference_kernels.retry_promoted(op, error, args, kwargs))

    def _what_it_calls(self, node: fx.Node, overload: OpOverload, precisions: Precisions) -> Any:
        """Writes an operation without a rule; where rules act on what it calls, all of that in its place."""
        if not _torch.calls_others(overload):
            return self._as_it_was(node)
        key = self._called_on(node, overload)
        opened = None if key in self._untouched else self._opened(node, overload, precisions)
        if opened is None:
            self._untouched.add(key)
            return self._as_it_was(node)
        graph, given = opened
        length, changes = len(self.graph.nodes), self._changes
        casts, env = dict(self._casts), dict(self._env)
        self._env.update(zip(placeholders(graph.graph), given, strict=True))
        result = self.write(graph.graph, graph, precisions)
        self._env = env
        if self._changes != changes:
            return result
        self._casts = casts
        for new in list(self.graph.nodes)[: length - 1 : -1]:
            self.graph.erase_node(new)
        self._untouched.add(key)
        return self._as_it_was(node)

    def _called_on(self, node: fx.Node, overload: OpOverload) -> object:
        """What says whether rules act on what a composite operation calls: the operation and its arguments' kinds."""
        leaves = _torch.tree_leaves(self._values(node))
        kinds = [(v.dtype, v.dim()) if isinstance(v, Tensor) else repr(v) for v in leaves]
        return overload, tuple(kinds)

    def _opened(
        self, node: fx.Node, overload: OpOverload, precisions: Precisions
    ) -> tuple[fx.GraphModule, list[Any]] | None:
        """The graph of what a composite operation calls, and the nodes that are its inputs.

        It is recorded in the regions that are in force: some operations look at the dtypes that casts have given to
        their values, and choose by them what to call next.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = _torch.tree_flatten(self.new((node.args, node.kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

        def calls(*inputs: Any) -> Any:
            rest = iter(inputs)
            filled = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            args, kwargs = _torch.tree_unflatten(filled, spec)
            return _torch.run_composite(overload, args, kwargs)

        numberless = _torch.without_numbers(self._fake_mode)
        with in_regions(precisions), dtype_errors.as_with_numbers(), numberless:
            record = make_fx(calls, _WITHOUT_SYMBOLS, pre_dispatch=True)
            traced = record(*[leaf.meta["val"] for leaf in given])
        traced.graph.eliminate_dead_code()
        for inner in traced.graph.nodes:
            inner.meta |= {key: node.meta[key] for key in _COPIED if key in node.meta}
        called = [inner.target for inner in traced.graph.nodes if inner.op == "call_function"]
        constants = [inner for inner in traced.graph.nodes if inner.op == "get_attr"]
        if constants:
            raise ExportError(f"{overload} makes constants of its own, which a graph cannot hold")
        return None if overload in called else (traced, given)

    def _as_it_was(self, node: fx.Node) -> fx.Node:
        """Writes a node as it was, on what its arguments have become."""
        args, kwargs = self.new((node.args, node.kwargs))
        return self.add(node.target, args, kwargs, node, recorded=self._recorded(node))

    def _checked_dtype(self, node: fx.Node) -> fx.Node:
        """Writes a check of a tensor's dtype for the dtype that it has; strict export records some without casts."""
        (source, *rest), kwargs = self.new((node.args, node.kwargs))
        if kwargs.get("dtype") is not None:
            kwargs = {**kwargs, "dtype": source.meta["val"].dtype}
        new = self.graph.create_node("call_function", node.target, (source, *rest), kwargs)
        new.meta = {**node.meta}
        return new

    def _values(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        return filled(self.new((node.args, node.kwargs)))  # type: ignore[no-any-return]

    def add(
        self, target: Any, args: Any, kwargs: Any, place: fx.Node, *, recorded: bool = False
    ) -> fx.Node:
        """Writes one call with its value.

        Args:
            target: what is called.
            args: its arguments.
            kwargs: its named arguments.
            place: the node of the old graph that is being written.
            recorded: whether the value is that of `place`.
        """
        new = self.graph.create_node("call_function", target, args, kwargs, name=place.name)
        new.meta = {**place.meta}
        if not recorded:
            new.meta["val"] = self._value_of(new, place)
            new.meta.pop("tensor_meta", None)
        if target is not place.target:
            new.meta.pop("unbacked_bindings", None)
        if writes(new):
            self._casts.clear()
        return new

    def _value_of(self, new: fx.Node, place: fx.Node) -> Any:
        known = place.meta.get("val")
        args, kwargs = filled((new.args, new.kwargs))
        with _torch.without_numbers(self._fake_mode):
            value = new.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(new.target, OpOverload) and dtype_errors.is_mixed((args, kwargs)):
            value = self._as_with_numbers(new.target, args, kwargs, value)
        if new.target is place.target and place.meta.get("unbacked_bindings"):
            # The sizes that only the data says have names already: the dtype alone is new.
            return retyped(known, value)
        return value

    def _as_with_numbers(self, overload: OpOverload, args: Any, kwargs: Any, value: Any) -> Any:
        """The value of an operation on mixed dtypes, in the dtypes that tensors with numbers have."""
        real = dtype_errors.tried(overload, args, kwargs)
        if isinstance(real, RuntimeError):  # it is the program's to raise it
            return value
        with _torch.without_numbers(self._fake_mode):
            return dtype_errors.in_dtypes_of(real, value)

    def _recorded(self, node: fx.Node) -> bool:
        """Whether what was recorded of a node without a rule still holds: its arguments have the dtypes of then.

        Where strict export records a region inside the model, dtypes are those that hold without it.
        """
        if "val" not in node.meta:
            return True
        if _torch.calls_others(node.target) and not node.meta.get("unbacked_bindings"):
            return False
        old = node.all_input_nodes
        return all(
            dtypes_of(each) == dtypes_of(self._env[each]) for each in old if each.op != "get_attr"
        )

    def cast(self, source: fx.Node, dtype: torch.dtype, place: fx.Node) -> fx.Node:
        """The node that converts a value; one that nothing writes in between is converted once."""
        self._changes += 1
        known = self._casts.get((source, dtype))
        if known is not None:
            return known
        name = f"{source.name}_{str(dtype).removeprefix('torch.')}"
        new = self.graph.create_node("call_function", CAST, (source, dtype), name=name)
        new.meta = {key: place.meta[key] for key in _COPIED if key in place.meta}
        with _torch.without_numbers(self._fake_mode):
            new.meta["val"] = source.meta["val"].to(dtype)
        self._casts[source, dtype] = new
        return new

    def changed(self) -> None:
        """Notes that an operation was written otherwise than it was."""
        self._changes += 1

    # Regions, branches and loops

    def _inlined(self, node: fx.Node, position: int, precisions: Precisions) -> Any:
        """Writes the body of a region, or of what else calls one, in the place of the call."""
        args = self.new(node.args)
        body = args[position]
        if position == INLINED["wrap_with_autocast"]:
            precisions = _inside(precisions, *args[:4])
            self.changed()
        operands = [arg for arg in args[position + 1 :] if not isinstance(arg, (str, type(None)))]
        given = placeholders(body.graph)
        operands = operands[len(operands) - len(given) :]
        env = dict(self._env)
        self._env.update(zip(given, operands, strict=True))
        result = self.write(body.graph, body, precisions)
        self._env = env
        return result

    def _branch_or_loop(self, node: fx.Node, precisions: Precisions) -> fx.Node:
        layout = layout_of(node)
        args, kwargs = self.new((node.args, node.kwargs))
        fixed = [] if layout.fixed is None else list(args[layout.fixed])
        changing = list(self.new(layout.changing))
        bodies = [self._env[body] for body in layout.bodies]
        written = [self._body(body, precisions, changing, fixed, layout.before) for body in bodies]
        results = [body.result for body in written]
        fixed = self._hoisted(written, fixed, layout, node)
        replaced: dict[int, fx.Node] = {}
        for old, new_body in zip(bodies, written, strict=True):
            name = self._add_module(new_body)
            replaced[id(old)] = self.graph.get_attr(name)
        new_args = [replaced.get(id(arg), arg) for arg in args]
        if layout.fixed is not None:
            new_args[layout.fixed] = type(args[layout.fixed])(fixed)
        new = self.graph.create_node(
            "call_function", node.target, tuple(new_args), kwargs, name=node.name
        )
        new.meta = {**node.meta}
        if results:
            new.meta["val"] = retyped(node.meta["val"], map_arg(results[-1], value_of))
        self._casts.clear()
        return new

    def _body(
        self,
        body: fx.GraphModule,
        precisions: Precisions,
        changing: list[Any],
        fixed: list[Any],
        before: int,
    ) -> _Body:
        inputs = placeholders(body.graph)
        values = [node.meta.get("val") for node in inputs]
        weights = [False] * len(inputs)
        for index, operand in [*enumerate(changing), *enumerate(fixed, before)]:
            if isinstance(operand, fx.Node):
                values[index] = retyped(values[index], value_of(operand))
                weights[index] = index >= before and operand in self._weights
        writer = GraphRewriter(self._fake_mode, inputs, values, weights)
        result = writer.write(body.graph, body, precisions)
        writer.graph.output(result)
        return _Body(writer, result)

    def _hoisted(
        self, bodies: list[_Body], fixed: list[Any], layout: Layout, place: fx.Node
    ) -> list[Any]:
        """Casts weights before a branch or loop instead of in its bodies, and returns its operands then."""
        added: list[Any] = []
        for index, operand in enumerate(fixed):
            if not isinstance(operand, fx.Node) or operand not in self._weights:
                continue
            inputs = [placeholders(body.writer.graph)[layout.before + index] for body in bodies]
            for dtype in _dtypes_of_casts(inputs):
                added.append(self.cast(operand, dtype, place))
                for each, body in zip(inputs, bodies, strict=True):
                    body.take_cast(each, dtype, added[-1])
        kept = [
            index
            for index in range(len(fixed))
            if any(placeholders(b.writer.graph)[layout.before + index].users for b in bodies)
            or fixed[index] not in self._weights
        ]
        for body in bodies:
            for index in reversed(range(len(fixed))):
                if index not in kept:
                    node = placeholders(body.writer.graph)[layout.before + index]
                    body.writer.graph.erase_node(node)
        return [fixed[index] for index in kept] + added

    def _add_module(self, body: _Body) -> str:
        body.writer.graph.lint()
        name = f"body_{len(self.modules)}"
        self.modules[name] = fx.GraphModule(dict(body.writer.modules), body.writer.graph)
        return name


class _Body:
    """The new graph of a branch or a loop, and what it gives back."""

    def __init__(self, writer: GraphRewriter, result: Any) -> None:
        self.writer = writer
        self.result = result

    def take_cast(self, weight: fx.Node, dtype: torch.dtype, operand: fx.Node) -> None:
        """Takes a cast weight as one more input, in the place of the casts of that weight."""
        graph = self.writer.graph
        with graph.inserting_after(placeholders(graph)[-1]):
            new = graph.placeholder(f"{weight.name}_{str(dtype).removeprefix('torch.')}_given")
        new.meta = {**weight.meta, "val": operand.meta["val"]}
        for cast in [user for user in weight.users if _casts_to(user, weight) is dtype]:
            cast.replace_all_uses_with(new)
            graph.erase_node(cast)


def _inside(
    precisions: Precisions, device: str, dtype: torch.dtype | None, enabled: bool, said: Any
) -> Precisions:
    """What is in force inside a region of the graph."""
    from precast.policy.policy import Policy

    around = precisions.get(device)
    lower = dtype or (around.dtype if around else torch.get_autocast_dtype(device))
    policy = policy_said(said) or (around.policy if around else Policy.load("torch"))
    return {**precisions, device: InForce(device, lower, enabled, policy)}


def _check_writable(here: InForce, overload: OpOverload, values: Any) -> None:
    """Refuses an operation without a rule whose kernel calls operations with rules, as the numbers decide.

    Raises:
        ExportError: rules may act on `values`.
    """
    if any(is_eligible(tensor, here.device_type) for tensor in tensors_in(values)):
        name = overload.name().removeprefix("aten::")
        raise ExportError(
            f"{name} calls operations that the policy {here.policy.name!r} has rules for, and which of them it calls "
            "depends on its numbers: no graph can say that. Give it a rule of its own, as in "
            f'policy.replace(ops={{"{name}": "fp32"}}), or call it outside of regions'
        )


def _is_mixed(here: InForce, values: Any) -> bool:
    own = (t for t in tensors_in(values) if t.device.type == here.device_type)
    return len({t.dtype for t in own if t.is_floating_point()}) > 1


def _casts_to(node: fx.Node, source: fx.Node) -> torch.dtype | None:
    """The dtype that a node casts a value to; None where it does something else with it."""
    return node.args[1] if cast_source(node) is source else None  # type: ignore[return-value]


def _dtypes_of_casts(inputs: list[fx.Node]) -> list[torch.dtype]:
    """The dtypes that bodies cast one weight to; none where a body writes it."""
    users = [(user, node) for node in inputs for user in node.users]
    if any(writes(user) for user, _ in users):
        return []
    found = [_casts_to(user, node) for user, node in users]
    return list(dict.fromkeys(dtype for dtype in found if dtype is not None))
