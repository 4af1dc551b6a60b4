"""Observation of a model on examples: the dtypes in which each of its weights is used.

Invariants:

- the model computes the same as without the observation: its float32 weights are observed in place;
- afterwards every weight is unchanged, also after an error of the model, and PyTorch's random numbers continue as if
  there had been no run;
- a weight is identified by its memory: names of one tensor, and tensors that share memory, are one weight.
"""

from __future__ import annotations

import copy
import functools
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
    fused = {
        id(p) for module in model.modules() if _may_be_fused(module) for p in module.parameters()
    }
    scripted = {
        id(p)
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for _, p in named_tensors(module)
    }
    for weight in weights.values():
        weight.fixed = _reason_to_keep(weight)
        ids = set(map(id, weight.tensors))
        if weight.fixed is None and not ids.isdisjoint(fused):
            weight.fixed = "PyTorch's fused kernel for attention takes it in float32"
        if weight.fixed is None and not ids.isdisjoint(scripted):
            weight.fixed = "a scripted module uses it"
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


def _reason_to_keep(weight: Weight) -> str | None:
    for tensor in weight.tensors:
        kind = type(tensor)
        if kind is not nn.Parameter and kind is not Tensor and kind is not nn.Buffer:
            return f"it is a {kind.__name__}"
        if tensor.dtype is not torch.float32:
            return f"the model has it in {tensor.dtype}"
        if tensor.layout is not torch.strided or not tensor.numel():
            return "it has no memory"
        if not _torch.counts_versions(tensor):
            return "it was made in inference mode"
    return None


def observe_uses(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> None:
    """Call the model with each example in the region, and record the uses of the weights.

    Each example is called without and with observation, and once more for functions of TorchScript and of C++.

    Raises:
        ConversionError: the model fails on an example, or the two calls differ.
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
    _observe_operations(model, weights, region, examples)


def _observe_operations(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> None:
    """Add the uses of weights in calls that PyTorch does not pass to the class of a weight.

    The results are not compared: under a dispatch mode PyTorch's fused kernels are composed of others.
    """
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
    return [result if isinstance(result, Tensor) else _plain_values(result) for result in results]


def _plain_values(result: Any) -> Any:
    """Return the tensors in a result, which may be of a library's class."""
    return tensors_in(result) or tensors_in(list(getattr(result, "__dict__", {}).values()))


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
            if func in METADATA or func == _DTYPE or not observed:
                return func(*args, **kwargs)
            device = observed[0].device_type
            dtype = region_dtype(device)
            if dtype is not None and casts_by_rule(func, args, kwargs, device):
                for each in observed:
                    each.weight.uses.dtypes.add(dtype)
                return func(*args, **kwargs)
            return _observe(func, args, kwargs, observed)


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
"""A stored weight returns the same dtype as its original."""


class _ObservedParameter(_ObservedWeight, nn.Parameter):
    pass


def _observe(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[_ObservedWeight]
) -> Any:
    plain = functools.partial(map_tensors, fn=_plain)
    versions = [(t, _torch.version_of(t)) for t in weights if _torch.counts_versions(t)]
    plain_weights = [_plain(t) for t in weights]
    result, uses, is_view = observed_call(func, plain(args), plain(kwargs), plain_weights)
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
    if not is_view:
        return result
    by_address = {address(each): each for each in weights}

    def view(tensor: Tensor) -> Tensor:
        owner = by_address.get(address(tensor))
        if owner is None or isinstance(tensor, _ObservedWeight):
            return tensor
        return _observed_view(tensor, owner)

    return map_tensors(result, view)


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, _ObservedWeight):
        return tensor
    trains = tensor.requires_grad and not _torch.is_functorch_active()
    return tensor.detach().requires_grad_() if trains else tensor.detach()


def _observed_view(tensor: Tensor, owner: _ObservedWeight) -> Tensor:
    view = tensor.as_subclass(_ObservedWeight)
    view.weight, view.device_type = owner.weight, owner.device_type
    return view


@contextmanager
def _observing(weights: Sequence[Weight], device_type: str) -> Iterator[None]:
    """Record the uses of all weights that may be stored in another dtype, in a block."""
    changed: list[tuple[Tensor, type]] = []
    try:
        for weight in weights:
            if weight.fixed is not None:
                continue
            for tensor in weight.tensors:
                kind = type(tensor)
                changed.append((tensor, kind))
                tensor.__class__ = _ObservedWeight if kind is Tensor else _ObservedParameter
                tensor.weight, tensor.device_type = weight, device_type  # type: ignore[attr-defined]
        yield
    finally:
        for tensor, kind in changed:
            tensor.__class__ = kind
            for name in ("weight", "device_type"):
                vars(tensor).pop(name, None)
