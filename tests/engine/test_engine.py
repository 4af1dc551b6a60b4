"""The engine: it overrides only what needs it, hands on without a region, and leaves no trace when taken off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from precast import Policy
from precast._internal import events
from precast.engine import registration
from precast.engine.thread_state import thread_state
from precast.errors import BannedOperationError, PrecastWarning
from precast.policy.policy import expanded_rules
from precast.weights.native import library

TORCH = Policy.load("torch")


@pytest.fixture(autouse=True)
def _fresh_engine() -> Iterator[None]:
    registration.unregister()
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        yield


def overridden() -> set[str]:
    return {name for name, device in registration._registered if device == "cpu"}


def test_only_operations_that_take_weights_are_overridden_for_pytorchs_policy() -> None:
    with precast.autocast("cpu", policy=TORCH):
        pass
    lower = {
        name for name, entry in expanded_rules(TORCH, "cpu")[0].items() if entry.rule == "lower"
    }
    assert overridden() == lower


def test_another_rule_overrides_that_operation_and_no_more() -> None:
    half = torch.ones(2).bfloat16()
    with precast.autocast("cpu", policy=TORCH.replace(ops={"relu": "fp32", "mse_loss": "keep"})):
        assert torch.relu(half).dtype is torch.float32
        assert F.mse_loss(half, half).dtype is torch.bfloat16
    with precast.autocast("cpu", policy=TORCH):
        assert torch.relu(half).dtype is torch.bfloat16
        assert F.mse_loss(half, half).dtype is torch.float32
        first = overridden()
    registration.unregister()
    with precast.autocast("cpu", policy=TORCH):
        assert first - overridden() == {"aten::relu", "aten::mse_loss"}


def test_an_empty_policy_is_float32_even_inside_a_torch_region() -> None:
    nothing = Policy("nothing", {})
    a = torch.randn(3, 3)
    with torch.autocast("cpu"), precast.autocast("cpu", policy=nothing):
        assert torch.equal(a @ a, a.mm(a))
        assert (a @ a).dtype is torch.float32


def test_taken_off_it_leaves_pytorchs_results() -> None:
    x, weight = torch.randn(2, 3), torch.nn.Parameter(torch.randn(3, 3))

    def in_torch_region() -> Tensor:
        with torch.autocast("cpu"):
            return F.linear(x, weight)

    before = in_torch_region()
    with precast.autocast("cpu", policy=TORCH.replace(ops={"linear": "fp32"})):
        assert F.linear(x, weight).dtype is torch.float32
    assert torch.equal(in_torch_region(), before)
    registration.unregister()
    assert overridden() == set()
    assert torch.equal(in_torch_region(), before)


def test_a_custom_operation_may_be_defined_after_its_rule() -> None:
    late = TORCH.replace(name="late", ops={"precast_test_late::twice": "lower"})
    with pytest.warns(PrecastWarning, match="precast_test_late::twice"):
        with precast.autocast("cpu", policy=late):
            pass

    @torch.library.custom_op("precast_test_late::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x + x

    with precast.autocast("cpu", policy=late):
        assert twice(torch.ones(2)).dtype is torch.bfloat16
    assert twice(torch.ones(2)).dtype is torch.float32


def test_banned_and_what_default_makes_of_it() -> None:
    p, target = torch.rand(4).bfloat16(), torch.rand(4)
    notes: list[object] = []
    with precast.autocast("cpu", policy=TORCH.retarget("cpu", like="cuda")):
        with pytest.raises(BannedOperationError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(p, target)
    with events.observe(notes.append):
        with precast.autocast("cpu", policy=Policy.load("default").retarget("cpu", like="cuda")):
            loss = F.binary_cross_entropy(p, target)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, F.binary_cross_entropy(p.float(), target))


def test_the_note_is_for_devices_where_pytorch_bans_it() -> None:
    policy = Policy.load("default")
    assert policy.resolve("binary_cross_entropy", "cuda").rule == "fp32"
    native = registration.torch_kernel("aten::binary_cross_entropy", "cuda")
    assert native is not None
    kernel = registration._kernel_for(
        policy, native, expanded_rules(policy, "cuda")[0]["aten::binary_cross_entropy"]
    )
    notes: list[events.OperationNote] = []
    assert kernel is not None
    with events.observe(notes.append):
        kernel(None, (torch.rand(3), torch.rand(3)), {})
    assert [(note.op, note.device_type) for note in notes] == [
        ("aten::binary_cross_entropy", "cuda")
    ]


def test_a_frame_is_made_once_for_each_policy() -> None:
    with precast.autocast("cpu", policy=TORCH):
        first = thread_state("cpu").state.bound_policy
    with precast.autocast("cpu", policy=Policy.load("torch")):
        assert thread_state("cpu").state.bound_policy is first


@pytest.mark.parametrize("policy", [TORCH, Policy.load("default")])
@pytest.mark.parametrize("rule", ["keep", "lower", "fp32", "promote"])
def test_numbers_may_stand_where_tensors_do(policy: Policy, rule: str) -> None:
    names = ("add", "mul", "sub", "div", "add_", "mul_")
    ours = policy.replace(ops=dict.fromkeys(names, rule))
    x = torch.tensor([1.5, 2.5]).bfloat16()
    dtype = torch.float32 if rule == "fp32" else torch.bfloat16
    with precast.autocast("cpu", policy=ours):
        for result in (x + 1, x * 2.0, 1 - x, x / 2):
            assert result.dtype is dtype
        y = x.clone()
        y += 1
        y *= 2.0
    with torch.autocast("cpu"):  # the kernels are still there, and hand on
        assert torch.equal(x * 2.0, x + x)
    assert torch.equal(y, (x + 1) * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_policy_torch_is_pytorchs_on_every_build(device: str) -> None:
    """Rows for kernels that only other builds have make no difference in this one."""
    bound = registration.bind(Policy.load("torch"), device)
    assert bound.matches_torch
    assert bound.distinct_fingerprint is None
