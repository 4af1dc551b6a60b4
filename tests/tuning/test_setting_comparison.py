"""compare_settings: the cause of a difference of two settings, and the smallest cure, against exhaustive search."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import ComparisonError
from precast.tuning.setting_comparison import smallest_set

BFLOAT16 = precast.Setting("default", torch.bfloat16)
NETWORKS = 20 if int(os.environ.get("PRECAST_PLANTED_FAULTS", "12")) >= 200 else 3


class Sensitive(nn.Module):
    """A layer whose error in 16 bits grows by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(16, 16) / 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return y + self.factor * (
            torch.nn.functional.linear(y, self.weight).float() - y @ self.weight.T.detach()
        )


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return nn.Sequential(*(Sensitive(draw.choice((0.1, 1.0, 10.0))) for _ in range(5))).eval()


def _distance(model: nn.Module, x: Tensor, modules: tuple[str, ...]) -> float:
    policy = precast.Policy.load("default").replace(modules=dict.fromkeys(modules, "fp32"))
    with torch.no_grad():
        right = model(x).double()
        attachment = precast.attach(model, policy, hold=False)
        with precast.autocast("cpu", torch.bfloat16, policy=policy):
            other = model(x).double()
        attachment.detach()
    return float((right - other).norm() / right.norm())


@pytest.mark.parametrize("seed", random.sample(range(1000), NETWORKS))
def test_the_cure_is_the_smallest_set_and_brings_the_distance_under_the_bound(seed: int) -> None:
    model, x = _network(seed), torch.randn(8, 16)
    names = [str(number) for number in range(5)]
    draw = random.Random(seed)
    some = tuple(draw.sample(names, 2))
    bound = 1.2 * _distance(model, x, some) + 1e-9
    difference = precast.compare_settings(model, x, a=precast.Setting(), b=BFLOAT16, bound=bound)
    sizes = [
        size for size in range(6) for each in itertools.combinations(names, size)
        if _distance(model, x, each) <= bound
    ]  # fmt: skip
    if sizes[0] == 0:
        assert difference.within_bound
        assert difference.cure is None
        return
    assert difference.cure is not None
    cured = [
        line.partition(" ")[0].strip('"') for line in difference.cure.splitlines() if "fp32" in line
    ]
    assert len(cured) == sizes[0]
    assert _distance(model, x, tuple(cured)) <= bound
    assert difference.cure_seconds is not None
    assert difference.cure_seconds > 0


def test_the_search_finds_the_smallest_set_where_errors_do_not_add_up() -> None:
    def distance(modules: frozenset[str]) -> float:
        return 0.0 if {"b", "d"} <= modules else 1.0 - 0.1 * len(modules & {"a", "c", "e"})

    assert smallest_set("abcde", distance, 0.5) == {"b", "d"}
    assert smallest_set("abcde", lambda _: 1.0, 0.5) is None
    assert smallest_set("abcde", lambda _: 0.1, 0.5) == set()


def test_the_first_operation_in_16_bits_is_the_cause() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(16, 4))
    before = [each.clone() for each in model.state_dict().values()]
    difference = precast.compare_settings(
        model, torch.randn(8, 16), a=precast.Setting(), b=BFLOAT16
    )
    assert difference.cause is not None
    assert (difference.cause.module, difference.cause.kind) == ("1", "dtype")
    assert difference.cure is not None  # without a bound, the whole model in float32
    assert '1 = "fp32"' in difference.cure
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("form", ["attached", "converted", "exported"])
@pytest.mark.parametrize("split", [1, 8])
def test_a_model_to_ship_agrees_with_its_region(form: str, split: int) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    setting = precast.Setting("default", torch.bfloat16, form, split=split)  # type: ignore[arg-type]
    x = torch.randn(8, 16)
    difference = precast.compare_settings(model, x, a=BFLOAT16, b=setting, bound=1e-2)
    assert difference.within_bound, difference
    assert difference.steps[0].output is not None
    kinds = {each.kind for each in difference.causes}
    assert not kinds, difference  # weights in 16 bits give the same results


def test_equal_settings_have_no_cause() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 4))
    difference = precast.compare_settings(
        model, {"input": torch.randn(8, 16)}, a=BFLOAT16, b=BFLOAT16
    )
    assert difference.equal
    assert difference.cause is None


def test_a_bound_out_of_reach_is_said() -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, 1.0 if torch.is_autocast_enabled("cpu") else 2.0)

    difference = precast.compare_settings(
        Rounds(), torch.ones(4), a=precast.Setting(), b=BFLOAT16, bound=0.01
    )
    assert difference.cure is None or "fp32" in difference.cure
    assert not difference.within_bound


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ComparisonError, match="needs a policy"):
        precast.Setting(form="converted")
    with pytest.raises(ComparisonError, match="expected at least 1"):
        precast.Setting(split=0)
    parts = precast.Setting(split=3)
    with pytest.raises(ComparisonError, match="the batch has 8 rows"):
        precast.compare_settings(nn.ReLU(), torch.randn(8, 4), a=precast.Setting(), b=parts)
    with pytest.raises(ComparisonError, match="expected one of region, attached"):
        precast.Setting("default", form="fast")  # type: ignore[arg-type]
    with pytest.raises(ComparisonError, match=r"expected a torch\.nn\.Module, got int"):
        precast.compare_settings(3, torch.ones(1), a=BFLOAT16, b=BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(ComparisonError, match="expected floating-point tensors"):
        precast.compare_settings(
            nn.Identity(), torch.ones(1, dtype=torch.int64), a=BFLOAT16, b=BFLOAT16
        )
