"""Exported graphs: the operators that stand for regions, branches and loops, and what composite operations call.

Invariants:

- nothing here imports what `torch.export` needs before a program exports.
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
    "calls_others",
    "calls_within",
    "fake_mode_of",
    "higher_order_name",
    "is_fake",
    "log_of_what_succeeds",
    "run_composite",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "updated_program",
    "without_numbers",
    "writes_an_argument",
]

COPY_IN_DTYPE: Final = torch.ops.aten._to_copy.default
"""What a cast is below the autocast keys (2.13)."""

DTYPE_CHECK: Final = torch.ops.aten._assert_tensor_metadata.default
"""What an exported program checks a tensor's dtype with (2.13)."""


def writes_an_argument(operation: OpOverload) -> bool:
    """Whether an operation writes one of its arguments; only its schema says so (2.13)."""
    return bool(operation._schema.is_mutable)


def calls_others(target: Any) -> bool:
    """Whether an operation is made of others in C++, whatever Python has for it too (2.13)."""
    return isinstance(target, OpOverload) and _composite_key(target) is not None


def _composite_key(overload: OpOverload) -> Any:
    """The key of the kernel that calls other operations and nothing else; None for an operation without one.

    Most composite operations differentiate what they call, and have a kernel of that kind. A few have a derivative of
    their own and are still made of operations that autocast sees.
    """
    keys = torch._C.DispatchKey
    key = (
        keys.CompositeExplicitAutogradNonFunctional
        if overload.name() == "aten::_trilinear"
        else keys.CompositeImplicitAutograd
    )
    has = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
    return key if has else None


def calls_within(target: Any) -> bool:
    """Whether a kernel calls operations that autocast sees, and decides by its numbers which ones (2.13)."""
    return isinstance(target, OpOverload) and target.name() == "aten::linalg_matrix_exp"


def fake_mode_of(nodes: Iterable[torch.fx.Node]) -> Any:
    """The mode that the values of an exported graph's inputs belong to, which have no numbers (2.13)."""
    values = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return torch._guards.detect_fake_mode(values)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers, as programs are recorded with (2.13)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def higher_order_name(target: Any) -> str | None:
    """The name of an operator that takes graphs, such as "cond"; None for all else (2.13)."""
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else None


def run_composite(overload: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls what a composite operation is made of (2.13).

    Python has versions of some, which take sizes without numbers where those in C++ do not. For recurrent layers its
    results have other bits, so that C++ is asked. For resizing it calls none of the operations with rules, and C++
    takes no sizes without numbers: this file says what is called. A function mode would call the operation itself.
    """
    key = _composite_key(overload)
    in_python = overload.py_kernels.get(key)
    with torch._C.DisableTorchFunction():
        if _RESIZES.match(overload.name()):
            return _resized(overload, *args, **kwargs)
        if in_python is not None and overload.overloadpacket.__name__ not in _RECURRENT:
            return in_python(*args, **kwargs)
        try:
            return overload._op_dk(key, *args, **kwargs)
        except RuntimeError:
            if in_python is None:
                raise
            return in_python(*args, **kwargs)  # sizes without numbers


_RECURRENT: Final = ("gru", "lstm", "rnn_relu", "rnn_tanh")
_RESIZES: Final = re.compile(r"aten::_?upsample_\w+\.vec$")


def _resized(overload: OpOverload, *given: Any, **named: Any) -> Any:
    """Resizes by the operation that takes a size, as aten/src/ATen/native/UpSample.h does (2.13)."""
    names = [argument.name for argument in overload._schema.arguments]
    said = dict(zip(names, given, strict=False)) | named
    image, size, scales = (said.pop(name) for name in ("input", "output_size", "scale_factors"))
    sides = image.shape[2:]
    if size is None:
        whole = [int(by) if by == int(by) else by for by in scales]
        size = [torch.sym_int(side * by) for side, by in zip(sides, whole, strict=True)]
    by_size = overload.overloadpacket.default
    return by_size(image, size, *said.values(), *(scales or [None] * len(sides)))


def without_numbers(fake_mode: Any) -> Any:
    """A context in which operations run on the tensors without numbers of a mode, as in `torch.export` (2.13)."""
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(fake_mode)
    stack.enter_context(torch.no_grad())
    stack.enter_context(enable_python_dispatcher())
    return stack


@contextmanager
def log_of_what_succeeds() -> Iterator[None]:
    """Holds back what PyTorch logs, and drops it where an error is raised, which says it all (2.13).

    The exporter logs the tracebacks of errors that it raises, and a graph of what it recorded until then it prints.
    """
    held: list[tuple[logging.Handler, logging.LogRecord]] = []
    named = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "torch"]
    handlers = list({h: None for name in named for h in logging.getLogger(name).handlers})
    holders = [_Holder(handler, held) for handler in handlers]
    for handler, holder in zip(handlers, holders, strict=True):
        handler.addFilter(holder)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except BaseException:
        held.clear()
        printed = io.StringIO()
        raise
    finally:
        for handler, holder in zip(handlers, holders, strict=True):
            handler.removeFilter(holder)
        for handler, record in held:
            handler.handle(record)
        if printed.getvalue():
            sys.stderr.write(printed.getvalue())


class _Holder(logging.Filter):
    """Keeps the records of one handler for later."""

    def __init__(
        self, handler: logging.Handler, held: list[tuple[logging.Handler, logging.LogRecord]]
    ) -> None:
        super().__init__()
        self._handler, self._held = handler, held

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps a record, and lets it not pass."""
        self._held.append((self._handler, record))
        return False


def updated_program(program: Any, **changes: Any) -> Any:
    """An exported program with another graph, signature, weights and constants; only a private method makes one (2.13).

    Args:
        program: the program that it is made of.
        changes: `graph_module`, `graph_signature`, `state_dict` and `constants`.
    """
    return program._update(**changes)
