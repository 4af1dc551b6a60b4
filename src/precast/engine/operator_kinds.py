"""Properties of dispatcher operations for observers: name, whether it is a view, and the casts that it makes."""

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
"""Operations that run whole layers, which autocast affects, or that cast their inputs."""
_COMPUTES_IN_FLOAT32: Final = frozenset(
    {"renorm", "renorm_", "scatter", "scatter_", "scatter_reduce", "scatter_reduce_"}
)
"""Operations whose kernels, on some devices, convert 16-bit values to float32 and back."""
_DEPENDS_ON_MODES: Final = frozenset({"linalg_eigvals", "linalg_eigvalsh", "linalg_svdvals"})
"""Composites that compute vectors, too, while any dispatch mode is on, with other last bits of the values (2.13)."""


class Cast(NamedTuple):
    """A cast from one floating dtype to another, and its duration."""

    source: Tensor
    target: Tensor
    seconds: float

    @property
    def bytes(self) -> int:
        """The size of the written elements."""
        return _torch.stored_bytes(self.target)


class Kind:
    """The properties of an operation that a trace uses; cached by `kind_of`."""

    __slots__ = (
        "_wants_tensor", "base", "is_composite", "is_operation", "is_view", "may_cast", "name",
        "selects_backend",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        full, _, overload = str(func).rpartition(".")
        self.base = (full or overload).replace(".", "::", 1).removeprefix("aten::")
        has_overload = overload and overload != "default" and full
        self.name = f"{self.base}.{overload}" if has_overload else self.base
        schema = _torch.schema_of(func) if isinstance(func, _torch.OpOverload) else None
        returned = [] if schema is None else [each.alias_info for each in schema.returns]
        self.is_view = bool(returned) and all(
            info is not None and not info.is_write for info in returned
        )
        """True if the results share the memory of the arguments."""
        arguments = [] if schema is None else schema.arguments
        self._wants_tensor = [str(a.type) == "Tensor" for a in arguments if not a.kwarg_only]
        self.may_cast = self.base in {"_to_copy", "copy_", "_foreach_copy_"}
        self.is_composite = _torch.is_composite(func)
        self.selects_backend = _torch.selects_backend(func)
        self.is_operation = not isinstance(func, _torch.OpOverload) or _torch.is_dispatched(func)
        """False for a query of a subclass, such as its sizes, which computes nothing."""

    def casts(self, args: tuple[Any, ...], out: Any, seconds: float) -> list[Cast]:
        """Return the casts between floating dtypes made by a call that took `seconds`."""
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
        """Return True if the operations inside a call may cast, as with mixed floating dtypes."""
        if self.may_cast or self.is_view or not tensors:
            return False
        args, kwargs = call
        if self.base in _RUNS_OTHERS or any(
            isinstance(a, torch.dtype) for a in (*args, *kwargs.values())
        ):
            return True
        dtypes = {t.dtype for t in tensors if t.dtype.is_floating_point}
        return len(dtypes) > 1 or (
            self.base in _COMPUTES_IN_FLOAT32 and dtypes <= _torch.SIXTEEN_BIT
        )

    def can_open(self, args: tuple[Any, ...]) -> bool:
        """Return True if a mode can see the operations inside a call.

        It cannot if a Python number is passed for a tensor, if arguments other than tensors select the kernel, or if
        the operation computes something else under a mode.
        """
        if self.selects_backend or self.base in _DEPENDS_ON_MODES:
            return False
        return not any(
            wants and isinstance(arg, int | float | complex)
            for arg, wants in zip(args, self._wants_tensor, strict=False)
        )


kind_of = functools.cache(Kind)


def tensors_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a call; for a list of tensors one per dtype."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += {t.dtype: t for t in value if isinstance(t, Tensor)}.values()
    return tensors


def floating_in(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors with a floating dtype."""
    return [t for t in tensors if t.dtype.is_floating_point]


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return dtype_name(tensor.dtype)


def _is_cast(source: Any, target: Any) -> bool:
    return (
        isinstance(source, Tensor)
        and isinstance(target, Tensor)
        and source.dtype is not target.dtype
        and source.dtype.is_floating_point
        and target.dtype.is_floating_point
    )
