"""An operation of the dispatcher as a trace looks at it: its name, whether it is a view, which casts it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch

__all__ = ["Kind", "floating_in", "kind_of", "tensors_of", "text_of"]

Cast = tuple[Tensor, Tensor]
"""What was cast, and what it was cast to."""

_texts: Final[dict[torch.dtype, str]] = {
    dtype: str(dtype).removeprefix("torch.") for dtype in _torch.all_dtypes()
}


class Kind:
    """An operation, looked at once."""

    __slots__ = ("_finds", "_wants_tensor", "base", "is_composite", "is_view", "may_cast", "name")

    def __init__(self, func: Any) -> None:
        full, _, overload = str(func).rpartition(".")
        self.base = (full or overload).replace(".", "::", 1).removeprefix("aten::")
        named = overload and overload != "default" and full
        self.name = f"{self.base}.{overload}" if named else self.base
        self.is_view = _is_view(func)
        self._wants_tensor = _wants_tensor(func)
        self._finds = _CASTS.get(self.base)
        self.may_cast = self._finds is not None
        self.is_composite = _torch.is_composite(func)

    def casts(self, args: tuple[Any, ...], out: Any) -> list[Cast]:
        """The casts between floating dtypes that a call of it was."""
        found = () if self._finds is None else self._finds(args, out)
        return [pair for pair in found if _is_cast(*pair)]

    def casts_inside(self, tensors: list[Tensor], call: tuple[Any, Any]) -> bool:
        """Whether a call may cast in what it calls in turn, as where floating dtypes are mixed."""
        if self.may_cast or self.is_view or not tensors:
            return False
        args, kwargs = call
        if self.base in _WHOLE or any(
            isinstance(a, torch.dtype) for a in (*args, *kwargs.values())
        ):
            return True
        dtypes = {t.dtype for t in tensors if t.dtype.is_floating_point}
        return len(dtypes) > 1 or (self.base in _IN_FLOAT32 and dtypes <= _LOW)

    def can_open(self, args: tuple[Any, ...]) -> bool:
        """Whether it can be called open; not where a number stands for a tensor, which only a plain call takes."""
        return not any(
            wants and isinstance(arg, int | float | complex)
            for arg, wants in zip(args, self._wants_tensor, strict=False)
        )


_WHOLE: Final = frozenset(
    {"_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_trilinear"}
    | {"mean", "mkldnn_rnn_layer_backward"}
)
"""One operation in which whole layers run, which autocast reaches, or which cast whatever they are given."""
_IN_FLOAT32: Final = frozenset(
    {"renorm", "renorm_", "scatter", "scatter_", "scatter_reduce", "scatter_reduce_"}
)
"""Operations whose kernels compute numbers of 16 bits in float32, on some devices, and copy them there and back."""
_LOW: Final = frozenset({torch.float16, torch.bfloat16})
_kinds: dict[Any, Kind] = {}


def kind_of(func: Any) -> Kind:
    """What there is to know of an operation."""
    known = _kinds.get(func)
    if known is None:
        known = _kinds[func] = Kind(func)
    return known


def tensors_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call; of a list of tensors one of each dtype."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += {t.dtype: t for t in value if isinstance(t, Tensor)}.values()
    return found


def floating_in(tensors: list[Tensor]) -> list[Tensor]:
    """Those of floating dtypes."""
    return [t for t in tensors if t.dtype.is_floating_point]


def text_of(tensor: Tensor) -> str:
    """A tensor's dtype as text."""
    return _texts[tensor.dtype]


def _is_cast(source: Any, target: Any) -> bool:
    return (
        isinstance(source, Tensor)
        and isinstance(target, Tensor)
        and source.dtype is not target.dtype
        and source.dtype.is_floating_point
        and target.dtype.is_floating_point
    )


def _is_view(func: Any) -> bool:
    """Whether it makes no numbers: its results are other looks at its arguments."""
    if not isinstance(func, _torch.OpOverload):
        return False
    schema = _torch.schema_of(func)
    returned = [r.alias_info for r in schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _wants_tensor(func: Any) -> list[bool]:
    """Which of its positional arguments are one tensor each."""
    if not isinstance(func, _torch.OpOverload):
        return []
    return [str(a.type) == "Tensor" for a in _torch.schema_of(func).arguments if not a.kwarg_only]


_CASTS: Final[dict[str, Callable[[Any, Any], Iterable[tuple[Any, Any]]]]] = {
    "_to_copy": lambda args, out: [(args[0], out)],
    "copy_": lambda args, _: [(args[1], args[0])],
    "_foreach_copy_": lambda args, _: zip(args[1], args[0], strict=False),
}
