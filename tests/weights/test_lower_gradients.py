"""attach(grad_dtype=...): gradients stay in 16 bits until the optimizer's step, which computes what it did."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import precast
from precast.weights import held

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to be held in training, where a bias is not."""


class Negated(Optimizer):
    """Somebody's optimizer, which looks at all gradients before it writes a weight."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            assert all(p.grad.dtype is torch.float32 for p in trained)
            largest = max((p.grad.abs().max().item() for p in trained), default=1.0)
            for p in trained:
                p.sub_(p.grad, alpha=group["lr"] / largest)
        return loss


Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.01),
    "SGD, momentum, foreach": lambda p: SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "another's": lambda p: Negated(p, lr=0.01),
}
of_every_kind = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def net() -> nn.Sequential:
    """Two weights of a part each and two that share one, biases that are not held, and a layout that is transposed."""
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    last: Any = model[3]
    last.weight = nn.Parameter(last.weight.detach().t().clone().t())
    return model


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precast.weights.low_precision_gradients._PART", 5 * WIDTH * WIDTH)


def weights(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.numel() > WIDTH * 100]


def loss_of(model: nn.Module, x: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    with precast.autocast("cpu", dtype=dtype, policy="torch"):
        y = model(x)
    result: Tensor = y.float().square().mean()
    return result


def batches(count: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return (torch.randn(4, WIDTH, generator=draw) for _ in range(count))


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a, b) and not a.isnan().any() for a, b in pairs)


@of_every_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bfloat16", "float16"])
def test_training_is_the_same_to_the_bit(make: Make, dtype: torch.dtype) -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    before = copy.deepcopy(theirs)
    optimizers = make(ours.parameters()), make(theirs.parameters())
    with precast.attach(ours, optimizer=optimizers[0], grad_dtype=dtype):
        for x in batches(5):
            losses = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(loss_of(model, x, dtype))
                losses[-1].backward()
                optimizer.step()
            assert losses[0] == losses[1]
            assert all(p.grad is not None and p.grad.dtype is dtype for p in weights(ours))
            assert same(ours, theirs)
    assert not same(ours, before)


def test_groups_schedules_and_states_are_as_without() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)

    def make(model: Any) -> tuple[Optimizer, Any]:
        groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 0.1}]
        optimizer = SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    (mine, my_schedule), (other, schedule) = make(ours), make(theirs)
    with precast.attach(ours, optimizer=mine, grad_dtype=BF16):
        for x in batches(4):
            loss_of(ours, x).backward()
            loss_of(theirs, x).backward()
            for step in (mine.step, my_schedule.step, mine.zero_grad):
                step()
            for step in (other.step, schedule.step, other.zero_grad):
                step()
    assert same(ours, theirs)
    a, b = mine.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state["momentum_buffer"].dtype is torch.float32
        assert torch.equal(state["momentum_buffer"], b["state"][key]["momentum_buffer"])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_called_once_and_its_loss_returned(by_name: bool) -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    mine, other = AdamW(ours.parameters(), lr=0.01), AdamW(theirs.parameters(), lr=0.01)
    calls = 0

    def closure_of(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        return closure

    with precast.attach(ours, optimizer=mine, grad_dtype=BF16):
        for x in batches(3):
            closure = closure_of(ours, mine, x)
            found = mine.step(closure=closure) if by_name else mine.step(closure)
            assert torch.equal(found, other.step(closure_of(theirs, other, x)))
            assert same(ours, theirs)
    assert calls == 6


def test_gradients_are_summed_in_16_bits_and_can_be_clipped_and_zeroed() -> None:
    model, parts = net(), []
    optimizer = SGD(model.parameters(), lr=0.1)
    with precast.attach(model, optimizer=optimizer, grad_dtype=BF16):
        for x in batches(2):
            loss = loss_of(model, x)
            parts.append(torch.autograd.grad(loss, weights(model)))
        for x in batches(2):
            loss_of(model, x).backward()
        for p, one, two in zip(weights(model), *parts, strict=True):
            assert one.dtype is two.dtype is BF16
            assert p.grad is not None
            assert torch.equal(p.grad, one + two)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert found.isfinite()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in weights(model))
        before = copy.deepcopy(model)
        optimizer.step()
        assert same(model, before)


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_leaves_copies_up_to_date(fused: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    with precast.attach(model, optimizer=optimizer, grad_dtype=BF16):
        for x in batches(2):
            loss_of(model, x).backward()
            optimizer.step()
            written = {}
            for p in weights(model):
                held_copy = held.held_parameters[id(p)].copies[BF16]
                assert torch.equal(held_copy.tensor, p.to(BF16))
                written[p] = held_copy.writes
            loss_of(model, x)
            assert all(
                held.held_parameters[id(p)].copies[BF16].writes == w for p, w in written.items()
            )


def test_after_the_attachment_gradients_are_float32() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    attachment = precast.attach(model, optimizer=optimizer, grad_dtype=BF16)
    (x,) = batches(1)
    loss_of(model, x).backward()
    low = [p.grad for p in weights(model)]
    attachment.detach()
    for p, gradient in zip(weights(model), low, strict=True):
        assert gradient is not None
        assert p.grad is not None
        assert p.grad.dtype is p.grad_dtype is torch.float32
        assert torch.equal(p.grad, gradient.float())
    optimizer.step()
    loss_of(model, x).backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_another_optimizer_in_the_place_of_the_one_that_was_given_sees_float32() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.01)
    first, second = batches(2)
    with precast.attach(model, optimizer=optimizer, grad_dtype=BF16):
        loss_of(model, first).backward()
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is BF16
        optimizer = AdamW(model.parameters())
        gc.collect()
        loss_of(model, second).backward()
        assert model.weight.grad.dtype is torch.float32
        optimizer.step()


def test_what_the_optimizer_does_not_train_or_is_used_in_float32_has_gradients_in_float32() -> None:
    model = net()
    first: Any = model[0]
    optimizer = SGD(first.parameters(), lr=0.1)
    with precast.attach(model, optimizer=optimizer, grad_dtype=BF16):
        (x,) = batches(1)
        loss_of(model, x).backward()
        assert first.weight.grad.dtype is BF16
        rest = [p for p in model.parameters() if p is not first.weight]
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in rest)
        model.zero_grad()
        with precast.autocast("cpu", dtype=torch.float16):
            y = model(x)
        y.float().sum().backward()
        assert first.weight.grad.dtype is BF16  # as was asked, whatever the region's dtype


def test_the_default_dtype_changes_nothing() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    mine, other = (SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, theirs))
    with precast.attach(ours, optimizer=mine, grad_dtype=BF16):
        for x in batches(3):
            for model, optimizer in ((ours, mine), (theirs, other)):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                torch.set_default_dtype(torch.float64)
                try:
                    optimizer.step()
                finally:
                    torch.set_default_dtype(torch.float32)
            assert same(ours, theirs)


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    mine, other = SGD(ours.parameters(), lr=0.01), SGD(theirs.parameters(), lr=0.01)
    with precast.attach(ours, optimizer=mine, grad_dtype=BF16):
        groups = mine.param_groups
        (x,) = batches(1)
        loss_of(ours, x).backward()
        mine.param_groups[0]["lr"] = "high"
        with pytest.raises(TypeError):
            mine.step()
        assert mine.param_groups is groups
        mine.param_groups[0]["lr"] = 0.01
        assert same(ours, theirs)
        for x in batches(2):
            for model, optimizer in ((ours, mine), (theirs, other)):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
            assert same(ours, theirs)


def test_a_copy_of_the_optimizer_knows_nothing_of_it() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with precast.attach(model, optimizer=optimizer, grad_dtype=BF16):
        other = copy.deepcopy(optimizer)
        (x,) = batches(1)
        loss_of(model, x).backward()
        other.step()
        assert all(p.grad is not None and p.grad.dtype is BF16 for p in weights(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad_dtype": torch.float32}, r"torch\.bfloat16 or torch\.float16"),
        ({"grad_dtype": "bf16"}, "grad_dtype='bf16'"),
        ({"grad_dtype": BF16}, "needs the optimizer"),
        ({"grad_dtype": BF16, "optimizer": SGD, "hold": False}, "weights that are held"),
        ({"grad_dtype": BF16, "optimizer": torch.optim.LBFGS}, "LBFGS, which computes many"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    model = net()
    if "optimizer" in arguments:
        arguments = {**arguments, "optimizer": arguments["optimizer"](model.parameters())}
    with pytest.raises(precast.errors.AttachError, match=message):
        precast.attach(model, **arguments)
    assert not any(id(p) in held.held_parameters for p in model.parameters())
    assert all(p.grad_dtype is torch.float32 for p in model.parameters())


def test_a_closure_of_anothers_optimizer_is_refused_where_it_would_see_16_bits() -> None:
    model = net()
    optimizer = Negated(model.parameters(), lr=0.1)
    with (
        precast.attach(model, optimizer=optimizer, grad_dtype=BF16),
        pytest.raises(precast.errors.AttachError, match="without a closure"),
    ):
        optimizer.step(lambda: 0.0)


# --- under a gradient scaler ---


@of_every_kind
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("auto", [False, True])
def test_a_scaler_divides_float16_gradients_in_float32(make: Make, clip: bool, auto: bool) -> None:
    """Gradients of 1e-9 are no numbers of float16: a step on them is what the scale is there for."""
    theirs = net()
    ours, before = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimizers = make(ours.parameters()), make(theirs.parameters())
    first: Any = "auto" if auto else 2.0**24
    scalers = [precast.GradScaler("cpu", first, growth_interval=2) for _ in range(2)]
    attached = precast.attach(ours, optimizer=optimizers[0], grad_dtype=torch.float16)
    low, skips = 0, 0
    for number, x in enumerate(batches(8)):
        for model, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            factor = float("inf") if number == 4 else 1e-7
            scaler.scale(loss_of(model, x, torch.float16) * factor).backward()
            low += sum(p.grad is not None and p.grad.dtype is torch.float16 for p in weights(model))
            if clip:
                norm = scaler.clip_grad_norm_(optimizer, 1e-9)
                assert number == 4 or norm > 0
            scaler.step(optimizer)
            scaler.update()
            event = scaler.last_step(optimizer)
            assert event is not None
            skips += bool(event.skipped)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    attached.detach()
    assert same(ours, theirs)
    assert low >= 8
    assert skips == 2 or auto
    assert isinstance(optimizers[0], SGD) or not same(ours, before)


def test_a_step_that_raised_may_be_tried_again_under_a_scaler() -> None:
    class Fails(Negated):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise OSError
            return super().step(closure)

    theirs = net()
    ours = copy.deepcopy(theirs)
    (x,) = batches(1)
    for model, kind in ((ours, Fails), (theirs, Negated)):
        optimizer = kind(model.parameters(), lr=0.1)
        scaler = precast.GradScaler("cpu", init_scale=2.0**10)
        with precast.attach(model, optimizer=optimizer, grad_dtype=torch.float16):
            scaler.scale(loss_of(model, x, torch.float16)).backward()
            if kind is Fails:
                with pytest.raises(OSError):
                    scaler.step(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert same(ours, theirs)


def test_the_scales_of_several_losses_divide_in_float32_too() -> None:
    theirs = net()
    ours = copy.deepcopy(theirs)
    (x,) = batches(1)
    for model, dtype in ((ours, torch.float16), (theirs, None)):
        optimizer = AdamW(model.parameters(), lr=0.01)
        scalers = precast.LossScalers("cpu", ["a", "b"], init_scale=2.0**24)
        with precast.attach(model, optimizer=optimizer, grad_dtype=dtype):
            for name in ("a", "b"):
                scalers.backward(name, loss_of(model, x, torch.float16) * 1e-7, optimizer)
            scalers.step(optimizer)
            scalers.update()
    assert same(ours, theirs)


def test_the_warning_on_float16_gradients_says_what_there_is_to_do() -> None:
    for dtype, advice in ((torch.float16, r"model\.float\(\)"), (torch.float32, "grad_dtype")):
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        parameter.grad_dtype = torch.float16
        parameter.grad = torch.ones(3, dtype=torch.float16)
        scaler = precast.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.warns(precast.errors.PrecastWarning, match=advice) as warned:
            scaler.unscale_(SGD([parameter]))
        assert (dtype is torch.float16) == ("model.float()" in str(warned[0].message))
