"""Weights in bfloat16 follow float32 masters whatever happens around the step: hooks, clipping, writes, copies."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import precast
from precast.errors import AttachError, PrecastWarning
from precast.optim import bfloat16_weights
from tests.optim.optimizers import ELEMENTWISE, NOT_ELEMENTWISE, Make
from tests.optim.test_low_precision_weights import (
    BF16,
    ROUNDINGS,
    WIDTH,
    give_gradients,
    net,
    programs,  # noqa: F401 -- a fixture
    train,
    with_rest,
)

pytestmark = pytest.mark.usefixtures("programs")
LIMIT = 0.01


def clip_by_hand(model: nn.Module, scaler: Any, optimizer: Optimizer) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def clip_twice(model: nn.Module, scaler: Any, optimizer: Optimizer) -> None:
    scaler.unscale_(optimizer)
    for limit in (2 * LIMIT, LIMIT):
        nn.utils.clip_grad_norm_(model.parameters(), limit)


Clip = Callable[[nn.Module, Any, Optimizer], object]
CLIPS: dict[str, Clip] = {
    "nothing": lambda _model, _scaler, _optimizer: None,
    "unscale_": lambda _model, scaler, optimizer: scaler.unscale_(optimizer),
    "unscale_, clip_grad_norm_": clip_by_hand,
    "twice": clip_twice,
}


def moved(make: Make, scaler: Any, clip: Clip, masters: str | None) -> list[Tensor]:
    """Train a model in regions of bfloat16 with a scaler; return how far its weights have moved."""
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters())
    if masters:
        bfloat16_weights(model, optimizer, masters=masters)  # type: ignore[arg-type]
    torch.manual_seed(5)
    x = torch.randn(8, WIDTH)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        clip(model, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    ends = [with_rest(optimizer, p) for p in model.parameters()]
    return [end - begin for end, begin in zip(ends, start, strict=True)]


@pytest.mark.filterwarnings("ignore::precast.errors.PrecastWarning")
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("scaler_of", [precast.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize(
    "make", (ELEMENTWISE | NOT_ELEMENTWISE).values(), ids=ELEMENTWISE | NOT_ELEMENTWISE
)
def test_updates_are_those_of_float32_masters(make: Make, scaler_of: Any, clip: Clip) -> None:
    """Gradients in bfloat16 differ by their rounding, so the distances do by a few percent, and not by a factor."""
    expected = moved(make, scaler_of("cpu", init_scale=1024.0), clip, None)
    for masters in [*ROUNDINGS, "float32"]:
        distances = moved(make, scaler_of("cpu", init_scale=1024.0), clip, masters)
        for mine, its in zip(distances, expected, strict=True):
            size = its.norm()
            noise = 2.0**-9 if masters == "stochastic" else 0.0  # of weights of 0.05 in each step
            assert (mine.norm() - size).abs() <= 0.1 * size + noise * 0.05 * WIDTH * 1.5


def clipping_hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], LIMIT)


@pytest.mark.parametrize("masters", ["kahan", "float32"])
@pytest.mark.parametrize("registered_first", [True, False])
def test_a_hook_before_the_step_may_clip(masters: Any, registered_first: bool) -> None:
    distances = []
    for with_masters in (masters, None):
        model = net()
        start = model[0].weight.detach().float().clone()
        optimizer = SGD(model.parameters(), lr=0.1)
        if registered_first:
            optimizer.register_step_pre_hook(clipping_hook)
        if with_masters:
            bfloat16_weights(model, optimizer, masters=with_masters)
        if not registered_first:
            optimizer.register_step_pre_hook(clipping_hook)
        train(model, optimizer, 4)
        distances.append((with_rest(optimizer, model[0].weight) - start).norm().item())
    assert distances[0] == pytest.approx(distances[1], rel=0.02)


def test_a_hook_after_the_step_sees_gradients_and_may_drop_them() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    missing: list[bool] = []
    optimizer.register_step_post_hook(
        lambda *_: missing.append(any(p.grad is None for p in model.parameters()))
    )
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    bfloat16_weights(model, optimizer)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert missing == [False] * 3


class _Failing(SGD):
    """An optimizer that fails at a parameter of the shape `fails`, once."""

    fails: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p.shape == self.fails:
                        raise MemoryError
                    p.add_(p.grad, alpha=-group["lr"])


def test_gradients_of_bfloat16_weights_survive_a_step_of_them_that_raises() -> None:
    model = net()
    optimizer = _Failing(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        bfloat16_weights(model, optimizer)
        train(model, optimizer, 2)
        optimizer.fails = model[2].weight.shape
        give_gradients(model, 2)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def nothing(_weight: Tensor) -> None: ...


def clamp(weight: Tensor) -> None:
    weight.clamp_(-2, 2)


def other_weights_and_back(weight: Tensor) -> None:
    stored = weight.clone()
    weight.zero_()
    weight.copy_(stored)


def through_numpy(weight: Tensor) -> None:
    weight.copy_(weight.float().clone())


WRITES = {f.__name__: f for f in (nothing, clamp, other_weights_and_back, through_numpy)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_write_that_changes_no_value_loses_no_update(
    write: Callable[[Tensor], None], momentum: float
) -> None:
    """Steps of a hundredth of the spacing of bfloat16, with a write after each."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16)
    nn.init.ones_(layer.weight)
    optimizer = SGD(layer.parameters(), lr=0.01 / 128 * (1 - momentum), momentum=momentum)
    bfloat16_weights(layer, optimizer)
    for _ in range(50):
        layer.weight.grad = torch.full_like(layer.weight, -1.0)
        optimizer.step()
        with torch.no_grad():
            write(layer.weight)
    learnt = (with_rest(optimizer, layer.weight) - 1).mean().item() * 128
    assert learnt == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_decay_by_hand_keeps_what_was_rounded_away(factor: float) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = SGD(layer.parameters(), lr=1e-3)
    bfloat16_weights(layer, optimizer)
    train(layer, optimizer, 2)  # type: ignore[arg-type]
    rest = optimizer.state[layer.weight]["rounded_away"].clone()
    with torch.no_grad():
        layer.weight.mul_(factor)
    layer.weight.grad = torch.zeros_like(layer.weight)
    start = layer.weight.detach().float()
    optimizer.step()
    ends = with_rest(optimizer, layer.weight)
    is_right = torch.isclose(ends, start + rest, rtol=2.0**-15, atol=0)
    # A smaller power of two has a smaller spacing, to which an error may not fit.
    assert is_right.float().mean() > 0.98


