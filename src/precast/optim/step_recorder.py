"""Recording of an optimizer's step for one parameter, without executing it.

Invariants:

- operations on tensors of the parameter's size are recorded and not executed; operations on single values (step counts,
  learning rates) are executed, and `undo` reverts them;
- only elementwise operations are recorded, according to PyTorch's tag; any other raises `NotElementwiseError`, and
  `undo` then restores everything;
- values that Python computes (learning rate, bias corrections) are arguments of the recording, not a part of it, so a
  schedule needs no new program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._torch import DispatchMode, without_modes, writes_argument

__all__ = ["NotElementwiseError", "RecordedStep", "StepCall", "StepRecorder"]


class NotElementwiseError(Exception):
    """An optimizer's step is not elementwise; the message names the operation."""


class StepArgument(NamedTuple):
    """One argument of a call."""

    kind: str
    """`value`, `scalar` or `constant`."""
    content: Any
    """The number of a value or a scalar, or the constant."""


class StepCall(NamedTuple):
    """One operation: its name in `torch.ops.aten`, and its arguments."""

    name: str
    args: tuple[StepArgument, ...]
    kwargs: tuple[tuple[str, StepArgument], ...]


class RecordedStep(NamedTuple):
    """The operations on one parameter, which may be any: the key of a compiled program.

    The value of number ``-1 - i`` is tensor i before the step; that of number ``i`` is the result of call i.
    """

    calls: tuple[StepCall, ...]
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the tensors."""
    results: tuple[int, ...]
    """The number of the final value of each tensor."""


class _OperationKind(NamedTuple):
    """The properties of an operation for arguments of certain dtypes."""

    dtype: torch.dtype
    takes_tensors: bool
    """True if its number arguments may be tensors, which can be arguments of a program."""


_kinds: Final[dict[Any, _OperationKind]] = {}
_SAME: Final = frozenset({"detach", "alias", "lift_fresh"})
_UNTAGGED: Final = frozenset({"copy_", "_to_copy", "zero_", "fill_"})
"""Elementwise operations without PyTorch's tag (2.13)."""
_FACTORED: Final = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
"""Arguments that have to be numbers, for which a program uses a separate multiplication."""


