"""Which updates of parameters in 16 bits round to nothing: exactly those, and looking changes no result."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import precast
from precast.diagnostics.numerics.lost_updates import LostUpdates
from tests.optim.optimizers import ELEMENTWISE, Lion, Make
from tests.support.documents import document
from tests.support.reports import numeric_findings

BF16 = torch.bfloat16
NUMBERS = 1024


class Weight(nn.Module):
    """A model of one parameter, which is its output."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.weight * 1


def stepped(model: nn.Module, optimizer: Optimizer, gradient: Tensor) -> dict[str, Any]:
    """One step that is counted; what is known of the parameter."""
    monitor = precast.monitor(model)
    model()
    model.weight.grad = gradient
    optimizer.step()
    monitor.end_step()
    [entry] = [e for e in monitor.to_dict()["modules"] if e["kind"] == "parameter"]
    monitor.detach()
    return entry


def test_what_rounds_to_nothing_is_counted_to_the_number() -> None:
    """At 1 the next numbers of bfloat16 are 1/128 up and 1/256 down: of three updates one is too small."""
    model = Weight(torch.ones(NUMBERS, dtype=BF16))
    optimizer = SGD(model.parameters(), lr=1.0)
    gradient = torch.zeros(NUMBERS)
    gradient[:100] = -(2.0**-9)  # less than half of 1/128: stays
    gradient[100:400] = -(2.0**-7)  # moves
    gradient[400:500] = -(2.0**-20)  # less than half of what two numbers of bfloat16 hold
    entry = stepped(model, optimizer, gradient.to(BF16))
    assert entry["updates_rounded_away"] == [200 / 500]
    size = 100 * 2.0**-9 + 300 * 2.0**-7 + 100 * 2.0**-20
    assert entry["updates_lost"] == [pytest.approx((size - 300 * 2.0**-7) / size)]
    assert entry["updates_rounded_away_with_kahan"] == [0.0], "a rest has an exponent of its own"


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_looking_changes_nothing_that_the_step_reads(make: Make, dtype: torch.dtype) -> None:
    """Not the results of two trainings: PyTorch's fused SGD gives others from call to call, for memory elsewhere."""
    torch.manual_seed(0)
    model = Weight(torch.randn(NUMBERS).to(dtype))
    optimizer = make(model.parameters())
    for _ in range(3):
        model.weight.grad = torch.randn(NUMBERS).to(dtype)
        before = pickle.dumps((model.weight.detach(), model.weight.grad, optimizer.state_dict()))
        lost = LostUpdates()
        lost.before(optimizer, {id(model.weight): "weight"})
        after = pickle.dumps((model.weight.detach(), model.weight.grad, optimizer.state_dict()))
        assert before == after
        assert list(optimizer.state) in ([], [model.weight])
        optimizer.step()
        lost.after()
        assert (lost.read() == {}) is isinstance(optimizer, Lion)


def test_what_is_lost_is_what_float32_would_have_kept() -> None:
    """AdamW's third step: against float32 masters with the same states, computed here."""
    torch.manual_seed(0)
    model = Weight(torch.randn(NUMBERS).to(BF16))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _step in range(2):
        model.weight.grad = torch.randn(NUMBERS).to(BF16)
        optimizer.step()
    was, gradient = model.weight.detach().clone(), torch.randn(NUMBERS).to(BF16)
    exact = nn.Parameter(was.float())
    twin = AdamW([exact], lr=1e-3)
    state = optimizer.state[model.weight]
    twin.state[exact] = {
        name: value.float().clone() if value.numel() > 1 else value.clone()
        for name, value in state.items()
    }
    exact.grad = gradient.float()
    twin.step()
    entry = stepped(model, optimizer, gradient)
    distance = (exact.detach() - was.float()).abs()
    stays = (distance > 0) & (model.weight.detach() == was)
    assert 0.1 < stays.float().mean() < 0.9, "both cases are there"
    assert entry["updates_rounded_away"] == [
        pytest.approx(stays.sum().item() / (distance > 0).sum().item())
    ]
    assert entry["updates_lost"] == [
        pytest.approx((distance * stays).sum().item() / distance.sum().item(), rel=1e-5)
    ]


