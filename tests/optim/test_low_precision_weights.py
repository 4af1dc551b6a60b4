"""Weights that are stored in bfloat16 learn from updates that bfloat16 cannot represent."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import precast
from precast.errors import AttachError, PrecastWarning
from precast.optim import bfloat16_weights, compiled_step, step_program
from tests.optim.optimizers import ELEMENTWISE, NOT_ELEMENTWISE, Make, groups

BF16 = torch.bfloat16
WIDTH = 160
ROUNDINGS = ["kahan", "stochastic"]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What was made to carry out steps; the operations are called one by one, as compiling takes long."""
    made: dict[Any, Any] = {}
    monkeypatch.setattr(step_program, "_programs", made)
    monkeypatch.setattr(step_program.torch, "compile", lambda module, **_: module)
    return made


def net() -> nn.Sequential:
    """Two weights that are worth storing in bfloat16, and two biases that are not; numbers of bfloat16 at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(BF16))
    return model


def give_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape) * factor).to(BF16).to(p.dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()


def with_rest(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """A weight with what was rounded away of it."""
    saved = optimizer.state_dict()
    parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
    number = parameters.index(id(parameter))
    its = saved["state"].get(number) or saved.get("rounding", {}).get(number, {})
    value = parameter.detach().float()
    return value + its["rounded_away"] if "rounded_away" in its else value


@pytest.mark.parametrize(
    "make", (ELEMENTWISE | NOT_ELEMENTWISE).values(), ids=ELEMENTWISE | NOT_ELEMENTWISE
)
def test_kahan_follows_float32_masters(make: Make, programs: Any) -> None:
    """The same gradients: after 12 steps a weight and its rest differ from a float32 weight by what 16 bits round."""
    model, plain = net(), net()
    optimizer, other = make(groups(model)), make(groups(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        bfloat16_weights(model, optimizer, masters="kahan")
        train(model, optimizer, 12)
    train(plain, other, 12)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype is (BF16 if mine.dim() == 2 else torch.float32)
        error = (with_rest(optimizer, mine) - its).abs().max()
        if mine.dtype is BF16:  # what the next forward sees is the weight alone
            rest = (with_rest(optimizer, mine) - mine).abs()
            assert (rest <= mine.abs() * 2.0**-8).all()
        # Each of 12 steps rounds to 16 bits at the most; what a step adds is the same to a few of them.
        assert error <= 12 * its.abs().max() * 2.0**-16
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("how", ROUNDINGS)
def test_what_bfloat16_cannot_hold_is_learnt(how: Any, programs: Any) -> None:
    """Steps of a hundredth of what bfloat16 resolves: plain weights stay, these move by the sum of them."""
    made = {}
    for masters in (how, None):
        layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        optimizer = SGD(layer.parameters(), lr=0.01 / 128)
        if masters is not None:
            bfloat16_weights(layer, optimizer, masters=masters)
        for _ in range(50):
            layer.weight.grad = torch.full_like(layer.weight, -1.0)
            optimizer.step()
        made[masters] = with_rest(optimizer, layer.weight)
    assert torch.equal(made[None], torch.ones(WIDTH, WIDTH))
    moved = made[how].double().mean().item() - 1
    # The rest is bfloat16 too, whose steps near the end are a fifth of an update; chance has 25,600 weights.
    assert moved == pytest.approx(50 * 0.01 / 128, rel=0.03)


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("states", [torch.float32, BF16])
def test_states_are_stored_as_asked(how: Any, states: torch.dtype, programs: Any) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    bfloat16_weights(model, optimizer, masters=how, states=states)
    train(model, optimizer, 3)
    assert programs
    for p in model.parameters():
        of_p = torch.float32 if p.dim() == 1 else states
        assert optimizer.state[p]["exp_avg"].dtype is of_p
        assert optimizer.state[p]["exp_avg_sq"].dtype is of_p
        assert optimizer.state[p]["step"] == 3
        assert ("rounded_away" in optimizer.state[p]) is (how == "kahan" and p.dim() == 2)
        assert optimizer.state[p].get("rounded_away", p.to(BF16)).dtype is BF16


def test_small_changes_of_states_in_bfloat16_are_not_lost(programs: Any) -> None:
    """The mean of squares falls by a thousandth a step, which bfloat16 cannot hold; by chance it falls all the same."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16)
    optimizer = AdamW(layer.parameters(), lr=1e-4)
    bfloat16_weights(layer, optimizer, masters="stochastic", states=BF16)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    begun = optimizer.state[layer.weight]["exp_avg_sq"].float().mean().item()
    for _ in range(100):
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
    now = optimizer.state[layer.weight]["exp_avg_sq"].float().mean().item()
    assert now / begun == pytest.approx(0.999**100, rel=0.01)


