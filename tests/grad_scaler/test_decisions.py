"""The table of what the scaler decides and computes as PyTorch's does: each claim is a program, run with both scalers.

A row is a claim, a program that takes a class of scalers, and the arguments with which it is run. The oracle is
`torch.amp.GradScaler` on the same program: what the program returns is the same to the bit. What the claim itself says
is asserted in the program, so it is true of both scalers. Scenes of PyTorch's own tests say which test they are from.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support import claims
from tests.support.claims import Claim, Claims, one_each
from tests.support.scaling import bits, make_parameter, sgd, started

claim = Claims()


def refused(kind: type[Any], call: Callable[[], Any], says: str) -> None:
    """A call is refused by both scalers: by ours with a `ScalerError` whose message says what is wrong."""
    claims.refused(issubclass(kind, GradScaler), call, ScalerError, says)


# --- gradients ---


def _sparse(values: list[float], dtype: torch.dtype) -> Tensor:
    indices = torch.tensor([[0, 1, 0], [2, 0, 2]])  # the first and the last are one element
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse invariants are in beta
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2, 3))


@claim(
    "sparse gradients are divided and checked",
    *one_each([16.0, 32.0, 64.0], [1.0, math.inf, 1.0], [1.0, 1.0, math.nan]),
)
def _sparse_gradients(kind: Any, values: list[float]) -> list[Any]:
    scaler = kind("cpu", 4.0)
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = _sparse(values, torch.float32)
    scaler.scale(torch.ones(1))
    scaler.step(sgd(parameter))
    scaler.update()
    return [bits(parameter), bits(parameter.grad.to_dense()), scaler.get_scale()]


@claim("a sparse float16 sum that overflows is found")
def _sparse_overflow(kind: Any) -> list[Any]:
    parameter = torch.zeros(2, 3, dtype=torch.float16).to_sparse()
    parameter.grad = _sparse([64000.0, 32.0, 64000.0], torch.float16)
    one, zero = torch.ones(()), torch.zeros(())
    found = kind("cpu")._unscale_grads_(sgd(parameter), one, zero, True)
    assert parameter.grad.is_coalesced()
    assert found[torch.device("cpu")].item() == 1.0
    return [list(found), bits(parameter.grad.to_dense())]


@claim("gradients of several dtypes and layouts are unscaled together", *one_each(-1, 0, 1, 2, 3))
def _unscaled_together(kind: Any, bad: int) -> list[Any]:
    """As in `test_grad_scaling_unscale`: the verdict may have one dimension, and float16 is let through."""
    full = torch.full((20, 20), 4.0)
    gradients = [full.clone(), full.clone()[:, :5], full.half(), full.half()]
    if bad >= 0:
        gradients[bad][2, 2] = math.inf
    parameters = [torch.empty_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    found = kind("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
    verdict = sum(each.item() for each in found.values())
    assert verdict == (bad >= 0)
    if bad < 0:
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)
    return [verdict]


# --- whole trainings: scenes of PyTorch's tests ---

SKIPPED_STEP, STEPS = 2, 4
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1.0),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1.0),
    "foreach AdamW": lambda ps: torch.optim.AdamW(ps, lr=1.0, foreach=True),
    "fused Adam": lambda ps: torch.optim.Adam(ps, lr=1.0, fused=True),
}
TREATMENTS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None,
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2),  # type: ignore[func-returns-value]
    "clipping by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _spoil(model: nn.Module, number: int) -> None:
    if number == SKIPPED_STEP:
        model.get_parameter("1.weight").grad.fill_(math.inf)  # type: ignore[union-attr]


def _trained(model: nn.Module) -> list[Any]:
    return [bits(parameter) for parameter in model.parameters()]


def _train(model: nn.Module, optimizer: Any, scaler: Any, treat: Callable[[Any], None]) -> None:
    """Without scaling where `scaler` is None; the step that is to be skipped is left out."""
    for number, (x, target) in enumerate(_data()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        if scaler is None:
            loss.backward()
            if number != SKIPPED_STEP:
                treat(model)
                optimizer.step()
            continue
        scaler.scale(loss).backward()
        _spoil(model, number)
        scaler.unscale_(optimizer)
        treat(model)
        scaler.step(optimizer)
        scaler.update()


@claim(
    "a scaled run is the plain one without its bad step",
    *[(optimizer, treatment) for optimizer in OPTIMIZERS for treatment in TREATMENTS],
)
def _plain_without_bad_step(kind: Any, optimizer: str, treatment: str) -> list[Any]:
    """As in `test_grad_scaling_autocast`, `_clipping`, `_clipping_separate_unscale`."""
    scaler = kind("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1)
    models = [_network(), _network()]
    for model, one in zip(models, (None, scaler), strict=True):
        made = OPTIMIZERS[optimizer](model.parameters())
        _train(model, made, one, TREATMENTS[treatment])
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    for plain, scaled in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(plain, scaled, atol=1e-6)
    return _trained(models[1])


@claim("gradients of two micro-batches are accumulated")
def _accumulation(kind: Any) -> list[Any]:
    """As in `test_grad_scaling_accumulation`."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=128.0, growth_interval=1)
    for number, (x, target) in enumerate(_data()):
        scaler.scale(F.mse_loss(model(x), target) / 2).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() == 128.0 * 4
    return _trained(model)


