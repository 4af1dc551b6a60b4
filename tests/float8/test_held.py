"""Attached models keep their weights in 8 bits: quantised once a step, and never used when out of date."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precast
from precast.engine import float8_kernels, registration
from precast.errors import StaleWeightError
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES
from precast.weights import held
from precast.weights.held_float8 import QuantisedCopy
from tests.support.unsampled import write_unsampled

BF16 = torch.bfloat16
rules = pytest.mark.parametrize("rule", FLOAT8_RULES)
BY_TENSOR = FLOAT8_RULES[:2]


@pytest.fixture(params=registration.available_engines(), autouse=True)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})
    with registration.use_engine(request.param):
        yield


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[QuantisedCopy]:
    """Each time that a held weight is quantised."""
    times: list[QuantisedCopy] = []
    before = QuantisedCopy.quantise

    def noted(self: QuantisedCopy, source: Tensor) -> None:
        times.append(self)
        before(self, source)

    monkeypatch.setattr(QuantisedCopy, "quantise", noted)
    return times


def policy(rule: str) -> Policy:
    return Policy.load("default").replace(name="in8", ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))


def region(rule: str) -> precast.autocast:
    return precast.autocast("cpu", BF16, policy=policy(rule))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 24))


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(9, 40)


@rules
def test_training_is_bit_for_bit_what_it_is_without_holding(rule: str) -> None:
    plain = network()
    kept = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(n.parameters(), 1e-2) for n in (plain, kept)]
    with precast.attach(kept):
        for _ in range(5):
            for net, optimizer in zip((plain, kept), optimizers, strict=True):
                optimizer.zero_grad()
                x = batch().requires_grad_()
                with region(rule):
                    net(x).float().square().mean().backward()
                optimizer.step()
            for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
                assert one.equal(other)


@rules
def test_a_weight_is_quantised_once_a_step_for_all_uses(
    rule: str, quantised: list[QuantisedCopy]
) -> None:
    net, x = network(), batch().requires_grad_()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    each = 1 if rule in BY_TENSOR else 2
    with precast.attach(net):
        with region(rule):
            net(x).float().sum().backward()
        optimizer.step()  # from the first step on, it is known who writes the weights
        optimizer.zero_grad()
        quantised.clear()
        for step in (1, 2, 3):
            for _ in range(3):  # accumulated
                with region(rule):
                    net(x).float().sum().backward()
            assert len(quantised) == step * 2 * each
            optimizer.step()
            optimizer.zero_grad()


@rules
def test_evaluation_quantises_once(rule: str, quantised: list[QuantisedCopy]) -> None:
    net, x = network(), batch()
    with precast.attach(net), torch.no_grad():
        for _ in range(4):
            with region(rule):
                net(x)
        assert len(quantised) == 2


def test_copies_take_a_byte_a_number() -> None:
    net = network()
    with precast.attach(net), torch.no_grad():
        with region("float8"):
            net(batch())
        copies = held.held_parameters[id(net[0].weight)].copies
        assert [copy.tensor.nbytes for copy in copies.values()] == [net[0].weight.numel()]
    assert not held.held_parameters


def _step(net: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.5, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@torch.no_grad()
def _in_place(net: nn.Sequential) -> None:
    net[0].weight.mul_(-2)


def _load(net: nn.Sequential) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def _other_data(net: nn.Sequential) -> None:
    net[0].weight.data = torch.randn_like(net[0].weight)


def _other_weight(net: nn.Sequential) -> None:
    net[0].weight = nn.Parameter(torch.randn_like(net[0].weight))


@rules
@pytest.mark.parametrize("write", [_step, _in_place, _load, _other_data, _other_weight])
def test_a_write_is_seen_at_the_next_use(rule: str, write: Callable[[nn.Sequential], None]) -> None:
    net, x = network(), batch()
    with precast.attach(net):
        for trains in (False, True):
            with torch.set_grad_enabled(trains), region(rule):
                net(x)
            write(net)
            with torch.set_grad_enabled(trains), region(rule):
                got = net(x)
                wanted = copy.deepcopy(net)(x)
            assert got.equal(wanted)


def test_an_unversioned_write_is_found() -> None:
    net, x = network(), batch()

    def enter_often() -> None:
        for _ in range(200):
            with torch.no_grad(), region("float8_rowwise"):
                net(x)

    with precast.attach(net):
        enter_often()  # nothing was written, and nothing is found
        write_unsampled(net[0].weight)
        with pytest.raises(StaleWeightError, match="held copy in e4m3 with a scale a row"):
            enter_often()


@rules
def test_backward_after_the_weight_was_quantised_again_uses_what_forward_used(rule: str) -> None:
    net, x = network(), batch().requires_grad_()
    plain = copy.deepcopy(net)
    with region(rule):
        plain(x).float().sum().backward()
    wanted, x.grad = x.grad, None
    with precast.attach(net):
        with region(rule):
            result = net(x).float().sum()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(2)
            with region(rule):
                net(x)
        result.backward()
    assert wanted is not None
    assert x.grad is not None
    assert x.grad.equal(wanted)


@rules
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(rule: str, reentrant: bool) -> None:
    net, x = network(), batch().requires_grad_()
    again = copy.deepcopy(net)
    with precast.attach(net), precast.attach(again):
        with region(rule):
            net(x).float().sum().backward()
            checkpoint(again, x, use_reentrant=reentrant).float().sum().backward()
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.equal(other.grad)


def test_a_trace_says_that_the_weight_is_held() -> None:
    net = network()
    with precast.attach(net), torch.no_grad(), region("float8"), precast.trace() as trace:
        net(batch())
    (row, _) = [row for row in trace.rows if row.op == "linear"]
    assert "@ e4m3 with one scale, held, emulated" in row.reason


def test_a_module_in_8_bits_beside_one_in_16() -> None:
    net = network()
    mixed = Policy.load("default").replace(modules={"0": "float8_rowwise"})
    with precast.attach(net, mixed), torch.no_grad():
        with precast.autocast("cpu", BF16):
            got = net(batch())
        kinds = [
            [
                type(copy).__name__
                for copy in held.held_parameters[id(net[i].weight)].copies.values()
            ]
            for i in (0, 2)
        ]
    assert kinds == [["QuantisedCopy"], ["Copy"]]
    with region("float8_rowwise"), torch.no_grad():
        hidden = functional.gelu(net[0](batch()))
    with precast.autocast("cpu", BF16, policy="default"), torch.no_grad():
        assert got.equal(net[2](hidden))
