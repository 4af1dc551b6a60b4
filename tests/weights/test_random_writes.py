"""Random programs write whole weights of an attached model in all ways, between any two events.

Each forward pass, in an outermost region of its own, must equal that of a new copy of the model under torch.autocast.
The default run draws few programs; `PRECAST_WRITE_PROGRAMS=10000` sets their number.
"""

from __future__ import annotations

import copy
import ctypes
import datetime
import functools
import gc
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import precast
from precast.engine import registration
from precast.weights import held

BF16 = torch.bfloat16
PROGRAMS = int(os.environ.get("PRECAST_WRITE_PROGRAMS", "40"))
AT_ONCE = 20
"""Programs of one test."""
EVENTS = 10


class Transposed(nn.Module):
    """A layer that multiplies by a view of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, by a view of the weight if there is no gradient."""
        return x @ self.weight.t()


class Program:
    """One random program: an attached model, other models, and aliases of weights that were taken at the start."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        width = self.draw.choice([24, 136])  # 136x136 is held in training, 24x24 is not
        kinds = [lambda: nn.Linear(width, width), lambda: Transposed(width)]
        layers = [self.draw.choice(kinds)() for _ in range(3)]
        if self.draw.random() < 0.3:
            layers[2].weight = layers[0].weight
        if self.draw.random() < 0.2:
            layers[1].weight.data = layers[0].weight.data
        for layer in layers:
            layer.requires_grad_(self.draw.random() < 0.7)
        self.model, self.other = nn.Sequential(*layers), nn.Linear(8, 8)
        self.x = torch.randn(2, width)
        self.take_aliases()
        self.optimizer: torch.optim.Optimizer | None = None
        if self.trained and self.draw.random() < 0.6:
            kind = self.draw.choice([torch.optim.SGD, torch.optim.Adam])
            self.optimizer = kind(self.trained, lr=0.01, fused=self.draw.random() < 0.5)
        self.waiting: list[tuple[Tensor, Tensor, nn.Module]] = []

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def weight(self) -> nn.Parameter:
        return self.draw.choice(list(self.model.parameters()))

    def take_aliases(self) -> None:
        """Take aliases of the weights: tensors, arrays and addresses."""
        self.aliases = [p.data for p in self.model.parameters()]
        self.arrays = [p.detach().numpy() for p in self.model.parameters()]
        self.packed = [torch.from_dlpack(p.detach()) for p in self.model.parameters()]

    def run(self) -> None:
        """Run the program, and compare each output."""
        with precast.attach(self.model):
            self.use()
            for _ in range(EVENTS):
                self.draw.choice(EVENT_KINDS)(self)
                if self.draw.random() < 0.7:
                    write = self.draw.choice(WRITES)
                    self.anywhere(lambda: write(self))  # noqa: B023 -- called at once
                if self.draw.random() < 0.8:
                    self.use()
            self.use()

    def anywhere(self, work: Callable[[], None]) -> None:
        """Do some work in this thread or in another."""
        if self.draw.random() < 0.25:
            with ThreadPoolExecutor(1) as other:
                other.submit(work).result()
        else:
            work()

    def use(self) -> None:
        """Compare an output of the model with that of a new copy, in any mode."""
        mode = self.draw.choice([torch.enable_grad, torch.no_grad, torch.inference_mode])
        self.anywhere(lambda: self.compare(mode))

    def compare(self, mode: Any) -> None:
        twin = copy.deepcopy(self.model)
        with mode():
            with torch.autocast("cpu", dtype=BF16):
                theirs = twin(self.x)
            with precast.autocast("cpu", dtype=BF16, policy="torch"):
                ours = self.model(self.x)
        assert_same(ours, theirs)
        if ours.requires_grad and self.draw.random() < 0.5:
            self.waiting.append((ours, theirs, twin))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Check that two tensors are equal; training may have made values NaN."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def region_of_another(program: Program) -> None:
    region = program.draw.choice([torch.autocast, precast.autocast])
    with program.draw.choice([torch.enable_grad, torch.no_grad])(), region("cpu", dtype=BF16):
        program.other(torch.ones(1, 8))


def backward_of_another(program: Program) -> None:
    program.other(torch.ones(1, 8)).sum().backward()


def step_of_another(program: Program) -> None:
    backward_of_another(program)
    torch.optim.SGD(program.other.parameters(), lr=0.1).step()


def waiting_backward(program: Program) -> None:
    """Run a backward pass that has waited: its gradients are those of the weights in its forward pass."""
    if not program.waiting:
        return
    ours, theirs, twin = program.waiting.pop(0)
    names = [n for n, p in twin.named_parameters() if p.requires_grad]
    parameters = [dict(program.model.named_parameters()).get(name) for name in names]
    if any(p is None or not p.requires_grad for p in parameters):
        return
    results = [
        torch.autograd.grad(output.float().square().sum(), inputs, allow_unused=True)
        for output, inputs in (
            (ours, parameters),
            (theirs, [dict(twin.named_parameters())[name] for name in names]),
        )
    ]
    for mine, his in zip(*results, strict=True):
        if mine is not None:  # a replaced parameter gets none
            assert_same(mine, his)


def backward(program: Program) -> None:
    if program.trained:
        with precast.autocast("cpu", dtype=BF16, policy="torch"):
            output = program.model(program.x)
        output.float().square().mean().backward()


def step(program: Program) -> None:
    backward(program)
    if program.optimizer is not None:
        program.optimizer.step()
    if program.draw.random() < 0.5:
        without_gradients(program)


def without_gradients(program: Program) -> None:
    program.model.zero_grad(set_to_none=program.draw.random() < 0.7)


def nothing(_: Program) -> None:
    pass


EVENT_KINDS = [
    region_of_another,
    backward_of_another,
    step_of_another,
    waiting_backward,
    backward,
    step,
    without_gradients,
    nothing,
]


def through_data(program: Program) -> None:
    program.weight().data.mul_(1.5)


def tiny(program: Program) -> None:
    program.weight().data.mul_(1 + 1e-5)


def other_values(program: Program) -> None:
    weight = program.weight()
    weight.data.copy_(torch.randn_like(weight) / 10)


def counted(program: Program) -> None:
    with torch.no_grad():
        program.weight().mul_(1.5)


def other_data(program: Program) -> None:
    weight = program.weight()
    weight.data = weight.data * 1.5


def data_of_a_buffer(program: Program) -> None:
    weight = program.weight()
    buffer = torch.randn(weight.numel() + 40)
    weight.data = buffer[40:].view(weight.shape)


def other_storage(program: Program) -> None:
    weight = program.weight()
    with torch.no_grad():
        weight.set_(torch.randn(weight.shape))


def by_an_alias(program: Program) -> None:
    program.draw.choice(program.aliases).mul_(1.5)


def by_numpy(program: Program) -> None:
    array = program.draw.choice(program.arrays)
    np.multiply(array, 1.5, out=array)


def by_dlpack(program: Program) -> None:
    program.draw.choice(program.packed).mul_(1.5)


def by_pointer(program: Program) -> None:
    weight = program.weight()
    values = torch.randn(weight.shape)
    if weight.is_contiguous():
        ctypes.memmove(weight.data_ptr(), values.data_ptr(), 4 * weight.numel())


@functools.cache
def ranks() -> list[Any]:
    """Return the process groups of two ranks, which are threads of this process."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    with ThreadPoolExecutor(2) as threads:
        groups = [threads.submit(dist.ProcessGroupGloo, store, r, 2, timeout) for r in range(2)]
    return [group.result() for group in groups]


