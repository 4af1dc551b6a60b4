"""attach, where compiled kernels renew the copies of weights that are trained, as the reference does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import precast
from precast.engine import registration
from precast.weights import held
from precast.weights.native import library

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to be held in training, where a bias is not."""


@pytest.fixture(autouse=True)
def _native_engine() -> Iterator[None]:
    if isinstance(missing := library.load(), library.Unavailable):
        pytest.skip(f"needs the native engine: {missing.reason}")
    with registration.use_engine("native"):
        yield
    gc.collect()
    assert held.held_parameters == {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The parameters for whose copies kernels have asked Python."""
    tensors: list[Tensor] = []
    original = held.handle_of

    def handle_of(parameter: Tensor, dtype: torch.dtype) -> Any:
        tensors.append(parameter)
        return original(parameter, dtype)

    monkeypatch.setattr(held, "handle_of", handle_of)
    return tensors


class Job:
    """A network that is trained, attached or not."""

    def __init__(self, *, attached: bool = True, optimizer: Any = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.inputs = torch.randn(4, WIDTH)
        self.attachment = precast.attach(self.model) if attached else None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.attachment is not None:
            self.attachment.detach()

    def weight(self, number: int = 0) -> nn.Parameter:
        weight = self.model[number].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def output(self) -> Tensor:
        with precast.autocast("cpu", dtype=BF16, policy="torch"):
            output: Tensor = self.model(self.inputs)
        return output

    def loss(self) -> Tensor:
        return self.output().float().square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.step()

    def numbers(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.parameters()]

    def is_as_its_weights_say(self) -> bool:
        """Whether the next forward pass uses copies of what the weights are now."""
        twin = deepcopy(self.model)
        with torch.autocast("cpu", dtype=BF16):
            expected = twin(self.inputs)
        return torch.equal(self.output(), expected)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


def test_a_training_step_asks_python_for_no_copy(asked: list[Tensor]) -> None:
    with Job() as job:
        job.train(3)
        assert asked
        asked.clear()
        job.train(3)
        assert asked == []
        assert job.is_as_its_weights_say()


def accumulate(job: Job) -> list[Tensor]:
    for _ in range(3):
        job.optimizer.zero_grad()
        for scale in (1, 0.5, 2):
            (job.loss() * scale).backward()
        job.optimizer.step()
    return job.numbers()


def hooks(job: Job) -> list[Tensor]:
    seen: list[Tensor] = []

    def note(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    for parameter in job.model.parameters():
        parameter.register_hook(note)
        parameter.register_post_accumulate_grad_hook(after)
    job.train()
    return [*seen, *job.numbers()]


def retained(job: Job) -> list[Tensor]:
    job.train()
    job.optimizer.zero_grad()
    loss = job.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.clone() for p in job.model.parameters() if p.grad is not None]


def twice_differentiated(job: Job) -> list[Tensor]:
    job.train()
    parameters = list(job.model.parameters())
    first = torch.autograd.grad(job.loss(), parameters, create_graph=True)
    penalty = sum((gradient.square().sum() for gradient in first), torch.zeros(()))
    return [*torch.autograd.grad(penalty, parameters, materialize_grads=True)]


def of_an_old_graph(job: Job) -> list[Tensor]:
    """The graph was recorded before a step: its gradients are those of the weights that it saw."""
    job.train()
    parameters = list(job.model.parameters())
    with precast.autocast("cpu", dtype=BF16, policy="torch"):
        with torch.autograd.graph.save_on_cpu():  # what is saved is not the parameter
            before = job.model(job.inputs)
    kept = job.output()
    job.optimizer.step()
    new = job.loss()
    old = torch.autograd.grad(kept.float().sum() + before.float().sum(), parameters)
    return [*old, *torch.autograd.grad(new, parameters)]


def checkpointed(job: Job) -> list[Tensor]:
    for _ in range(3):
        job.optimizer.zero_grad()
        with precast.autocast("cpu", dtype=BF16, policy="torch"):
            output = torch.utils.checkpoint.checkpoint(job.model, job.inputs, use_reentrant=False)
        output.float().square().mean().backward()
        job.optimizer.step()
    return job.numbers()


def evaluated_in_between(job: Job) -> list[Tensor]:
    outputs = []
    for _ in range(3):
        job.train(2)
        with torch.no_grad():
            outputs.append(job.output())
    return [*outputs, *job.numbers()]


def several_uses(job: Job) -> list[Tensor]:
    for _ in range(3):
        job.optimizer.zero_grad()
        with precast.autocast("cpu", dtype=BF16, policy="torch"):
            output = job.model(job.model(job.inputs))
        output.float().square().mean().backward()
        job.optimizer.step()
    return job.numbers()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "work",
    [
        accumulate,
        hooks,
        retained,
        twice_differentiated,
        of_an_old_graph,
        checkpointed,
        evaluated_in_between,
        several_uses,
    ],
)
def test_it_computes_what_it_does_without_an_attachment(
    work: Callable[[Job], list[Tensor]], optimizer: Any
) -> None:
    with Job(optimizer=optimizer) as ours, Job(attached=False, optimizer=optimizer) as theirs:
        assert_same(work(ours), work(theirs))


def in_place(job: Job) -> None:
    with torch.no_grad():
        job.weight().mul_(2)


def other_memory(job: Job) -> None:
    job.weight().data = 3 * job.weight().data


def inside_writing(job: Job) -> None:
    assert job.attachment is not None
    with job.attachment.writing():
        job.weight().data.mul_(2)


def refreshed(job: Job) -> None:
    assert job.attachment is not None
    job.weight().data.mul_(2)
    job.attachment.refresh()


def where_a_gradient_vanished(job: Job) -> None:
    job.optimizer.zero_grad()
    job.loss().backward()
    job.weight().data.mul_(2)
    job.optimizer.zero_grad()


def where_no_optimizer_is_left(job: Job) -> None:
    del job.optimizer
    gc.collect()
    job.loss().backward()
    job.weight().data.mul_(2)


def through_shared_memory(job: Job) -> None:
    other = nn.Linear(WIDTH, WIDTH)
    other.weight.data = job.weight().data
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with precast.attach(other):
        for _ in range(2):
            with precast.autocast("cpu", dtype=BF16, policy="torch"):
                other(job.inputs).float().sum().backward()
            job.output()
            optimizer.step()
        assert job.is_as_its_weights_say()


@pytest.mark.parametrize(
    "write",
    [
        in_place,
        other_memory,
        inside_writing,
        refreshed,
        where_a_gradient_vanished,
        where_no_optimizer_is_left,
        through_shared_memory,
    ],
)
def test_what_is_written_is_seen(write: Callable[[Job], None]) -> None:
    with Job() as job:
        job.train()
        assert job.is_as_its_weights_say()
        write(job)
        assert job.is_as_its_weights_say()


def test_what_somebody_reads_is_not_overwritten(asked: list[Tensor]) -> None:
    with Job() as job:
        job.train()
        asked.clear()
        (copy,) = held.held_parameters[id(job.weight())].copies.values()
        reader = copy.new_handle().tensor
        before = reader.clone()
        job.step()
        job.step()
        assert any(tensor is job.weight() for tensor in asked)
        assert torch.equal(reader, before)
        assert job.is_as_its_weights_say()


def test_tangents_and_dispatch_modes_are_the_references(asked: list[Tensor]) -> None:
    with Job() as job:
        job.train()
        asked.clear()
        with forward_ad.dual_level():
            tangent = torch.randn_like(job.inputs)
            dual = forward_ad.make_dual(job.inputs, tangent)
            with precast.autocast("cpu", dtype=BF16, policy="torch"):
                primal, found = forward_ad.unpack_dual(job.model(dual))
        assert found is not None
        assert torch.equal(primal, job.output())
        job.train()


def test_another_thread_trains_on() -> None:
    """A copy is lent to the kernels of one thread; those of another ask for it, and then have it."""
    with Job() as ours, Job(attached=False) as theirs, ThreadPoolExecutor(1) as other:
        for job in (ours, theirs):
            job.train(2)
            other.submit(job.train, 3).result()
            job.train(2)
        assert_same(ours.numbers(), theirs.numbers())


def test_eight_threads_use_one_model_while_it_is_trained() -> None:
    """Each computes its gradients apart: PyTorch lets no two threads have the gradients of one parameter at once."""

    def gradients(job: Job) -> tuple[Tensor, ...]:
        return torch.autograd.grad(job.loss(), list(job.model.parameters()))

    with Job() as job:
        job.train()
        stop, found = threading.Event(), list[bool]()

        def use() -> None:
            while not stop.is_set():
                found.append(all(bool(g.isfinite().all()) for g in gradients(job)))

        threads = [threading.Thread(target=use) for _ in range(7)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            for parameter, gradient in zip(job.model.parameters(), gradients(job), strict=True):
                parameter.grad = gradient
            job.optimizer.step()
        stop.set()
        for thread in threads:
            thread.join()
        assert found
        assert all(found)
        assert job.is_as_its_weights_say()


def test_nothing_keeps_a_trained_parameter_alive() -> None:
    with Job() as job:
        job.train()
        parameter, copies = (
            weakref.ref(job.weight()),
            held.held_parameters[id(job.weight())].copies,
        )
        copy = weakref.ref(next(iter(copies.values())))
        del copies
        job.attachment = None
        del job.model, job.optimizer
        gc.collect()
        assert parameter() is None
        assert copy() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_autograd_takes_the_gradients_of_held_weights() -> None:
    from torch._dynamo import compiled_autograd

    with Job() as ours, Job(attached=False) as theirs:
        for job in (ours, theirs):
            job.train()
            job.optimizer.zero_grad()
            loss = job.loss()
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        torch.compiler.reset()
        assert_same(
            [p.grad for p in ours.model.parameters()], [p.grad for p in theirs.model.parameters()]
        )
