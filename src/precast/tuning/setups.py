"""The workload of a search, and the setups it compares: a policy with its 16-bit dtype, or float32.

Invariants:
- the user's model is copied and never run; a copy starts from its weights;
- two copies with one seed get the same batches in the same order, and the same random numbers in each step, whatever
  else runs in between;
- `preserved_random_states` restores the random states of the caller, also after an error or Ctrl-C.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from precast import _torch
from precast.attachment.attachment import Attachment, attach
from precast.autocast_mode.region import autocast, disable
from precast.errors import PrecastError, PrecastWarning, TuningError
from precast.policy.module_names import named_parameters
from precast.policy.policy import Policy

__all__ = ["FLOAT32", "MOST_BATCHES", "Setup", "Workload", "attached", "copy_model"]
__all__ += ["current_time", "exception_text", "move_weights", "preserved_random_states"]
__all__ += ["seed_all", "workload_of"]

MOST_BATCHES: Final = 32
"""The number of batches that are kept. A training that needs more starts again with the first one."""
_SEEDS: Final = 2**31

Step = Callable[[nn.Module, Any], Tensor]
Metric = Callable[[nn.Module, Any], Tensor | float]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and how it is trained or run.

    Attributes:
        step: returns the loss of a model on a batch; None for inference.
        metric: the value that is compared for each batch, at the end of a training or of a run; None compares losses.
    """

    model: nn.Module
    step: Step | None
    batches: tuple[Any, ...]
    optimizer: MakeOptimizer = torch.optim.AdamW
    device_type: str = "cpu"
    metric: Metric | None = None
    seed: int = 0

    @property
    def task(self) -> Literal["training", "inference"]:
        """The kind of task."""
        return "inference" if self.step is None else "training"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        assert self.step is not None, "a training has a step"
        loss = self.step(model, batch)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.reshape(())
        raise TuningError(
            f"step(model, batch) returned {_kind_of(loss)}; it has to return the loss, a tensor of one floating-point "
            "number, on which backward can be called"
        )

    def measure(self, model: nn.Module, number: int) -> float:
        """Return the metric of a batch, without gradients; its number also seeds random operations."""
        assert self.metric is not None, "there is a metric"
        seed_all(self.seed, number)
        with torch.no_grad():
            value = self.metric(model, self.batches[number])
        if (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, int | float):
            return float(value)
        raise TuningError(
            f"metric(model, batch) returned {_kind_of(value)}; it has to return one number, of which a smaller one is "
            "better"
        )


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"an object of type {type(value).__name__}"


@dataclass(frozen=True)
class Setup:
    """The precision of a copy: a policy and the dtype of its region; for float32 no policy, and no region.

    `silent` is a parameter whose gradient becomes zero under the policy; empty if there is none.
    """

    name: str
    policy: Policy | None
    dtype: torch.dtype
    silent: str = field(default="", compare=False)

    def region(self, device_type: str) -> AbstractContextManager[object]:
        """Return the region of a step."""
        if self.policy is None:
            return nullcontext()
        return autocast(device_type, dtype=self.dtype, policy=self.policy)


FLOAT32: Final = Setup("float32", None, torch.float32)


def workload_of(
    model: nn.Module,
    step: Step | None,
    batches: Any,
    *,
    optimizer: MakeOptimizer | None = None,
    metric: Metric | None = None,
    seed: int = 0,
) -> Workload:
    """Return a workload with the first batches of a list or iterable, or of the iterator that a function returns."""
    source = batches() if callable(batches) and not isinstance(batches, Iterable) else batches
    if isinstance(source, Tensor) or not isinstance(source, Iterable):
        raise TuningError(
            f"batches is {type(source).__name__}; it has to be a list of batches, a data loader, or a function that "
            "returns an iterator of batches"
        )
    first = tuple(itertools.islice(source, MOST_BATCHES))
    if not first:
        raise TuningError(
            "batches ended before the first batch: nothing can be measured without one"
        )
    for name, parameter in named_parameters(model):
        if is_lazy(parameter) or parameter.is_meta:
            raise TuningError(
                f"the model's {name} has no values yet. Call a lazy model once; load a model on the meta device"
            )
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return Workload(model, step, first, optimizer or torch.optim.AdamW, device_type, metric, seed)


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, whose parameters have no gradients."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TuningError(
            f"the model, a {type(model).__name__}, is or has a module of TorchScript, whose copy cannot be trained "
            "and which hides the module of each operation. Pass the model as it was before torch.jit.script."
        )
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise TuningError(
            f"the model, a {type(model).__name__}, cannot be copied ({type(error).__name__}: {error}). Trials train "
            "copies of it, never the model itself, so it needs what copy.deepcopy can copy: before its first step, "
            "and without open files, locks, or tensors that autograd has computed."
        ) from error
    copied.zero_grad(set_to_none=True)
    return copied


def attached(model: nn.Module, setup: Setup, *, hold: bool = False) -> Attachment | None:
    """Attach the policy of a setup to a copy; None for float32. Rules without effect raise no warning here."""
    if setup.policy is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        return attach(model, setup.policy, hold=hold)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch, on all devices. Autocast is off inside."""
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    python_state = random.getstate()
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
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def seed_all(*numbers: int) -> None:
    """Seed Python, NumPy and PyTorch by some numbers."""
    _torch.seed_all(random.Random(repr(numbers)).randrange(_SEEDS))


def move_weights(model: nn.Module, by: float, *seed: int) -> None:
    """Move each floating-point weight by a random share of itself, `by` on average."""
    generator = torch.Generator().manual_seed(random.Random(repr(seed)).randrange(_SEEDS))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + by * noise.to(parameter.device, parameter.dtype))


def exception_text(error: Exception) -> str:
    """Return an exception of a copy in 16 bits as a reason why it fails."""
    return str(error) if isinstance(error, PrecastError) else f"{type(error).__name__}: {error}"


def current_time(device_type: str) -> float:
    """Return the time after the device has finished its work."""
    if device_type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