def receive(destination: Tensor, values: Tensor) -> None:
    """Broadcast values from one rank into the memory of another, which moves no version counter."""
    receiver, sender = ranks()
    options = dist.BroadcastOptions()
    options.rootRank = 1
    sent = sender.broadcast([values], options)
    receiver.broadcast([destination], options).wait()
    sent.wait()


def by_broadcast(program: Program) -> None:
    weight = program.weight()
    if weight.is_contiguous():
        receive(weight.detach(), torch.randn(weight.shape) / 10)


def together(program: Program) -> None:
    torch._foreach_mul_([p.data for p in program.model.parameters()], 1.5)


def by_a_fused_optimizer_of_an_alias(program: Program) -> None:
    alias = nn.Parameter(program.weight().data)
    alias.grad = torch.randn_like(alias)
    torch.optim.SGD([alias], lr=0.1, fused=True).step()


def swapped_and_back(program: Program) -> None:
    own = [p.data.clone() for p in program.model.parameters()]
    for p in program.model.parameters():
        p.data.mul_(0.5)
    program.use()
    for p, values in zip(program.model.parameters(), own, strict=True):
        p.data.copy_(values)


def loaded(program: Program) -> None:
    state = {
        name: torch.randn_like(value) / 10 for name, value in program.model.state_dict().items()
    }
    program.model.load_state_dict(state)


