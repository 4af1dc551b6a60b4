"""The names that AMP505 looks for: torch has none of them, and it has all that replaces them."""

from __future__ import annotations

import operator

import pytest
import torch

from precast_lint.renaming.absent import (
    ABSENT,
    ABSENT_FFT,
    ABSENT_FUNCTIONAL,
    ABSENT_LINALG,
    ABSENT_NN,
    ABSENT_RANDOM,
)

_TABLES = [
    (torch, ABSENT),
    (torch.nn.functional, ABSENT_FUNCTIONAL),
    (torch.linalg, ABSENT_LINALG),
    (torch.fft, ABSENT_FFT),
    (torch.random, ABSENT_RANDOM),
    (torch.nn, ABSENT_NN),
]


@pytest.mark.parametrize(("module", "table"), _TABLES)
def test_torch_has_none_of_the_absent_names(module: object, table: dict[str, str]) -> None:
    assert [name for name in table if hasattr(module, name)] == []


@pytest.mark.parametrize("there", sorted({v for _, table in _TABLES for v in table.values()}))
def test_what_replaces_them_is_there(there: str) -> None:
    assert callable(operator.attrgetter(there.removeprefix("torch."))(torch))
