"""Compiles what an optimizer does to one parameter to a program that reads and writes each number once.

Invariants:

- a program serves all parameters to which the same is done, whatever their size and shape: they are rows of numbers;
- it reads tensors that are stored in 16 bits, computes as the optimizer does, and writes parameter and states;
- whatever it is to write, it has written when it returns; where it cannot be compiled, it has written nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx, nn

from precast._torch import COPY_IN_DTYPE, CompiledKernel, kernel_of
from precast.optim import rounding
from precast.optim.rounding import Rounding
from precast.optim.step_recorder import Argument, Call, Recorded

__all__ = ["Program", "ProgramKey", "program", "row"]

_aten: Final[Any] = torch.ops.aten
_GRADIENT: Final = 1


class ProgramKey(NamedTuple):
    """What a program is compiled for."""

    recorded: Recorded
    stored: tuple[torch.dtype, ...]
    """What each of the recorded tensors is stored in; states in bfloat16 are rounded stochastically."""
    is_scaled: bool
    """Whether the first scalar is what gradients are multiplied by before the step sees them."""
    keeps_gradient: bool
    """Whether what the step writes to the gradient is dropped."""
    rounding: Rounding | None
    """Of the parameter, where it is stored in bfloat16."""

    @property
    def writes_elsewhere(self) -> bool:
        """Whether it writes a parameter in bfloat16 to other memory, for a caller who copies it.

        Beside float32, Inductor reads and writes half a register of bfloat16 at a time. Where that is in place, what is
        read overlaps what has just been written, and the processor waits for the write: nearly half of all time.
        """
        return self.rounding is not None and torch.float32 in self.stored[_GRADIENT + 1 :]

    @property
    def takes_seeds(self) -> bool:
        """Whether something is rounded by chance."""
        states = self.stored[_GRADIENT + 1 :]
        return self.rounding == "stochastic" or torch.bfloat16 in states


class Program:
    """What carries out a recorded step.

    It is called with its tensors, which lie side by side in memory, whatever their shape is, and with how many numbers
    of each it goes through: those of the recording, one tensor of float32 scalars (k,), a seed for each two tensors
    (int32) if it takes seeds, what was rounded away of the parameter with "kahan", and where the parameter and that are
    written if they are written elsewhere.

    Args:
        compiled: called with the same tensors as rows (n,).
        numbered: which of the tensors have as many numbers as it goes through.
        kernel: what that comes down to, where it is known.
    """

    __slots__ = ("_compiled", "_kernel", "_numbered")

    def __init__(
        self,
        compiled: Callable[..., Any],
        numbered: Sequence[bool],
        kernel: CompiledKernel | None = None,
    ) -> None:
        self._compiled, self._numbered, self._kernel = compiled, numbered, kernel

    def __call__(self, tensors: Sequence[Tensor], count: int) -> None:
        """Takes the step."""
        if self._kernel is not None:
            self._kernel(tensors, count)
            return
        each = zip(tensors, self._numbered, strict=True)
        self._compiled(*[row(t, range(count)) if is_row else t for t, is_row in each])

    @property
    def is_kernel(self) -> bool:
        """Whether it is called without what a compiler puts around it."""
        return self._kernel is not None

    def with_kernel(self, tensors: Sequence[Tensor]) -> Program:
        """The same, called directly where that gives the same bits; `tensors` are some that it has been called with."""
        kernel = kernel_of(self._compiled, self._tried(tensors), _TRIED)
        if kernel is None:
            return self
        expected, found = self._tried(tensors), self._tried(tensors)
        self._compiled(*expected)
        kernel(found, _TRIED)
        same = all(map(_has_bits_of, expected, found))
        return Program(self._compiled, self._numbered, kernel) if same else self

    def _tried(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A few numbers for each of these tensors, the same at each call."""
        made = []
        for number, (tensor, is_row) in enumerate(zip(tensors, self._numbered, strict=True), 1):
            numbers = torch.arange(1, 1 + (_TRIED if is_row else tensor.numel())).mul_(number)
            made.append(numbers.remainder_(97).div(97).to(tensor.dtype))
        return made


