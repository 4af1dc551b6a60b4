"""Trains copies of a model under policies, so that what one policy does can be compared with what another does.

Invariants:
- the given model is copied and never run; a copy starts from its weights;
- two copies with one seed see the same batches in the same order, and draw the same random numbers in each step,
  whatever else ran in between. Seed 0 starts from the model's own weights. Each other seed moves every weight by a
  relative `_MOVED`, so that the weights round in another way, and takes the batches in another order;
- random states are those of the caller again after `random_states_kept`, also after an error or Ctrl-C;
- in float16 a gradient scaler finds its first scale from the first gradients. A step that it skips is repeated under
  the lower scale: in long training one of thousands is skipped, and in a short one it would count as an error.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast.attachment.attachment import Attachment, attach
from precast.autocast_mode.region import autocast, disable
from precast.diagnostics.report.tree import Node, tree
from precast.diagnostics.tracing.tracer import trace
from precast.errors import BrokenModelError, PrecastWarning, TuningError
from precast.grad_scaler.scaler import GradScaler
from precast.policy.policy import Policy

__all__ = [
    "FLOAT32",
    "MOST_BATCHES",
    "NO_GRADIENT",
    "Setup",
    "Training",
    "Workload",
    "copied",
    "kept_bytes",
    "move_weights",
    "random_states_kept",
    "read_batches",
    "run_losses",
    "scalar_loss",
    "seed_all",
    "shortest_step",
    "traced",
]

_MOVED: Final = 1e-3
MOST_BATCHES: Final = 32
"""So many batches are kept; a training that needs more begins again with the first."""
_MOST_TIMED: Final = 16
_EVALUATED: Final = 4  # batches, for the loss at the end
_MOST_REPEATED: Final = 40
"""So often a skipped step is repeated, while the loss scale falls."""
_CLIPPED: Final = 2**31

Step = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, eq=False)
class Workload:
    """What is trained, and how."""

    model: nn.Module
    step: Step | None
    """Takes a model and a batch, and returns the loss. None where the model is not trained."""
    batches: tuple[Any, ...]
    optimizer: MakeOptimizer
    device_type: str
    metric: Callable[[nn.Module, Any], Tensor | float] | None = None
    """What is compared, for each batch: at the end of a training, or of a run. None compares the loss."""
    seed: int = 0
    prepare: Callable[[nn.Module], nn.Module] | None = None
    """Wraps or shards each copy that is trained, as `DistributedDataParallel` and `fully_shard` do."""


@dataclass(frozen=True)
class Setup:
    """In which precision a copy runs: a policy and its 16-bit dtype, or float32 without a region."""

    name: str
    policy: Policy | None
    dtype: torch.dtype

    def region(self, device_type: str) -> AbstractContextManager[object]:
        """The region in which the step runs."""
        if self.policy is None:
            return nullcontext()
        return autocast(device_type, dtype=self.dtype, policy=self.policy)


FLOAT32: Final = Setup("float32", None, torch.float32)


def read_batches(batches: Any) -> tuple[Any, ...]:
    """The first batches of a list or another iterable, or of the iterator that a function returns.

    Raises:
        TuningError: there are none, or `batches` is neither.
    """
    given = batches() if callable(batches) and not isinstance(batches, Iterable) else batches
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise TuningError(
            f"batches is {type(given).__name__}; it has to be a list of batches, a data loader, or a function that "
            "returns an iterator of batches"
        )
    found = tuple(itertools.islice(given, MOST_BATCHES))
    if not found:
        raise TuningError(
            "batches ended before the first batch: nothing can be measured without one"
        )
    return found


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, whose parameters have no gradients.

    Raises:
        TuningError: it cannot be copied.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TuningError(
            f"the model, a {type(model).__name__}, is or has a module of TorchScript, whose copy cannot be trained "
            "and which does not say which module runs what. Give the model as it was before torch.jit.script."
        )
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise TuningError(
            f"the model, a {type(model).__name__}, cannot be copied ({type(error).__name__}: {error}). Trials train "
            "copies of it, never the model itself, so it needs what copy.deepcopy can copy: before its first step, "
            "and without open files, locks, or tensors that autograd has computed."
        ) from error
    made.zero_grad(set_to_none=True)
    return made


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the random states of Python, NumPy and PyTorch, on all devices; autocast is off inside."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    python = random.getstate()
    devices = range(torch.accelerator.device_count())
    device_type = (torch.accelerator.current_accelerator() or torch.device("cuda")).type
    try:
        with (
            torch.random.fork_rng([*devices], device_type=device_type),
            torch.inference_mode(False),
            torch.enable_grad(),
            disable(),
        ):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)


def seed_all(*numbers: int) -> None:
    """Seeds Python, NumPy and PyTorch by some numbers, the same in every process."""
    seed = random.Random(repr(numbers)).randrange(_CLIPPED)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def scalar_loss(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch.

    Raises:
        TuningError: it is no tensor of one number.
    """
    assert workload.step is not None, "what has no step is not trained"
    loss = workload.step(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = (
            f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
            if isinstance(loss, Tensor)
            else repr(type(loss))
        )
        raise TuningError(
            f"step(model, batch) returned {what}; it has to return the loss, a tensor of one floating-point number, "
            "on which backward can be called"
        )
    return loss.reshape(())


@dataclass(eq=False)
class Training:
    """One copy of the model, while it is trained in one precision."""

    workload: Workload
    setup: Setup
    seed: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""
    """Why it cannot go on; empty while it can."""

    def __post_init__(self) -> None:
        workload, setup = self.workload, self.setup
        self.model = copied(workload.model)
        if self.seed:
            move_weights(self.model, _MOVED, workload.seed, self.seed)
        if workload.prepare is not None:
            self.model = workload.prepare(self.model)
            if not isinstance(self.model, nn.Module):
                raise TuningError(
                    f"prepare(model) returned {type(self.model).__name__}; it has to return the model that is trained, "
                    "as DistributedDataParallel(model) and fully_shard(model) do"
                )
        self._order = list(range(len(workload.batches)))
        random.Random(repr((workload.seed, self.seed))).shuffle(self._order)
        self.optimizer = workload.optimizer(
            [each for each in self.model.parameters() if each.requires_grad]
        )
        self._scaler = GradScaler(
            workload.device_type, init_scale="auto", enabled=setup.dtype is torch.float16
        )
        self._attachment: Attachment | None = None
        if setup.policy is not None:
            with (
                warnings.catch_warnings()
            ):  # of the rules that do nothing: who reads the policy is told
                warnings.simplefilter("ignore", PrecastWarning)
                self._attachment = attach(self.model, setup.policy, hold=False)

    def close(self) -> None:
        """Ends the attachment of the copy."""
        if self._attachment is not None:
            self._attachment.detach()

    def step(self) -> None:
        """Trains on the next batch; does nothing after a failure."""
        if self.failure:
            return
        number = len(self.losses)
        batch = self.workload.batches[self._order[number % len(self._order)]]
        try:
            self._step(batch, number)
        except TuningError:
            raise
        except BrokenModelError as broken:
            self.failure = str(broken)
        except Exception as error:
            if self.setup.policy is None:
                raise
            self.failure = f"{type(error).__name__}: {error}"

    def _step(self, batch: Any, number: int) -> None:
        for _ in range(_MOST_REPEATED):
            seed_all(self.workload.seed, self.seed, number)
            begun = _now(self.workload.device_type)
            loss, is_taken = self._attempt(batch)
            if is_taken:
                break
        else:
            self.failure = f"gradients overflow in step {number + 1} under every loss scale"
        self.seconds.append(_now(self.workload.device_type) - begun)
        self.losses.append(float(loss.detach()))
        if not math.isfinite(self.losses[-1]):
            self.failure = f"the loss of step {number + 1} is {self.losses[-1]}"

    def _attempt(self, batch: Any) -> tuple[Tensor, bool]:
        """Steps, unless the scaler skips it; returns the loss and whether it did."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.setup.region(self.workload.device_type):
            loss = scalar_loss(self.workload, self.model, batch)
        if not loss.requires_grad:
            raise TuningError(NO_GRADIENT)
        self._scaler.scale(loss).backward()
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise TuningError(NO_GRADIENT)
        self._scaler.step(self.optimizer)
        last = self._scaler.last_step(self.optimizer) if self._scaler.is_enabled() else None
        self._scaler.update()
        return loss, last is None or not bool(last.skipped) or not bool(loss.isfinite())

    def final(self) -> float:
        """The mean loss, or metric, of some batches that is reached; NaN after a failure."""
        if self.failure:
            return math.nan
        workload = self.workload
        found = []
        for number, batch in enumerate(workload.batches[:_EVALUATED]):
            seed_all(workload.seed, number)
            with self.setup.region(workload.device_type):
                if workload.metric is None:
                    value: Tensor | float = scalar_loss(workload, self.model, batch)
                else:
                    value = workload.metric(self.model, batch)
            found.append(float(value.detach() if isinstance(value, Tensor) else value))
        return math.fsum(found) / len(found)


NO_GRADIENT: Final = (
    "the loss reaches no parameter of the model that step was given: backward leaves all of them without a gradient. "
    "step(model, batch) has to run the model that it is given, which is a copy, and at least one parameter has to "
    "require a gradient."
)


def move_weights(model: nn.Module, by: float, *seed: int) -> None:
    """Moves each floating-point weight by a random share of itself, `by` on average."""
    generator = torch.Generator().manual_seed(random.Random(repr(seed)).randrange(_CLIPPED))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + by * drawn.to(parameter.device, parameter.dtype))


def run_losses(workload: Workload, setup: Setup, seed: int, steps: int) -> Training:
    """A training of so many steps, closed."""
    training = Training(workload, setup, seed)
    try:
        for _ in range(steps):
            training.step()
    finally:
        training.close()
    return training


def shortest_step(workload: Workload, setup: Setup) -> float:
    """Return the seconds of the shortest of the first steps, as many as a second is enough for, but at least two."""
    training = Training(workload, setup, 0)
    end = time.monotonic() + 1.0
    try:
        for number in range(_MOST_TIMED):
            if number >= 2 and time.monotonic() > end:
                break
            training.step()
    finally:
        training.close()
    return min(training.seconds)


def kept_bytes(workload: Workload, setup: Setup) -> int:
    """The bytes that autograd keeps for backward of one step, beside the parameters themselves."""
    training = Training(workload, setup, 0)
    own = {_local(each).untyped_storage().data_ptr() for each in training.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # which stays, so that no other one gets its address
        return tensor

    try:
        seed_all(workload.seed, 0)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            setup.region(workload.device_type),
        ):
            scalar_loss(workload, training.model, workload.batches[0])
    finally:
        training.close()
    return sum(storage.nbytes() for storage in kept.values())


def _local(parameter: Tensor) -> Tensor:
    """The part of a sharded parameter that is in this process; others are whole."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def traced(workload: Workload, setup: Setup) -> list[Node]:
    """What the second step of a training runs in each module, in which dtypes, and with which casts."""
    training = Training(workload, setup, 0)
    try:
        training.step()
        with trace(training.model) as seen:
            training.step()
    finally:
        training.close()
    return tree(seen.data)


def _now(device_type: str) -> float:
    """The time, after the device has done what it was given."""
    if device_type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
