"""Compilation of a recorded optimizer step to a program that reads and writes each element once.

Invariants:

- a program serves all parameters with the same recorded step, of any size and shape: they are passed as rows;
- it reads tensors in 16 bits, computes as the optimizer does, and writes parameter and states;
- all writes are complete when it returns; if it cannot be compiled, it has written nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from precast._torch import COPY_IN_DTYPE
from precast.optim import rounding
from precast.optim.rounding import Rounding
from precast.optim.step_recorder import RecordedStep, StepArgument, StepCall

__all__ = ["ProgramKey", "StepProgram", "program", "row"]

StepProgram = Callable[[Sequence[Tensor], int], None]
"""Takes a recorded step; called with tensors that are contiguous in memory, and the number of elements to process.

The tensors are those of the recording, one tensor of float32 scalars (k,), a seed for each two tensors (int32) if it
takes seeds, the rounding errors of the parameter with "kahan", and the output memory of the parameter and its rounding
errors if they are written elsewhere.
"""

_aten: Final[Any] = torch.ops.aten
_GRADIENT: Final = 1


class ProgramKey(NamedTuple):
    """The properties that a program is compiled for."""

    recorded: RecordedStep
    stored: tuple[torch.dtype, ...]
    """The stored dtype of each recorded tensor; states in bfloat16 are rounded stochastically."""
    is_scaled: bool
    """True if gradients are multiplied by the first scalar before the step reads them."""
    keeps_gradient: bool
    """True if writes of the step to the gradient are dropped."""
    rounding: Rounding
    """The rounding of the parameter."""

    @property
    def writes_elsewhere(self) -> bool:
        """True if it writes a bfloat16 parameter to other memory, which the caller copies.

        In code with float32, Inductor reads and writes half a register of bfloat16 at a time. In place, each read would
        overlap the previous write, and the processor would wait for it: nearly half of the whole time.
        """
        return torch.float32 in self.stored[_GRADIENT + 1 :]

    @property
    def takes_seeds(self) -> bool:
        """True if some result is rounded stochastically."""
        states = self.stored[_GRADIENT + 1 :]
        return self.rounding == "stochastic" or torch.bfloat16 in states


_programs: Final[dict[ProgramKey, StepProgram]] = {}


def program(key: ProgramKey) -> StepProgram:
    """Return the program of a recorded step. Its first call compiles it, and raises the compiler's errors."""
    existing = _programs.get(key)
    if existing is not None:
        return existing
    compiled = torch.compile(
        _module(key).forward,
        dynamic=True,
        fullgraph=True,
        # The key has everything that guards would check. The number of elements is an argument, and the number of
        # threads may change after the compilation.
        options={
            "guard_filter_fn": lambda guards: [False for _ in guards],
            "cpp.dynamic_threads": True,
        },
    )
    recorded = len(key.stored)
    small = {recorded, recorded + 1} if key.takes_seeds else {recorded}

    def run(tensors: Sequence[Tensor], count: int) -> None:
        part = range(count)
        compiled(*[t if i in small else row(t, part) for i, t in enumerate(tensors)])

    _programs[key] = run
    return run


def row(tensor: Tensor, part: range) -> Tensor:
    """Return elements of a tensor in memory order; not as a view, because a program would get the base of a view."""
    return tensor.data.as_strided_((len(part),), (1,), tensor.storage_offset() + part.start)


def _module(key: ProgramKey) -> fx.GraphModule:
    recorded, graph = key.recorded, fx.Graph()
    tensors = [graph.placeholder(f"tensor_{i}") for i in range(len(recorded.dtypes))]
    scalars = graph.placeholder("scalars")
    seeds = graph.placeholder("seeds") if key.takes_seeds else None
    rest = graph.placeholder("rest") if key.rounding == "kahan" else None
    outputs = rest, tensors[0]
    if key.writes_elsewhere:
        rest_out = None if rest is None else graph.placeholder("rest_out")
        outputs = rest_out, graph.placeholder("out")
    first_scalar = int(key.is_scaled)
    values: dict[int, fx.Node] = {}
    for number, (tensor, dtype) in enumerate(zip(tensors, recorded.dtypes, strict=True)):
        values[-1 - number] = _cast(graph, tensor, key.stored[number], dtype)
    if rest is not None:
        values[-1] = graph.call_function(_aten.add, (values[-1], rest))
    if key.is_scaled:
        scaled = values[-1 - _GRADIENT], _scalar(graph, scalars, 0)
        values[-1 - _GRADIENT] = graph.call_function(_aten.mul, scaled)

    def node_of(argument: StepArgument) -> Any:
        if argument.kind == "value":
            return values[argument.content]
        if argument.kind == "scalar":
            return _scalar(graph, scalars, argument.content + first_scalar)
        return argument.content

    for number, call in enumerate(recorded.calls):
        values[number] = _write(graph, call, node_of)
    for number, (tensor, result) in enumerate(zip(tensors, recorded.results, strict=True)):
        if result == -1 - number or (number == _GRADIENT and key.keeps_gradient):
            continue
        value = values[result]
        if key.stored[number] is torch.bfloat16 and number != _GRADIENT:
            rounded = _rounded(
                graph, value, key.rounding if number == 0 else "stochastic", seeds, number
            )
            if rest is not None and number == 0:
                lost = graph.call_function(_aten.sub, (value, rounded))
                graph.call_function(_aten.copy_, (outputs[0], lost))
            value = rounded
        graph.call_function(_aten.copy_, (tensor if number else outputs[1], value))
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


def _cast(graph: fx.Graph, node: fx.Node, of: torch.dtype, to: torch.dtype) -> fx.Node:
    return node if of is to else graph.call_function(COPY_IN_DTYPE, (node,), {"dtype": to})


def _rounded(
    graph: fx.Graph, value: fx.Node, how: Rounding, seeds: fx.Node | None, number: int
) -> fx.Node:
    """Return a float32 value rounded to bfloat16's precision."""
    if how != "stochastic":
        return graph.call_function(rounding.nearest, (value,))
    assert seeds is not None
    seed = graph.call_function(_aten.select, (seeds, 0, number // 2))
    return graph.call_function(rounding.stochastic, (value, seed, number % 2))


def _scalar(graph: fx.Graph, scalars: fx.Node, number: int) -> fx.Node:
    return graph.call_function(_aten.select, (scalars, 0, number))


def _write(graph: fx.Graph, call: StepCall, node_of: Callable[[StepArgument], Any]) -> fx.Node:
    args = [node_of(each) for each in call.args]
    kwargs = {key: node_of(each) for key, each in call.kwargs}

    def op(name: str, *operands: Any) -> fx.Node:
        return graph.call_function(getattr(_aten, name), operands)

    alpha, value = kwargs.get("alpha"), kwargs.get("value")
    if isinstance(alpha, fx.Node):
        return op(call.name, args[0], op("mul", args[1], alpha))
    if isinstance(value, fx.Node):
        # In the order of PyTorch's kernels, so that rounding is the same.
        last = "mul" if call.name == "addcmul" else "div"
        return op("add", args[0], op(last, op("mul", args[1], value), args[2]))
    return graph.call_function(getattr(_aten, call.name), tuple(args), kwargs)
