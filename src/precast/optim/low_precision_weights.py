"""Weights that are stored in bfloat16 only, without float32 masters, and still learn from small updates.

Invariants:

- the optimizer computes in float32: it gets stand-ins of these weights, of their gradients and of states that are
  stored in bfloat16, which exist during the step only;
- the result of a step is rounded once. With "kahan", the rounding error is stored in bfloat16 with the optimizer's
  states and added before the next step; with "stochastic", weights are rounded up or down at random, so that the mean
  is right;
- rounding errors and seeds are in the optimizer's state, and so in its `state_dict`; loading preserves each dtype.
  Before the optimizer has created its states, they are stored here and in a separate entry of the `state_dict`, because
  PyTorch's optimizers and distributed checkpoints assume that a parameter with any state has all states;
- for a sharded weight all tensors are sharded alike. The optimizer gets a stand-in of the whole weight, so that a step
  that reads several elements at once computes as usual, and each process rounds its own part;
- parameters stay the same objects and keep their hooks; a step that is skipped, or raises, changes none of them;
- a step starts from the weight plus its rounding error. If the program has written the weight, errors that the new
  values cannot have are discarded, and so are all errors of a weight that was never stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._torch import (
    fused_add,
    fused_copy,
    fused_multiply,
    is_capturing,
    is_distributed,
    is_dtensor,
    step_without_hooks,
)
from precast.errors import AttachError
from precast.optim import averages, rounding
from precast.optim.partial_steps import (
    called_before,
    counts_of,
    is_large,
    outside_autocast,
    parameters_of,
    set_gradient,
    treats_each_parameter_by_itself,
    without_scaler,
)
from precast.optim.rounding import OF_ROUNDING, REST, SEED, Rounding
from precast.optim.shards import part_of, shard_number, versions_of, whole_like

__all__ = [
    "MIN_ELEMENTS",
    "Hook",
    "LowPrecisionWeights",
    "active",
    "is_worth_storing_low",
    "learns_by_rounding",
]

MIN_ELEMENTS: Final = 16384
"""Weights with fewer elements stay float32, and are not worth a call of a compiled program."""
_PENDING_KEY: Final = "rounding"
"""The key in an optimizer's `state_dict` for the entries of weights without states."""
_PART: Final = {"cpu": 1 << 20}
"""Elements of weights that have stand-ins at a time, if the optimizer allows it: 16 MiB with two states."""
_LARGE_PART: Final = 1 << 25  # elsewhere: 256 MiB; each part costs launches


def is_worth_storing_low(parameter: Tensor) -> bool:
    """Return True for a large float32 parameter. Biases and weights of norms are a tiny share of a model."""
    return parameter.dim() > 1 and parameter.numel() >= MIN_ELEMENTS


active: Final[weakref.WeakSet[LowPrecisionWeights]] = weakref.WeakSet()


