"""Exported graphs: special operators, fake tensors, and decompositions of composite operations.

Invariant: the modules that `torch.export` needs are not imported before a program exports.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "COPY_IN_DTYPE",
    "DTYPE_CHECK",
    "drop_log_on_error",
    "fake_mode_of",
    "fake_tensor_context",
    "has_composite_kernel",
    "higher_order_name",
    "is_fake",
    "run_composite",
    "selects_operations_by_value",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "updated_program",
    "writes_argument",
]

COPY_IN_DTYPE: Final = torch.ops.aten._to_copy.default
"""The operator of a cast below the autocast keys (2.13)."""

DTYPE_CHECK: Final = torch.ops.aten._assert_tensor_metadata.default
"""The operator that checks a tensor's dtype in an exported program (2.13)."""


def writes_argument(operation: OpOverload) -> bool:
    """Return True if the schema of an operation has an argument that it writes (2.13)."""
    return bool(operation._schema.is_mutable)


def has_composite_kernel(target: Any) -> bool:
    """Return True if an operation has a composite kernel in C++, with or without one in Python (2.13)."""
    return isinstance(target, OpOverload) and _composite_key(target) is not None


def _composite_key(overload: OpOverload) -> Any:
    """Return the dispatch key of the composite kernel of an operation; None if it has none.

    The derivative of most composite operations is that of the operations that they call. `_trilinear` has a separate
    derivative, and still calls operations that autocast sees.
    """
    keys = torch._C.DispatchKey
    key = (
        keys.CompositeExplicitAutogradNonFunctional
        if overload.name() == "aten::_trilinear"
        else keys.CompositeImplicitAutograd
    )
    return key if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key) else None


def selects_operations_by_value(target: Any) -> bool:
    """Return True if the values of its arguments decide which operations, seen by autocast, a kernel calls (2.13)."""
    return isinstance(target, OpOverload) and target.name() == "aten::linalg_matrix_exp"


def fake_mode_of(nodes: Iterable[torch.fx.Node]) -> Any:
    """Return the fake tensor mode of an exported graph's inputs (2.13)."""
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return torch._guards.detect_fake_mode(values)


def is_fake(value: Any) -> bool:
    """Return True for a fake tensor, as used to record a program (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def higher_order_name(target: Any) -> str | None:
    """Return the name of a higher-order operator, such as "cond"; None for other operations (2.13)."""
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else None


def run_composite(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the decomposition of a composite operation (2.13).

    Some operations also have a decomposition in Python, which supports more symbolic sizes than the one in C++ and is
    preferred. For recurrent layers its results have other bits, so C++ is used. For resizing it calls no operation that
    has a rule, and C++ does not support symbolic sizes, so `_resize_by_size` is used. Function modes are disabled,
    because they would call the operation itself.
    """
    key = _composite_key(overload)
    python_kernel = overload.py_kernels.get(key)
    with torch._C.DisableTorchFunction():
        if _RESIZES.match(overload.name()):
            return _resize_by_size(overload, *args, **kwargs)
        if python_kernel is not None and overload.overloadpacket.__name__ not in _RECURRENT:
            return python_kernel(*args, **kwargs)
        try:
            return overload._op_dk(key, *args, **kwargs)
        except RuntimeError:
            if python_kernel is None:
                raise
            return python_kernel(*args, **kwargs)  # symbolic sizes


_RECURRENT: Final = ("gru", "lstm", "rnn_relu", "rnn_tanh")
_RESIZES: Final = re.compile(r"aten::_?upsample_\w+\.vec$")


def _resize_by_size(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Resize by the overload that takes a size, as aten/src/ATen/native/UpSample.h does (2.13)."""
    names = [argument.name for argument in overload._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    image, size, scales = (
        arguments.pop(name) for name in ("input", "output_size", "scale_factors")
    )
    sides = image.shape[2:]
    if size is None:
        factors = [int(factor) if factor == int(factor) else factor for factor in scales]
        size = [torch.sym_int(side * factor) for side, factor in zip(sides, factors, strict=True)]
    by_size = overload.overloadpacket.default
    return by_size(image, size, *arguments.values(), *(scales or [None] * len(sides)))


def fake_tensor_context(fake_mode: Any) -> Any:
    """Return a context in which operations run on fake tensors, as in `torch.export` (2.13)."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(fake_mode)
    stack.enter_context(torch.no_grad())
    stack.enter_context(enable_python_dispatcher())
    return stack


@contextmanager
def drop_log_on_error() -> Iterator[None]:
    """Delay the output of PyTorch's loggers and to stderr, and drop it after an error (2.13).

    When the exporter raises an error, it also logs the traceback and prints the graph so far.
    """
    output = io.StringIO()
    names = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "torch"]
    handlers = {each for name in names for each in logging.getLogger(name).handlers}
    streams = {h: h.setStream(output) for h in handlers if type(h) is logging.StreamHandler}
    try:
        with redirect_stderr(output):
            yield
    except BaseException:
        output = io.StringIO()
        raise
    finally:
        for handler, stream in streams.items():
            handler.setStream(stream)
        sys.stderr.write(output.getvalue())


def updated_program(program: Any, **changes: Any) -> Any:
    """Return an exported program with another `graph_module`, `graph_signature`, `state_dict` or `constants` (2.13)."""
    return program._update(**changes)
