"""`convert`: models for inference that store their weights in the dtypes in which a policy uses them.

Invariants:

- the results of the converted model are those of the float32 model in a region of the policy, bit for bit, or it
  raises an error that names the weight;
- the model is changed only after all checks and observations, so an error leaves it unchanged;
- weights that shared memory still share it.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from precast._internal import cures
from precast._internal.display import dtype_name
from precast._internal.pytree import tensors_in
from precast.attachment.module_hooks import apply
from precast.autocast_mode.region import autocast
from precast.errors import ConversionError, PrecastWarning
from precast.policy.module_names import name_of_each, named_tensors, unwrapped
from precast.policy.module_plan import Plan, plan
from precast.policy.policy import Policy, as_policy
from precast.shipping.conversion import Conversion, StoredAs
from precast.shipping.converted_class import ConvertedState, is_converted, set_converted, state_of
from precast.shipping.observed_weights import Example, Weight, observe_uses, weights_of
from precast.shipping.stored_modules import use_stored_weights
from precast.shipping.stored_weights import StoredParameter, stored_buffer

__all__ = ["conversion_report", "convert", "finish", "store"]

_rules: Final = WeakIdKeyDictionary()
"""Maps a converted model to its rules for modules, which act as long as it exists."""


def convert(
    model: nn.Module,
    policy: Policy | str | os.PathLike[str] = "default",
    dtype: torch.dtype | str | None = None,
    *,
    example: Any,
    in_place: bool = False,
    methods: Sequence[str] = ("generate",),
) -> nn.Module:
    """Convert a model for inference to one that stores its weights in the dtypes in which the policy uses them.

    The model is called with the example in a region of the policy, to observe the dtypes in which each weight is used.
    A weight that the region only ever casts to 16 bits is stored in these. Weights that are used in float32 or in
    several dtypes, weights that the example does not use, and buffers that the model writes are not changed.

    The converted model needs no region: its calls run under the policy. Their results are those of `model` in a region,
    bit for bit, without a graph of the weights. If a later call would use a 16-bit weight in float32, it raises a
    `ConversionError` that names the weight.

    Args:
        model: the model, in evaluation mode, with its weights in float32.
        policy: a `Policy`, the name of a preset or the path of a policy file, including its rules for modules.
        dtype: the lower precision, torch.bfloat16 or torch.float16. None is PyTorch's default for the model's device.
        example: the arguments of a call: its only argument, a tuple of positional arguments, or a dict of keyword
            arguments. A list has one of these for each call, to cover several paths through the model.
        in_place: convert `model` itself; its float32 weights are freed one by one. Otherwise it is not changed, and the
            converted model shares no memory with it.
        methods: names of other methods that run under the policy, if the model has them.

    Returns:
        The converted model, of a subclass of its class. `conversion_report` describes its
            weights.

    Raises:
        ConversionError: the model cannot be converted; it has not changed.
        PolicyError: the policy cannot be read or applied.
        RegionError: the device does not support the dtype.

    Examples:
        >>> import precast
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).eval()
        >>> converted = precast.convert(model, example=torch.ones(1, 256))
        >>> converted[0].weight.dtype, converted[1].weight.dtype
        (torch.bfloat16, torch.float32)
        >>> converted(torch.ones(1, 256)).dtype
        torch.bfloat16
        >>> report = precast.conversion_report(converted)
        >>> report.bytes, report.bytes_before
        (133632, 265216)
    """
    policy = as_policy(policy)
    device = _check(model)
    region = autocast(device.type, dtype, policy=policy)
    if not region.policy or not policy.tables.get(device.type):
        raise ConversionError(
            f"convert(policy=...) got {policy.name!r}, which has no rules for {device.type}, the device of the model. "
            f"{cures.CONVERT_DEVICE.text}"
        )
    planned = plan(model, policy)
    examples = _examples(example, device)
    for complaint in planned.complaints():
        warnings.warn(complaint, PrecastWarning, stacklevel=2)
    weights = weights_of(model)
    applied = apply(model, planned)
    try:
        # Without its cache, a region has one 16-bit copy at a time beside the float32 weights.
        uncached = autocast(device.type, dtype, cache_enabled=False, policy=policy)
        observe_uses(model, weights, uncached, examples)
    finally:
        applied.remove()
    rows = tuple(map(_stored_as, weights))
    name = type(model).__name__
    report = Conversion(name, policy.name, dtype_name(region.fast_dtype), device.type, rows)
    stored = [(w, dtype) for w in weights if (dtype := _stored_dtype(w)) is not None]
    if in_place:
        del weights
        while stored:
            weight, low = stored.pop(0)
            for tensor, values in _cast(weight, low):
                store(tensor, values, weight.name, device.type)
    else:
        model = _copied(model, stored, device.type)
    return finish(model, region, planned, report, methods)


def conversion_report(model: nn.Module) -> Conversion:
    """Return the report of a model that `convert` or `load_converted` returned, with an entry for each weight.

    Raises:
        ConversionError: the model is not converted.

    Examples:
        >>> import precast
        >>> converted = precast.convert(nn.Linear(256, 256).eval(), example=torch.ones(1, 256))
        >>> [(weight.name, weight.dtype) for weight in conversion_report(converted).weights]
        [('weight', 'bfloat16'), ('bias', 'bfloat16')]
    """
    if not isinstance(model, nn.Module) or not is_converted(model):
        raise ConversionError(
            f"conversion_report(model): expected a model that convert or load_converted returned, got "
            f"{type(model).__name__}."
        )
    return state_of(model).report


def finish(
    model: nn.Module, region: autocast, planned: Plan, report: Conversion, methods: Sequence[str]
) -> nn.Module:
    """Make a model with stored weights run under the policy, and return it."""
    for parameter in model.parameters():
        if not parameter.is_leaf:  # in a copy of a scripted module they are results of autograd
            parameter.detach_().requires_grad_()
    use_stored_weights(model)
    existing = tuple(method for method in methods if hasattr(type(model), method))
    set_converted(model, ConvertedState(region, report, existing))
    _rules[model] = apply(model, planned)
    return model


def store(tensor: Tensor, values: Tensor, name: str, device: str) -> None:
    """Replace the memory of a tensor in place, and make it a stored weight."""
    tensor.data = values
    stored = _stored(values, tensor, name, device)
    tensor.__class__ = type(stored)
    vars(tensor).update(vars(stored))


def _stored_dtype(weight: Weight) -> torch.dtype | None:
    """Return the 16-bit dtype to store a weight in; None to leave it unchanged."""
    uses = weight.uses
    is_low = weight.fixed is None and not uses.computed and len(uses.dtypes) == 1
    return next(iter(uses.dtypes)) if is_low else None


def _stored_as(weight: Weight) -> StoredAs:
    before, uses, dtype = weight.bytes, weight.uses, _stored_dtype(weight)
    names = " and ".join(sorted(map(dtype_name, uses.dtypes)))
    if dtype is not None:
        return StoredAs(weight.name, names, before // 2, before, f"used in {names} only")
    if weight.fixed is not None:
        why = weight.fixed
    elif uses.computed:
        why = f"used in float32 by {', '.join(uses.computed[:3])}"
    else:
        why = f"used in {names}" if names else "the example did not use it"
    return StoredAs(weight.name, dtype_name(weight.dtype), before, before, why, names or None)


def _cast(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of a weight with its values in a dtype; tensors that share memory still share it."""
    first = weight.tensors[0].detach()
    storage = first.untyped_storage()
    with torch.no_grad():
        whole = first.new_empty(0).set_(storage, 0, (storage.nbytes() // first.itemsize,), (1,))
        values = whole.to(dtype)
    for tensor in weight.tensors:
        yield tensor, values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _stored(values: Tensor, original: Tensor, name: str, device: str) -> Any:
    if isinstance(original, nn.Parameter):
        return StoredParameter(values, name, device, original.requires_grad)
    return stored_buffer(values, name, device)


def _copied(model: nn.Module, stored: list[tuple[Weight, torch.dtype]], device: str) -> nn.Module:
    """Return a copy of the model with stored weights; their old values are not copied."""
    memo: dict[int, Any] = {}
    for weight, dtype in stored:
        for tensor, values in _cast(weight, dtype):
            memo[id(tensor)] = _stored(values, tensor, weight.name, device)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConversionError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
            f"{cures.CONVERT_IN_PLACE.text}"
        ) from error


def _check(model: object) -> torch.device:
    """Check that a model can be converted; return its device."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConversionError(f"convert(model) got {kind}. It takes a torch.nn.Module.")
    if is_converted(model):
        raise ConversionError(f"this {kind} is converted already. {cures.CONVERT_FLOAT32.text}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            f"this {kind} is scripted: uses of its weights inside TorchScript cannot be observed. "
            f"{cures.CONVERT_UNSCRIPTED.text}"
        )
    if unwrapped(model) is not model:
        raise ConversionError(
            f"convert(model) got a {kind}, a wrapper. {cures.CONVERT_INSIDE.text}"
        )
    training = [name or "the model" for name, module in name_of_each(model) if module.training]
    if training:
        raise ConversionError(
            f"convert is for inference, and {training[0]} is in training mode. {cures.CONVERT_EVAL.text}"
        )
    named = named_tensors(model)
    if not named:
        raise ConversionError(f"this {kind} has no weights to convert.")
    for name, tensor in named:
        if is_lazy(tensor):
            raise ConversionError(
                f"{name} has no shape yet. Call the model once with the example, then convert it."
            )
        if tensor.device.type == "meta":
            raise ConversionError(
                f"{name} is on the meta device and has no values. {cures.CONVERT_META.text}"
            )
    devices = {tensor.device.type: name for name, tensor in named}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ConversionError(
            f"convert takes a model on one type of device; this one is on several: {places}"
        )
    return named[0][1].device


def _examples(example: Any, device: torch.device) -> list[Example]:
    """Return the arguments of each call in an example."""
    several = example if isinstance(example, list) else [example]
    if not several:
        raise ConversionError("convert(example=[]): pass at least one example of a call.")
    for tensor in tensors_in(several):
        if tensor.device.type != device.type:
            raise ConversionError(
                f"convert(example=...) has a tensor on {tensor.device.type}, but the model is on {device.type}. Move "
                "one of them."
            )
    calls = [each if isinstance(each, tuple | Mapping) else (each,) for each in several]
    return [((), dict(c)) if isinstance(c, Mapping) else (c, {}) for c in calls]
