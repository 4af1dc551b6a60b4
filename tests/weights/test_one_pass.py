"""attach(step="one-pass"): the optimizer's step goes through memory once, and computes what it did."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import precast
from precast.weights import held, step_program
from precast.weights.partial_steps import set_gradient
from precast.weights.step_program import ProgramKey

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to be stepped in one pass, where a bias is not."""


class Lion(Optimizer):
    """Somebody's optimizer, which treats each number by itself."""

    def __init__(self, params: Any, lr: float = 1e-3, wd: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["average"], group["betas"]
                p.data.mul_(1 - group["lr"] * group["wd"])
                update = average.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Normalized(Optimizer):
    """One that counts its steps, and then looks at all numbers of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("step", torch.zeros(())).add_(1)
                    p.mul_(0.99).sub_(
                        p.grad / p.grad.norm(), alpha=group["lr"] / state["step"].item()
                    )


class Counting(Optimizer):
    """One that counts the calls of its step in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


Make = Callable[[Any], Optimizer]
optim = torch.optim
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, all": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
    "SGD, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=torch.tensor(0.01), amsgrad=True, maximize=True, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "another's": Lion,
}
NOT_ELEMENTWISE: dict[str, Make] = {
    "Adafactor": optim.Adafactor,
    "Rprop": optim.Rprop,
    "one that normalizes": Normalized,
    "one that counts": Counting,
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[ProgramKey, Any]:
    """What was made to carry out steps; the operations are called one by one, as compiling takes long."""
    made: dict[ProgramKey, Any] = {}
    monkeypatch.setattr(step_program, "_programs", made)
    monkeypatch.setattr(step_program.torch, "compile", lambda module, **_: module)
    return made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    with torch.no_grad():
        model[2].weight.data = model[2].weight.data.t().contiguous().t()
    use(model)
    return model


def use(model: nn.Module) -> Tensor:
    with precast.autocast("cpu", dtype=BF16):
        result: Tensor = model(torch.ones(2, WIDTH))
    return result


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first}, {"params": last, "lr": 0.003}]


def give_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(BF16).float().mul_(factor).as_strided(p.shape, p.stride())


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def check_copies(model: nn.Module) -> None:
    """Every copy has the bits of its weight, and no next use has to write it."""
    for p in (p for p in model.parameters() if p.dim() == 2):
        for dtype, made in held.held_parameters[id(p)].copies.items():
            assert torch.equal(made.tensor, p.to(dtype))
            assert made.is_fresh_for(p)


def both(make: Make, steps: int = 7) -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    """The same training twice: in one pass, and by the optimizer."""
    model, plain = net(), net()
    optimizer, other = make(groups(model)), make(groups(plain))
    precast.attach(model, optimizer=optimizer, step="one-pass")
    use(model)
    for step in range(steps):
        for each, its in ((model, optimizer), (plain, other)):
            give_gradients(each, step)
            for group in its.param_groups:
                group["lr"] = group["lr"] * 0.9
            its.step()
    return model, optimizer, plain, other