def assigned(program: Program) -> None:
    state = {
        name: torch.randn_like(value) / 10 for name, value in program.model.state_dict().items()
    }
    program.model.load_state_dict(state, assign=True)
    program.optimizer = None
    program.take_aliases()


def from_a_vector(program: Program) -> None:
    parameters = list(program.model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector * 1.5, parameters)


def swapped_tensors(program: Program) -> None:
    """PyTorch refuses to swap a held parameter, which is referenced weakly; a new one is held from its next use on."""
    weight = program.weight()
    if id(weight) not in held.held_parameters:
        return
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn(weight.shape)))


def frozen_or_not(program: Program) -> None:
    weight = program.weight()
    weight.requires_grad_(not weight.requires_grad)


WRITES = [
    through_data,
    tiny,
    other_values,
    counted,
    other_data,
    data_of_a_buffer,
    other_storage,
    by_an_alias,
    by_numpy,
    by_dlpack,
    by_pointer,
    by_broadcast,
    together,
    by_a_fused_optimizer_of_an_alias,
    swapped_and_back,
    loaded,
    assigned,
    from_a_vector,
    swapped_tensors,
    frozen_or_not,
]


@pytest.fixture(params=registration.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield
    gc.collect()
    assert held.held_parameters == {}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_outputs_are_those_of_the_weights(first: int) -> None:
    for seed in range(first, min(first + AT_ONCE, PROGRAMS)):
        try:
            Program(seed).run()
        except BaseException as error:
            error.add_note(f"the program with seed {seed}")
            raise


# --- FSDP2 ---


@pytest.fixture(scope="module")
def _world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def local(value: Tensor) -> Tensor:
    """Return the memory of this rank's part of a tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


class ShardedProgram:
    """One random program: an attached model with a layer between two others that FSDP2 shards."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width = self.draw.choice([24, 136])
        layers = [nn.Linear(self.width, self.width) for _ in range(3)]
        reshards = self.draw.random() < 0.5
        mesh = init_device_mesh("cpu", (1,))
        self.sharded = fully_shard(layers[1], mesh=mesh, reshard_after_forward=reshards)
        self.model = nn.Sequential(*layers)
        self.x = torch.randn(2, self.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)

    def run(self) -> None:
        """Run the program, and compare each output."""
        writes = [self.step, self.through_data, self.by_broadcast, self.load, self.change_state]
        with precast.attach(self.model):
            for _ in range(EVENTS):
                self.compare()
                if self.draw.random() < 0.7:
                    self.draw.choice(writes)()
            self.compare()

    def memory(self) -> Tensor:
        """Return the memory of a weight, in which FSDP2 keeps the values of its layer between two uses."""
        assert isinstance(self.sharded, FSDPModule)
        self.sharded.reshard()
        return local(self.draw.choice([layer.weight for layer in self.model]))  # type: ignore[union-attr]

    def through_data(self) -> None:
        self.memory().data.mul_(self.draw.choice([1.5, 1 + 1e-5]))

    def by_broadcast(self) -> None:
        memory = self.memory()
        receive(memory, torch.randn(memory.shape) / 10)

    def load(self) -> None:
        self.memory()
        state = {name: value * 1.5 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def change_state(self) -> None:
        assert isinstance(self.sharded, FSDPModule)
        self.draw.choice([self.sharded.unshard, self.sharded.reshard])()

    def step(self) -> None:
        with precast.autocast("cpu", dtype=BF16, policy="torch"):
            output = self.model(self.x)
        output.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compare(self) -> None:
        """Compare an output of the model with that of a new model with the same values."""
        self.memory()
        twin = nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(3)])
        values = self.model.state_dict().values()
        with torch.no_grad():
            for parameter, value in zip(twin.parameters(), values, strict=True):
                parameter.copy_(local(value))
        with self.draw.choice([torch.enable_grad, torch.no_grad])():
            with torch.autocast("cpu", dtype=BF16):
                theirs = twin(self.x)
            with precast.autocast("cpu", dtype=BF16, policy="torch"):
                ours = self.model(self.x)
        assert_same(ours, theirs)


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_outputs_of_sharded_layers_are_those_of_their_values(first: int) -> None:
    for seed in range(first, min(first + AT_ONCE, PROGRAMS)):
        try:
            ShardedProgram(seed).run()
        except BaseException as error:
            error.add_note(f"the program with seed {seed}")
            raise
