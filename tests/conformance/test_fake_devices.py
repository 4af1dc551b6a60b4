"""Devices that the machine does not have: autocast on fake tensors of cuda, xpu, mps and mtia.

Fake tensors have no values and carry the dispatch keys of a device, so PyTorch's own autocast kernels of that device
decide. Compared are every row of the tables and PyTorch's samples for tests of operations (OpInfo). Under the policy
`torch`, and in PyTorch's regions while precast is installed, the same kernels get the same dtypes, and the same errors
are raised. Under `default` and `lean`, results and errors are those of docs/operations.md.

A run draws a mixture of dtypes for each row, and some operations of OpInfo, from `PRECAST_PROGRAMS_SEED`. With
`PRECAST_FAKE_DEVICES=all` it compares each row in all mixtures, and all samples. Backward is left out: on fake tensors
of CUDA it ends the process in a build for the CPU. No kernel computes: values, streams and speed are not compared.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor

import precast
from precast import _torch
from precast._internal.pytree import tensors_in
from precast.engine import registration
from precast.policy.mixed_dtypes import refuses_mixtures
from precast.policy.policy import Policy, Rule, expanded_rules
from tests.conftest import PROGRAMS_SEED
from tests.support import op_samples
from tests.support.behaviour import (
    Outcome,
    by_hand,
    in_dtypes,
    map_tensors,
    observe,
    on_device,
    torch_region,
)
from tests.support.op_samples import Sample

ALL = os.environ.get("PRECAST_FAKE_DEVICES") == "all"
DEVICES = ("cuda", "xpu", "mps", "mtia")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOWER = (torch.bfloat16, torch.float16)
POLICIES = {name: Policy.load(name) for name in ("torch", "default", "lean")}
OPINFO_PER_RUN = 20

# PyTorch warns of some operations once in a process.
pytestmark = pytest.mark.filterwarnings("ignore")
on_each = pytest.mark.parametrize("device", DEVICES)
in_each_mode = pytest.mark.parametrize("mode", [*POLICIES, "installed"])
on_each_engine = pytest.mark.parametrize("engine", registration.ENGINES)


@pytest.fixture(autouse=True)
def _as_if_devices_were_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("precast.autocast_mode.region.cuda_is_usable", lambda: True)
    monkeypatch.setattr(fake_tensor.log, "disabled", True)  # it logs every error
    # The method selects the device first, which a build without it cannot.
    monkeypatch.setattr(Tensor, "copy_", functools.partialmethod(torch.ops.aten.copy_.default))
    with torch.no_grad():
        yield


class Case(NamedTuple):
    """One call on a device, in a region with a lower precision."""

    name: str
    call: Callable[[Sample], Any]
    device: str
    lower: torch.dtype
    sample: Sample

    def run(self, region: AbstractContextManager[object]) -> Outcome:
        """Call the operation in a region, on new fake tensors."""
        sample = map_tensors(lambda t: on_device(t, self.device), self.sample)
        with region:
            return observe(lambda: self.call(sample))

    def __str__(self) -> str:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors_in(self.sample)]
        return f"{self.name} of {', '.join(dtypes)} in a {self.lower} region on {self.device}"


def mixtures(sample: Sample) -> list[tuple[torch.dtype, ...]]:
    """All dtypes of the first three floating tensors, which the others repeat."""
    floating = [t for t in tensors_in(sample) if t.is_floating_point()]
    return list(itertools.product(DTYPES, repeat=min(3, len(floating))))


@functools.cache
def rows(device: str) -> list[Case]:
    """The cases of every row of the tables of which this build of PyTorch has the operation."""
    random_state = random.Random(f"{PROGRAMS_SEED} {device}")
    table, torchs = (expanded_rules(POLICIES[name], device)[0] for name in ("lean", "torch"))
    available = op_samples.named() | op_samples.promoted()
    cases = []
    for name, entry in table.items():
        assert entry.builds or name in available or name not in torchs, name
        if entry.builds or name not in available:
            continue
        of_row = [
            Case(
                name,
                functools.partial(op_samples.call, name),
                device,
                lower,
                in_dtypes(sample, dtypes or DTYPES),
            )
            for sample in op_samples.samples(name)
            for dtypes, lower in itertools.product(mixtures(sample), LOWER)
        ]
        cases += of_row if ALL else [random_state.choice(of_row)]
    return cases


@functools.cache
def opinfo(device: str) -> list[Case]:
    """PyTorch's samples for tests of operations, each in a mixture of dtypes."""
    from torch.testing._internal.common_methods_invocations import op_db

    random_state = random.Random(f"{PROGRAMS_SEED} {device}")
    operations = [op for op in op_db if torch.float32 in op.dtypes]
    cases = []
    for op in operations if ALL else random_state.sample(operations, OPINFO_PER_RUN):
        inputs = list(itertools.islice(op.sample_inputs("cpu", torch.float32), None if ALL else 4))
        for each in inputs if ALL else inputs[:1] and [random_state.choice(inputs)]:
            sample = Sample((each.input, *each.args), each.kwargs)
            if any(t.layout is not torch.strided for t in tensors_in(sample)):
                continue
            dtypes = random_state.choice(mixtures(sample)) or DTYPES
            call = functools.partial(_call, op.op)
            cases.append(
                Case(op.name, call, device, random_state.choice(LOWER), in_dtypes(sample, dtypes))
            )
    return cases


