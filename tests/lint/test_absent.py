"""The names that AMP505 looks for: torch has none of them, and it has all that replaces them."""

from __future__ import annotations

import operator

import pytest
import torch

from precast_lint.renaming.absent import ABSENT, ABSENT_FUNCTIONAL


def test_torch_has_none_of_the_absent_names() -> None:
    assert [name for name in ABSENT if hasattr(torch, name)] == []
    assert [name for name in ABSENT_FUNCTIONAL if hasattr(torch.nn.functional, name)] == []


@pytest.mark.parametrize("there", sorted({*ABSENT.values(), *ABSENT_FUNCTIONAL.values()}))
def test_what_replaces_them_is_there(there: str) -> None:
    assert callable(operator.attrgetter(there.removeprefix("torch."))(torch))