def test_parts_of_a_large_weight_have_chances_of_their_own(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = WIDTH * WIDTH // 2
    monkeypatch.setattr(compiled_step, "_PART_ELEMENTS", half)
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = SGD(
        layer.parameters(), lr=0.5**9, momentum=0.5
    )  # a step goes half way to the next number
    bfloat16_weights(layer, optimizer, masters="stochastic")
    for _ in range(2):  # the first is the optimizer's own, which has no parts
        with torch.no_grad():
            layer.weight.fill_(1.0)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert programs
    moved = layer.weight.detach().float().flatten() < 1
    first, second = moved[:half], moved[half:]
    assert 0.1 < first.float().mean() < 0.9
    both = (first == second).float().mean()
    assert 0.3 < both < 0.7


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("states", [None, BF16])
def test_a_training_goes_on_from_its_state_dicts(how: Any, states: Any, programs: Any) -> None:
    """To the bit: in another process the chances are those that would have come."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    bfloat16_weights(model, optimizer, masters=how, states=states)
    train(model, optimizer, 3)
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    torch.manual_seed(99)
    other = net()
    its = AdamW(other.parameters(), lr=0.01)
    bfloat16_weights(other, its, masters=how, states=states)
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    for each, stepped in ((model, optimizer), (other, its)):
        train(each, stepped, 3, first=3)
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, others)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(its.state[others][name]))
            assert getattr(value, "dtype", None) is getattr(its.state[others][name], "dtype", None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ROUNDINGS)
def test_distributed_checkpoints_load_into_a_training_that_has_not_begun(
    how: Any, programs: Any, tmp_path: Path
) -> None:
    made = []
    for seed in (0, 1):
        model = net()
        with torch.no_grad():
            model[0].weight.add_(
                1e-4 * (1 + seed)
            )  # not a number of bfloat16, so that something is beside it
        optimizer = AdamW(model.parameters(), lr=0.01)
        bfloat16_weights(model, optimizer, masters=how)
        made.append((model, optimizer))
    (model, optimizer), (other, its) = made
    train(model, optimizer, 3)
    saved = get_state_dict(model, optimizer)
    checkpoint.save(dict(zip("mo", saved, strict=True)), checkpoint_id=tmp_path, no_dist=True)
    found = get_state_dict(other, its)
    checkpoint.load(dict(zip("mo", found, strict=True)), checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, its, model_state_dict=found[0], optim_state_dict=found[1])
    for each, stepped in made:
        train(each, stepped, 2, first=3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == its.state[others].keys()
        for name, value in optimizer.state[mine].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(its.state[others][name]))


@pytest.mark.parametrize("how", ROUNDINGS)
def test_a_training_that_has_not_begun_is_saved_and_loaded(how: Any, programs: Any) -> None:
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        layer = nn.Linear(WIDTH, WIDTH)
        optimizer = AdamW(layer.parameters(), lr=0.01)
        bfloat16_weights(layer, optimizer, masters=how)
        made.append((layer, optimizer))
    (layer, optimizer), (other, its) = made
    other.load_state_dict(layer.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(with_rest(optimizer, layer.weight), with_rest(its, other.weight))
    AdamW(nn.Linear(WIDTH, WIDTH).parameters()).load_state_dict(optimizer.state_dict())
    for each, stepped in made:
        train(each, stepped, 2)
    assert torch.equal(with_rest(optimizer, layer.weight), with_rest(its, other.weight))
    assert torch.equal(layer.weight, other.weight)


def test_a_float32_checkpoint_is_taken_up_without_loss(programs: Any) -> None:
    """What a weight has beyond bfloat16 goes beside it, and not away."""
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    exact = layer.weight.detach().clone()
    optimizer = SGD(layer.parameters(), lr=0.1)
    bfloat16_weights(layer, optimizer, masters="kahan")
    error = (with_rest(optimizer, layer.weight) - exact).abs()
    assert (error <= exact.abs() * 2.0**-16).all()
    assert (layer.weight.detach().float() - exact).abs().max() > 100 * error.max()


def test_the_same_seed_gives_the_same_training(programs: Any) -> None:
    trained = []
    for seed in (5, 5, 6):
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(seed)
        bfloat16_weights(model, optimizer, masters="stochastic", generator=generator)
        train(model, optimizer, 3)
        trained.append(model[0].weight.detach().clone())
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_step_and_nothing_is_written(how: Any, fused: bool, programs: Any) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    bfloat16_weights(model, optimizer, masters=how)
    scaler = precast.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        give_gradients(model, step, factor=1024.0)
        if step == 2:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.scale(torch.ones(()))
        before = pickle.dumps((model.state_dict(), optimizer.state_dict()["state"]))
        scaler.step(optimizer)
        scaler.update()
        same = pickle.dumps((model.state_dict(), optimizer.state_dict()["state"])) == before
        assert same is (step == 2)


@pytest.mark.parametrize("how", ROUNDINGS)
def test_a_compiler_that_fails_changes_no_result(how: Any, programs: Any, monkeypatch: Any) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    results = []
    for compiles in (True, False):
        if not compiles:
            monkeypatch.setattr(step_program, "_programs", {})
            monkeypatch.setattr(step_program.torch, "compile", lambda *_, **__: fails)
        model = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            bfloat16_weights(model, optimizer, masters=how)
            train(model, optimizer, 5)
        results.append([with_rest(optimizer, p) for p in model.parameters()])
    for mine, its in zip(*results, strict=True):
        if how == "kahan":
            torch.testing.assert_close(mine, its, rtol=2.0**-13, atol=1e-5)
        else:  # other chances: the mean is the same
            assert (mine - its).mean().abs() < 1e-4


def test_a_closure_gives_the_loss_and_the_gradients(programs: Any) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    bfloat16_weights(model, optimizer, masters="kahan")
    before = model[0].weight.detach().clone()

    def closure() -> float:
        give_gradients(model, 0)
        return 2.0

    with pytest.warns(PrecastWarning, match="closure"):
        assert optimizer.step(closure) == 2.0
    assert not torch.equal(before, model[0].weight)


def test_an_optimizer_that_counts_its_steps_counts_each_once(programs: Any) -> None:
    model = net()
    optimizer: Any = NOT_ELEMENTWISE["one that counts"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        bfloat16_weights(model, optimizer, masters="kahan")
        train(model, optimizer, 4)
    assert optimizer.count == 4


def test_parameters_keep_the_hooks_of_their_gradients(programs: Any) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=BF16)
    optimizer = AdamW(layer.parameters(), lr=0.01)
    bfloat16_weights(layer, optimizer, masters="kahan")
    seen: list[torch.dtype] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, WIDTH, dtype=BF16)).sum().backward()
        optimizer.step()
    assert seen == [BF16] * 3


def test_16_bits_become_float32_masters() -> None:
    layer = nn.Linear(WIDTH, WIDTH, dtype=BF16)
    optimizer = AdamW(layer.parameters())
    bfloat16_weights(layer, optimizer, masters="float32")
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


def test_after_remove_the_optimizer_steps_bfloat16_itself(programs: Any) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = bfloat16_weights(model, optimizer, masters="kahan")
    train(model, optimizer, 1)  # the first step is the optimizer's own
    handle.remove()
    train(model, optimizer, 2)
    assert not programs
    assert model[0].weight.dtype is BF16
    assert "rounded_away" not in optimizer.state[model[0].weight]


def refused(match: str, make: Any = None, model: Any = None, **options: Any) -> None:
    model = net() if model is None else model
    optimizer = (make or AdamW)(model.parameters())
    dtypes = [p.dtype for p in model.parameters()]
    with pytest.raises(AttachError, match=match):
        bfloat16_weights(model, optimizer, **options)
    assert [p.dtype for p in model.parameters()] == dtypes
    if isinstance(optimizer, Optimizer):
        assert not optimizer.state
        assert not optimizer._optimizer_step_pre_hooks


def test_what_cannot_be_stored_so_is_one_clear_error_and_changes_nothing() -> None:
    refused('expected "kahan", "stochastic"', masters="stocastic")
    refused("expected torch.bfloat16, torch.float32", masters="kahan", states=torch.float16)
    refused('needs masters="kahan"', masters="float32", states=BF16)
    refused("gradients=torch.float16; expected", masters="kahan", gradients=torch.float16)
    refused('gradients=torch.bfloat16 needs masters="kahan"', masters="float32", gradients=BF16)
    refused("got a LBFGS", make=torch.optim.LBFGS, masters="kahan")
    refused("0.weight is torch.float16", model=net().half(), masters="stochastic")
    refused("has no parameter of this", make=lambda _: AdamW(net().parameters()))
    refused("optimizer is a Linear", make=lambda _: nn.Linear(1, 1))
    with pytest.raises(AttachError, match="model is a list"):
        bfloat16_weights([], AdamW(net().parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ROUNDINGS)
def test_one_weight_is_stored_for_one_optimizer(how: Any, programs: Any) -> None:
    model = net()
    optimizer, other = AdamW(model.parameters()), SGD(model.parameters(), lr=0.1)
    handle = bfloat16_weights(model, optimizer, masters=how)
    hooks = len(other._optimizer_step_pre_hooks), len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(AttachError, match=r"0\.weight is stored .* for the step of another AdamW"):
        bfloat16_weights(model, other, masters="kahan")
    with pytest.raises(AttachError, match=r"for the step of this AdamW"):
        bfloat16_weights(model, optimizer, masters=how)
    assert not other.state
    assert hooks == (
        len(other._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_pre_hooks),
    )
    train(model, optimizer, 2)
    handle.remove()
    bfloat16_weights(model, other, masters="kahan")


def test_an_optimizer_that_is_gone_is_in_nobodys_way(programs: Any) -> None:
    model = net()
    bfloat16_weights(model, AdamW(model.parameters()), masters="kahan")
    gc.collect()
    optimizer = SGD(model.parameters(), lr=0.1)
    bfloat16_weights(model, optimizer, masters="kahan")
    train(model, optimizer, 2)
    assert programs


def test_a_sparse_gradient_is_one_clear_error_and_changes_nothing(programs: Any) -> None:
    model = nn.ModuleDict({"e": nn.Embedding(400, 64, sparse=True), "l": nn.Linear(WIDTH, WIDTH)})
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    bfloat16_weights(model, optimizer, masters="kahan")
    before = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    model["l"].weight.grad = torch.ones_like(model["l"].weight)
    model["e"](torch.tensor([1, 2])).sum().backward()
    with pytest.raises(AttachError, match=r"SGD.step\(\): a weight in bfloat16 .* has a sparse"):
        optimizer.step()
    assert pickle.dumps((model.state_dict(), optimizer.state_dict())) == before
    assert all(p.grad is not None for p in (model["l"].weight, model["e"].weight))


@pytest.mark.trial("BFLOAT16_DENSE")
@pytest.mark.parametrize("is_dense", [True, False])
def test_an_embedding_with_dense_gradients_or_another_optimizer_trains(is_dense: bool) -> None:
    embedding, layer = nn.Embedding(400, 64, sparse=not is_dense), nn.Linear(64, WIDTH)
    model = nn.Sequential(embedding, layer)
    optimizers = [SGD((model if is_dense else layer).parameters(), lr=0.1)]
    bfloat16_weights(model, optimizers[0], masters="kahan")
    if not is_dense:
        optimizers.append(SGD(embedding.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    with precast.autocast("cpu"):
        model(torch.arange(8)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_states_of_another_dtype_are_one_clear_error(how: Any, dtype: torch.dtype) -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    its = optimizer.state[model[2].weight]
    its["exp_avg"] = its["exp_avg"].to(dtype)
    with pytest.raises(AttachError, match=rf"state 'exp_avg' of 2\.weight is {dtype}"):
        bfloat16_weights(model, optimizer, masters=how)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert its.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_clipping_after_the_optimizer_is_deleted_is_an_error() -> None:
    model = net()
    handle = bfloat16_weights(model, AdamW(model.parameters()))
    gc.collect()
    with pytest.raises(AttachError, match="was deleted"):
        handle.clip_grad_norm_(1.0)


def test_copies_held_by_an_attachment_follow_the_compiled_step(programs: Any) -> None:
    """A rule in float16 needs copies of the bfloat16 weights; a step makes them stale."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    bfloat16_weights(model, optimizer)
    with precast.attach(model):
        for step in range(4):
            with precast.autocast("cpu", dtype=torch.float16), torch.no_grad():
                result = model(torch.ones(2, WIDTH))
                expected = copy.deepcopy(model).half()(torch.ones(2, WIDTH, dtype=torch.float16))
            assert torch.equal(result, expected), step
            train(model, optimizer, 1, first=step)
    assert programs


@pytest.mark.parametrize("how", ROUNDINGS)
def test_a_compiled_step_gives_what_its_operations_give(how: Any) -> None:
    """Compiled for real, and called one by one: the compiler removes no rounding, and chances are the same."""
    trained = []
    for compiled in (True, False):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.5)
        torch.manual_seed(4)
        bfloat16_weights(model, optimizer, masters=how, states=BF16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_program, "_programs", {})
            if not compiled:
                patch.setattr(step_program.torch, "compile", lambda module, **_: module)
            train(model, optimizer, 4)
        trained.append((model, optimizer))
    (model, optimizer), (other, its) = trained
    for mine, others in zip(model.parameters(), other.parameters(), strict=True):
        # A product and a sum may be rounded once or twice: then a weight may go to the other neighbour.
        torch.testing.assert_close(
            with_rest(optimizer, mine), with_rest(its, others), rtol=2.0**-7, atol=1e-4
        )
        assert (with_rest(optimizer, mine) == with_rest(its, others)).float().mean() > 0.98


