"""Several losses into the same parameters, each with its scale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from precast.errors import BrokenModelError, ScalerError
from precast.grad_scaler.losses import LossScalers
from tests.support.scaling import KINDS, bits

Tensor = torch.Tensor


def started(kind: str = "sgd") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, KINDS[kind](list(model.parameters()))


@pytest.mark.parametrize("kind", ["sgd", "foreach adam", "fused adam"])
@pytest.mark.parametrize("micro", [1, 2])
def test_training_is_as_with_the_sum_of_the_losses(kind: str, micro: int) -> None:
    found = []
    for scaled in (False, True):
        model, optimizer = started(kind)
        scalers = LossScalers("cpu", ["first", "second"], growth_interval=2)
        for turn in range(4):
            optimizer.zero_grad()
            for number in range(micro):
                output = model(torch.full((2, 3), float(turn + number)).double())
                losses = {"first": output[:, 0].sum(), "second": output[:, 1].square().sum() * 1e-6}
                if scaled:
                    for name, loss in losses.items():
                        scalers.backward(name, loss, optimizer, retain_graph=name == "first")
                else:
                    for loss in losses.values():  # added in the same order
                        loss.backward(retain_graph=True)
            if scaled:
                scalers.step(optimizer)
                scalers.update()
            else:
                optimizer.step()
        found.append([bits(p) for p in model.parameters()])
    assert found[0] == found[1]
    assert [scaler.get_scale() for scaler in scalers.values()] == [2.0**18] * 2


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_one_bad_loss_skips_the_step_and_lowers_its_own_scale_alone(kind: str) -> None:
    model, optimizer = started(kind)
    before = [bits(p) for p in model.parameters()]
    scalers = LossScalers("cpu", ["good", "bad", "unused"])
    output = model(torch.ones(2, 3).double())
    scalers.backward("bad", output.sum() * math.inf, optimizer, retain_graph=True)
    scalers.backward("good", output.sum(), optimizer)
    scalers.step(optimizer)
    assert [bits(p) for p in model.parameters()] == before
    event = scalers["bad"].last_step(optimizer)
    assert event is not None
    assert event.skipped
    assert not event.loss_finite
    assert len(event.names) == 4
    good = scalers["good"].last_step(optimizer)
    assert good is not None
    assert not good.skipped
    scalers.update()
    assert {name: scaler.get_scale() for name, scaler in scalers.items()} == {
        "good": 2.0**16,
        "bad": 2.0**15,
        "unused": 2.0**16,
    }


def test_small_gradients_survive_beside_large_ones() -> None:
    """In float16, one scale for both loses the small one; two do not."""
    large, small = 2.0**14, 2.0**-26
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scalers = LossScalers("cpu", ["large", "small"], init_scale=2.0**14)
    scalers["large"].scale(torch.ones(()))
    scalers["large"].update(2.0)
    for name, size, place in (("large", large, 0), ("small", small, 1)):
        loss = parameter.half()[place] * size  # its gradient is float16
        scalers.backward(name, loss, optimizer)
    scalers.step(optimizer)
    assert parameter.tolist() == [-large, -small]
    plain = torch.nn.Parameter(torch.zeros(2))
    (plain.half()[1] * small * 2.0).backward()  # under the scale that the large one bears
    assert plain.grad is not None
    assert plain.grad[1] == 0.0


def test_states_and_being_off() -> None:
    scalers = LossScalers("cpu", ["a", "b"], init_scale=8.0)
    fresh = LossScalers("cpu", ["a", "b"])
    fresh.load_state_dict(scalers.state_dict())
    assert fresh["b"].get_scale() == 8.0
    with pytest.raises(ScalerError, match="the states of a; the losses here are a, b"):
        fresh.load_state_dict({"a": {}})
    good, bad = scalers.state_dict()["a"], {"scale": -1.0}
    with pytest.raises(ScalerError, match="without growth_factor"):
        fresh.load_state_dict({"a": {**good, "scale": 2.0}, "b": bad})
    assert fresh.state_dict() == scalers.state_dict()
    off = LossScalers("cpu", ["a"], enabled=False)
    model, optimizer = started()
    before = [bits(p) for p in model.parameters()]
    off.backward("a", model(torch.ones(2, 3).double()).sum(), optimizer)
    off.step(optimizer)
    off.update()
    assert [bits(p) for p in model.parameters()] != before
    assert off.state_dict() == {"a": {}}


def test_wrong_calls_say_what_to_do() -> None:
    for names in ([], ["a", "a"]):
        with pytest.raises(ScalerError, match="a different name for each loss"):
            LossScalers("cpu", names)
    scalers = LossScalers("cpu", ["a"])
    model, optimizer = started()
    loss = model(torch.ones(2, 3).double()).sum()
    with pytest.raises(ScalerError, match="unknown loss 'b'; expected one of a"):
        scalers.backward("b", loss, optimizer)
    with pytest.raises(ScalerError, match="needs the optimizers"):
        scalers.backward("a", loss)
    with pytest.raises(ScalerError, match=r"not passed to backward\(name, loss, optimizer\)"):
        scalers.step(optimizer)
    assert len(scalers) == 1


def test_a_loss_need_not_reach_all_of_its_optimizers() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in parameters]
    scalers = LossScalers("cpu", ["both", "first"])
    scalers.backward("both", parameters[0].sum() + parameters[1].sum(), *optimizers)
    scalers.backward("first", parameters[0].sum(), *optimizers)
    for optimizer in optimizers:
        scalers.step(optimizer)
    scalers.update()
    assert [p.tolist() for p in parameters] == [[0.0, 0.0], [0.5, 0.5]]
    assert scalers["first"].last_step(optimizers[1]) is None


def test_what_backward_refuses_or_breaks_off_leaves_gradients_as_they_were() -> None:
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scalers = LossScalers("cpu", ["a"])
    scalers.backward("a", parameter.sum(), optimizer)
    assert parameter.grad is not None
    with pytest.raises(ScalerError, match="share a parameter"):
        scalers.backward("a", parameter.sum(), optimizer, torch.optim.SGD([parameter, other]))
    assert parameter.grad.tolist() == [1.0, 1.0]
    out_of_memory = other * 2
    out_of_memory.register_hook(fail)
    with pytest.raises(MemoryError):
        scalers.backward("a", out_of_memory.sum() + parameter.sum(), optimizer)
    assert parameter.grad.tolist() == [1.0, 1.0]
    scalers.step(optimizer)
    with pytest.raises(ScalerError, match=r"after step\(\).*update\(\) first"):
        scalers.backward("a", parameter.sum(), optimizer)
    assert parameter.grad.tolist() == [1.0, 1.0]


def fail(_: Tensor) -> None:
    raise MemoryError


def test_an_iteration_ends_for_all_losses_where_one_is_broken() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scalers = LossScalers("cpu", ["bad", "good"], max_nonfinite_losses=0)
    for factor in (math.nan, 1.0):
        optimizer.zero_grad()
        scalers.backward("bad", parameter.sum() * factor, optimizer)
        scalers.backward("good", parameter.sum(), optimizer)
        scalers.step(optimizer)
        if math.isnan(factor):
            with pytest.raises(BrokenModelError):
                scalers.update()
    scalers.update()
    assert parameter.tolist() == [0.0, 0.0]


def test_a_sparse_gradient_and_a_dense_one_are_added() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scalers = LossScalers("cpu", ["a", "b"])
    for names in (["a", "b"], ["b", "a"]):
        optimizer.zero_grad()
        losses = {
            "a": nn.functional.embedding(torch.tensor([0, 2]), weight, sparse=True).sum(),
            "b": weight.sum(),
        }
        for name in names:
            scalers.backward(name, losses[name], optimizer)
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == [2.0, 1.0, 2.0]
        scalers.step(optimizer)
        scalers.update()


def test_gradients_whose_memory_backward_writes_again() -> None:
    """As those of DistributedDataParallel with gradient_as_bucket_view."""
    parameter = torch.nn.Parameter(torch.ones(2))
    bucket = torch.empty(2)

    def into_bucket(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = bucket.view(2).copy_(p.grad)

    parameter.register_post_accumulate_grad_hook(into_bucket)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scalers = LossScalers("cpu", ["a", "b"])
    scalers.backward("a", parameter.sum() * 3, optimizer)
    scalers.backward("b", parameter.sum() * 5, optimizer)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [8.0, 8.0]


def test_gradients_are_unscaled_for_whoever_clips_them_and_only_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scalers = LossScalers("cpu", ["a", "b"], init_scale=16.0)
    for scaler in scalers.values():  # one that has no loss in this iteration knows it as well
        scaler.scale(torch.ones(()))
    scalers.backward("a", parameter.sum() * 3, optimizer)
    assert scalers["b"].clip_grad_norm_(optimizer, 3.0).item() == 6.0
    for call in (scalers["a"].unscale_, scalers["a"].step):
        with pytest.raises(ScalerError, match="one scaler of a LossScalers"):
            call(optimizer)
    scalers.step(optimizer)
    assert torch.allclose(parameter, torch.full((4,), -0.5))
