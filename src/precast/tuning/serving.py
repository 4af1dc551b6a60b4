"""Runs copies of a model for inference under policies: times them, and counts the memory that they need.

Invariants:
- the given model is copied and never run; a copy has the model's weights and its modules' modes;
- a copy under a policy is converted, so that its weights are stored once, in the dtypes in which they are used. Where
  it cannot be converted, it is attached, which keeps 16-bit copies beside its weights;
- each run of a batch draws the same random numbers, whatever else ran in between;
- only calls of the model count as its time, and not what the metric does with their results.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from precast._internal.pytree import tensors_in
from precast._torch import ObservingMode
from precast.attachment.attachment import Attachment, attach
from precast.diagnostics.report.tree import Node, tree
from precast.diagnostics.tracing.tracer import trace
from precast.errors import PrecastError, PrecastWarning, TuningError
from precast.shipping.converted import convert
from precast.tuning.training import Setup, Workload, copied, seed_all

__all__ = ["Calls", "Serving", "measured_metric", "needed_bytes", "shortest_run", "traced_run"]

_EXAMPLES: Final = 2
"""The batches whose calls show `convert` how the model uses its weights."""
Served = Literal["as it is", "converted", "attached"]


class Calls:
    """Notes the calls of a model from outside: their time, what the first is given and what it gives."""

    def __init__(self, model: nn.Module, device_type: str = "cpu", *, keeps: bool = False) -> None:
        """Listens until `close`; keeps the arguments and the result of the first call if it is asked to."""
        self.seconds = 0.0
        self.count = 0
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.result: Any = None
        self._keeps = keeps
        self._depth = 0
        self._begun = 0.0
        self._device_type = device_type
        self._handles = [  # by the class, as a scripted module's own method refuses
            nn.Module.register_forward_pre_hook(
                model, self._before, with_kwargs=True, prepend=True
            ),
            nn.Module.register_forward_hook(model, self._after, always_call=True),
        ]

    def begin(self) -> None:
        """Forgets what was noted."""
        self.seconds, self.count, self._depth = 0.0, 0, 0
        self.given = self.result = None

    def close(self) -> None:
        """Listens no longer."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._keeps and self.given is None:
            self.given = copy.deepcopy((args, kwargs))
        self._begun = _now(self._device_type)

    def _after(self, _model: nn.Module, _args: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self.seconds += _now(self._device_type) - self._begun
        self.count += 1
        if self._keeps and self.count == 1:
            self.result = result


def measured_metric(workload: Workload, model: nn.Module, number: int, batch: Any = None) -> float:
    """The metric of a batch, without gradients.

    Args:
        workload: whose metric.
        model: what runs.
        number: the batch's place, which also seeds what is random.
        batch: what is taken instead of it, if not None.

    Raises:
        TuningError: it is no number.
    """
    assert workload.metric is not None, "inference is compared by a metric"
    seed_all(workload.seed, number)
    with torch.no_grad():
        value = workload.metric(model, workload.batches[number] if batch is None else batch)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
    raise TuningError(
        f"metric(model, batch) returned {what}; it has to return one number, of which a smaller one is better"
    )


@dataclass(eq=False)
class Serving:
    """One copy of the model, while it is run in one precision."""

    workload: Workload
    setup: Setup
    seconds: list[float] = field(default_factory=list)
    failure: str = ""
    """Why it cannot go on; empty while it can."""
    served: Served = "as it is"

    def __post_init__(self) -> None:
        self._attachment: Attachment | None = None
        self.model = copied(self.workload.model).requires_grad_(False)
        if self.setup.policy is not None:
            self._serve()
        self._calls = Calls(self.model, self.workload.device_type)

    def run(self, number: int) -> float:
        """The metric of a batch; NaN after a failure. How long it takes is added to `seconds`."""
        if self.failure:
            return math.nan
        self._calls.begin()
        begun = _now(self.workload.device_type)
        try:
            with self._region():
                value = measured_metric(self.workload, self.model, number)
        except TuningError:
            raise
        except Exception as error:  # of the program, or of an operation in 16 bits
            if self.setup.policy is None:
                raise
            self.failure = f"{type(error).__name__}: {error}"
            return math.nan
        whole = _now(self.workload.device_type) - begun
        self.seconds.append(self._calls.seconds if self._calls.count else whole)
        if not math.isfinite(value):
            self.failure = f"the metric of batch {number + 1} is {value}"
        return value

    def weight_bytes(self) -> int:
        """The memory of all weights and buffers, each once, with the 16-bit copies of an attachment."""
        held = self._attachment.memory() if self._attachment is not None else 0
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(_storages(tensors).values()) + int(held)

    def close(self) -> None:
        """Ends the attachment of the copy."""
        self._calls.close()
        if self._attachment is not None:
            self._attachment.detach()

    def _region(self) -> AbstractContextManager[object]:
        """A region, but for a converted model, whose calls have their own."""
        return (
            nullcontext()
            if self.served == "converted"
            else self.setup.region(self.workload.device_type)
        )

    def _serve(self) -> None:
        policy = self.setup.policy
        assert policy is not None
        with (
            warnings.catch_warnings()
        ):  # of the rules that do nothing: who reads the policy is told
            warnings.simplefilter("ignore", PrecastWarning)
            try:
                examples = _examples(self.workload, self.model)
                converted = convert(copied(self.model), policy, self.setup.dtype, example=examples)
                for number in range(min(_EXAMPLES, len(self.workload.batches))):
                    measured_metric(self.workload, converted, number)
            except (
                Exception
            ):  # the metric may also call what no region of the converted model covers
                self._attachment = attach(self.model, policy, hold=True)
                self.served = "attached"
            else:
                self.model, self.served = converted, "converted"


def needed_bytes(workload: Workload, setup: Setup) -> int:
    """The memory of the weights, and the most that results of operations take beside them while a batch is run."""
    serving = Serving(workload, setup)
    try:
        serving.run(0)
        with _Alive() as alive:
            serving.run(0)
        most: int = alive.most
        return serving.weight_bytes() + most
    finally:
        serving.close()


def shortest_run(workload: Workload, setup: Setup) -> float:
    """The seconds of a run of the first batch with everything that the metric does, the shortest of three."""
    serving = Serving(workload, setup)
    found = []
    try:
        for _ in range(3):
            begun = _now(workload.device_type)
            serving.run(0)
            found.append(_now(workload.device_type) - begun)
    finally:
        serving.close()
    return min(found)


def traced_run(workload: Workload, setup: Setup) -> list[Node]:
    """What the run of a batch does in each module, in which dtypes, and with which casts."""
    model = copied(workload.model).requires_grad_(False)
    attachment = None
    if setup.policy is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            attachment = attach(model, setup.policy)
    try:
        with setup.region(workload.device_type):
            measured_metric(workload, model, 0)
            with trace(model) as seen:
                measured_metric(workload, model, 0)
    finally:
        if attachment is not None:
            attachment.detach()
    return tree(seen.data)


class _Alive(ObservingMode):
    """Counts the bytes of what operations have made and nothing has freed yet, without what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.most: int = 0
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _storages(tensors_in((args, kwargs)))
        for tensor in tensors_in(out):
            storage = _storage(tensor)
            if storage is None or id(storage) in given or id(storage) in self._known:
                continue
            key, size = id(storage), storage.nbytes()
            self._known[key] = weakref.ref(storage, self._freed(key, size))
            self._now += size
        self.most = max(self.most, self._now)
        return out

    def _freed(self, key: int, size: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self._now -= size
            self._known.pop(key, None)

        return free


def _examples(workload: Workload, model: nn.Module) -> list[Any]:
    """What the model is called with for the first batches, as `convert` takes it."""
    calls = Calls(model, keeps=True)
    found = []
    try:
        for number in range(min(_EXAMPLES, len(workload.batches))):
            calls.begin()
            measured_metric(workload, model, number)
            if calls.given is None:
                raise PrecastError("the metric does not call the model itself")
            args, kwargs = calls.given
            if args and kwargs:
                bound = inspect.signature(model.forward).bind(*args, **kwargs)
                args, kwargs = (), dict(bound.arguments)
            found.append(kwargs or args)
    finally:
        calls.close()
    return found


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The sizes of the memory behind tensors, by its identity."""
    found = (_storage(tensor) for tensor in tensors)
    return {id(storage): storage.nbytes() for storage in found if storage is not None}


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return None


def _now(device_type: str) -> float:
    """The time, after the device has done what it was given."""
    if device_type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
