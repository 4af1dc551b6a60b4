"""Weights that are stored in bfloat16 alone, without a float32 master, and still learn from small updates.

Invariants:

- the optimizer computes in float32, as it says itself: it sees stand-ins of these weights, of their gradients and of
  states that are stored in bfloat16, which live as long as the step does;
- what the step gives is rounded once. What is rounded away stays beside the weight in bfloat16 and is added before the
  next step ("kahan"), or the weight is rounded up or down by chance, so that its mean is right ("stochastic");
- what that needs is in the optimizer's state, and so in its `state_dict`; loading it leaves each dtype what it was.
  Until the optimizer has made states of its own it waits here, and is beside the states in the `state_dict`:
  PyTorch's optimizers, and its distributed checkpoints, take one that has any state for one that has all;
- of a sharded weight everything is sharded alike; the optimizer sees a stand-in of the whole, so that one that looks at
  several numbers does what it does with sharded weights, and each process rounds its own part;
- parameters stay the same objects and keep their hooks; a step that is skipped, or raises, has changed none of them;
- what was rounded away of a weight is forgotten when somebody else writes the weight, as its version counter says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from precast._torch import is_dtensor, step_without_hooks
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
from precast.optim.shards import part_of, shard_number, versions_of, whole_like, why_not

__all__ = [
    "MIN_ELEMENTS",
    "Hook",
    "LowPrecisionWeights",
    "check",
    "is_distributed",
    "is_worth_storing_low",
    "learns_by_rounding",
]

MIN_ELEMENTS: Final = 16384
"""Smaller weights stay float32, and are not worth a call of a compiled program."""
_BESIDE: Final = "rounding"
"""The key in an optimizer's `state_dict` of what waits for its first step."""
_PART: Final = 1 << 20
"""Numbers of the weights that have stand-ins at a time, where the optimizer allows that: 16 MiB with two states."""


def is_worth_storing_low(parameter: Tensor) -> bool:
    """Whether a float32 parameter is large enough: biases, and weights of norms, are a few thousandths of a model."""
    return parameter.dim() > 1 and parameter.numel() >= MIN_ELEMENTS


_living: Final[weakref.WeakSet[LowPrecisionWeights]] = weakref.WeakSet()