_TRIED: Final = 1009
"""Numbers of a row on which a program is tried: several vectors, and a rest."""

_programs: Final[dict[ProgramKey, Program]] = {}


def program(key: ProgramKey, name: str) -> Callable[[Sequence[Tensor], int], None]:
    """What carries out a recorded step: called as a `Program` is.

    The first call compiles it, which raises what the compiler raises; `name` is the optimizer's, for what is said then.
    """
    made = _programs.get(key)
    if made is None:
        compiled = torch.compile(
            _module(key).forward,
            dynamic=True,
            fullgraph=True,
            # What PyTorch would look at before each call is in the key; the number of numbers is an argument.
            # So is the number of threads, which may change after it was compiled.
            options={
                "guard_filter_fn": lambda guards: [False for _ in guards],
                "cpp.dynamic_threads": True,
            },
        )
        recorded = len(key.stored)
        small = {recorded, recorded + 1} if key.takes_seeds else {recorded}

        def first(tensors: Sequence[Tensor], count: int) -> None:
            made = Program(compiled, [number not in small for number in range(len(tensors))])
            with _said(name):
                made(tensors, count)
            _programs[key] = made.with_kernel(tensors)

        return first
    return made


def row(tensor: Tensor, part: range) -> Tensor:
    """Return elements of a tensor in memory order; not as a view, of which a program would see the base."""
    return tensor.data.as_strided_((len(part),), (1,), tensor.storage_offset() + part.start)


def _has_bits_of(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _module(key: ProgramKey) -> fx.GraphModule:
    recorded, graph = key.recorded, fx.Graph()
    tensors = [graph.placeholder(f"tensor_{i}") for i in range(len(recorded.dtypes))]
    scalars = graph.placeholder("scalars")
    seeds = graph.placeholder("seeds") if key.takes_seeds else None
    rest = graph.placeholder("rest") if key.rounding == "kahan" else None
    written = rest, tensors[0]
    if key.writes_elsewhere:
        rest_out = None if rest is None else graph.placeholder("rest_out")
        written = rest_out, graph.placeholder("out")
    begun = int(key.is_scaled)
    values: dict[int, fx.Node] = {}
    for number, (tensor, dtype) in enumerate(zip(tensors, recorded.dtypes, strict=True)):
        values[-1 - number] = _cast(graph, tensor, key.stored[number], dtype)
    if rest is not None:
        values[-1] = graph.call_function(_aten.add, (values[-1], rest))
    if key.is_scaled:
        scaled = values[-1 - _GRADIENT], _scalar(graph, scalars, 0)
        values[-1 - _GRADIENT] = graph.call_function(_aten.mul, scaled)

    def given(argument: Argument) -> Any:
        if argument.kind == "value":
            return values[argument.what]
        if argument.kind == "scalar":
            return _scalar(graph, scalars, argument.what + begun)
        return argument.what

    for number, call in enumerate(recorded.calls):
        values[number] = _write(graph, call, given)
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
                graph.call_function(_aten.copy_, (written[0], lost))
            value = rounded
        graph.call_function(_aten.copy_, (tensor if number else written[1], value))
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


def _cast(graph: fx.Graph, node: fx.Node, of: torch.dtype, to: torch.dtype) -> fx.Node:
    return node if of is to else graph.call_function(COPY_IN_DTYPE, (node,), {"dtype": to})


def _rounded(
    graph: fx.Graph, value: fx.Node, how: Rounding | None, seeds: fx.Node | None, number: int
) -> fx.Node:
    """A value in float32 with numbers of bfloat16."""
    if how != "stochastic":
        return graph.call_function(rounding.nearest, (value,))
    assert seeds is not None
    seed = graph.call_function(_aten.select, (seeds, 0, number // 2))
    return graph.call_function(rounding.stochastic, (value, seed, number % 2))


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
