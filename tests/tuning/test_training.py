"""Trials train copies: the model, its gradients and the random states stay as they are, and runs can be repeated."""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading
import warnings
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from precast.errors import TuningError
from precast.grad_scaler.scaler import GradScaler
from precast.policy.policy import Policy
from precast.tuning.setups import (
    FLOAT32,
    Setup,
    Workload,
    preserved_random_states,
    workload_of,
)
from precast.tuning.training import Training, TrainingTask

BFLOAT16 = Setup("default", Policy.load("default"), torch.bfloat16)
FLOAT16 = Setup("half", Policy.load("default"), torch.float16)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def batches(count: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def workload(trained: nn.Module | None = None, **changed) -> Workload:
    settings = {"step": step, "batches": tuple(batches()), "optimizer": sgd, "device_type": "cpu"}
    return Workload(trained or model(), **{**settings, **changed})


def run_losses(given: Workload, setup: Setup, seed: int, steps: int) -> Training:
    """Return a training of so many steps, closed."""
    training = Training(given, setup, seed)
    try:
        for _ in range(steps):
            training.run()
    finally:
        training.close()
    return training


# --- what does not change ---


def test_the_model_is_not_touched() -> None:
    mine = model()
    step(mine, batches()[0]).backward()
    before = copy.deepcopy(mine.state_dict())
    gradients = [parameter.grad.clone() for parameter in mine.parameters()]
    run_losses(workload(mine), BFLOAT16, 1, 4)
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    assert all(map(torch.equal, gradients, (p.grad for p in mine.parameters())))
    assert not mine._forward_hooks
    assert not mine._forward_pre_hooks


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_random_states_are_the_callers_again(error: type[BaseException] | None) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    wanted = draw()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with nullcontext() if error is None else pytest.raises(error):
        with preserved_random_states():
            run_losses(workload(), FLOAT32, 0, 2)
            draw()
            if error is not None:
                raise error
    assert draw() == wanted


def test_a_region_around_does_not_reach_the_trainings() -> None:
    alone = run_losses(workload(), FLOAT32, 0, 3).losses
    with torch.autocast("cpu"), torch.no_grad(), preserved_random_states():
        assert run_losses(workload(), FLOAT32, 0, 3).losses == alone


# --- pairs ---


def test_two_trainings_in_turns_are_as_each_alone() -> None:
    alone = [run_losses(workload(), setup, 2, 6).losses for setup in (FLOAT32, BFLOAT16)]
    both = [Training(workload(), setup, 2) for setup in (FLOAT32, BFLOAT16)]
    for number in range(6):
        for training in both if number % 2 else both[::-1]:
            training.run()
    assert [training.losses for training in both] == alone
    assert alone[0] != alone[1]
    assert alone[0] == pytest.approx(alone[1], rel=0.05)


def test_seeds_differ_and_the_first_is_the_model_itself() -> None:
    started = [Training(workload(), FLOAT32, seed).model.state_dict() for seed in (0, 1)]
    mine = model().state_dict()
    assert torch.equal(started[0]["0.weight"], mine["0.weight"])
    assert not torch.equal(started[1]["0.weight"], mine["0.weight"])
    assert started[1]["0.weight"] == pytest.approx(mine["0.weight"], rel=0.01)
    curves = [tuple(run_losses(workload(), FLOAT32, seed, 3).losses) for seed in (0, 1, 2)]
    assert len({*curves}) == 3


def test_the_loss_falls_also_in_float16() -> None:
    for setup in (FLOAT32, BFLOAT16, FLOAT16):
        training = Training(workload(batches=tuple(batches(1))), setup, 0)
        before = training.values()[0]
        for _ in range(30):
            training.run()
        assert not training.failure
        assert training.values()[0] < 0.8 * before
        assert len(training.seconds) == len(training.losses) == 30


def test_a_metric_takes_the_place_of_the_loss_at_the_end() -> None:
    def errors(model: nn.Module, batch) -> torch.Tensor:
        return (model(batch[0]).argmax(1) != batch[1]).float().mean()

    final = Training(workload(metric=errors), FLOAT32, 0).values()[0]
    assert final * 16 * 4 == pytest.approx(round(final * 16 * 4))


def test_a_metric_that_raises_in_16_bits_is_a_failure_of_the_setup() -> None:
    def metric(model: nn.Module, batch) -> float:
        return float(model(batch[0]).numpy().mean())  # NumPy has no bfloat16

    training = Training(workload(metric=metric), BFLOAT16, 0)
    assert math.isnan(training.values()[0])
    assert "unsupported ScalarType BFloat16" in training.failure
    assert math.isfinite(Training(workload(metric=metric), FLOAT32, 0).values()[0])


def test_a_metric_that_raises_in_float32_is_named() -> None:
    def metric(model: nn.Module, batch) -> float:
        raise LookupError("of the program")

    with pytest.raises(LookupError) as caught:
        Training(workload(metric=metric), FLOAT32, 0).values()
    assert caught.value.__notes__ == ["precast.tune: the metric failed in float32"]


def test_a_policy_with_rules_for_modules_is_followed() -> None:
    seen = []
    mine = model()
    mine[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    policy = Policy.load("default").replace(modules={"3": {"ops": {"linear": "fp32"}}})
    for each in (BFLOAT16, Setup("mine", policy, torch.bfloat16)):
        run_losses(workload(mine), each, 0, 1)
    assert seen == [torch.bfloat16, torch.float32]


def test_memory_that_is_kept_for_backward_is_half_in_16_bits() -> None:
    mine, wide = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(512, 8)
    given = workload(mine, batches=(wide,), step=lambda model, x: model(x).sum())
    full, half = (TrainingTask(given).needed_bytes(each) for each in (FLOAT32, BFLOAT16))
    assert (
        full == 2 * 512 * 8 * 4
    )  # the batch, and the result of the ReLU, which the second layer takes
    assert half == pytest.approx(full / 2, rel=0.05)


def test_a_step_that_the_scaler_skips_is_repeated() -> None:
    """So that the trainings of a pair have taken the same number of steps."""
    given = workload(batches=tuple(batches(1)))
    training = Training(given, FLOAT16, 0)
    training._scaler = GradScaler("cpu", init_scale=2.0**40)
    for _ in range(3):
        training.run()
    assert training._scaler.counters.skipped > 3
    assert training.losses == pytest.approx(run_losses(given, FLOAT32, 0, 3).losses, rel=0.01)
    assert len(training.seconds) == 3


# --- failures ---


def test_what_overflows_in_float16_is_a_failure_and_no_error() -> None:
    training = run_losses(
        workload(step=lambda model, batch: (model(batch[0]) * 1e6).square().mean()), FLOAT16, 0, 5
    )
    assert "inf" in training.failure or "finite" in training.failure
    assert math.isnan(training.values()[0])


def test_an_operation_that_has_no_kernel_in_16_bits_is_a_failure_and_one_in_float32_is_raised() -> (
    None
):
    def half_fails(model: nn.Module, batch) -> torch.Tensor:
        if model(batch[0]).dtype is not torch.float32:
            raise RuntimeError('"something" not implemented for BFloat16')
        return step(model, batch)

    assert "not implemented" in run_losses(workload(step=half_fails), BFLOAT16, 0, 2).failure

    def fails(model: nn.Module, batch) -> torch.Tensor:
        raise RuntimeError("of the program")

    with pytest.raises(RuntimeError, match="of the program"):
        run_losses(workload(step=fails), FLOAT32, 0, 1)


def test_a_model_of_torchscript_is_an_error() -> None:
    """Its copy has parameters that no optimizer takes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        mine = nn.Sequential(torch.jit.script(model()))
    with pytest.raises(TuningError, match=r"as it was before torch\.jit\.script"):
        run_losses(workload(mine), FLOAT32, 0, 1)


def test_a_model_that_cannot_be_copied() -> None:
    mine = model()
    mine.lock = threading.Lock()
    with pytest.raises(
        TuningError, match=r"a Sequential, cannot be copied \(TypeError: cannot pickle"
    ):
        Training(workload(mine), FLOAT32, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda model, batch: model(batch[0]), r"a tensor of shape \(16, 3\) and torch.float32"),
        (lambda model, batch: step(model, batch).item(), "float"),
        (lambda model, batch: None, "NoneType"),
        (lambda model, batch: batch[1].sum(), r"torch.int64"),
    ],
)
def test_a_loss_that_is_no_scalar(wrong, said: str) -> None:
    with pytest.raises(TuningError, match=said):
        run_losses(workload(step=wrong), FLOAT32, 0, 1)


def test_a_loss_without_a_gradient() -> None:
    other = model()
    for wrong in (
        lambda model, batch: step(model, batch).detach(),
        lambda model, batch: step(other, batch),  # the user's own model, and not the copy
    ):
        with pytest.raises(
            TuningError, match="reaches no parameter of the model that step was called with"
        ):
            run_losses(workload(step=wrong), FLOAT32, 0, 1)


def test_batches_are_a_list_a_loader_or_a_function() -> None:
    def first_of(given: object) -> tuple:
        return workload_of(model(), step, given).batches

    known = batches(3)
    loader = torch.utils.data.DataLoader([*range(6)], batch_size=2)
    assert first_of(known) == tuple(known)
    assert first_of(lambda: iter(known)) == tuple(known)
    assert len(first_of(loader)) == 3
    assert len(first_of(itertools.count)) == 32
    with pytest.raises(TuningError, match="ended before the first batch"):
        first_of(list)
    for wrong in (torch.ones(3), 5, lambda: 5):
        with pytest.raises(TuningError, match="batches is"):
            first_of(wrong)


def test_batches_that_end_are_taken_again() -> None:
    assert len(run_losses(workload(batches=tuple(batches(2))), FLOAT32, 0, 5).losses) == 5