def check_equal(one: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_a_step_in_one_pass_is_the_optimizers(make: Make, programs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", precast.errors.PrecastWarning)
        model, optimizer, plain, other = both(make)
    assert programs
    check_equal(model, plain)
    check_copies(model)
    mine, its = optimizer.state_dict(), other.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    for states, others in zip(mine["state"].values(), its["state"].values(), strict=True):
        assert states.keys() == others.keys()
        for name, value in states.items():
            torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", NOT_ELEMENTWISE.values(), ids=NOT_ELEMENTWISE)
def test_what_is_not_elementwise_is_stepped_as_before_and_said_once(
    make: Make, programs: Any
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer, plain, other = both(make)
    assert not programs
    assert all(map(torch.equal, weights(model), weights(plain)))
    lines = [str(w.message) for w in said if w.category is precast.errors.PrecastWarning]
    assert len(lines) == 1
    assert f"{type(optimizer).__name__} steps as before, not in one pass" in lines[0]
    for states, others in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[name]))
    if isinstance(optimizer, Counting):
        assert optimizer.count == 7


def test_weights_of_all_sizes_and_all_values_of_a_schedule_share_a_program(programs: Any) -> None:
    model = net()
    optimizer = SGD(groups(model), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    precast.attach(model, optimizer=optimizer, step="one-pass")
    use(model)
    for step in range(8):
        give_gradients(model, step)
        optimizer.step()
        schedule.step()
    assert len(programs) == 1


def test_an_optimizer_without_states_gets_none(programs: Any) -> None:
    """Also of weights that are alike, of which one is recorded."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    optimizer = SGD(model.parameters(), lr=0.1)
    precast.attach(model, optimizer=optimizer, step="one-pass")
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    assert programs
    assert not optimizer.state_dict()["state"]


def test_states_go_on_in_a_plain_optimizer_and_come_back(programs: Any) -> None:
    model, optimizer, plain, other = both(lambda p: AdamW(p, lr=0.01), steps=3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain.load_state_dict(model.state_dict())
    for each, its in ((model, optimizer), (plain, other)):
        give_gradients(each, 9)
        its.step()
    check_equal(model, plain)


def test_gradients_in_16_bits_are_read_as_they_are(programs: Any) -> None:
    model, plain = net(), net()
    optimizer, other = AdamW(model.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
    precast.attach(model, optimizer=optimizer, grad_dtype=BF16, step="one-pass")
    precast.attach(plain, optimizer=other, grad_dtype=BF16)
    for step in range(4):
        for each, its in ((model, optimizer), (plain, other)):
            torch.manual_seed(step)
            its.zero_grad()
            with precast.autocast("cpu", dtype=BF16):
                loss = each(torch.randn(4, WIDTH)).float().square().mean()
            loss.backward()
            its.step()
            assert each[0].weight.grad.dtype is BF16
        plain.load_state_dict(model.state_dict())  # what rounds otherwise is not to grow
    assert {key.stored[1] for key in programs} == {BF16}
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32
    check_copies(model)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        mine, its = optimizer.state[model[0].weight][name], other.state[plain[0].weight][name]
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_scaler_skips_a_step_and_nothing_is_written(
    dtype: Any, fused: bool, programs: Any
) -> None:
    model, plain = net(), net()
    made = [AdamW(m.parameters(), lr=0.01, fused=fused) for m in (model, plain)]
    scalers = [precast.GradScaler("cpu", init_scale=1024.0) for _ in made]
    precast.attach(model, optimizer=made[0], grad_dtype=dtype, step="one-pass")
    for step in range(5):
        for each, optimizer, scaler in zip((model, plain), made, scalers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with precast.autocast("cpu", dtype=torch.float16):
                loss = each(torch.randn(4, WIDTH)).float().square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            before = weights(each), copy.deepcopy(optimizer.state_dict()["state"])
            scaler.step(optimizer)
            scaler.update()
            event = scaler.last_step(optimizer)
            assert event is not None
            assert bool(event.skipped) is (step == 3)
            if step == 3:
                assert all(map(torch.equal, before[0], weights(each)))
                assert str(before[1]) == str(optimizer.state_dict()["state"])
        check_equal(model, plain)
        plain.load_state_dict(model.state_dict())
    assert programs
    check_copies(model)


def test_who_writes_a_weight_afterwards_is_noticed(programs: Any) -> None:
    model, *_ = both(lambda p: SGD(p, lr=0.1))
    use(model)
    with torch.no_grad():
        model[0].weight.mul_(0)
        model[0].bias.mul_(0)
        model[2].bias.mul_(0)
    assert not use(model).any()


def test_clipping_and_accumulation_come_before(programs: Any) -> None:
    model, plain = net(), net()
    made = [AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    precast.attach(model, optimizer=made[0], step="one-pass")
    for step in range(4):
        for each, optimizer in zip((model, plain), made, strict=True):
            optimizer.zero_grad()
            for part in range(2):
                torch.manual_seed(2 * step + part)
                with precast.autocast("cpu", dtype=BF16):
                    loss = each(torch.randn(4, WIDTH)).float().square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
        check_equal(model, plain)
        plain.load_state_dict(model.state_dict())
    assert programs


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_in_the_pass_gives_the_bits_of_clipping_before(
    max_norm: float, programs: Any
) -> None:
    """Beside a step in one pass after PyTorch's own clipping; biases are clipped before the step, too."""
    model, other = net(), net()
    made = [AdamW(groups(m), lr=0.01) for m in (model, other)]
    attachment = precast.attach(model, optimizer=made[0], step="one-pass")
    precast.attach(other, optimizer=made[1], step="one-pass")
    for step in range(4):
        for each in (model, other):
            give_gradients(each, step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = attachment.clip_grad_norm_(max_norm)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(other.parameters(), max_norm))
        for optimizer in made:
            optimizer.step()
        assert all(map(torch.equal, weights(model), weights(other)))
        if step:
            assert torch.equal(model[0].weight.grad, before[0])
    assert {key.is_scaled for key in programs} == {True, False}


def test_gradients_in_16_bits_are_clipped_in_float32(programs: Any) -> None:
    """So they lose nothing to another rounding: as float32 gradients with the same numbers do."""
    model, other = net(), net()
    made = [SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, other)]
    attachment = precast.attach(model, optimizer=made[0], grad_dtype=BF16, step="one-pass")
    precast.attach(other, optimizer=made[1], step="one-pass")
    for step in range(3):
        give_gradients(other, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            set_gradient(p, q.grad.to(BF16 if p.dim() == 2 else torch.float32))
        attachment.clip_grad_norm_(0.3)
        nn.utils.clip_grad_norm_(other.parameters(), 0.3)
        for optimizer in made:
            optimizer.step()
    assert programs
    for mine, its in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_what_is_not_stepped_in_one_pass_is_clipped_all_the_same() -> None:
    for make in (lambda p: SGD(p, lr=0.1), optim.Adafactor):
        model, plain = net(), net()
        optimizer, other = make(model.parameters()), make(plain.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", precast.errors.PrecastWarning)
            attachment = precast.attach(model, optimizer=optimizer, step="one-pass")
            for each in (model, plain):
                give_gradients(each, 0)
            attachment.clip_grad_norm_(0.5)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
        other.step()
        assert all(map(torch.equal, weights(model), weights(plain)))


def test_a_gradient_that_is_written_after_clipping_is_one_clear_error(programs: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = precast.attach(model, optimizer=optimizer, step="one-pass")
    for _ in range(2):
        give_gradients(model, 0)
        optimizer.step()
    before = weights(model)
    attachment.clip_grad_norm_(0.1)
    model[0].weight.grad.add_(1.0)
    with pytest.raises(precast.errors.AttachError, match="written between"):
        optimizer.step()
    assert all(map(torch.equal, before, weights(model)))
    give_gradients(model, 1)  # others in their place are not clipped
    optimizer.step()
    assert (before[0] - model[0].weight).abs().max() > 0.1


def test_a_scaler_and_clipping_in_the_pass(programs: Any) -> None:
    model, plain = net(), net()
    made = [AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    scalers = [precast.GradScaler("cpu", init_scale=1024.0) for _ in made]
    attachment = precast.attach(model, optimizer=made[0], step="one-pass")
    for step in range(4):
        for each, optimizer, scaler in zip((model, plain), made, scalers, strict=True):
            optimizer.zero_grad()
            give_gradients(each, step, 1024.0 * (float("inf") if step == 2 else 1.0))
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            if each is model:
                attachment.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        check_equal(model, plain)
    assert programs


def test_clipping_needs_an_optimizer() -> None:
    with pytest.raises(precast.errors.AttachError, match="needs the optimizer"):
        precast.attach(net()).clip_grad_norm_(1.0)


def test_a_compiler_that_fails_leaves_the_step_to_the_optimizer(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(step_program.torch, "compile", lambda *_, **__: fails)
    with pytest.warns(precast.errors.PrecastWarning, match=r"No working C\+\+ compiler found\.$"):
        model, optimizer, plain, other = both(lambda p: AdamW(p, lr=0.01))
    assert all(map(torch.equal, weights(model), weights(plain)))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[p]["step"] == other.state[q]["step"]


def test_a_closure_is_called_as_before(programs: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    precast.attach(model, optimizer=optimizer, step="one-pass")

    def closure() -> float:
        give_gradients(model, 0)
        return 2.0

    with pytest.warns(precast.errors.PrecastWarning, match="closure"):
        assert optimizer.step(closure) == 2.0
    optimizer.step(closure)
    assert not programs


def test_a_step_after_detach_is_the_optimizers(programs: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    attachment = precast.attach(model, optimizer=optimizer, step="one-pass")
    attachment.detach()
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    assert not programs


def test_what_attach_cannot_take_is_one_clear_error() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(precast.errors.AttachError, match="needs the optimizer"):
        precast.attach(model, step="one-pass")
    with pytest.raises(precast.errors.AttachError, match="needs the optimizer"):
        precast.attach(model, optimizer=optimizer, hold=False, step="one-pass")
    with pytest.raises(precast.errors.AttachError, match='give "one-pass"'):
        precast.attach(model, optimizer=optimizer, step="two")  # type: ignore[arg-type]
    assert not precast.attachment.attachment.attached_models()


def test_states_of_another_dtype_are_one_clear_error() -> None:
    for dtype in (BF16, torch.float16, torch.float64):
        model = net()
        optimizer = AdamW(model.parameters())
        give_gradients(model, 0)
        optimizer.step()
        its = optimizer.state[model[0].weight]
        its["exp_avg_sq"] = its["exp_avg_sq"].to(dtype)
        with pytest.raises(
            precast.errors.AttachError, match=rf"'exp_avg_sq' of 0\.weight is {dtype}"
        ):
            precast.attach(model, optimizer=optimizer, step="one-pass")
        assert not precast.attachment.attachment.attached_models()


def test_a_step_that_pytorch_refuses_has_changed_nothing(programs: Any) -> None:
    """Adam looks for sparse gradients before it changes anything, and so does this."""
    model = nn.ModuleDict({"l": nn.Linear(WIDTH, WIDTH), "e": nn.Embedding(400, 64, sparse=True)})
    optimizer = Adam(model.parameters(), lr=0.1)
    precast.attach(model, optimizer=optimizer, step="one-pass")
    for _ in range(2):
        model["l"].weight.grad = torch.ones_like(model["l"].weight)
        optimizer.step()
    assert programs
    before = model["l"].weight.detach().clone()
    model["e"](torch.tensor([1, 2])).sum().backward()
    with (
        pytest.warns(precast.errors.PrecastWarning, match="a gradient is sparse"),
        pytest.raises(RuntimeError, match="does not support sparse gradients"),
    ):
        optimizer.step()
    assert torch.equal(model["l"].weight, before)
    assert optimizer.state[model["l"].weight]["step"] == 2


def test_two_optimizers_of_one_model_step_in_turn(programs: Any) -> None:
    model, plain = net(), net()
    made = [(AdamW(m.parameters()), SGD(m.parameters(), lr=0.1)) for m in (model, plain)]
    for optimizer in made[0]:
        precast.attach(model, optimizer=optimizer, step="one-pass")
    for step in range(6):
        for each, optimizers in zip((model, plain), made, strict=True):
            give_gradients(each, step)
            optimizers[step % 2].step()
    assert len(programs) == 2
    check_equal(model, plain)


def test_compiled_steps_err_no_more_than_the_optimizers() -> None:
    """One program, compiled for real: gradients in bfloat16, a weight and its transpose, a schedule, copies."""
    model, plain, exact = net(), net(), net().double()
    made = [AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, plain, exact)]
    precast.attach(model, optimizer=made[0], step="one-pass")
    use(model)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"] if _is_loaded() else 0
    for step in range(12):
        for each, optimizer in zip((model, plain, exact), made, strict=True):
            torch.manual_seed(step)
            for p in each.parameters():
                noise = torch.randn(p.shape).to(BF16).to(p.dtype)
                p.grad = torch.empty_like(p).copy_(noise)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    check_copies(model)
    for index in (0, 2):
        error, its = (
            (m[index].weight.double() - exact[index].weight).abs() for m in (model, plain)
        )
        assert error.mean() <= 1.02 * its.mean()
        assert error.max() < 1e-6
    with torch.inference_mode():
        assert torch.equal(use(model), use(copy.deepcopy(model)))


def test_a_program_that_was_compiled_for_one_size_is_right_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No guard looks at sizes: one that vectors divide comes first, then those that they do not."""
    made: dict[ProgramKey, Any] = {}
    monkeypatch.setattr(step_program, "_programs", made)
    shapes = (128, 128), (131, 127), (16411, 1), (130, 129)
    results = []
    for attached in (True, False):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            precast.attach(model, optimizer=optimizer, step="one-pass")
        for _ in range(3):
            for p in model:
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append([p.detach() for p in model])
    assert len(made) == 1
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def _is_loaded() -> bool:
    return "torch._dynamo.utils" in sys.modules
