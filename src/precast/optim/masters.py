"""`bfloat16_weights`: store the weights that an optimizer trains in bfloat16, with or without float32 masters.

Invariants:

- a call that raises has changed nothing;
- the optimizer keeps its class, groups and states; hooks on its step do the rest, and `remove` removes them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal import cures
from precast._torch import SIXTEEN_BIT, is_distributed, is_dtensor
from precast._torch.optimizer_hooks import on_optimizer_step, run_next_to_step
from precast.errors import AttachError
from precast.optim.checks import check, refuse_copy
from precast.optim.compiled_step import CompiledStep
from precast.optim.low_precision_weights import Hook, LowPrecisionWeights, is_worth_storing_low
from precast.optim.partial_steps import is_large, parameters_of
from precast.optim.shards import part_of
from precast.optim.total_norm import clip_to_norm, total_norm
from precast.policy.module_names import named_parameters, named_tensors

__all__ = ["Bfloat16Weights", "bfloat16_weights"]

Masters = Literal["float32", "kahan", "stochastic"]


def bfloat16_weights(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    masters: Masters = "kahan",
    states: torch.dtype | None = None,
    gradients: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Bfloat16Weights:
    """Store the weights that `optimizer` trains in bfloat16 so that they learn from small updates.

    Args:
        model: the model, or a part of it.
        optimizer: the optimizer that trains the weights, of any class that steps dense weights.
        masters: "kahan" stores weights in bfloat16 and adds the rounding error of each step, which is stored in
            bfloat16 too, to the next update (Kahan summation): 4 bytes an element instead of 6. "stochastic" rounds
            each new weight up or down at random so that its mean is right: 2 bytes an element. Both apply to parameters
            that are bfloat16 already, and to float32 ones with at least two dimensions and 16,384 elements. Deep
            copies of the model have float32 weights where the model had, so that averages of weights move. "float32"
            converts 16-bit parameters to float32 masters.
        states: torch.bfloat16 stores the optimizer's states of these weights in bfloat16, rounded stochastically. With
            None they are float32.
        gradients: torch.float32 adds the gradients of these weights up in float32 over several backward passes, for 2
            more bytes an element: in bfloat16, 256 + 1 is 256. With None they have the dtype of their weight.
        generator: random generator of the stochastic rounding, on the CPU. With None PyTorch's default generator; if
            torch.distributed is initialized, all processes then draw the same numbers, so that replicas stay equal.

    Returns:
        A handle that clips gradients, and removes the hooks. It lasts as long as the optimizer.

    Raises:
        AttachError: an argument has the wrong type; the optimizer trains no parameter of the model; the optimizer, one
            of its states or one of the parameters is not supported; or two parameters share memory.

    Examples:
        >>> import precast.optim
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> handle = precast.optim.bfloat16_weights(model, optimizer, masters="kahan")
        >>> model.weight.dtype, model.bias.dtype
        (torch.bfloat16, torch.float32)
        >>> handle.remove()
    """
    _check_types(model, optimizer, masters)
    _check_dtypes(masters, states, gradients)
    chosen = dict(_chosen(model, optimizer, masters))
    _check_wrappers(model, chosen, masters)
    if gradients is torch.float32 and masters != "float32":
        _check_accumulation(chosen)
    _check_memory(model, chosen)
    if masters == "float32":
        for parameter in chosen.values():
            parameter.data = parameter.detach().float()
        return Bfloat16Weights(optimizer, None)
    check(optimizer, chosen, masters)
    _check_states(model, optimizer)
    weights = LowPrecisionWeights(
        optimizer, chosen, masters, states or torch.float32, _seed(generator)
    )
    weights.average_in_float32(model)
    if gradients is torch.float32:
        weights.add_gradients_in_float32()
    return Bfloat16Weights(optimizer, weights)


class Bfloat16Weights:
    """A handle on weights that are stored in bfloat16, returned by `bfloat16_weights`.

    It lasts as long as the optimizer, whether or not the program keeps a reference.
    """

    def __init__(self, optimizer: Optimizer, weights: LowPrecisionWeights | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._weights = weights
        self._removals: list[Callable[[], object]] = []
        if weights is None:
            return
        self._compiled = CompiledStep(optimizer, weights)
        self._hooks = (
            optimizer.register_step_pre_hook(Hook(weakref.ref(self), "_before_step")),
            optimizer.register_step_post_hook(Hook(weakref.ref(self), "_after_step")),
        )
        self._removals = [
            *(hook.remove for hook in self._hooks),
            on_optimizer_step(before=self._before_hooks),
            weights.end,
        ]
        weakref.finalize(optimizer, self.remove).atexit = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of the gradients that the optimizer reads, as `torch.nn.utils.clip_grad_norm_` does.

        Gradients may be plain or sharded, also over several meshes. Call it after `scaler.unscale_`.

        Args:
            max_norm: largest norm that is not reduced.
            norm_type: order of the norm: 2.0, 1.0, ``math.inf`` ...
            error_if_nonfinite: raise RuntimeError if the norm is not finite.

        Returns:
            The norm before clipping, shape ().

        Raises:
            AttachError: the optimizer does not exist any more.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise AttachError("clip_grad_norm_: the optimizer of these weights was deleted.")
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients, norm_type, error_if_nonfinite)
        clip_to_norm(parameters, max_norm, norm)
        return norm

    def remove(self) -> None:
        """Remove the hooks. Weights and states stay in bfloat16, and the optimizer steps them itself."""
        while self._removals:
            self._removals.pop(0)()

    def _before_hooks(self, optimizer: Optimizer) -> None:
        """Let hooks of the program, such as one that clips, run before the weights are stepped."""
        if optimizer is self._optimizer():
            run_next_to_step(optimizer, *self._hooks)
        else:
            refuse_copy(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step the weights in bfloat16, and remove their gradients until the optimizer's own step has run."""
        assert self._weights is not None
        try:
            self._compiled.before_step(optimizer, args, kwargs)
            return self._weights.before_step(optimizer, args, kwargs)
        except BaseException:
            self._after_step(optimizer, args, kwargs)  # PyTorch calls no hook after an error
            raise

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        assert self._weights is not None
        self._compiled.after_step()
        self._weights.after_step()