@claim("a penalty on gradients is computed of unscaled ones")
def _penalty(kind: Any) -> list[Any]:
    """As in `test_grad_scaling_penalty`."""
    found = []
    for scaler in (None, kind("cpu", init_scale=128.0)):
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, target in _data():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            parameters = list(model.parameters())
            scaled = loss if scaler is None else scaler.scale(loss)
            gradients = torch.autograd.grad(scaled, parameters, create_graph=True)
            inverse = 1.0 if scaler is None else 1.0 / scaler.get_scale()
            penalty = torch.stack([(g * inverse).square().sum() for g in gradients]).sum().sqrt()
            total = loss + penalty
            (total if scaler is None else scaler.scale(total)).backward()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
        found.append(model)
    for plain, penalised in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.allclose(plain, penalised, atol=1e-6)
    return _trained(found[1])


@claim("one of two optimizers is skipped alone")
def _skipped_alone(kind: Any) -> list[Any]:
    """As in `test_grad_scaling_multiple`."""
    models = [_network(), _network()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = kind("cpu", init_scale=128.0, growth_interval=1)
    for number, (x, target) in enumerate(_data()):
        before = copy.deepcopy(models[1].state_dict())
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(x) for model in models]
        losses = [F.mse_loss(outputs[0] + 0.5 * outputs[1], target), F.mse_loss(outputs[1], target)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        _spoil(models[1], number)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(before[k], v) for k, v in models[1].state_dict().items())
        assert same == (number == SKIPPED_STEP)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5
    return [*_trained(models[0]), *_trained(models[1])]


@claim("a pickled scaler goes on")
def _pickled(kind: Any) -> list[Any]:
    """As in `test_grad_scaling_autocast` with `try_pickle`."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=128.0, growth_interval=2)
    for x, target in _data():
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), target)).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler = pickle.loads(pickle.dumps(scaler))
    assert scaler.get_scale() == 128.0 * 4
    return _trained(model)


@claim("the scale never overflows")
def _never_overflows(kind: Any) -> list[Any]:
    """As in `test_grad_scale_will_not_overflow`."""
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = kind("cpu", growth_interval=1, growth_factor=2.0**4, init_scale=1e38)
    loss = ((model(torch.randn(1, 5)) - 1e-30) ** 2).mean() * 1e-30
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert math.isfinite(scaler.get_scale())
    return [*_trained(model), scaler.get_scale()]


# --- what is scaled ---


@claim(
    "a scaled loss is the loss times the scale",
    *[(d, s) for d in (torch.float32, torch.float16, torch.bfloat16) for s in ((), (1,), (3,))],
)
def _scaled_loss(kind: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Any]:
    return [bits(kind("cpu").scale(torch.randn(shape).to(dtype)))]


def generator(losses: list[Tensor]) -> Iterator[Tensor]:
    """A generator of losses."""
    return (x for x in losses)


@claim("iterators and sets of losses are scaled lazily", *one_each(iter, set, generator))
def _lazily(kind: Any, lazy: Any) -> list[Any]:
    one = torch.ones(1)
    scaled = kind("cpu", 4.0).scale(lazy([one]))
    assert isinstance(scaled, map)
    assert [t.item() for t in scaled] == [4.0]
    [nested] = kind("cpu", 4.0).scale([lazy([one])])
    assert [t.item() for t in nested] == [4.0]
    return []


# --- what a step does ---


@claim("two losses into one optimizer add their gradients")
def _two_losses(kind: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind, init_scale=8.0)
    before = parameter.detach().clone()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, before - 0.25 * 3)
    return [bits(parameter)]


@claim("unscaled gradients can be clipped")
def _clipped(kind: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind)
    before = parameter.detach().clone()
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    nn.utils.clip_grad_value_(parameter, 0.5)
    scaler.step(optimizer)
    assert torch.equal(parameter, before - 0.125)
    return [bits(parameter)]


@claim("what the optimizer's step returns comes back")
def _step_returns(kind: Any) -> list[Any]:
    class Told(torch.optim.SGD):
        def step(self, closure: Any = None, factor: int = 1) -> Any:
            return 10 * factor

    scaler, parameter, _ = started(kind)
    assert scaler.step(Told([parameter], lr=1.0), factor=4) == 40
    return []


@claim("None as closure, by position, is no closure")
def _no_closure(kind: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind)
    before = parameter.detach().clone()
    scaler.step(optimizer, None)
    assert not torch.equal(parameter, before)
    return [bits(parameter)]


@claim("a scale that a user has set on the optimizer is divided by as well")
def _users_scale(kind: Any) -> list[Any]:
    parameter = nn.Parameter(torch.ones(5, 5))
    parameter.grad = torch.full_like(parameter, 15.0)
    optimizer = torch.optim.Adam([parameter], fused=True)
    optimizer.grad_scale = torch.tensor([3.0])
    scaler = kind("cpu", init_scale=5.0)
    scaler.scale(torch.ones(5))
    scaler.step(optimizer)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    return [bits(parameter)]


class Scaling(torch.optim.Optimizer):
    """An optimizer with a scaling of its own, for the two contracts that PyTorch has had."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})


