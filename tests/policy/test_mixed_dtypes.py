"""The column of operations that refuse every mixture of dtypes, against the installed PyTorch."""

from __future__ import annotations

import pytest

from precast.engine import registration
from precast.policy.mixed_dtypes import REFUSED
from precast.policy.policy import Policy, Rule, expanded_rules
from tools import probe_tables


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_column_is_what_pytorch_refuses(device: str) -> None:
    registration.unregister()  # kernels of precast would count as PyTorch's
    assert probe_tables.refusing_operations(device, seeds=range(6)) == REFUSED[device]


@pytest.mark.parametrize("device", REFUSED)
def test_each_has_a_row_that_promotes_it(device: str) -> None:
    rows = expanded_rules(Policy.load("default"), device)[0]
    assert {rows[name].rule for name in REFUSED[device]} == {Rule.PROMOTE}