def _check_types(model: object, optimizer: object, masters: object) -> None:
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"{_NAME}: model is a {type(model).__name__}. Pass a torch.nn.Module: the model, or a part of it."
        )
    if not isinstance(optimizer, Optimizer):
        raise AttachError(
            f"{_NAME}: optimizer is a {type(optimizer).__name__}. Pass a torch.optim.Optimizer; of a wrapper, the "
            "optimizer inside."
        )
    if set(map(id, parameters_of(optimizer))).isdisjoint(map(id, model.parameters())):
        raise AttachError(
            f"{_NAME}: this {type(optimizer).__name__} has no parameter of this {type(model).__name__}. Pass the one "
            "that trains this model, created after the model was moved or converted."
        )
    if masters not in ("float32", "kahan", "stochastic"):
        raise AttachError(
            f'{_NAME}: masters={masters!r}; expected "kahan", "stochastic" or "float32".'
        )


def _check_dtypes(masters: str, states: torch.dtype | None, gradients: torch.dtype | None) -> None:
    for name, dtype in (("states", states), ("gradients", gradients)):
        if dtype not in (None, torch.float32, torch.bfloat16):
            raise AttachError(
                f"{_NAME}: {name}={dtype!r}; expected torch.bfloat16, torch.float32 or None."
            )
        if masters == "float32" and dtype is torch.bfloat16:
            raise AttachError(
                f'{_NAME}: {name}=torch.bfloat16 needs masters="kahan" or "stochastic", got "float32".'
            )


