"""Observation of a model on examples: the dtypes in which each of its weights is used.

Invariants:

- the model computes the same as without the observation: its float32 weights are observed in place;
- afterwards every weight is unchanged, also after an error of the model, and PyTorch's random numbers continue as if
  there had been no run;
- a weight is identified by its memory: names of one tensor, and tensors that share memory, are one weight.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha

from precast import _torch
from precast._internal import cures
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.weight_casts import METADATA
from precast.autocast_mode.region import autocast
from precast.errors import ConversionError, PrecastError
from precast.policy.module_names import named_tensors
from precast.shipping.function_calls import (
    UseRecorder,
    WeightUses,
    address,
    casts_by_rule,
    counted,
    has_float8_rule,
    is_same,
    makes_parameter,
    observed_call,
    region_dtype,
)

__all__ = ["Example", "Weight", "observe_uses", "unchanged_buffers", "weights_of"]

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


@dataclass(eq=False)
class Weight:
    """Tensors of a model that share memory; usually one.

    Attributes:
        names: maps each name in the model to its tensor.
        uses: its observed uses.
        fixed: the reason to leave it unchanged whatever its uses are; None if there is none.
    """

    names: dict[str, Tensor]
    uses: WeightUses = field(default_factory=WeightUses)
    fixed: str | None = None

    @property
    def name(self) -> str:
        """The first of the names."""
        return next(iter(self.names))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, without duplicates."""
        return list({id(tensor): tensor for tensor in self.names.values()}.values())

    @property
    def dtype(self) -> torch.dtype:
        """The current dtype of the tensors."""
        return self.tensors[0].dtype

    @property
    def bytes(self) -> int:
        """The current memory of the weight."""
        return self.tensors[0].untyped_storage().nbytes()


def weights_of(model: nn.Module) -> list[Weight]:
    """Return the parameters and buffers of a model."""
    weights: dict[object, Weight] = {}
    for name, tensor in named_tensors(model):
        key = address(tensor) or id(tensor)
        weights.setdefault(key, Weight({})).names[name] = tensor
    reasons: dict[int, str] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            reasons |= {id(t): "a scripted module uses it" for _, t in named_tensors(module)}
        elif _may_be_fused(module):
            why = "PyTorch's fused kernel for attention takes it in float32"
            reasons |= {id(t): why for t in module.parameters()}
    for weight in weights.values():
        reason = (_reason_to_keep(tensor) or reasons.get(id(tensor)) for tensor in weight.tensors)
        weight.fixed = next(filter(None, reason), None)
    return list(weights.values())


def _may_be_fused(module: nn.Module) -> bool:
    """Return True if PyTorch may pass a module's weights to one fused kernel, which ignores autocast (2.13).

    That depends on each input, and on the class of the weights: it would never be used with stored weights.
    """
    for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer):
        if isinstance(module, kind) and type(module).forward is kind.forward:
            attention = getattr(module, "self_attn", module)
            device = next(module.parameters()).device.type
            return bool(attention.batch_first) and mha.get_fastpath_enabled() and device != "cuda"
    return False


def _reason_to_keep(tensor: Tensor) -> str | None:
    if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
        return f"it is a {type(tensor).__name__}"
    if tensor.dtype is not torch.float32:
        return f"the model has it in {tensor.dtype}"
    if tensor.layout is not torch.strided or not tensor.numel():
        return "it has no memory"
    return None if _torch.counts_versions(tensor) else "it was made in inference mode"