def test_of_float32_and_of_what_learns_by_rounding_nothing_is_lost() -> None:
    model = Weight(torch.ones(NUMBERS))
    entry = stepped(model, SGD(model.parameters(), lr=1e-9), torch.ones(NUMBERS))
    assert entry["updates_rounded_away"] == entry["updates_lost"] == [0.0]
    model = Weight(torch.ones(NUMBERS, dtype=BF16))
    optimizer = SGD(model.parameters(), lr=1e-5)
    precast.optim.bfloat16_weights(model, optimizer)
    entry = stepped(model, optimizer, torch.ones(NUMBERS, dtype=BF16))
    assert entry["updates_rounded_away"] == [0.0]


def test_compensation_that_a_write_discards_is_lost() -> None:
    """A write that changes nothing discards none; one that moves half of the values, that of these."""
    model = Weight(torch.ones(NUMBERS, dtype=BF16))
    optimizer = SGD(model.parameters(), lr=1e-4)
    precast.optim.bfloat16_weights(model, optimizer)
    gradient = torch.ones(NUMBERS, dtype=BF16)
    stepped(model, optimizer, gradient)
    with torch.no_grad():
        model.weight.clamp_(max=2)
    assert stepped(model, optimizer, gradient)["updates_rounded_away"] == [0.0]
    with torch.no_grad():
        model.weight[: NUMBERS // 2] = 1e-3
    entry = stepped(model, optimizer, gradient)
    assert entry["updates_rounded_away"] == entry["updates_lost"] == [0.5]
    assert stepped(model, optimizer, gradient)["updates_rounded_away"] == [0.0]


@pytest.mark.filterwarnings("ignore:PyTorch's fused SGD on the CPU")  # its gradients are looked at
def test_a_fused_step_under_a_scaler_is_looked_at_without_the_scale() -> None:
    """Scaled by 1024 the updates would be large enough; they are not."""
    model = Weight(torch.ones(NUMBERS))
    model.weight.data = model.weight.detach().to(BF16)
    optimizer = SGD(model.parameters(), lr=1e-4, fused=True)
    scaler = precast.GradScaler("cpu", init_scale=1024.0)
    monitor = precast.monitor(model)
    scaler.scale(model().float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    [entry] = [e for e in monitor.to_dict()["modules"] if e["kind"] == "parameter"]
    assert entry["updates_rounded_away"] == [1.0]
    assert torch.equal(model.weight.detach(), torch.ones(NUMBERS, dtype=BF16))


@pytest.mark.parametrize("share", [0.98, 0.2])
def test_the_report_says_it_with_what_keeps_the_updates(share: float) -> None:
    made: Any = document(overflow_at=None)
    parameters = [m for m in made["health"]["modules"] if m["kind"] == "parameter"]
    for module in parameters:
        steps = len(module["steps"])
        module["updates_rounded_away"] = [0.0] * steps
        module["updates_rounded_away_with_kahan"] = [0.001] * steps
    parameters[1]["updates_rounded_away"] = [None, *[share] * (len(parameters[1]["steps"]) - 1)]
    made["findings"] = []
    found = [f for f in numeric_findings(made) if f["kind"] == "rounded away"]
    assert len(found) == (share > 0.5)
    for finding in found:
        assert (
            f"98% of the updates of `{parameters[1]['name']}` round to nothing" in finding["title"]
        )
        assert "bfloat16_weights" in finding["suggestion"]
        assert "0.1% of the updates" in finding["suggestion"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_parameter_of_one_element_has_its_states_in_float32_too(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    with precast.monitor(model, every=1) as watched:
        for _ in range(3):
            model(torch.ones(2, 4, dtype=dtype)).float().mean().backward()
            optimizer.step()
    assert watched.steps == 3


# --- optimizer states and averages ---


def test_a_second_moment_in_16_bits_grows_and_cannot_decay() -> None:
    """Its values are at their peak: 0.999 of a value of bfloat16 rounds to the value itself."""
    model = Weight(torch.ones(NUMBERS, dtype=BF16))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    large, small = torch.full((NUMBERS,), 8.0).to(BF16), torch.full((NUMBERS,), 0.01).to(BF16)
    model.weight.grad = large
    optimizer.step()
    peak = optimizer.state[model.weight]["exp_avg_sq"].clone()
    entry = stepped(model, optimizer, small)
    assert torch.equal(optimizer.state[model.weight]["exp_avg_sq"], peak)
    assert entry["states_rounded_away"] == [{"exp_avg": 0.0, "exp_avg_sq": 1.0}]


def test_states_in_float32_and_states_that_have_converged_are_not_stuck() -> None:
    model = Weight(torch.ones(NUMBERS))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        entry = stepped(model, optimizer, torch.ones(NUMBERS))
    assert entry["states_rounded_away"] == [{}]
    model = Weight(torch.ones(NUMBERS, dtype=BF16))
    momentum = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model.weight.grad = torch.ones(NUMBERS, dtype=BF16)
    momentum.step()
    momentum.state[model.weight]["momentum_buffer"].fill_(10.0)  # 0.9 * 10 + 1
    entry = stepped(model, momentum, torch.ones(NUMBERS, dtype=BF16))
    assert entry["states_rounded_away"] in ([{}], [{"momentum_buffer": 0.0}])


def follow(decay: float, dtype: torch.dtype, write: str = "both") -> list[float | None]:
    """One counted step of a model with an average; the share of the average that did not move."""
    torch.manual_seed(0)
    model = Weight(torch.randn(NUMBERS))
    others = [Weight(torch.randn(NUMBERS)).to(dtype) for _ in range(3)]  # frozen, as a teacher is
    average = (model.weight.detach() * 1.5).to(dtype)
    cast = model.weight.detach().to(dtype)
    optimizer = SGD(model.parameters(), lr=1e-3)
    monitor = precast.monitor(model)
    model()
    model.weight.grad = torch.randn(NUMBERS)
    optimizer.step()
    cast.copy_(model.weight.detach())
    if write == "both":
        average.mul_(decay).add_(model.weight.detach().to(dtype), alpha=1 - decay)
    elif write == "data":
        average.data.lerp_(model.weight.detach().to(dtype), 1 - decay)
    monitor.end_step()
    [entry] = [e for e in monitor.to_dict()["modules"] if e["kind"] == "parameter"]
    monitor.detach()
    assert len(others) == 3
    shares: list[float | None] = entry["average_rounded_away"]
    return shares


def test_an_average_in_16_bits_that_does_not_move_is_found() -> None:
    [share] = follow(0.9995, BF16)
    assert share is not None
    assert share > 0.9


@pytest.mark.parametrize(
    ("decay", "dtype", "write"),
    [(0.9995, torch.float32, "both"), (0.5, BF16, "both"), (0.5, BF16, "data"), (0.9995, BF16, "")],
)
def test_averages_that_move_and_frozen_copies_are_no_alarm(
    decay: float, dtype: torch.dtype, write: str
) -> None:
    [share] = follow(decay, dtype, write)
    assert share is None or share < 0.5


def counted(shares: list[float | None], key: str = "updates_rounded_away") -> list[str]:
    """The titles of the findings for a parameter with these shares in its counted steps."""
    made: Any = document(overflow_at=None)
    made["findings"] = []
    [module, *_] = [m for m in made["health"]["modules"] if m["kind"] == "parameter"]
    steps = len(module["steps"])
    nothing: Any = {} if key.startswith("states") else None
    module[key] = [nothing] * (steps - len(shares)) + shares
    return [f["title"] for f in numeric_findings(made) if "rounded away" in f["kind"]]


def test_the_latest_counted_step_decides() -> None:
    assert counted([0.9, 0.9, 0.9, 0.1]) == []
    [title] = counted([0.0, 0.0, 0.0, 0.9])
    assert "90% of the updates" in title
    assert "the latest counted step" in title
    [title] = counted([0.0, 0.8, 0.9, None])
    assert "90% of the updates" in title


def test_states_and_averages_have_findings_of_their_own() -> None:
    states: Any = [{"exp_avg": 0.0, "exp_avg_sq": 0.99}]
    [title] = counted(states, "states_rounded_away")
    assert "state `exp_avg_sq`" in title
    [title] = counted([0.99], "average_rounded_away")
    assert "A moving average of" in title