class LowPrecisionWeights:
    """Has an optimizer step weights in bfloat16 so that they learn.

    Args:
        optimizer: what trains them.
        parameters: name -> what is trained and stored in bfloat16, as `check` takes it; float32 becomes bfloat16 now.
        how: how they are rounded.
        states: torch.float32 or torch.bfloat16, the dtype of the optimizer's states between steps.
        seed: of what is rounded by chance, a whole number from 0 to 2**31 - 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        how: Rounding,
        states: torch.dtype,
        seed: int,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._how: Final[Rounding] = how
        self._states = states
        self._parameters = {id(p): weakref.ref(p) for p in parameters.values()}
        self._taken: list[tuple[Tensor, Tensor]] = []
        """Parameters that were stepped, and their gradients, while a step lasts."""
        self._counts: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._waiting: dict[int, dict[str, Any]] = {}
        """``id`` of a parameter of which the optimizer has no states yet -> what rounding needs of it."""
        self._seeds = {id(p): (seed << 32) + (i << 20) for i, p in enumerate(parameters.values())}
        self._narrowed = [weakref.ref(p) for p in parameters.values() if p.dtype is torch.float32]
        """Parameters that were float32 before."""
        self._stops: list[Callable[[], None]] = []
        for parameter in parameters.values():
            self._store(optimizer, parameter)
        here = weakref.ref(self)
        self._versions: dict[int, tuple[int, ...]] = {}
        """Of parameters, after the last write that was ours; what was loaded is taken as it is."""
        self._note_versions()
        _living.add(self)
        self._hooks = [
            optimizer.register_state_dict_post_hook(Hook(here, "_saves")),
            optimizer.register_load_state_dict_pre_hook(Hook(here, "_loads")),
            optimizer.register_load_state_dict_post_hook(Hook(here, "_has_loaded")),
        ]

    @property
    def roundings(self) -> dict[int, Rounding]:
        """``id`` of each weight -> how it is rounded."""
        return dict.fromkeys(self._parameters, self._how)

    def average_in_float32(self, model: nn.Module) -> None:
        """Have averages of the model's weights be float32, as in copies of the model that are made to hold them."""
        narrowed = [p for p in (reference() for reference in self._narrowed) if p is not None]
        self._stops += averages.copy_in_float32(model, narrowed)
        averages.read_in_float32(_full_value)

    def full_value(self, parameter: Tensor) -> Tensor:
        """Return a weight in float32, with what was rounded away of it unless somebody has written it since."""
        value = parameter.detach().float()
        optimizer = self._optimizer()
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        rest = states.get(REST, self._waiting.get(id(parameter), {}).get(REST))
        is_ours = self._versions.get(id(parameter)) == versions_of(parameter)
        return value if rest is None or not is_ours else value + rest

    def end(self) -> None:
        """Has the optimizer step them as it does itself; they stay in bfloat16, and their states become so."""
        for stop in (*(hook.remove for hook in self._hooks), *self._stops):
            stop()
        _living.discard(self)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for parameter in self._living():
            its = optimizer.state[parameter]
            for name in OF_ROUNDING:
                its.pop(name, None)
            for name, value in its.items():
                if is_large(value) and value.is_floating_point():
                    its[name] = value.to(parameter.dtype)
            if not its:
                del optimizer.state[parameter]

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Steps what is left of these weights, and hides it from the step that follows."""
        self._taken, self._counts = [], {}
        args, kwargs = called_before(args, kwargs)
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and found_inf.item():
            self._hide(parameters_of(optimizer))
            return args, kwargs
        factor = None if scale is None else 1.0 / scale.double()
        with torch.no_grad(), outside_autocast(), without_scaler(optimizer):
            for groups in self._parts(optimizer):
                self._step(optimizer, groups, factor)
        return args, kwargs

    def after_step(self) -> None:
        """Restore the gradients of the parameters that were stepped."""
        self._note_versions()
        optimizer, taken, self._taken = self._optimizer(), self._taken, []
        for parameter, gradient in taken:
            set_gradient(parameter, gradient)
        if optimizer is not None:
            vars(optimizer).update(
                self._counts
            )  # it has counted this step, and again without gradients

    def forget_if_written(self, optimizer: Optimizer) -> None:
        """Forgets what was rounded away of weights that somebody has written since the last step."""
        for parameter in self._living():
            its = optimizer.state.get(parameter)
            if its:  # they may be somebody's who knows nothing of rounding
                self._complete(parameter, its)
            versions = self._versions.get(id(parameter))
            if versions is not None and versions != versions_of(parameter):
                self._waiting.get(id(parameter), {}).pop(REST, None)
                if its and REST in its:
                    part_of(its[REST]).zero_()
                self._versions[id(parameter)] = versions_of(parameter)

    def _complete(self, parameter: Tensor, its: dict[str, Any]) -> None:
        """Adds what rounding needs to the states of a parameter, where it is not there yet."""
        for name, value in self._waiting.pop(id(parameter), {}).items():
            its.setdefault(name, value)
        its.setdefault(SEED, self._seeds[id(parameter)])
        if self._how == "kahan" and REST not in its:
            its[REST] = torch.zeros_like(parameter)

    def _note_versions(self) -> None:
        self._versions = {id(p): versions_of(p) for p in self._living()}

    def _living(self) -> list[Tensor]:
        return [
            p for p in (reference() for reference in self._parameters.values()) if p is not None
        ]

    def _store(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Makes a weight bfloat16, with what was beside it in another process.

        Replicas may begin with other weights and be given those of one: there, nothing is beside them at first.
        """
        made = optimizer.state.get(parameter, {})
        for name, value in made.items():  # Adagrad makes them before the first step
            if self._states is torch.float32 and is_large(value) and name not in OF_ROUNDING:
                made[name] = _full(value)
        its = made or self._waiting.setdefault(id(parameter), {})
        its.setdefault(SEED, self._seeds[id(parameter)])
        value, forgets = parameter.detach().float(), is_distributed() and REST not in its
        if REST in its:
            value = value + its[REST]
        elif parameter.dtype is torch.bfloat16:
            return
        low = self._rounded(value, its)
        if REST in its and forgets:
            its[REST].zero_()
        if parameter.dtype is torch.bfloat16:
            with torch.no_grad():
                parameter.copy_(low)
        else:
            parameter.data = low.to(torch.bfloat16)

    def _rounded(self, value: Tensor, its: dict[str, Any]) -> Tensor:
        """Numbers of bfloat16 in float32; notes what is rounded away."""
        if self._how == "stochastic":
            its.pop(REST, None)
            return _by_chance(value, its)
        low = whole_like(value, rounding.nearest(part_of(value)))
        its[REST] = (value - low).to(torch.bfloat16)
        return low

    def _parts(self, optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
        """Groups of parameters that a step is called for: a few of these weights; or all that there is to step."""
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
                if part and numbers + parameter.numel() > _PART:
                    yield [{**group, "params": part}]
                    part, numbers = [], 0
                part.append(parameter)
                numbers += parameter.numel()
            if part:
                yield [{**group, "params": part}]

    def _step(
        self, optimizer: Optimizer, groups: list[dict[str, Any]], factor: Tensor | None
    ) -> None:
        """Has the optimizer step stand-ins of these weights, then rounds what it gives."""
        seen, all_groups = list[tuple[Tensor, Tensor]](), optimizer.param_groups
        for group in groups:
            group["params"] = [self._seen(optimizer, p, seen, factor) for p in group["params"]]
        counts = counts_of(optimizer)
        optimizer.param_groups = groups
        try:
            step_without_hooks(optimizer)()
            for parameter, stand_in in seen:
                if stand_in is not parameter:
                    self._take_back(optimizer, parameter, stand_in)
        except BaseException:
            vars(optimizer).update(counts)
            raise
        finally:
            optimizer.param_groups = all_groups
            for parameter, stand_in in seen:
                if stand_in is not parameter:
                    optimizer.state.pop(stand_in, None)
        if counts_of(optimizer) != counts:
            self._counts = counts_of(optimizer)
        self._hide(parameter for parameter, _ in seen)

    def _seen(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        seen: list[tuple[Tensor, Tensor]],
        factor: Tensor | None,
    ) -> Tensor:
        """What a step sees of a parameter: itself, or float32 in its place."""
        assert parameter.grad is not None
        if id(parameter) not in self._parameters:
            if factor is not None:
                part_of(parameter.grad).mul_(factor)
            seen.append((parameter, parameter))
            return parameter
        its = optimizer.state[parameter]
        self._complete(parameter, its)
        value = parameter.detach().to(torch.float32)
        if REST in its:
            value += its[REST]
        stand_in = nn.Parameter(value)
        gradient = parameter.grad.to(torch.float32, copy=factor is not None)
        if factor is not None:
            part_of(gradient).mul_(factor)
        stand_in.grad = gradient
        states = {name: _full(v) for name, v in its.items() if name not in OF_ROUNDING}
        if states:
            optimizer.state[stand_in] = states
        seen.append((parameter, stand_in))
        return stand_in

    def _take_back(self, optimizer: Optimizer, parameter: Tensor, stand_in: Tensor) -> None:
        its = optimizer.state[parameter]
        parameter.copy_(self._rounded(stand_in.detach(), its))
        for name, value in optimizer.state.get(stand_in, {}).items():
            its[name] = self._stored(value, its)

    def _stored(self, value: Any, its: dict[str, Any]) -> Any:
        """A state as it is kept between steps."""
        if not is_large(value) or value.dtype is not torch.float32 or self._states is value.dtype:
            return value
        return _by_chance(value, its)

    def _hide(self, parameters: Iterable[Tensor]) -> None:
        """Has the step that follows find no gradients here."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._taken.append((parameter, parameter.grad))
                parameter.grad = None

    def _saves(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Adds what waits to what is saved: `Optimizer.load_state_dict` leaves keys that it does not know alone."""
        saved = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(saved, parameters_of(optimizer), strict=True):
            if waiting := self._waiting.get(id(parameter)):
                state_dict.setdefault(_BESIDE, {})[number] = dict(waiting)

    def _loads(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _has_loaded(self, optimizer: Optimizer) -> None:
        """Gives states the dtype that they were saved in: PyTorch casts them to that of the parameter."""
        loaded, self._loaded = self._loaded, {}
        self._versions.clear()  # the weights may be loaded before or after
        self._waiting.clear()
        saved = (number for group in loaded["param_groups"] for number in group["params"])
        for number, parameter in zip(saved, parameters_of(optimizer), strict=True):
            if id(parameter) not in self._parameters:
                continue
            its = optimizer.state.get(parameter)
            if its is None:
                for name, value in loaded.get(_BESIDE, {}).get(number, {}).items():
                    copied = value.clone().to(parameter.device) if is_large(value) else value
                    self._waiting.setdefault(id(parameter), {})[name] = copied
                continue
            for name, value in loaded["state"].get(number, {}).items():
                if is_large(value) and its[name].dtype is not value.dtype:
                    its[name] = value.detach().clone().to(parameter.device)
            self._complete(parameter, its)


class Hook:
    """A hook on an optimizer that calls a method of `owner`. In a copy of the optimizer it does nothing."""

    def __init__(self, owner: weakref.ref[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *args: Any) -> Any:
        """Call the method, if its owner still exists."""
        owner = self._owner()
        return None if owner is None else getattr(owner, self._name)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_gone, self._name)


def _gone() -> None:
    """A weak reference to what is no more."""


def _full_value(parameter: Tensor) -> Tensor | None:
    """Return the float32 value of a weight that learns by rounding, and None for another one."""
    owners = (weights for weights in _living if id(parameter) in weights.roundings)
    return next((weights.full_value(parameter) for weights in owners), None)


def learns_by_rounding(parameter: Tensor) -> bool:
    """Whether a weight is stored in bfloat16 alone, and loses nothing of its updates all the same."""
    return any(id(parameter) in weights.roundings for weights in _living)


def is_distributed() -> bool:
    """Whether other processes train with this one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _by_chance(value: Tensor, its: dict[str, Any]) -> Tensor:
    its[SEED], seed = rounding.next_seed(its[SEED], shard_number(value))
    numbers = part_of(value)
    rounded = rounding.stochastic(numbers.reshape(-1), seed).reshape(numbers.shape)
    return whole_like(value, rounded)


def _full(value: Any) -> Any:
    """A state as the step sees it; what it counts in is a copy, as it may raise."""
    if not isinstance(value, Tensor):
        return value
    if not is_large(value):
        return value.clone()
    return value.to(torch.float32) if value.is_floating_point() else value


def check(optimizer: Optimizer, parameters: Mapping[str, Tensor], how: Rounding) -> None:
    """Refuses what cannot be stored so.

    Raises:
        AttachError: the optimizer or a parameter is of a kind that this cannot be done with.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise AttachError(
            f'bfloat16_weights(masters="{how}") got a {kind}, which does not compute a step from one dense '
            "gradient for each weight. Train with an optimizer that does, such as AdamW."
        )
    stored = {id(p): weights for weights in _living for p in weights._living()}
    for name, parameter in parameters.items():
        theirs = stored[id(parameter)]._optimizer() if id(parameter) in stored else None
        if theirs is not None:
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is stored without a master already, for the step of '
                f"{'this' if theirs is optimizer else 'another'} {type(theirs).__name__}. What is rounded away of a "
                "weight can be kept for one optimizer alone: give each its own parameters, or remove the other."
            )
        if is_dtensor(parameter):
            _check_sharded(name, parameter, how)
        elif type(parameter) not in (Tensor, nn.Parameter) or parameter.layout is not torch.strided:
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is a {type(parameter).__name__} with layout '
                f"{parameter.layout}; expected a plain, strided parameter. Leave it out of this optimizer."
            )
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise AttachError(
                f'bfloat16_weights(masters="{how}"): {name} is {parameter.dtype}; expected torch.float32 or '
                "torch.bfloat16. Convert it first."
            )


def _check_sharded(name: str, parameter: Tensor, how: Rounding) -> None:
    if parameter.dtype is not torch.bfloat16:
        raise AttachError(
            f'bfloat16_weights(masters="{how}"): {name} is sharded, and {parameter.dtype}: its memory is '
            "allocated. Convert the model to torch.bfloat16 first (model.bfloat16()), and shard it then."
        )
    reason = why_not(parameter, ())
    if reason is not None or type(part_of(parameter)) is not Tensor:
        raise AttachError(
            f'bfloat16_weights(masters="{how}"): {name} is sharded as {parameter.placements}, '  # type: ignore[attr-defined]
            f"and what lies in a process is a {type(part_of(parameter)).__name__}; it takes parts that are plain, "
            "and no sums of parts. Leave it out of this optimizer."
        )