def averaged(model: nn.Module, optimizer: Optimizer, average: Any, steps: int) -> Tensor:
    """Train with steps that bfloat16 cannot hold; return the same average of the weights, taken in float64."""
    weight = model[0].weight
    expected = with_rest(optimizer, weight).double()
    average(model)
    for _ in range(steps):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        average(model)
        expected += (with_rest(optimizer, weight).double() - expected) * DECAY
    return expected


DECAY = 0.002
AVERAGES: dict[str, Any] = {
    "by one function": {"avg_fn": get_ema_avg_fn(1 - DECAY)},
    "by one function for all": {"multi_avg_fn": get_ema_multi_avg_fn(1 - DECAY)},
}


def slow_net(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    """A layer with weights of 1, whose steps are a hundredth of what bfloat16 resolves there."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.BatchNorm1d(WIDTH))
    nn.init.ones_(model[0].weight)
    return model, SGD(model.parameters(), lr=0.01 / 128)


def ended_as(model: nn.Module, average: Tensor, expected: Tensor) -> None:
    """Assert that an average has moved to where float64 says, but for what the mean of 30 rounded steps differs by."""
    assert average.dtype is torch.float32
    moved = (expected - 1).mean().item()
    assert moved > 0
    assert (average.double() - 1).mean().item() == pytest.approx(moved, rel=0.05)


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("is_before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("masters", [*ROUNDINGS, "float32"])
def test_an_average_of_weights_in_bfloat16_moves(
    masters: Any, is_before: bool, how: str, programs: Any
) -> None:
    model, optimizer = slow_net()
    average = AveragedModel(model, **AVERAGES[how]) if is_before else None
    bfloat16_weights(model, optimizer, masters=masters)
    average = average or AveragedModel(model, **AVERAGES[how])
    expected = averaged(model, optimizer, average.update_parameters, 30)
    ended_as(model, average.module[0].weight.detach(), expected)
    update_bn([torch.randn(8, WIDTH)], average)
    assert average(torch.randn(8, WIDTH)).dtype is torch.float32
    assert model[0].weight.dtype is (torch.float32 if masters == "float32" else BF16)


@pytest.mark.parametrize("masters", ROUNDINGS)
def test_a_mean_of_all_weights_moves_also_after_remove(masters: Any, programs: Any) -> None:
    model, optimizer = slow_net()
    handle = bfloat16_weights(model, optimizer, masters=masters)
    average = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    average.update_parameters(model)
    handle.remove()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight, torch.full((WIDTH, WIDTH), 1.5))


@pytest.mark.parametrize("masters", ROUNDINGS)
def test_an_average_by_hand_moves(masters: Any, programs: Any) -> None:
    """A deep copy that is a float32 model again takes increments that bfloat16 cannot hold."""
    model, optimizer = slow_net()
    bfloat16_weights(model, optimizer, masters=masters)
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update(model: nn.Module) -> None:
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.mul_(1 - DECAY).add_(its, alpha=DECAY)

    expected = averaged(model, optimizer, update, 200)
    moved = average[0].weight.detach().double().mean().item() - 1
    assert average[0].weight.dtype is torch.float32
    # The copy sees weights without what was rounded away of them, which is at most half of a last place.
    assert moved == pytest.approx(expected.mean().item() - 1, abs=2.0**-8 * 200 * DECAY)
    assert moved > 2.0**-8 * DECAY


def test_a_deep_copy_has_float32_weights_where_the_model_had(programs: Any) -> None:
    model, optimizer = slow_net()
    model.register_module("given", nn.Linear(WIDTH, WIDTH, dtype=BF16))
    model.register_module("tied", nn.Linear(WIDTH, WIDTH))
    model.tied.weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = bfloat16_weights(model, optimizer, masters="kahan")
    for made in (copy.deepcopy(model), copy.deepcopy(nn.ModuleList([model]))[0]):
        assert [p.dtype for p in made.parameters()] == [
            BF16 if name.startswith("given") else torch.float32
            for name, _ in model.named_parameters()
        ]
        assert made.tied.weight is made[0].weight
        assert torch.equal(made[0].weight, model[0].weight.float())
        assert copy.deepcopy(made)[0].weight.dtype is torch.float32
        assert b"precast" not in pickle.dumps(made)
    assert copy.deepcopy(model[0]).weight.dtype is torch.float32
    assert b"precast" not in pickle.dumps(model)
    assert pickle.loads(pickle.dumps(model))[0].weight.dtype is BF16
    assert copy.deepcopy(model.state_dict())["0.weight"].dtype is BF16
    handle.remove()
    assert copy.deepcopy(model)[0].weight.dtype is BF16


def test_an_average_that_stays_in_bfloat16_is_warned_of_and_the_advice_works(programs: Any) -> None:
    model, optimizer = slow_net(BF16)
    bfloat16_weights(model, optimizer, masters="kahan")
    frozen = AveragedModel(model, **AVERAGES["by one function for all"])
    with pytest.warns(
        PrecastWarning, match=r"AveragedModel\(copy.deepcopy\(model\).float\(\)"
    ) as seen:
        frozen.update_parameters(model)
    frozen.update_parameters(model)  # warnings are errors
    assert len(seen) == 1
    average = AveragedModel(copy.deepcopy(model).float(), **AVERAGES["by one function for all"])
    expected = averaged(model, optimizer, average.update_parameters, 30)
    ended_as(model, average.module[0].weight.detach(), expected)


@pytest.mark.trial("BFLOAT16_BEFORE_DDP")
def test_weights_for_which_ddp_has_allocated_buffers_keep_their_dtype(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = AdamW(model.parameters())
        with pytest.raises(AttachError, match="then wrap the model"):
            bfloat16_weights(model, optimizer)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model = net()
        optimizer = AdamW(model.parameters())
        bfloat16_weights(model, optimizer)
        model = nn.parallel.DistributedDataParallel(model)
        give_gradients(model, 0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert not any(map(torch.equal, before, model.parameters()))
    finally:
        torch.distributed.destroy_process_group()


# --- gradients of several backward passes ---


def backward(model: nn.Module, factor: float) -> None:
    """Add `factor` to each element of the gradients."""
    sum(p.float().sum() for p in model.parameters()).mul(factor).backward()


def accumulating(how: Any, gradients: torch.dtype | None) -> tuple[nn.Module, Optimizer, Any]:
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    return model, optimizer, bfloat16_weights(model, optimizer, masters=how, gradients=gradients)


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize(("gradients", "total"), [(torch.float32, 257.0), (None, 256.0)])
def test_gradients_are_added_up_in_float32(
    how: Any, gradients: torch.dtype | None, total: float, programs: Any
) -> None:
    model, optimizer, _ = accumulating(how, gradients)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, 256.0)
        backward(model, 1.0)
        weight = model[0].weight
        assert weight.dtype is BF16
        assert weight.grad.dtype is (gradients or BF16)
        assert weight.grad.unique().tolist() == [total]
        before = weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, weight)


def test_sums_in_float32_are_clipped_scaled_and_stepped(programs: Any) -> None:
    """The step is that of the whole sum: 257 / 257 is 1, and 256 / 257 is less."""
    model, optimizer, handle = accumulating("kahan", torch.float32)
    scaler = precast.GradScaler("cpu", init_scale=2.0**10)
    backward(model, 256.0 * scaler.get_scale())
    backward(model, 1.0 * scaler.get_scale())
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    count = sum(p.numel() for p in model.parameters())
    norm = handle.clip_grad_norm_(count**0.5)
    expected = torch.tensor(257.0 * count**0.5)  # of 100,000 elements, added up in float32
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
    before = with_rest(optimizer, model[0].weight)
    scaler.step(optimizer)
    scaler.update()
    moved = before - with_rest(optimizer, model[0].weight)
    torch.testing.assert_close(moved, torch.ones_like(moved), rtol=0, atol=2.0**-10)


def test_gradients_have_the_dtype_of_their_weight_again_after_remove(programs: Any) -> None:
    model, _, handle = accumulating("kahan", torch.float32)
    backward(model, 257.0)
    handle.remove()
    assert model[0].weight.grad.dtype is BF16
    backward(model, 1.0)
    assert model[0].weight.grad.unique().tolist() == [256.0]


def test_passes_without_synchronisation_are_averaged_in_float32(tmp_path: Path) -> None:
    """DDP itself would reduce them in the dtype of their weight."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, optimizer, _ = accumulating("kahan", torch.float32)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for factor in (256.0, 1.0):
            with wrapped.no_sync(), precast.autocast("cpu", dtype=BF16):
                wrapped(torch.full((1, WIDTH), factor)).float().sum().backward()
        alone = net().to(BF16)
        expected = []
        for factor in (256.0, 1.0):
            alone.zero_grad()
            with precast.autocast("cpu", dtype=BF16):
                alone(torch.full((1, WIDTH), factor)).float().sum().backward()
            expected.append(alone[0].weight.grad.float())
        torch.distributed.all_reduce(model[0].weight.grad)
        assert torch.equal(model[0].weight.grad, sum(expected))
        optimizer.step()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.trial("ACCUMULATE_UNDER_FSDP")
def test_fsdp_adds_up_in_float32_by_itself(tmp_path: Path) -> None:
    """256 + 1 + 1, rounded once."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wide = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(WIDTH, 1, bias=False).to(BF16), mp_policy=wide)
        optimizer = SGD(model.parameters(), lr=1.0)
        with pytest.raises(AttachError, match="weight is sharded, and FSDP adds its gradients up"):
            bfloat16_weights(model, optimizer, gradients=torch.float32)
        for number, factor in enumerate((256.0, 1.0, 1.0)):
            model.set_requires_gradient_sync(number == 2)
            model(torch.full((1, WIDTH), factor, dtype=BF16)).sum().backward()
        assert model.weight.grad.full_tensor().unique().tolist() == [258.0]
    finally:
        torch.distributed.destroy_process_group()