def observe_uses(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> None:
    """Call the model with each example in the region, and record the uses of the weights.

    Each example is called without and with observation, and once more for functions of TorchScript and of C++.
    """
    with unchanged_buffers(model):
        plain = _run(model, weights, region, examples)
    with unchanged_buffers(model), _observing(weights, region.device):
        observed = _run(model, weights, region, examples)
    if not is_same(plain, observed):
        raise ConversionError(
            f"two calls of this {type(model).__name__} with the same example gave different results, so it cannot be "
            "verified that a converted model gives the same ones. It has state other than buffers, or depends on the "
            "class of its parameters."
        )
    # PyTorch does not pass all calls to the class of a weight. Results are not compared: under a dispatch mode fused
    # kernels are composed of others.
    uses = {address(w.tensors[0]): WeightUses() for w in weights if w.fixed is None}
    recorder = UseRecorder(uses, [region.device], any_layout=True)
    with unchanged_buffers(model), suppress(ConversionError), recorder:
        _run(model, weights, region, examples)
    for weight in weights:
        use = uses.get(address(weight.tensors[0]))
        if use is not None:
            weight.uses.dtypes |= use.dtypes
            weight.uses.computed = weight.uses.computed or use.computed


def _run(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> list[Any]:
    """Return the model's results for each example, without a change of PyTorch's random state."""
    device = region.device
    devices = [] if device == "cpu" else [weights[0].tensors[0].device]
    results = []
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for example in examples:
            args, kwargs = map(_copied, example)  # a cache in the arguments grows with each call
            try:
                with region:
                    results.append(model(*args, **kwargs))
            except PrecastError:
                raise
            except Exception as error:
                raise ConversionError(
                    f"the model failed on the example, so nothing was converted: {type(error).__name__}: {error}. "
                    f"{cures.CONVERT_ARGUMENTS.text}"
                ) from error
    # A result may be of a library's class.
    return [tensors_in(r) or tensors_in(list(getattr(r, "__dict__", {}).values())) for r in results]


def _copied(value: Any) -> Any:
    value = map_tensors(value, counted)
    try:
        return copy.deepcopy(value)
    except Exception:  # some arguments cannot be copied
        return value


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, their values and their memory after a block."""
    bindings = [
        (module, name, buffer)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    before = [(b, b.data, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        for module, name, buffer in bindings:
            setattr(module, name, buffer)
        with torch.no_grad():
            for buffer, memory, values in before:
                buffer.data = memory
                buffer.copy_(values)


class _ObservedWeight(Tensor):
    """A weight with recorded uses."""

    weight: Weight
    device_type: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _torch.without_subclass_functions():
            weights = [t for t in tensors_in((args, kwargs)) if isinstance(t, _ObservedWeight)]
            observed = [t for t in weights if hasattr(t, "weight")]  # not a deep copy
            if func in METADATA or func in _SAME_OF_STORED or not observed:
                return func(*args, **kwargs)
            device = observed[0].device_type
            dtype = region_dtype(device)
            if dtype is not None and casts_by_rule(func, args, kwargs, device):
                for each in observed:
                    each.weight.uses.dtypes.add(dtype)
                return func(*args, **kwargs)
            return _observe(func, args, kwargs, observed)


_SAME_OF_STORED = (Tensor.dtype.__get__, Tensor.requires_grad_)  # type: ignore[attr-defined]
"""Functions that return the same for a stored weight as for its original."""


class _ObservedParameter(_ObservedWeight, nn.Parameter):
    def detach(self) -> Any:
        if not makes_parameter(inspect.currentframe()) or not hasattr(self, "weight"):
            return super().detach()
        return _observed(_plain(self).detach(), self, _ObservedParameter)


def _observed(tensor: Tensor, owner: _ObservedWeight, kind: type[Any]) -> Any:
    """Return a view of an observed weight that is observed, too."""
    view = tensor.as_subclass(kind)
    view.weight, view.device_type = owner.weight, owner.device_type
    return view


def _observe(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[_ObservedWeight]
) -> Any:
    versions = [(t, _torch.version_of(t)) for t in weights if _torch.counts_versions(t)]
    call = map_tensors(args, _plain), map_tensors(kwargs, _plain)
    result, uses, is_view = observed_call(func, *call, [_plain(t) for t in weights])
    for each in weights:
        use = uses.get(address(each))
        if use is not None:
            each.weight.uses.dtypes |= use.dtypes
            operations = [*use.computed, *use.refused]
            if use.computed and has_float8_rule(func, each.device_type):
                operations = [f"{func.__name__}, which quantises it to 8 bits at each use"]
            for operation in operations:
                each.weight.uses.add_computed(operation)
    for each, version in versions:
        if _torch.version_of(each) != version:
            each.weight.uses.add_computed("the model, which writes it")
    by_address = {address(each): each for each in weights}

    def view(tensor: Tensor) -> Any:
        owner = by_address.get(address(tensor))
        if owner is None or isinstance(tensor, _ObservedWeight):
            return tensor
        return _observed(tensor, owner, _ObservedWeight)

    return map_tensors(result, view) if is_view else result


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, _ObservedWeight):
        return tensor
    trains = tensor.requires_grad and not _torch.is_functorch_active()
    return tensor.detach().requires_grad_() if trains else tensor.detach()


@contextmanager
def _observing(weights: Sequence[Weight], device_type: str) -> Iterator[None]:
    """Record the uses of all weights that may be stored in another dtype, in a block."""
    observed = [(w, t, type(t)) for w in weights if w.fixed is None for t in w.tensors]
    try:
        for weight, tensor, kind in observed:
            tensor.__class__ = _ObservedWeight if kind is Tensor else _ObservedParameter
            tensor.weight, tensor.device_type = weight, device_type  # type: ignore[attr-defined]
        yield
    finally:
        for _, tensor, kind in observed:
            tensor.__class__ = kind
            for name in ("weight", "device_type"):
                vars(tensor).pop(name, None)
