"""The table `torch` against the installed PyTorch: each kernel has its row, each rule is right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch

from precast import _torch
from precast._internal import torch_versions
from precast.policy import toml_file
from precast.policy.policy import DEVICE_TYPES, Policy, Rule, expanded_rules
from tests.support import op_samples
from tests.support.behaviour import consistent_rules

# Fake tensors play these devices where they are absent; maia's carry no Autocast key.
PROBED = ("cpu", "cuda", "mps", "xpu", "mtia")

_LIST_KERNELS = f"""
import json
from precast import _torch
names = sorted(_torch.operator_names())
devices = {DEVICE_TYPES!r}
print(json.dumps({{d: [n for n in names if _torch.has_autocast_kernel(n, d)] for d in devices}}))
"""


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[str]]:
    # A fresh interpreter: in this one, kernels that precast has registered would count too.
    run = subprocess.run(
        [sys.executable, "-c", _LIST_KERNELS], capture_output=True, text=True, check=True
    )
    listed: dict[str, list[str]] = json.loads(run.stdout)
    return listed


def rows_of_this_build(device: str) -> dict[str, Rule]:
    built_with = {"", "rocm" if torch.version.hip else "cuda" if torch.version.cuda else ""}
    known, unknown = expanded_rules(Policy.load("torch"), device)
    assert not unknown, f"the installed PyTorch has no operator for {unknown}"
    return {name: entry.rule for name, entry in known.items() if entry.builds in built_with}


def rows_that_can_be_tried(device: str) -> dict[str, Rule]:
    """Without those that only some builds have, where the device is not there: their kernels ask it, fake or not."""
    entries = expanded_rules(Policy.load("torch"), device)[0]
    present = _torch.has_device(device)
    rows = rows_of_this_build(device)
    return {name: rule for name, rule in rows.items() if present or not entries[name].builds}


def rows_of_all_versions(device: str) -> set[str]:
    """The operations of the table for any PyTorch that precast supports, as far as the installed one has them."""
    tables = (toml_file.read("torch", version).tables for version in torch_versions.supported())
    return {name for rows in tables for name in expanded_rules(Policy("any", rows), device)[0]}


def drift(device: str, kernels: Iterable[str], rows: Iterable[str]) -> list[str]:
    """What to change in torch.toml so that it has a row for each kernel and no other."""
    missing, surplus = set(kernels) - set(rows), set(rows) - set(kernels)
    return [f"[ops.{device}] add {name}" for name in sorted(missing)] + [
        f"[ops.{device}] remove {name}" for name in sorted(surplus)
    ]


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_every_autocast_kernel_has_a_row_and_every_row_a_kernel(device, kernels):
    assert drift(device, kernels[device], rows_of_this_build(device)) == []


def test_drift_names_the_operation():
    rows = rows_of_this_build("cpu")
    kernels = (set(rows) - {"aten::linear"}) | {"aten::brand_new.overload"}
    assert drift("cpu", kernels, rows) == [
        "[ops.cpu] add aten::brand_new.overload",
        "[ops.cpu] remove aten::linear",
    ]


@pytest.mark.parametrize("device", PROBED)
def test_each_rule_is_what_pytorch_does(device):
    wrong = {
        name: f"the table says {rule}, PyTorch does {sorted(seen) or 'something else'}"
        for name, rule in rows_that_can_be_tried(device).items()
        if (seen := consistent_rules(name, device)) != {rule}
    }
    assert wrong == {}


def test_unprobed_devices_repeat_a_probed_one():
    unprobed = {d for d in Policy.load("torch").tables if d not in PROBED}
    assert unprobed == {"maia"}
    assert rows_of_this_build("maia") == rows_of_this_build("xpu")


def test_there_are_samples_for_every_row_and_no_others():
    assert op_samples.named() == set().union(*map(rows_of_all_versions, DEVICE_TYPES))


@pytest.mark.parametrize("name", sorted(op_samples.NOT_ON_CPU))
def test_operations_listed_as_uncallable_are_uncallable(name):
    with torch.no_grad():
        for sample in op_samples.samples(name):
            with pytest.raises((RuntimeError, NotImplementedError)):
                op_samples.call(name, sample)


def test_all_other_operations_can_be_called_on_cpu_tensors():
    with torch.no_grad():
        for name in sorted(op_samples.named() - set(op_samples.NOT_ON_CPU)):
            for sample in op_samples.samples(name, seed=torch.seed() % 1000):
                op_samples.call(name, sample)


def test_samples_are_fresh_for_each_seed_and_repeat_for_the_same():
    first, again, other = (
        op_samples.samples("aten::linear", seed)[0].args[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