class StepRecorder(DispatchMode):
    """A dispatch mode in which a step is called for one parameter, of more than one element, contiguous in memory."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        """The tensors that the step reads and writes: the parameter, its gradient, then the states in order of use."""
        self.scalars: list[float] = []
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._calls: list[StepCall] = []
        self._dtypes: list[torch.dtype] = []
        self._numbers: dict[int, int] = {}
        self._current: list[int] = []
        self._results: dict[int, tuple[Tensor, list[int]]] = {}
        """Maps ``id`` of each result's meta tensor to the tensor and its value's number, which aliases share."""
        self._originals: list[tuple[Tensor, Tensor]] = []
        for tensor in (parameter, gradient):
            self._value(tensor)

    def recorded(self) -> RecordedStep:
        """Return the recording."""
        return RecordedStep(
            tuple(self._calls), tuple(t.dtype for t in self.tensors), tuple(self._current)
        )

    def undo(self) -> None:
        """Restore single values that were written."""
        with torch.no_grad():
            for tensor, was in reversed(self._originals):
                tensor.copy_(was)
        self._originals.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(t.numel() > 1 for t in _tensors((*args, *kwargs.values()))):
            return self._run(func, args, kwargs)
        name: str = func.name().removeprefix("aten::").partition(".")[0]
        if torch.is_grad_enabled():
            raise NotElementwiseError("its step records a graph")
        if name in _SAME:
            return self._alias(func(*args, **kwargs), args[0])
        if torch.Tag.pointwise not in func.tags and name not in _UNTAGGED:
            raise NotElementwiseError(
                f"its step calls {name}, which does not treat each number by itself"
            )
        if not writes_argument(func):
            return self._new(*self._add(name, args, kwargs))
        if "out" in kwargs:
            target = kwargs["out"]
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        else:
            target, name = args[0], name.removesuffix("_")
        if name == "copy":
            source = args[1]
            if source.numel() == 1:
                raise NotElementwiseError("its step copies one value into many elements")
            self._set(target, *self._number_and_dtype(source))
        else:
            self._set(target, *self._add(name, args, kwargs))
        return target

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes_argument(func):
            self._originals += [
                (t, t.clone()) for t in _tensors((*args, *kwargs.values())) if not t.is_meta
            ]
        return func(*args, **kwargs)

    def _add(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, torch.dtype]:
        kind = self._kind(name, args, kwargs)
        call = StepCall(
            name,
            tuple(self._argument(each, kind) for each in args),
            tuple((key, self._argument(each, kind)) for key, each in kwargs.items()),
        )
        self._calls.append(call)
        self._dtypes.append(kind.dtype)
        return len(self._calls) - 1, kind.dtype

    def _argument(self, value: Any, kind: _OperationKind) -> StepArgument:
        if isinstance(value, Tensor) and value.numel() > 1:
            return StepArgument("value", self._number_and_dtype(value)[0])
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                raise NotElementwiseError("its step computes with whole numbers in tensors")
            value = value.item()
        elif not isinstance(value, float) or not kind.takes_tensors:
            return StepArgument("constant", value)
        self.scalars.append(float(value))
        return StepArgument("scalar", len(self.scalars) - 1)

    def _number_and_dtype(self, tensor: Tensor) -> tuple[int, torch.dtype]:
        number = self._value(tensor)
        if number < 0:
            return number, self.tensors[-1 - number].dtype
        return number, self._dtypes[number]

    def _value(self, tensor: Tensor) -> int:
        result = self._results.get(id(tensor))
        if result is not None:
            return result[1][0]
        pointer = tensor.data_ptr()
        number = self._numbers.get(pointer)
        if number is None:
            if tensor.shape != self._shape or tensor.stride() != self._stride or not tensor.is_cpu:
                raise NotElementwiseError(
                    "its states have another shape or layout than the parameter"
                )
            number = self._numbers[pointer] = len(self.tensors)
            self.tensors.append(tensor)
            self._current.append(-1 - number)
        elif self.tensors[number].dtype is not tensor.dtype:
            raise NotElementwiseError("its states share memory")
        return self._current[number]

    def _set(self, target: Tensor, number: int, dtype: torch.dtype) -> None:
        if target.dtype is not dtype:
            call = StepCall(
                "_to_copy",
                (StepArgument("value", number),),
                (("dtype", StepArgument("constant", target.dtype)),),
            )
            self._calls.append(call)
            self._dtypes.append(target.dtype)
            number = len(self._calls) - 1
        result = self._results.get(id(target))
        if result is not None:
            result[1][0] = number
        else:
            self._value(target)
            self._current[self._numbers[target.data_ptr()]] = number

    def _new(self, number: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty_strided(self._shape, self._stride, dtype=dtype, device="meta")
        self._results[id(result)] = result, [number]
        return result

    def _alias(self, alias: Tensor, of: Tensor) -> Tensor:
        result = self._results.get(id(of))
        if result is not None:
            self._results[id(alias)] = alias, result[1]
        return alias

    def _kind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OperationKind:
        key = name, *map(_type_of, args), *((k, _type_of(v)) for k, v in kwargs.items())
        if key not in _kinds:
            _kinds[key] = _kind_of(name, args, kwargs)
        return _kinds[key]


def _type_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.numel() > 1
    if isinstance(value, (list, tuple, dict)):
        raise NotElementwiseError("its step takes several tensors at once")
    return type(value) if isinstance(value, float) else value


def _kind_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OperationKind:
    """Return the kind of an operation, by calling it on meta tensors."""
    packet = getattr(torch.ops.aten, name)

    def like(value: Any, *, numbers: bool) -> Any:
        if isinstance(value, Tensor):
            shape = (2,) if value.numel() > 1 else ()
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if numbers and isinstance(value, float):
            return torch.empty((), device="meta")
        return value

    def result(*, numbers: bool) -> Tensor:
        factor = _FACTORED.get(name)
        return packet(  # type: ignore[no-any-return]
            *(like(each, numbers=numbers) for each in args),
            **{k: like(v, numbers=numbers and k != factor) for k, v in kwargs.items()},
        )

    with without_modes():
        plain = result(numbers=False)
        if not isinstance(plain, Tensor) or plain.shape != (2,):
            raise NotElementwiseError(f"its step calls {name}, whose result has another shape")
        try:
            takes = result(numbers=True).dtype is plain.dtype
        except (RuntimeError, TypeError):
            takes = False
    return _OperationKind(plain.dtype, takes)


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
