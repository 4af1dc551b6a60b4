"""An operation of the dispatcher as its watchers see it: its name, whether it is a view, and which casts it makes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from precast import _torch
from precast._internal.display import dtype_name

__all__ = ["Cast", "Kind", "dtype_name", "dtype_of", "floating_in", "kind_of", "tensors_of"]

_RUNS_OTHERS: Final = frozenset(
    {"_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_trilinear"}
    | {"mean", "mkldnn_rnn_layer_backward"}
)
"""Operations that run whole layers, which autocast reaches, or that cast whatever they are given."""
_COMPUTES_IN_FLOAT32: Final = frozenset(
    {"renorm", "renorm_", "scatter", "scatter_", "scatter_reduce", "scatter_reduce_"}
)
"""Operations whose kernels, on some devices, convert 16-bit numbers to float32 and back."""
_LOW: Final = frozenset({torch.float16, torch.bfloat16})


class Cast(NamedTuple):
    """A cast from one floating dtype to another, and how long it took."""

    source: Tensor
    target: Tensor
    seconds: float

    @property
    def bytes(self) -> int:
        """The size of the elements that it wrote."""
        return _torch.stored_bytes(self.target)


class Kind:
    """What a trace has to know of an operation; `kind_of` finds it out once for each."""

    __slots__ = (
        "_wants_tensor", "base", "is_composite", "is_operation", "is_view", "may_cast", "name", "selects_backend",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        full, _, overload = str(func).rpartition(".")
        self.base = (full or overload).replace(".", "::", 1).removeprefix("aten::")
        named = overload and overload != "default" and full
        self.name = f"{self.base}.{overload}" if named else self.base
        schema = _torch.schema_of(func) if isinstance(func, _torch.OpOverload) else None
        returned = [] if schema is None else [each.alias_info for each in schema.returns]
        self.is_view = bool(returned) and all(
            info is not None and not info.is_write for info in returned
        )
        """Whether its results are its arguments' numbers, seen in another shape."""
        arguments = [] if schema is None else schema.arguments
        self._wants_tensor = [str(a.type) == "Tensor" for a in arguments if not a.kwarg_only]
        self.may_cast = self.base in {"_to_copy", "copy_", "_foreach_copy_"}
        self.is_composite = _torch.is_composite(func)
        self.selects_backend = _torch.selects_backend(func)
        self.is_operation = not isinstance(func, _torch.OpOverload) or _torch.is_dispatched(func)
        """False for a question about a subclass, such as that for its sizes, which computes nothing."""

    def casts(self, args: tuple[Any, ...], out: Any, seconds: float) -> list[Cast]:
        """The casts between floating dtypes that one call made, which took `seconds`."""
        if not self.may_cast:
            return []
        pairs: Iterable[tuple[Any, Any]] = [(args[0], out)]
        if self.base == "copy_":
            pairs = [(args[1], args[0])]
        elif self.base == "_foreach_copy_":
            pairs = zip(args[1], args[0], strict=False)
        casts = [pair for pair in pairs if _is_cast(*pair)]
        return [Cast(*pair, seconds / len(casts)) for pair in casts]

    def casts_inside(self, tensors: list[Tensor], call: tuple[Any, Any]) -> bool:
        """Whether a call may cast in the operations that it calls, as it does where floating dtypes are mixed."""
        if self.may_cast or self.is_view or not tensors:
            return False
        args, kwargs = call
        if self.base in _RUNS_OTHERS or any(
            isinstance(a, torch.dtype) for a in (*args, *kwargs.values())
        ):
            return True
        dtypes = {t.dtype for t in tensors if t.dtype.is_floating_point}
        return len(dtypes) > 1 or (self.base in _COMPUTES_IN_FLOAT32 and dtypes <= _LOW)

    def can_open(self, args: tuple[Any, ...]) -> bool:
        """Return whether the operations that it calls can be seen.

        They cannot where a number is given for a tensor, or where tensors alone do not choose the kernel.
        """
        return not self.selects_backend and not any(
            wants and isinstance(arg, int | float | complex)
            for arg, wants in zip(args, self._wants_tensor, strict=False)
        )


kind_of = functools.cache(Kind)


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


def dtype_of(tensor: Tensor) -> str:
    """A tensor's dtype as text."""
    return dtype_name(tensor.dtype)


def _is_cast(source: Any, target: Any) -> bool:
    return (
        isinstance(source, Tensor)
        and isinstance(target, Tensor)
        and source.dtype is not target.dtype
        and source.dtype.is_floating_point
        and target.dtype.is_floating_point
    )
