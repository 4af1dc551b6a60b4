"""Whether a copy still stands for its weight: the one condition that caches, held copies and generated kernels share.

Invariants:

- a copy notes the version counter, the address, the shape and the strides that its source had when it was cast;
- it stands for its source while the source has all four;
- the condition is written once, as an expression: the functions here are compiled from it, and
  `precast.engine.generated` writes it into its kernels, where a call would cost more than the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

__all__ = ["SourceNotes", "fresh_expression", "has_geometry_of", "is_at", "is_fresh"]


class SourceNotes(Protocol):
    """What a copy notes of its source when it is cast."""

    version: int
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]


_HAS_GEOMETRY: Final = "{copy}.shape == {source}.shape and {copy}.stride == {source}.stride()"
_IS_AT: Final = "{copy}.pointer == {source}.data_ptr() and " + _HAS_GEOMETRY
_IS_FRESH: Final = "{copy}.version == {source}._version and " + _IS_AT


def fresh_expression(copy: str, source: str) -> str:
    """The source text of `is_fresh` for a copy and a source of these names."""
    return _IS_FRESH.format(copy=copy, source=source)


def _compiled(expression: str) -> Callable[[SourceNotes, Tensor], bool]:
    text = expression.format(copy="copy", source="source")
    function: Any = eval(f"lambda copy, source: {text}")  # the texts above, and no others
    return function  # type: ignore[no-any-return]


has_geometry_of = _compiled(_HAS_GEOMETRY)
"""Whether the source has the shape and the strides that it had when it was cast."""
is_at = _compiled(_IS_AT)
"""Whether the source lies in the memory in which it was cast, with the same shape and strides."""
is_fresh = _compiled(_IS_FRESH)
"""Whether the copy still stands for the source; the source must count its versions."""
