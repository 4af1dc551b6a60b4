"""Values of a weight that are recorded before it is cast, to find writes that its version counter does not count.

The compiled kernels have the same (`native/samples.h`); this one is used without the library.

Invariants:

- there is one position in each of `_RECORDED` equal parts of the weight, from a generator of this file's own. Every
  second position is preferably one of a value that is not zero;
- a check compares `_COMPARED` values, one in each eighth of the weight; the next check compares others. A weight with
  at most `_RECORDED` elements is compared as a whole;
- only weights on the CPU have samples: elsewhere a comparison would wait;
- nothing outside of the storage is read, and no observer sees the operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from precast._torch import without_dispatch, without_torch_function

__all__ = ["WeightSamples"]

_RECORDED: Final = 32
_COMPARED: Final = 8
_ROUNDS: Final = _RECORDED // _COMPARED
_ATTEMPTS: Final = 8
_generator: Final = torch.Generator()


class WeightSamples:
    """The recorded values of one weight, and their positions."""

    __slots__ = ("_positions", "_turn", "_values")

    def __init__(self) -> None:
        self._positions: Tensor | None = None
        """In the order in which checks compare them; None if the weight cannot be read."""
        self._values: Tensor
        self._turn = 0

    def record_samples(self, parameter: Tensor) -> None:
        """Record values of the parameter, before the copy is written."""
        self._positions = None
        with _unobserved():
            words = _words_of(parameter)
            if words is None:
                return
            candidates = _candidates(words.numel())
            values = words.take(candidates)
            is_nonzero = (values << 1) != 0  # neither 0 nor -0
            best = is_nonzero.byte().argmax(1, keepdim=True)
            self._positions, self._values = candidates.gather(1, best), values.gather(1, best)

    def match_samples(self, parameter: Tensor, *, compares_all: bool) -> bool:
        """Return True if the parameter has the recorded values, all of them or the next ones."""
        if self._positions is None:
            return True
        with _unobserved():
            words = _words_of(parameter)
            if words is None:
                return False
            self._turn += 1
            start = self._turn % _ROUNDS * _COMPARED
            is_whole = compares_all or words.numel() <= _RECORDED
            compared = slice(None) if is_whole else slice(start, start + _COMPARED)
            return words.take(self._positions[compared]).equal(self._values[compared])


@contextmanager
def _unobserved() -> Iterator[None]:
    with without_torch_function(), without_dispatch(), torch.inference_mode(False):
        yield


def _words_of(parameter: Tensor) -> Tensor | None:
    """Return the float32 values as integers, whose bits are compared; None if they cannot be read."""
    if not parameter.is_cpu or parameter.dtype is not torch.float32 or not parameter.numel():
        return None
    weight = parameter.detach().view(torch.int32)
    try:  # checks the bounds of the storage, which may have been resized
        return weight.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    except RuntimeError:
        return None


def _candidates(elements: int) -> Tensor:
    """Return the candidates for each position, of shape (positions, attempts)."""
    if elements <= _RECORDED:
        return torch.arange(elements).unsqueeze(1)
    bounds = torch.arange(_RECORDED + 1) * elements // _RECORDED
    parts = torch.arange(_RECORDED).view(_COMPARED, _ROUNDS).t().flatten()
    starts, sizes = bounds[parts], bounds.diff()[parts]
    numbers = torch.randint(2**62, (_RECORDED, _ATTEMPTS), generator=_generator)
    candidates = starts.unsqueeze(1) + numbers % sizes.unsqueeze(1)
    candidates[::2] = candidates[::2, :1]  # these need not be other than zero
    return candidates
