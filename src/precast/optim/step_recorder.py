"""Records what an optimizer's step would do to one parameter, without doing it.

Invariants:

- operations on tensors of the parameter's size are written down and not carried out; operations on single numbers (step
  counts, learning rates) are carried out, and `undo` takes them back;
- only operations that treat each number by itself are written down, as PyTorch's own tag says; any other raises
  `NotElementwiseError`, and nothing has been changed after `undo`;
- numbers that Python computes (learning rate, corrections of bias) are arguments of what is recorded, not a part of it,
  so a schedule changes no program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast._torch import DispatchMode, without_modes, writes_an_argument

__all__ = ["Call", "NotElementwiseError", "Recorded", "StepRecorder"]


class NotElementwiseError(Exception):
    """A step does something to a parameter that is not done to each number by itself; says what."""


class Argument(NamedTuple):
    """One argument of a call: the number of a value, or of a scalar, or a constant."""

    kind: str
    """`value`, `scalar` or `constant`."""
    what: Any


class Call(NamedTuple):
    """One operation: its name in `torch.ops.aten`, and what it gets."""

    name: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]


class Recorded(NamedTuple):
    """What is done to one parameter, whichever it is; the key of a compiled program.

    The value of number ``-1 - i`` is the tensor i as it was; that of number ``i`` is the result of call i.
    """

    calls: tuple[Call, ...]
    dtypes: tuple[torch.dtype, ...]
    """Those of the tensors."""
    results: tuple[int, ...]
    """The number of the value that each tensor has at the end."""


class _Kind(NamedTuple):
    """What is known of an operation on arguments of certain dtypes."""

    dtype: torch.dtype
    takes_tensors: bool
    """Whether a number may be given as a tensor, which a program can take as an argument."""


_known: Final[dict[Any, _Kind]] = {}
_SAME: Final = frozenset({"detach", "alias", "lift_fresh"})
_UNTAGGED: Final = frozenset({"copy_", "_to_copy", "zero_", "fill_"})
"""What treats each number by itself and has no tag that says so (2.13)."""
_FACTORED: Final = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
"""Arguments that have to be numbers, and that a program applies with a multiplication of its own."""


class StepRecorder(DispatchMode):
    """The mode in which a step is called for one parameter.

    Args:
        parameter: what is stepped; it has more than one number, which lie side by side.
        gradient: what the step sees as its gradient; its numbers are not read.
    """

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        """What the step reads and writes: the parameter, its gradient, then the states as they were met."""
        self.scalars: list[float] = []
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._calls: list[Call] = []
        self._dtypes: list[torch.dtype] = []
        self._numbers: dict[int, int] = {}
        self._current: list[int] = []
        self._made: dict[int, tuple[Tensor, list[int]]] = {}
        """``id`` of each tensor that stands for a result -> itself, and its value's number, which aliases share."""
        self._before: list[tuple[Tensor, Tensor]] = []
        for tensor in (parameter, gradient):
            self._value(tensor)

    def recorded(self) -> Recorded:
        """All that was recorded."""
        return Recorded(
            tuple(self._calls), tuple(t.dtype for t in self.tensors), tuple(self._current)
        )

    def undo(self) -> None:
        """Gives single numbers that were written what they were."""
        with torch.no_grad():
            for tensor, was in reversed(self._before):
                tensor.copy_(was)
        self._before.clear()

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
        if not writes_an_argument(func):
            return self._new(*self._add(name, args, kwargs))
        if "out" in kwargs:
            target = kwargs["out"]
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        else:
            target, name = args[0], name.removesuffix("_")
        if name == "copy":
            source = args[1]
            if source.numel() == 1:
                raise NotElementwiseError("its step copies one number into many")
            self._set(target, *self._known_value(source))
        else:
            self._set(target, *self._add(name, args, kwargs))
        return target

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if writes_an_argument(func):
            self._before += [
                (t, t.clone()) for t in _tensors((*args, *kwargs.values())) if not t.is_meta
            ]
        return func(*args, **kwargs)

    def _add(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, torch.dtype]:
        kind = self._kind(name, args, kwargs)
        call = Call(
            name,
            tuple(self._argument(each, kind) for each in args),
            tuple((key, self._argument(each, kind)) for key, each in kwargs.items()),
        )
        self._calls.append(call)
        self._dtypes.append(kind.dtype)
        return len(self._calls) - 1, kind.dtype

    def _argument(self, given: Any, kind: _Kind) -> Argument:
        if isinstance(given, Tensor) and given.numel() > 1:
            return Argument("value", self._known_value(given)[0])
        if isinstance(given, Tensor):
            if not given.is_floating_point():
                raise NotElementwiseError("its step computes with whole numbers in tensors")
            given = given.item()
        elif not isinstance(given, float) or not kind.takes_tensors:
            return Argument("constant", given)
        self.scalars.append(float(given))
        return Argument("scalar", len(self.scalars) - 1)

    def _known_value(self, tensor: Tensor) -> tuple[int, torch.dtype]:
        number = self._value(tensor)
        if number < 0:
            return number, self.tensors[-1 - number].dtype
        return number, self._dtypes[number]

    def _value(self, tensor: Tensor) -> int:
        made = self._made.get(id(tensor))
        if made is not None:
            return made[1][0]
        place = tensor.data_ptr()
        number = self._numbers.get(place)
        if number is None:
            if tensor.shape != self._shape or tensor.stride() != self._stride or not tensor.is_cpu:
                raise NotElementwiseError(
                    "its states have another shape or layout than the parameter"
                )
            number = self._numbers[place] = len(self.tensors)
            self.tensors.append(tensor)
            self._current.append(-1 - number)
        elif self.tensors[number].dtype is not tensor.dtype:
            raise NotElementwiseError("its states share memory")
        return self._current[number]

    def _set(self, target: Tensor, number: int, dtype: torch.dtype) -> None:
        if target.dtype is not dtype:
            call = Call(
                "_to_copy",
                (Argument("value", number),),
                (("dtype", Argument("constant", target.dtype)),),
            )
            self._calls.append(call)
            self._dtypes.append(target.dtype)
            number = len(self._calls) - 1
        made = self._made.get(id(target))
        if made is not None:
            made[1][0] = number
        else:
            self._value(target)
            self._current[self._numbers[target.data_ptr()]] = number

    def _new(self, number: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty_strided(self._shape, self._stride, dtype=dtype, device="meta")
        self._made[id(result)] = result, [number]
        return result

    def _alias(self, alias: Tensor, of: Tensor) -> Tensor:
        made = self._made.get(id(of))
        if made is not None:
            self._made[id(alias)] = alias, made[1]
        return alias

    def _kind(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
        key = name, *map(_type_of, args), *((k, _type_of(v)) for k, v in kwargs.items())
        if key not in _known:
            _known[key] = _tried(name, args, kwargs)
        return _known[key]


def _type_of(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.dtype, given.numel() > 1
    if isinstance(given, (list, tuple, dict)):
        raise NotElementwiseError("its step takes several tensors at once")
    return type(given) if isinstance(given, float) else given


def _tried(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
    """Tries an operation on tensors without numbers."""
    packet = getattr(torch.ops.aten, name)

    def like(given: Any, *, numbers: bool) -> Any:
        if isinstance(given, Tensor):
            shape = (2,) if given.numel() > 1 else ()
            return torch.empty(shape, dtype=given.dtype, device="meta")
        if numbers and isinstance(given, float):
            return torch.empty((), device="meta")
        return given

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
    return _Kind(plain.dtype, takes)


def _tensors(given: Any) -> Iterator[Tensor]:
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
