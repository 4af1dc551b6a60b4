"""Compiles what an optimizer does to one parameter to a program that reads and writes each number once.

Invariants:

- a program serves all parameters to which the same is done, whatever their size: they are given as rows of numbers;
- it reads the gradient in its own dtype, computes as the optimizer does, and writes parameter, states and copies;
- whatever it is to write, it has written when it returns; where it cannot be compiled, it has written nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from precast._torch import COPY_IN_DTYPE
from precast.weights.step_recorder import Argument, Call, Recorded

__all__ = ["ProgramKey", "program"]

_aten: Final[Any] = torch.ops.aten
_GRADIENT: Final = 1


class ProgramKey(NamedTuple):
    """What a program is compiled for."""

    recorded: Recorded
    gradient: torch.dtype
    """What the gradient is stored in; the step computes with float32."""
    is_scaled: bool
    """Whether the first scalar is what gradients are multiplied by before the step sees them."""
    keeps_gradient: bool
    """Whether what the step writes to the gradient is dropped."""
    copies: tuple[torch.dtype, ...]


_programs: Final[dict[ProgramKey, Callable[..., Any]]] = {}


def program(key: ProgramKey, name: str) -> Callable[..., Any]:
    """What carries out a recorded step.

    It is called with its tensors as rows of numbers (n,), one tensor of float32 scalars (k,), and the copies (n,). The
    first call compiles it, which raises what the compiler raises; `name` is the optimizer's, for what is said then.
    """
    made = _programs.get(key)
    if made is None:
        compiled = torch.compile(_module(key), dynamic=True, fullgraph=True)

        def first(*tensors: Tensor) -> None:
            with _said(name):
                compiled(*tensors)
            _programs[key] = compiled

        return first
    return made


def _module(key: ProgramKey) -> fx.GraphModule:
    recorded, graph = key.recorded, fx.Graph()
    tensors = [graph.placeholder(f"tensor_{i}") for i in range(len(recorded.dtypes))]
    scalars = graph.placeholder("scalars")
    copies = [graph.placeholder(f"copy_{i}") for i in range(len(key.copies))]
    begun = int(key.is_scaled)
    values: dict[int, fx.Node] = {-1 - i: tensor for i, tensor in enumerate(tensors)}
    gradient = tensors[_GRADIENT]
    if key.gradient is not recorded.dtypes[_GRADIENT]:
        to: dict[str, Any] = {"dtype": recorded.dtypes[_GRADIENT]}
        gradient = graph.call_function(COPY_IN_DTYPE, (gradient,), to)
    if key.is_scaled:
        gradient = graph.call_function(_aten.mul, (gradient, _scalar(graph, scalars, 0)))
    values[-1 - _GRADIENT] = gradient

    def given(argument: Argument) -> Any:
        if argument.kind == "value":
            return values[argument.what]
        if argument.kind == "scalar":
            return _scalar(graph, scalars, argument.what + begun)
        return argument.what

    for number, call in enumerate(recorded.calls):
        values[number] = _write(graph, call, given)
    for number, (tensor, result) in enumerate(zip(tensors, recorded.results, strict=True)):
        if result != -1 - number and not (number == _GRADIENT and key.keeps_gradient):
            graph.call_function(_aten.copy_, (tensor, values[result]))
    for copy in copies:
        graph.call_function(_aten.copy_, (copy, values[recorded.results[0]]))
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


def _scalar(graph: fx.Graph, scalars: fx.Node, number: int) -> fx.Node:
    return graph.call_function(_aten.select, (scalars, 0, number))


def _write(graph: fx.Graph, call: Call, given: Callable[[Argument], Any]) -> fx.Node:
    args = [given(each) for each in call.args]
    kwargs = {key: given(each) for key, each in call.kwargs}

    def op(name: str, *operands: Any) -> fx.Node:
        return graph.call_function(getattr(_aten, name), operands)

    alpha, value = kwargs.get("alpha"), kwargs.get("value")
    if isinstance(alpha, fx.Node):
        return op(call.name, args[0], op("mul", args[1], alpha))
    if isinstance(value, fx.Node):
        # In the order of PyTorch's kernels, so that it rounds as they do.
        last = "mul" if call.name == "addcmul" else "div"
        return op("add", args[0], op(last, op("mul", args[1], value), args[2]))
    return graph.call_function(getattr(_aten, call.name), tuple(args), kwargs)


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Says on stderr that something is compiled, where it takes longer than a second."""
    begun = time.perf_counter()

    def say() -> None:
        print(
            f"precast: torch.compile compiles the step of {name} ...", file=sys.stderr, flush=True
        )

    timer = threading.Timer(1.0, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - begun
    if seconds > 1:
        print(
            f"precast: the step of {name} is compiled, {seconds:.1f} s", file=sys.stderr, flush=True
        )
