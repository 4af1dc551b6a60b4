"""Training loops that write attached weights through `.data` compute what they compute with torch.autocast."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import precast
from precast.engine import registration
from precast.weights import held

BF16 = torch.bfloat16
WIDTH = 136
"""Wide enough for a weight to be held in training, where a bias is not."""
STEPS = 6


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield
    assert held.held_parameters == {}


class Loop:
    """A model in training, and all outputs that it had; each forward pass is in an outermost region of its own."""

    def __init__(self, region: Callable[[], Any]) -> None:
        self.draw = torch.Generator().manual_seed(5)
        torch.manual_seed(0)
        self.region, self.model = region, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.outputs: list[Tensor] = []

    @property
    def data(self) -> list[Tensor]:
        return [p.data for p in self.model.parameters()]

    @property
    def gradients(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def noise(self, scale: float = 0.01) -> list[Tensor]:
        return [scale * torch.randn(d.shape, generator=self.draw) for d in self.data]

    def output(self, model: nn.Module | None = None) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.draw)
        with self.region():
            y: Tensor = (model or self.model)(x)
        self.outputs.append(y.detach().clone())
        return y

    def loss(self, model: nn.Module | None = None) -> Tensor:
        return self.output(model).float().square().mean()

    def evaluate(self, model: nn.Module | None = None) -> float:
        with torch.no_grad():
            return self.loss(model).item()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def saved(self) -> list[Tensor]:
        return [d.clone() for d in self.data]

    def load(self, values: list[Tensor]) -> None:
        for d, value in zip(self.data, values, strict=True):
            d.copy_(value)

    def add(self, values: list[Tensor], alpha: float = 1.0) -> None:
        for d, value in zip(self.data, values, strict=True):
            d.add_(value, alpha=alpha)

    def scale(self, factor: float) -> None:
        for d in self.data:
            d.mul_(factor)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def average_swapped_in_and_out(loop: Loop) -> None:
    mean = loop.saved()
    for _ in range(STEPS):
        loop.step()
        for m, d in zip(mean, loop.data, strict=True):
            m.lerp_(d, 0.3)
        own = loop.saved()
        loop.load(mean)
        loop.evaluate()
        loop.load(own)
        loop.evaluate()


def average_exchanged_by_memory(loop: Loop) -> None:
    mean = loop.saved()
    for _ in range(STEPS):
        loop.step()
        for _ in range(2):
            for i, p in enumerate(loop.parameters):
                p.data, mean[i] = mean[i], p.data
            loop.evaluate()


def stochastic_weight_averaging(loop: Loop) -> None:
    total = loop.noise(0)
    for i in range(STEPS):
        loop.step()
        total = [t + d for t, d in zip(total, loop.data, strict=True)]
        loop.evaluate()
        own = loop.saved()
        loop.load([t / (i + 1) for t in total])
        loop.evaluate()
        loop.load(own)


def polyak(loop: Loop) -> None:
    start = loop.saved()
    for _ in range(STEPS):
        loop.evaluate()
        loop.step()
        for d, s in zip(loop.data, start, strict=True):
            d.lerp_(s, 0.1)


def sharpness_aware(loop: Loop, weighted: bool = False) -> None:
    for _ in range(STEPS):
        loop.backward()
        own, gradients = loop.saved(), loop.gradients
        if weighted:
            gradients = [g * d.abs() for g, d in zip(gradients, own, strict=True)]
        loop.add([g.clone() for g in gradients], 0.5)
        loop.backward()
        loop.load(own)
        loop.optimizer.step()
        loop.evaluate()


def adaptive_sharpness_aware(loop: Loop) -> None:
    sharpness_aware(loop, weighted=True)


def lookahead(loop: Loop) -> None:
    slow = loop.saved()
    for _ in range(STEPS):
        loop.step()
        loop.step()
        for s, d in zip(slow, loop.data, strict=True):
            s.lerp_(d, 0.5)
        loop.load(slow)
        loop.evaluate()


def zeroth_order(loop: Loop, draw: Callable[[Loop], list[Tensor]] = Loop.noise) -> None:
    for _ in range(STEPS):
        noise = draw(loop)
        loop.add(noise)
        up = loop.evaluate()
        loop.add(noise, -2)
        down = loop.evaluate()
        loop.add(noise, 1 - 10 * (up - down))
        loop.evaluate()


def simultaneous_perturbation(loop: Loop) -> None:
    zeroth_order(loop, lambda loop: [0.01 * n.sign() for n in loop.noise()])


def zeroth_order_of_frozen_weights(loop: Loop) -> None:
    loop.model.requires_grad_(False)
    zeroth_order(loop)


def zeroth_order_with_tiny_steps(loop: Loop) -> None:
    zeroth_order(loop, lambda loop: loop.noise(1e-4))


def evolution(loop: Loop) -> None:
    for _ in range(STEPS):
        own, scores = loop.saved(), []
        for _ in range(3):
            noise = loop.noise()
            loop.add(noise)
            scores.append((loop.evaluate(), noise))
            loop.load(own)
        loop.add(min(scores, key=lambda score: score[0])[1])


def hill_climbing(loop: Loop) -> None:
    best = loop.evaluate()
    for _ in range(STEPS):
        own = loop.saved()
        loop.add(loop.noise())
        if (score := loop.evaluate()) < best:
            best = score
        else:
            loop.load(own)
        loop.evaluate()


def drop_connect(loop: Loop) -> None:
    for _ in range(STEPS):
        own = loop.saved()
        for d in loop.data:
            d.mul_(2 * torch.randint(0, 2, d.shape, generator=loop.draw))
        loop.backward()
        loop.load(own)
        loop.optimizer.step()


def noise_on_weights(loop: Loop) -> None:
    for _ in range(STEPS):
        noise = loop.noise()
        loop.add(noise)
        loop.backward()
        loop.add(noise, -1)
        loop.optimizer.step()
        loop.evaluate()


def line_search(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.backward()
        own, gradients, score = loop.saved(), [g.clone() for g in loop.gradients], 1e9
        for rate in (4.0, 1.0, 0.25):
            loop.load(own)
            loop.add(gradients, -rate)
            score, last = loop.evaluate(), score
            if score > last:
                break


def lion(loop: Loop) -> None:
    momentum = loop.noise(0)
    for _ in range(STEPS):
        loop.backward()
        for m, g in zip(momentum, loop.gradients, strict=True):
            m.lerp_(g, 0.1)
        loop.add([m.sign() for m in momentum], -1e-3)


def momentum_by_hand(loop: Loop) -> None:
    momentum = loop.noise(0)
    for _ in range(STEPS):
        loop.backward()
        for m, g in zip(momentum, loop.gradients, strict=True):
            m.mul_(0.9).add_(g)
        loop.add(momentum, -0.1)
        loop.evaluate()


def adam_by_hand(loop: Loop) -> None:
    first, second = loop.noise(0), loop.noise(0)
    for _ in range(STEPS):
        loop.backward()
        for a, b, g in zip(first, second, loop.gradients, strict=True):
            a.lerp_(g, 0.1)
            b.lerp_(g.square(), 0.01)
        loop.add([a / (b.sqrt() + 1e-8) for a, b in zip(first, second, strict=True)], -1e-3)
        loop.evaluate()
        loop.optimizer.zero_grad()


def accumulated_gradients_by_hand(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.loss().backward()
        loop.add(loop.gradients, -0.05)
        loop.evaluate()


def gradients_that_are_never_stored(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.add(list(torch.autograd.grad(loop.loss(), loop.parameters)), -0.1)


def trained_in_float32(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.model(torch.ones(1, WIDTH)).square().mean().backward()
        loop.add(loop.gradients, -0.1)
        loop.optimizer.zero_grad()
        loop.evaluate()


def rollback_of_a_bad_batch(loop: Loop) -> None:
    good = loop.saved()
    for i in range(3 * STEPS):
        loop.optimizer.zero_grad()
        loss = loop.loss()
        if i % 3 == 2:
            loop.load(good)
            continue
        loss.backward()
        loop.optimizer.step()
        if i % 3 == 0:
            good = loop.saved()


def best_weights_restored(loop: Loop) -> None:
    best, score = loop.saved(), loop.evaluate()
    for _ in range(STEPS):
        loop.step()
        if (new := loop.evaluate()) < score:
            best, score = loop.saved(), new
    loop.load(best)
    loop.evaluate()


def restarts(loop: Loop) -> None:
    start = loop.saved()
    for _ in range(STEPS):
        loop.step()
        loop.load(start)
        loop.evaluate()


def clipped(loop: Loop) -> None:
    for bound in (0.08, 0.07, 0.06, 0.05, 0.04, 0.03):
        loop.step()
        for d in loop.data:
            d.copy_(d.sign() * bound)
        loop.evaluate()


def decayed(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.scale(0.9)
        loop.step()
        loop.scale(0.9)
        loop.evaluate()


def limited_norms(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()
        for d in loop.data:
            d.div_(d.norm(dim=0, keepdim=True) + 1e-3)
        loop.evaluate()


def binarized(loop: Loop, rounded: Callable[[Tensor], Tensor] = torch.sign) -> None:
    for _ in range(STEPS):
        own = loop.saved()
        loop.load([0.1 * rounded(d) for d in own])
        loop.backward()
        loop.load(own)
        loop.optimizer.step()


def quantized(loop: Loop) -> None:
    binarized(loop, lambda values: (values * 64).round() / 64)


def _hook(loop: Loop, write: Callable[[Tensor], object]) -> None:
    def hook(module: nn.Module, _: Any) -> None:
        for p in module.parameters(recurse=False):
            write(p.data)

    for layer in loop.model:
        layer.register_forward_pre_hook(hook)
    for _ in range(STEPS):
        loop.step()
        loop.evaluate()
        loop.evaluate()


def normalized_by_a_hook(loop: Loop) -> None:
    _hook(loop, lambda data: data.mul_(1.5 / data.norm()))


def written_by_a_hook(loop: Loop) -> None:
    _hook(loop, lambda data: data.add_(torch.randn(data.shape, generator=loop.draw), alpha=0.01))


def federated(loop: Loop) -> None:
    other = network()
    other.load_state_dict(loop.model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(STEPS):
        loop.step()
        optimizer.zero_grad()
        loop.loss(other).backward()
        optimizer.step()
        for p, d in zip(other.parameters(), loop.data, strict=True):
            d.add_(p.data).mul_(0.5)
            p.data.copy_(d)
        loop.evaluate()


def target_network(loop: Loop, rate: float = 0.2) -> None:
    online = network()
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = loop.output(online).float().square().mean() + loop.evaluate()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, d in zip(online.parameters(), loop.data, strict=True):
            d.mul_(1 - rate).add_(p.data, alpha=rate)


def target_network_copied(loop: Loop) -> None:
    target_network(loop, rate=1.0)


def aliases_of_numpy(loop: Loop) -> None:
    arrays = [p.detach().numpy() for p in loop.parameters]
    for _ in range(STEPS):
        loop.evaluate()
        for array in arrays:
            np.multiply(array, 1.25, out=array)
        loop.backward()


def aliases_of_dlpack(loop: Loop) -> None:
    aliases = [torch.from_dlpack(p.detach()) for p in loop.parameters]
    for _ in range(STEPS):
        loop.evaluate()
        for alias in aliases:
            alias.mul_(1.25)
        loop.backward()


def written_by_pointer(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.evaluate()
        for d in loop.data:
            values = (d * 1.25).contiguous()
            ctypes.memmove(d.data_ptr(), values.data_ptr(), 4 * d.numel())
        loop.backward()


def written_together(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.evaluate()
        torch._foreach_mul_(loop.data, 1.25)
        loop.backward()


def stepped_by_the_optimizer_of_an_alias(loop: Loop) -> None:
    aliases = [nn.Parameter(d) for d in loop.data]
    optimizer = torch.optim.SGD(aliases, lr=0.1, fused=True)
    for _ in range(STEPS):
        for alias, noise in zip(aliases, loop.noise(), strict=True):
            alias.grad = noise
        optimizer.step()
        loop.evaluate()
        loop.backward()


LOOPS = [
    average_swapped_in_and_out,
    average_exchanged_by_memory,
    stochastic_weight_averaging,
    polyak,
    sharpness_aware,
    adaptive_sharpness_aware,
    lookahead,
    zeroth_order,
    simultaneous_perturbation,
    zeroth_order_of_frozen_weights,
    zeroth_order_with_tiny_steps,
    evolution,
    hill_climbing,
    drop_connect,
    noise_on_weights,
    line_search,
    lion,
    momentum_by_hand,
    adam_by_hand,
    accumulated_gradients_by_hand,
    gradients_that_are_never_stored,
    trained_in_float32,
    rollback_of_a_bad_batch,
    best_weights_restored,
    restarts,
    clipped,
    decayed,
    limited_norms,
    binarized,
    quantized,
    normalized_by_a_hook,
    written_by_a_hook,
    federated,
    target_network,
    target_network_copied,
    aliases_of_numpy,
    aliases_of_dlpack,
    written_by_pointer,
    written_together,
    stepped_by_the_optimizer_of_an_alias,
]


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_a_loop_has_the_outputs_of_torch_autocast(program: Callable[[Loop], None]) -> None:
    outputs = []
    for attaches in (False, True):
        region = precast.autocast if attaches else torch.autocast
        options = {"policy": "torch"} if attaches else {}
        loop = Loop(lambda: region("cpu", dtype=BF16, **options))  # noqa: B023 -- called in this turn
        with precast.attach(loop.model) if attaches else nullcontext():
            program(loop)
        outputs.append(loop.outputs)
    assert len(outputs[0]) == len(outputs[1]) >= STEPS
    for i, (theirs, ours) in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(theirs, ours), f"output {i} of {len(outputs[0])}"


def _double(weight: Tensor) -> None:
    weight.data.mul_(2)


def test_a_write_by_another_process_is_seen() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH)
    model.share_memory()
    for p in model.parameters():
        p.data.fill_(1.0)
    with precast.attach(model), torch.no_grad():
        for expected in (1 + WIDTH, 2 * WIDTH + 1):
            with precast.autocast("cpu", dtype=BF16):
                assert model(x)[0, 0].item() == torch.tensor(float(expected)).to(BF16).item()
            child = multiprocessing.get_context("fork").Process(
                target=_double, args=(model.weight,)
            )
            child.start()
            child.join()
            assert child.exitcode == 0


def test_an_open_region_sees_a_write_without_gradients() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(1, WIDTH)
    with precast.attach(model), torch.no_grad(), precast.autocast("cpu", dtype=BF16):
        for value in (1.0, 2.0, 3.0):
            model.weight.data.fill_(value)
            assert model(x)[0, 0].item() == value * WIDTH


def casts(model: nn.Module) -> int:
    return sum(
        copy.writes
        for p in model.parameters()
        for copy in held.held_parameters[id(p)].copies.values()
    )


def region_with_gradients(other: nn.Module, region: Callable[[], Any]) -> None:
    with region():
        other(torch.ones(1, 8))


def region_without_gradients(other: nn.Module, region: Callable[[], Any]) -> None:
    with torch.no_grad():
        region_with_gradients(other, region)


def backward_without_a_region(other: nn.Module, _: Callable[[], Any]) -> None:
    other(torch.ones(1, 8)).sum().backward()


def step_of_another_optimizer(other: nn.Module, region: Callable[[], Any]) -> None:
    backward_without_a_region(other, region)
    torch.optim.SGD(other.parameters(), lr=0.1).step()


@pytest.mark.parametrize("attached", [1, 8])
@pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
@pytest.mark.parametrize(
    "event",
    [
        region_with_gradients,
        region_without_gradients,
        backward_without_a_region,
        step_of_another_optimizer,
    ],
)
def test_work_on_another_model_causes_no_cast(event: Any, region: Any, attached: int) -> None:
    models, x = [network() for _ in range(attached)], torch.randn(1, WIDTH)
    attachments = [precast.attach(model) for model in models]
    other = nn.Linear(8, 8)

    def use() -> None:
        for model in models:
            with torch.no_grad(), precast.autocast("cpu", dtype=BF16):
                model(x)

    use()
    before = [casts(model) for model in models]
    for _ in range(10):
        event(other, lambda: region("cpu", dtype=BF16))
        use()
    assert [casts(model) for model in models] == before
    for attachment in attachments:
        attachment.detach()
