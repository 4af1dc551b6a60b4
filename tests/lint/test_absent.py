"""The names that AMP505 looks for: torch has none of them, and it has all that replaces them."""

from __future__ import annotations

import operator

import pytest
import torch

from precast_lint.renaming.absent import ABSENT


def test_torch_has_none_of_the_absent_names() -> None:
    assert [name for name in ABSENT if hasattr(torch, name)] == []


@pytest.mark.parametrize("there", sorted(set(ABSENT.values())))
def test_what_replaces_them_is_there(there: str) -> None:
    assert callable(operator.attrgetter(there.removeprefix("torch."))(torch))