@pytest.mark.parametrize("value", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("was_nan", [True, False])
def test_a_write_of_another_size_starts_from_what_is_written(value: float, was_nan: bool) -> None:
    """A pruned weight stays 0, and a weight that was NaN recovers."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = SGD(layer.parameters(), lr=0.1)
    bfloat16_weights(layer, optimizer)
    train(layer, optimizer, 2)  # type: ignore[arg-type]
    if was_nan:
        layer.weight.grad = torch.full_like(layer.weight, torch.nan)
        optimizer.step()
    with torch.no_grad():
        layer.weight.fill_(value)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    written = torch.full((WIDTH, WIDTH), value).to(BF16)
    assert torch.equal(layer.weight, written)
    torch.testing.assert_close(
        with_rest(optimizer, layer.weight), written.float(), rtol=2.0**-8, atol=0
    )


def test_weights_that_are_loaded_before_the_first_step_are_exactly_those() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = SGD(layer.parameters(), lr=0.1)
    bfloat16_weights(layer, optimizer)
    values = torch.randn(WIDTH, WIDTH).to(BF16)
    layer.load_state_dict({"weight": values, "bias": torch.zeros(WIDTH)})
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert torch.equal(with_rest(optimizer, layer.weight), values.float())


MAKES: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "SGD without states": lambda p: SGD(p, lr=0.01),
}


@pytest.mark.parametrize("masters", ROUNDINGS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("steps", "own_steps", "weights_first"), list(itertools.product((0, 3), (0, 2), (True, False)))
)
def test_weights_and_states_are_loaded_in_any_order(
    steps: int, own_steps: int, weights_first: bool, make: Make, masters: Any
) -> None:
    model, other = net(), net()
    optimizer, its = make(model.parameters()), make(other.parameters())
    for seed, (each, stepped) in enumerate(((model, optimizer), (other, its))):
        torch.manual_seed(seed)
        with torch.no_grad():
            each[0].weight.add_(torch.rand(each[0].weight.shape) * 1e-4)
        bfloat16_weights(each, stepped, masters=masters)
    train(model, optimizer, steps)
    train(other, its, own_steps, first=20)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if weights_first:
        other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    if not weights_first:
        other.load_state_dict(saved[0])
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(with_rest(optimizer, mine), with_rest(its, others))
    train(model, optimizer, 2, first=3)
    train(other, its, 2, first=3)
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(with_rest(optimizer, mine), with_rest(its, others))


@pytest.mark.parametrize("masters", ROUNDINGS)
def test_a_state_dict_outlives_its_model_and_its_handle(masters: Any) -> None:
    def saved(removes: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        handle = bfloat16_weights(model, optimizer, masters=masters)
        train(model, optimizer, 2)
        state = optimizer.state_dict()
        expected = copy.deepcopy(state)
        if removes:
            handle.remove()
        return state, expected

    for removes in (True, False):
        state, expected = saved(removes)
        for number, values in expected["state"].items():
            assert values.keys() == state["state"][number].keys()
            for name, value in values.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(state["state"][number][name])
                )
                assert getattr(value, "dtype", None) is getattr(
                    state["state"][number][name], "dtype", None
                )


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_copy_trains_on_after_another_call_and_is_an_error_before(
    make: Make, dtype: torch.dtype, copied: Any
) -> None:
    model = net().to(dtype)
    optimizer = make(model.parameters())
    bfloat16_weights(model, optimizer)
    train(model, optimizer, 2)
    twin, its = copied((model, optimizer))
    if twin[0].weight.dtype is BF16:
        before = pickle.dumps((twin.state_dict(), its.state_dict()))
        give_gradients(twin, 0)
        with pytest.raises(AttachError, match=r"Call precast.optim.bfloat16_weights\(model"):
            its.step()
        assert pickle.dumps((twin.state_dict(), its.state_dict())) == before
    bfloat16_weights(twin, its)
    before_step = [p.detach().clone() for p in model.parameters()]
    train(twin, its, 1, first=2)
    assert all(map(torch.equal, before_step, model.parameters()))
    train(model, optimizer, 1, first=2)
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


def same_values() -> nn.Module:
    model = net()
    model.register_module("tied", nn.Linear(WIDTH, 2 * WIDTH))
    model.tied.weight = nn.Parameter(model[0].weight.data)
    return model


def part_of_another() -> nn.Module:
    model = net()
    model.register_parameter("row", nn.Parameter(model[0].weight.data[3]))
    return model


def view_in_a_buffer() -> nn.Module:
    model = net()
    model.register_buffer("view", model[0].weight.data[:, 1:])
    return model


@pytest.mark.parametrize("masters", ["kahan", "float32"])
@pytest.mark.parametrize("make", [same_values, part_of_another, view_in_a_buffer])
def test_two_tensors_in_one_memory_are_an_error(make: Any, masters: Any) -> None:
    model = make()
    if masters == "float32":
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.view(BF16)
    dtypes = [p.dtype for p in model.parameters()]
    with pytest.raises(AttachError, match="are two tensors in the same memory"):
        bfloat16_weights(model, SGD(model.parameters(), lr=0.1), masters=masters)
    assert [p.dtype for p in model.parameters()] == dtypes


def test_tied_parameters_and_neighbours_in_one_memory_are_none() -> None:
    model = net()
    model.register_module("tied", nn.Linear(WIDTH, 2 * WIDTH))
    model.tied.weight = model[0].weight
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    parts = flat.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.data = part.view(p.shape)
    optimizer = SGD(model.parameters(), lr=0.1)
    bfloat16_weights(model, optimizer)
    assert model.tied.weight is model[0].weight


@pytest.mark.parametrize("masters", [*ROUNDINGS, "float32"])
def test_clipping_twice_clips_to_the_smaller_norm(masters: Any) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = bfloat16_weights(model, optimizer, masters=masters)
    train(model, optimizer, 2)
    give_gradients(model, 3)
    for limit in (2.0, 1.0):
        handle.clip_grad_norm_(limit)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert total.item() == pytest.approx(limit, rel=0.02)