class LowPrecisionWeights:
    """The weights in bfloat16 of one optimizer, which it steps so that they learn from small updates."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        method: Rounding,
        states: torch.dtype,
        seed: int,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.rounding: Final[Rounding] = method
        self._states = states
        self._parameters = {id(p): weakref.ref(p) for p in parameters.values()}
        self._hidden: list[tuple[Tensor, Tensor]] = []
        """The parameters stepped in the current step, with their gradients."""
        self._counts: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        """Maps the ``id`` of a parameter without optimizer states to its rounding error and seed."""
        self._seeds = {id(p): (seed << 32) + (i << 20) for i, p in enumerate(parameters.values())}
        self._narrowed = [weakref.ref(p) for p in parameters.values() if p.dtype is torch.float32]
        """The parameters that were float32 before."""
        self._discarded: dict[int, Tensor] = {}
        """Maps the ``id`` of a parameter to the result of `pop_discarded`."""
        self._stops: list[Callable[[], None]] = []
        self._adds_in_float32 = False
        for parameter in parameters.values():
            self._store(optimizer, parameter)
        reference = weakref.ref(self)
        self._versions: dict[int, tuple[int, ...]] = {}
        """The version counters of parameters after the last step; empty after states were loaded."""
        self._record_versions()
        active.add(self)
        self._hooks = [
            optimizer.register_state_dict_post_hook(Hook(reference, "_add_pending_to_saved_state")),
            optimizer.register_load_state_dict_pre_hook(Hook(reference, "_before_load")),
            optimizer.register_load_state_dict_post_hook(Hook(reference, "_after_load")),
        ]

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, if it still exists."""
        return self._optimizer()

    def stores(self, parameter: Tensor) -> bool:
        """Return True if a parameter is one of these weights."""
        return id(parameter) in self._parameters

    def add_gradients_in_float32(self) -> None:
        """Make autograd cast each gradient of these weights to float32 before it is accumulated."""
        self._adds_in_float32 = True
        self._set_gradient_dtype(torch.float32)

    def _set_gradient_dtype(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters():
            gradient = parameter.grad
            set_gradient(parameter, None if gradient is None else gradient.to(dtype))
            parameter.grad_dtype = dtype

    def average_in_float32(self, model: nn.Module) -> None:
        """Make averages of the model's weights float32, in deep copies of the model and in `AveragedModel`."""
        narrowed = [p for p in (reference() for reference in self._narrowed) if p is not None]
        self._stops += averages.copy_in_float32(model, narrowed)
        averages.read_in_float32(_full_value)

    def full_value(self, parameter: Tensor) -> Tensor:
        """Return a weight in float32, including its rounding error."""
        optimizer = self._optimizer()
        if optimizer is None:
            return parameter.detach().float()
        self._check_write(parameter, optimizer.state.get(parameter, {}))
        states = optimizer.state.get(parameter) or self._pending.get(id(parameter), {})
        value = parameter.detach().float()
        return value + states[REST] if REST in states else value

    def end(self) -> None:
        """Remove the hooks. Weights and states stay in bfloat16, and the optimizer steps them without precast."""
        for stop in (*(hook.remove for hook in self._hooks), *self._stops):
            stop()
        active.discard(self)
        if self._adds_in_float32:
            self._set_gradient_dtype(torch.bfloat16)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for parameter in self.parameters():
            # A new dict: a `state_dict` of the program shares the old one.
            states = {
                name: value.to(parameter.dtype)
                if is_large(value) and value.is_floating_point()
                else value
                for name, value in optimizer.state.pop(parameter, {}).items()
                if name not in OF_ROUNDING
            }
            if states:
                optimizer.state[parameter] = states

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Step the weights that have gradients, and hide these from the optimizer's own step."""
        self._hidden, self._counts = [], {}
        is_captured = is_capturing()
        if is_captured and self._draws_numbers:
            raise AttachError(
                f"{type(optimizer).__name__}.step(): a CUDA graph would repeat the random numbers of stochastic "
                'rounding at each replay. Capture a step with masters="kahan" and float32 states, or leave the step '
                "out of the graph."
            )
        args, kwargs = called_before(args, kwargs)
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        on_device = found_inf is not None and (is_captured or self._can_skip_on_device(optimizer))
        if found_inf is not None and not on_device and found_inf.item():
            self._hide(parameters_of(optimizer))
            return args, kwargs
        factor = None if scale is None else 1.0 / scale.double()
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            if on_device:  # the fused kernel skips stand-ins without a wait
                vars(optimizer)["found_inf"] = found_inf
            for groups in self._parts(optimizer):
                self._step(optimizer, groups, factor)
        return args, kwargs

    def after_step(self) -> None:
        """Restore the gradients of the parameters that were stepped."""
        self._record_versions()
        optimizer, hidden, self._hidden = self._optimizer(), self._hidden, []
        for parameter, gradient in hidden:
            set_gradient(parameter, gradient)
        if optimizer is not None:
            # The optimizer has counted this step twice: the second time without gradients.
            vars(optimizer).update(self._counts)

    @property
    def _draws_numbers(self) -> bool:
        return self.rounding == "stochastic" or self._states is torch.bfloat16

    def _can_skip_on_device(self, optimizer: Optimizer) -> bool:
        """Return True if a kernel can decide, without a wait, whether a step of these weights is skipped."""
        return (
            not self._draws_numbers
            and treats_each_parameter_by_itself(optimizer)
            and not any(p.is_cpu or is_dtensor(p) for p in self.parameters())
        )

    def check_writes(self, optimizer: Optimizer) -> None:
        """Discard rounding errors that do not fit the values that the program has written since the last step."""
        for parameter in self.parameters():
            states = optimizer.state.get(parameter)
            if states:  # they may have been set by code that does not support rounding
                self._complete(parameter, states)
            self._check_write(parameter, states or {})

    def _check_write(self, parameter: Tensor, states: dict[str, Any]) -> None:
        versions = self._versions.get(id(parameter))
        if versions is None or versions == versions_of(parameter):
            return
        self._versions[id(parameter)] = versions_of(parameter)
        self._pending.get(id(parameter), {}).pop(REST, None)
        if REST in states:
            with torch.no_grad():
                weight, rest = part_of(parameter.detach()), part_of(states[REST])
                # Rounding may have made an error as large as half a spacing, so it is compared a little smaller.
                total = weight.float() + rest.float() * (1.0 - 2.0**-7)
                unfit, size = total.to(weight.dtype) != weight, rest.abs()
                lost = size * unfit
                counts = (size > 0).sum(), (lost > 0).sum(), size.sum(), lost.sum()
                self._discarded[id(parameter)] = torch.stack([each.double() for each in counts])
                rest.masked_fill_(unfit, 0.0)

    def pop_discarded(self, parameter: Tensor) -> Tensor | None:
        """Return the rounding errors that the program's writes since the last step discarded; None without writes.

        The tensor has the number of nonzero errors, the number of discarded ones, and the sum of each.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            self.check_writes(optimizer)
        return self._discarded.pop(id(parameter), None)

    def _complete(self, parameter: Tensor, states: dict[str, Any]) -> None:
        """Add the rounding error and the seed to the states of a parameter, if they are missing."""
        for name, value in self._pending.pop(id(parameter), {}).items():
            states.setdefault(name, value)
        states.setdefault(SEED, self._seeds[id(parameter)])
        if self.rounding == "kahan" and REST not in states:
            states[REST] = torch.zeros_like(parameter)

    def _record_versions(self) -> None:
        self._versions = {id(p): versions_of(p) for p in self.parameters()}

    def parameters(self) -> list[Tensor]:
        """Return the weights that still exist."""
        return [
            p for p in (reference() for reference in self._parameters.values()) if p is not None
        ]

    def _store(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Convert a weight to bfloat16, and store its rounding error.

        Replicas may start with different weights before they get those of one process: with several processes, the
        rounding errors are zero at first.
        """
        own = optimizer.state.get(parameter, {})
        for name, value in own.items():  # Adagrad creates them before the first step
            if self._states is torch.float32 and is_large(value) and name not in OF_ROUNDING:
                own[name] = _state_in_float32(value)
        states = own or self._pending.setdefault(id(parameter), {})
        states.setdefault(SEED, self._seeds[id(parameter)])
        value, starts_at_zero = parameter.detach().float(), is_distributed() and REST not in states
        if REST in states:
            value = value + states[REST]
        elif parameter.dtype is torch.bfloat16:
            return
        low = self._rounded(value, states)
        if REST in states and starts_at_zero:
            states[REST].zero_()
        if parameter.dtype is torch.bfloat16:
            with torch.no_grad():
                parameter.copy_(low)
        else:
            parameter.data = low.to(torch.bfloat16)

    def _rounded(self, value: Tensor, states: dict[str, Any]) -> Tensor:
        """Round to values of bfloat16, as float32; store the rounding error in `states`."""
        if self.rounding == "stochastic":
            states.pop(REST, None)
            return _round_stochastically(value, states)
        low = whole_like(value, rounding.nearest(part_of(value)))
        states[REST] = (value - low).to(torch.bfloat16)
        return low

    def _parts(self, optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
        """Yield parameter groups to step at once: with a few of these weights, or with all parameters."""
        if not treats_each_parameter_by_itself(optimizer):
            groups = [
                {**group, "params": [p for p in group["params"] if p.grad is not None]}
                for group in optimizer.param_groups
            ]
            if any(id(p) in self._parameters for group in groups for p in group["params"]):
                yield groups
            return
        for group in optimizer.param_groups:
            part: list[Tensor] = []
            numbers = 0
            for parameter in group["params"]:
                if id(parameter) not in self._parameters or parameter.grad is None:
                    continue
                most = _PART.get(parameter.device.type, _LARGE_PART)
                if part and numbers + parameter.numel() > most:
                    yield [{**group, "params": part}]
                    part, numbers = [], 0
                part.append(parameter)
                numbers += parameter.numel()
            if part:
                yield [{**group, "params": part}]

    def _step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], factor: Tensor | None
    ) -> None:
        pairs, all_groups = list[tuple[Tensor, Tensor]](), optimizer.param_groups
        first_steps = [
            p
            for group in groups
            for p in group["params"]
            if id(p) in self._parameters and not optimizer.state.get(p)
        ]
        for group in groups:
            stand_ins = self._stand_ins(optimizer, group["params"], factor)
            pairs += zip(group["params"], stand_ins, strict=True)
            group["params"] = stand_ins
        counts = counts_of(optimizer)
        optimizer.param_groups = groups
        try:
            step_without_hooks(optimizer)()
            self._write_results(optimizer, [pair for pair in pairs if pair[0] is not pair[1]])
        except BaseException:
            vars(optimizer).update(counts)
            for parameter in first_steps:
                self._pending[id(parameter)] = optimizer.state.pop(parameter)
            raise
        finally:
            optimizer.param_groups = all_groups
            for parameter, stand_in in pairs:
                if stand_in is not parameter:
                    optimizer.state.pop(stand_in, None)
        if counts_of(optimizer) != counts:
            self._counts = counts_of(optimizer)
        self._hide(parameter for parameter, _ in pairs)

    def _stand_ins(
        self, optimizer: Optimizer, parameters: list[Tensor], factor: Tensor | None
    ) -> list[Tensor]:
        """Return float32 stand-ins of these weights, with gradients and states, and other parameters unchanged."""
        if factor is not None:
            factors = {p.device: factor.to(p.device) for p in parameters}
            for parameter in parameters:
                if id(parameter) not in self._parameters:
                    part_of(_gradient(parameter)).mul_(factors[parameter.device])
        own_parameters = [p for p in parameters if id(p) in self._parameters]
        states = [optimizer.state[p] for p in own_parameters]
        for parameter, own in zip(own_parameters, states, strict=True):
            self._complete(parameter, own)
        values = _in_float32([p.detach() for p in own_parameters], copy=True)
        with_rest = [i for i, own in enumerate(states) if REST in own]
        if with_rest:
            rests = _in_float32([states[i][REST] for i in with_rest])
            fused_add([values[i] for i in with_rest], rests)
        gradients = _in_float32([_gradient(p) for p in own_parameters], copy=factor is not None)
        if factor is not None:
            for device, each in factors.items():
                there = [part_of(g) for g in gradients if g.device == device]
                if there:
                    fused_multiply(there, each.float())
        stand_ins = {}
        for parameter, value, gradient, own in zip(
            own_parameters, values, gradients, states, strict=True
        ):
            stand_in = stand_ins[id(parameter)] = nn.Parameter(value)
            stand_in.grad = gradient
            wide = {
                name: _state_in_float32(v) for name, v in own.items() if name not in OF_ROUNDING
            }
            if wide:
                optimizer.state[stand_in] = wide
        return [stand_ins.get(id(p), p) for p in parameters]

    def _write_results(self, optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Round the stand-ins to the weights, and their states to the stored ones."""
        states = [optimizer.state[parameter] for parameter, _ in pairs]
        if self.rounding == "kahan" and pairs and not any(is_dtensor(p) for p, _ in pairs):
            stored = [p.detach() for p, _ in pairs] + [own[REST] for own in states]
            values = [s.detach() for _, s in pairs]
            found_inf = getattr(optimizer, "found_inf", None)
            new = stored if found_inf is None else [torch.empty_like(each) for each in stored]
            low, rests = new[: len(values)], new[len(values) :]
            fused_copy(low, values)  # a cast rounds to the nearest value
            fused_add(values, _in_float32(low), -1)
            fused_copy(rests, values)
            if found_inf is not None:
                _write_unless(found_inf, stored, new)
        else:
            for (parameter, stand_in), own in zip(pairs, states, strict=True):
                parameter.copy_(self._rounded(stand_in.detach(), own))
        for (_, stand_in), own in zip(pairs, states, strict=True):
            for name, value in optimizer.state.get(stand_in, {}).items():
                count = own.get(name)
                if isinstance(count, Tensor) and count.numel() == 1:
                    if count is not value:
                        count.copy_(value)  # in place: a captured graph reads it again
                else:
                    own[name] = self._stored(value, own)

    def _stored(self, value: Any, states: dict[str, Any]) -> Any:
        if not is_large(value) or value.dtype is not torch.float32 or self._states is value.dtype:
            return value
        return _round_stochastically(value, states)

    def _hide(self, parameters: Iterable[Tensor]) -> None:
        """Remove gradients, so that the optimizer's own step ignores these parameters."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _add_pending_to_saved_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add pending entries to the saved state: `Optimizer.load_state_dict` ignores unknown keys."""
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(saved, parameters_of(optimizer), strict=True):
            if pending := self._pending.get(id(parameter)):
                state_dict.setdefault(_PENDING_KEY, {})[number] = dict(pending)

    def _before_load(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _after_load(self, optimizer: Optimizer) -> None:
        """Restore the dtypes of states, which PyTorch has cast to the dtype of the parameter."""
        loaded, self._loaded = self._loaded, {}
        self._versions.clear()  # the weights may be loaded before or after
        self._pending.clear()
        saved = (number for group in loaded["param_groups"] for number in group["params"])
        for number, parameter in zip(saved, parameters_of(optimizer), strict=True):
            if id(parameter) not in self._parameters:
                continue
            states = optimizer.state.get(parameter)
            if states is None:
                for name, value in loaded.get(_PENDING_KEY, {}).get(number, {}).items():
                    copied = value.clone().to(parameter.device) if is_large(value) else value
                    self._pending.setdefault(id(parameter), {})[name] = copied
                continue
            for name, value in loaded["state"].get(number, {}).items():
                if is_large(value) and states[name].dtype is not value.dtype:
                    states[name] = value.detach().clone().to(parameter.device)
            self._complete(parameter, states)


class Hook:
    """A hook on an optimizer that calls a method of `owner`. In a copy of the optimizer it does nothing."""

    def __init__(self, owner: weakref.ref[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *args: Any) -> Any:
        """Call the method, if its owner still exists."""
        owner = self._owner()
        return None if owner is None else getattr(owner, self._name)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_deleted, self._name)


def _deleted() -> None:
    """A weak reference to a deleted object."""


def _full_value(parameter: Tensor) -> Tensor | None:
    """Return the float32 value of one of such weights; None for other parameters."""
    weights = learns_by_rounding(parameter)
    return None if weights is None else weights.full_value(parameter)


def learns_by_rounding(parameter: Tensor) -> LowPrecisionWeights | None:
    """Return the `LowPrecisionWeights` to which a parameter belongs; None if there is none."""
    return next((weights for weights in active if weights.stores(parameter)), None)


def _round_stochastically(value: Tensor, states: dict[str, Any]) -> Tensor:
    states[SEED], seed = rounding.next_seed(states[SEED], shard_number(value))
    elements = part_of(value)
    rounded = rounding.stochastic(elements.reshape(-1), seed).reshape(elements.shape)
    return whole_like(value, rounded)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _in_float32(tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    """Return tensors in float32, converted by one kernel for all on devices that have one."""
    if any(is_dtensor(t) for t in tensors):
        return [t.to(torch.float32, copy=copy) for t in tensors]
    wide = [
        t if t.dtype is torch.float32 and not copy else torch.empty_like(t, dtype=torch.float32)
        for t in tensors
    ]
    pairs = [(w, t) for w, t in zip(wide, tensors, strict=True) if w is not t]
    if pairs:
        fused_copy([w for w, _ in pairs], [t for _, t in pairs])
    return wide


def _write_unless(found_inf: Tensor, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Write tensors of bfloat16 into others, bit by bit, unless `found_inf` is nonzero. Does not wait for the device.

    In a skipped step the sources may differ from the targets, because a rounding error that was rounded to a tie
    changes its weight. Integers wrap, so old + (new - old) * 1 is exactly new.
    """
    old, new = ([each.view(torch.int16) for each in tensors] for tensors in (targets, sources))
    fused_add(new, old, -1)
    for device in {each.device for each in old}:
        is_good = (found_inf.to(device, non_blocking=True).reshape(()) == 0).to(torch.int16)
        fused_multiply([each for each in new if each.device == device], is_good)
    fused_add(old, new)


def _state_in_float32(value: Any) -> Any:
    """Return a state in float32 for a step. A count is copied, because the step may fail."""
    if not isinstance(value, Tensor):
        return value
    if not is_large(value):
        return value.clone() if value.is_cpu else value  # a copy on a device would cost two kernels
    return value.to(torch.float32) if value.is_floating_point() else value