def _call(function: Callable[..., Any], sample: Sample) -> Any:
    return function(*sample.args, **sample.kwargs)


# --- what is expected ---


@functools.cache
def torch_outcomes(source: Callable[[str], list[Case]], device: str) -> list[Outcome]:
    """Return PyTorch's decisions for the cases of a device, without kernels of precast."""
    cases = source(device)
    assert registration.unregister()
    with fake_tensor.FakeTensorMode():
        return [case.run(torch_region(device, case.lower)) for case in cases]


@functools.cache
def documented_rows(device: str, mode: str) -> list[Outcome]:
    """Return the decisions of the rows of a device in a mode."""
    torchs = torch_outcomes(rows, device)
    if mode in ("torch", "installed"):
        return torchs
    with fake_tensor.FakeTensorMode():
        pairs = zip(rows(device), torchs, strict=True)
        return [documented(case, outcome, POLICIES[mode]) for case, outcome in pairs]


def documented(case: Case, torchs: Outcome, policy: Policy) -> Outcome:
    """Return the decision that docs/operations.md states for a row under `default` or `lean`."""
    own, original = (
        expanded_rules(each, case.device)[0].get(case.name) for each in (policy, POLICIES["torch"])
    )
    assert own is not None
    expected = torchs
    if original is not None and own.rule is not original.rule:
        cast = by_hand(own.rule, case.name, _fake(case), case.lower)
        assert cast is not None
        expected = observe(lambda: op_samples.call(*cast))._replace(kernels=[])
    if original is None and own.rule is Rule.PROMOTE and _is_refused_mixture(case):
        return _promoted(case, set())
    if not expected.error:
        return expected
    promotes = original is not None and own.rule is Rule.PROMOTE
    others = {case.lower} if promotes else set()
    if own.rule is Rule.FP32_IF_REFUSED and any(t.dtype in LOWER for t in tensors_in(case.sample)):
        others = {torch.float32}
    promoted = _promoted(case, others)
    return expected._replace(kernels=[]) if promoted.error else promoted


def _is_refused_mixture(case: Case) -> bool:
    """Return True if an operation that refuses every mixture gets one, which fake tensors may accept."""
    floating = [t for t in tensors_in(case.sample) if t.is_floating_point()]
    is_mixed = len({t.dtype for t in floating}) > 1
    has_elements = all(t.numel() > 1 for t in floating)
    return is_mixed and has_elements and refuses_mixtures(case.name, case.device)


def _fake(case: Case) -> Sample:
    return map_tensors(lambda t: on_device(t, case.device), case.sample)


def _promoted(case: Case, others: set[torch.dtype]) -> Outcome:
    """The operation outside a region in the widest dtype; an argument that it writes keeps its dtype."""
    sample = _fake(case)
    dtypes = {t.dtype for t in tensors_in(sample) if t.is_floating_point()} | others
    widest = functools.reduce(torch.promote_types, dtypes)
    wide = map_tensors(lambda t: t.to(widest) if t.is_floating_point() else t, sample)
    outcome = observe(lambda: case.call(wide))
    overload = _torch.find_overload(case.name)
    assert overload is not None
    contents = [
        a.name for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    if contents and not outcome.error:
        values = {
            **dict(zip((a.name for a in overload._schema.arguments), sample.args, strict=False)),
            **sample.kwargs,
        }
        outcome = observe(lambda: [values[name] for name in contents])
    return outcome._replace(kernels=[])


# --- comparisons ---


def outcomes(cases: Iterable[Case], mode: str, engine: str) -> Iterator[tuple[Case, Outcome]]:
    """Return precast's decisions for cases."""
    with registration.use_engine(engine), fake_tensor.FakeTensorMode():
        if mode in POLICIES:
            for case in cases:
                region = precast.autocast(case.device, case.lower, policy=POLICIES[mode])
                yield case, case.run(region)
            return
        with precast.install("torch"):
            for case in cases:
                yield case, case.run(torch_region(case.device, case.lower))


@on_each
@in_each_mode
@on_each_engine
def test_rows(
    device: str, mode: str, engine: str, record_property: Callable[[str, object], None]
) -> None:
    expected = documented_rows(device, mode)
    record_property("cases", len(expected))
    for (case, actual), each in zip(outcomes(rows(device), mode, engine), expected, strict=True):
        kernels = actual.kernels if each.kernels or mode in ("torch", "installed") else []
        assert actual._replace(kernels=kernels) == each, case


@on_each
@in_each_mode
@on_each_engine
def test_opinfo(
    device: str, mode: str, engine: str, record_property: Callable[[str, object], None]
) -> None:
    """Under `default` and `lean`, all that PyTorch computes is computed, with results of the same sizes."""
    pytest.importorskip("expecttest")
    expected = torch_outcomes(opinfo, device)
    record_property("cases", len(expected))
    for (case, actual), each in zip(outcomes(opinfo(device), mode, engine), expected, strict=True):
        if mode in ("torch", "installed"):
            assert actual == each, case
        elif not each.error:
            assert not actual.error, case
            assert mode == "lean" or actual.results == each.results, case