def _chosen(model: nn.Module, optimizer: Optimizer, masters: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, with their names, whose storage is to change or that are stored in 16 bits already."""
    trained = set(map(id, parameters_of(optimizer)))
    for name, parameter in named_parameters(model):
        if id(parameter) not in trained:
            continue
        is_low = parameter.dtype in SIXTEEN_BIT
        becomes_low = masters != "float32" and parameter.dtype is torch.float32
        if is_low or (becomes_low and is_worth_storing_low(parameter)):
            yield name, parameter


def _check_accumulation(chosen: dict[str, Tensor]) -> None:
    """Refuse gradients in float32 where FSDP adds them up."""
    sharded = next((name for name, parameter in chosen.items() if is_dtensor(parameter)), None)
    if sharded is not None:
        raise AttachError(
            f"{_NAME}: gradients=torch.float32, but {sharded} is sharded, and FSDP adds its gradients up. "
            f"{cures.ACCUMULATE_UNDER_FSDP.text}"
        )


def _check_wrappers(model: nn.Module, chosen: dict[str, Tensor], masters: str) -> None:
    """Refuse to change the dtype of parameters for which DDP or FSDP2 has allocated memory."""
    stored = torch.float32 if masters == "float32" else torch.bfloat16
    changed = [name for name, parameter in chosen.items() if parameter.dtype is not stored]
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    is_wrapped = ddp is not None and any(
        isinstance(module, ddp.DistributedDataParallel) for module in model.modules()
    )
    if changed and is_wrapped:
        raise AttachError(
            f"{_NAME}: the dtype of {changed[0]} has to change, but DistributedDataParallel has allocated its "
            f"buffers. {cures.BFLOAT16_BEFORE_DDP.text}"
        )
    for name, parameter in chosen.items():
        if masters == "float32" and is_dtensor(parameter):
            raise AttachError(
                f'{_NAME}: masters="float32", but {name} is sharded, and {parameter.dtype}. Shard a float32 model, '
                "with MixedPrecisionPolicy(param_dtype=torch.bfloat16): its shards are masters."
            )


def _check_memory(model: nn.Module, chosen: dict[str, Tensor]) -> None:
    """Refuse parameters whose memory another tensor of the model uses: each is converted and stepped by itself."""
    tensors = {id(t): (name, t) for name, t in reversed(named_tensors(model))}
    spans = sorted(
        (part.data_ptr(), part.data_ptr() + part.itemsize * _extent(part), name)
        for name, part in ((name, part_of(t.detach())) for name, t in tensors.values())
        if type(part) is Tensor and part.layout is torch.strided and part.numel()
    )
    names, end, last = {tensors[id(p)][0] for p in chosen.values()}, 0, ""
    for start, stop, name in spans:
        if start < end and not names.isdisjoint((name, last)):
            raise AttachError(
                f"{_NAME}: {last} and {name} are two tensors in the same memory, and would be stepped one without the "
                "other. Make them one parameter, or clone one of them."
            )
        if stop > end:
            end, last = stop, name


def _extent(tensor: Tensor) -> int:
    """Return the number of elements between the first and the last one of a tensor, inclusive."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _check_states(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse states that a compiled step does not compute with."""
    for name, parameter in named_parameters(model):
        is_low = parameter.dtype is torch.bfloat16 or is_worth_storing_low(parameter)
        if parameter.dtype not in (torch.float32, torch.bfloat16) or not is_low:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            is_tensor = is_large(value) and value.is_floating_point()
            if is_tensor and value.dtype not in (torch.float32, torch.bfloat16):
                raise AttachError(
                    f"{_NAME}: the optimizer's state {key!r} of {name} is {value.dtype}; expected float32 or bfloat16. "
                    "Convert it, or create the optimizer again."
                )


def _seed(generator: torch.Generator | None) -> int:
    """Return a seed; without a generator the same in all processes, so that replicas are rounded alike."""
    if generator is None and is_distributed():
        return 0
    return int(torch.randint(2**31, (), generator=generator))


_NAME: Final = "bfloat16_weights"