@claim("an optimizer that scales by itself reads its attributes")
def _scales_by_itself(kind: Any) -> list[Any]:
    class Reads(Scaling):
        def step(self, closure: Any = None) -> None:
            self.seen = self.grad_scale, self.found_inf

    scaler, parameter, _ = started(kind, init_scale=16.0)
    optimizer = Reads([parameter])
    scaler.step(optimizer)
    assert [t.item() for t in optimizer.seen] == [16.0, 0.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert torch.equal(parameter.grad, torch.full((3,), 32.0))  # the optimizer is to unscale
    return [bits(t) for t in optimizer.seen]


@claim("an optimizer of the old contract gets the scaler, and a warning at the caller's line")
def _old_contract(kind: Any) -> list[Any]:
    class Takes(Scaling):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            assert not hasattr(self, "grad_scale")
            assert grad_scaler._found_inf_per_device(self) == {}
            self.checked = grad_scaler._check_inf_per_device(self)
            self.scale = grad_scaler._get_scale_async()

    scaler, parameter, _ = started(kind, init_scale=16.0)
    optimizer = Takes([parameter])
    with pytest.warns(FutureWarning, match="GradScaler is going to stop") as warned:
        scaler.step(optimizer)
    assert warned[0].filename == __file__
    assert optimizer.checked == {torch.device("cpu"): torch.zeros(())}
    assert optimizer.scale.item() == 16.0
    scaler.update()
    return [scaler.state_dict()]


@claim("a fused optimizer without gradients does nothing")
def _fused_without_gradients(kind: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind)
    other = make_parameter()
    before = other.detach().clone()
    scaler.step(torch.optim.Adam([other], fused=True))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(other, before)
    return [bits(parameter)]


@claim("an optimizer need not be hashable")
def _not_hashable(kind: Any) -> list[Any]:
    """As a dataclass of optimizers is not."""
    parameter = make_parameter()
    before = parameter.detach().clone()
    both: Any = Both([sgd(parameter)])
    scaler = kind("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(both)
    scaler.update()
    assert torch.equal(parameter, before - 0.25)
    return [bits(parameter), scaler.state_dict()]


@dataclasses.dataclass
class Both:
    """Several optimizers as one."""

    parts: list[torch.optim.Optimizer]

    @property
    def param_groups(self) -> list[Any]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()


@claim("a subclass can override a part")
def _subclass(kind: Any) -> list[Any]:
    class Doubling(kind):
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)

    parameter = make_parameter()
    before = parameter.detach().clone()
    scaler = Doubling("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(sgd(parameter))
    assert torch.equal(parameter, before - 0.5)
    return [bits(parameter)]


# --- the order of calls ---


@claim(
    "calls before any loss was scaled are refused",
    *one_each("unscale_", "step", "update"),
)
def _before_any_loss(kind: Any, call: str) -> list[Any]:
    scaler, optimizer = kind("cpu"), sgd(make_parameter())
    arguments = () if call == "update" else (optimizer,)
    says = r"before any loss was scaled.*scale\(loss\)"
    refused(kind, lambda: getattr(scaler, call)(*arguments), says)
    return []


@claim("gradients are unscaled once")
def _unscaled_once(kind: Any) -> list[Any]:
    scaler, _, optimizer = started(kind)
    scaler.unscale_(optimizer)
    refused(kind, lambda: scaler.unscale_(optimizer), "twice")
    return []


@claim("gradients are not unscaled after the step")
def _unscaled_after_step(kind: Any) -> list[Any]:
    scaler, _, optimizer = started(kind)
    scaler.step(optimizer)
    refused(kind, lambda: scaler.unscale_(optimizer), "after step")
    return []


@claim("an optimizer steps once in an iteration")
def _one_step(kind: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind)
    scaler.step(optimizer)
    refused(kind, lambda: scaler.step(optimizer), r"twice.*update\(\)")
    scaler.update()
    scaler.step(optimizer)
    return [bits(parameter)]


@claim("there are gradients to check")
def _nothing_to_check(kind: Any) -> list[Any]:
    """As in `test_grad_scaler_pass_itself` and its neighbours: a step without gradients."""
    scaler, _, _ = started(kind)
    refused(kind, lambda: scaler.step(sgd(make_parameter())), "no gradients were checked")
    refused(kind, scaler.update, "no gradients were checked")
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    return [scaler.state_dict()]


# --- being off, settings, copies ---


@claim("a scaler that is off passes everything through")
def _off(kind: Any) -> list[Any]:
    scaler = kind("cpu", enabled=False)
    parameter = make_parameter()
    before, optimizer = parameter.detach().clone(), sgd(parameter)
    outputs = [parameter.sum(), "anything"]
    assert scaler.scale(outputs) is outputs
    outputs[0].backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(new_scale=3.0)
    assert torch.equal(parameter, before - 0.25)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0  # its own step, so its own closures
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.get_scale() == 1.0
    return [bits(parameter)]


@claim("a growth factor of 1 freezes the scale")
def _frozen(kind: Any) -> list[Any]:
    scaler, _, optimizer = started(kind, init_scale=8.0)
    scaler.set_growth_factor(1.0)
    scaler.set_growth_interval(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.set_backoff_factor(1.0)
    assert scaler.get_backoff_factor() == 1.0
    return [scaler.state_dict()]


@claim("a new scale is a number or a tensor", *one_each(3.0, torch.tensor(3.0)))
def _new_scale(kind: Any, new: Any) -> list[Any]:
    scaler, _, _ = started(kind)
    scaler.update(new)
    assert scaler.get_scale() == 3.0
    assert float(new) == 3.0
    return [scaler.state_dict()]


@claim("loading a state keeps the scale's tensor itself")
def _keeps_tensor(kind: Any) -> list[Any]:
    scaler, _, _ = started(kind)
    tensor = scaler._get_scale_async()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0})
    assert scaler._get_scale_async() is tensor
    assert tensor.item() == 5.0
    return [bits(tensor)]


def pickled(scaler: Any) -> Any:
    """A copy by way of pickle."""
    return pickle.loads(pickle.dumps(scaler))


@claim(
    "a copy goes on where the scaler was, and none is made inside an iteration",
    *one_each(copy.deepcopy, pickled),
)
def _copied(kind: Any, duplicate: Any) -> list[Any]:
    scaler, parameter, optimizer = started(kind, growth_interval=2, init_scale=8.0)
    scaler.step(optimizer)
    refused(kind, lambda: duplicate(scaler), r"inside an iteration.*after update\(\)")
    scaler.update()
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.state_dict()["_growth_tracker"] == 1
    twin.scale((parameter * 2).sum()).backward()
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (16.0, 8.0)
    return [bits(parameter), twin.state_dict()]


@pytest.mark.parametrize("row", claim, ids=str)
def test_the_scaler_does_as_pytorchs(row: Claim) -> None:
    row.hold(torch.amp.GradScaler, GradScaler)


def test_each_claim_is_in_the_table_once() -> None:
    assert len({str(row) for row in claim}) == len(claim)
