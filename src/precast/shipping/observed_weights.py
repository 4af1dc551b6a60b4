"""Runs a model on examples, and sees in which dtypes each of its weights is used.

Invariants:

- the model computes what it always computes in such a region: its weights are watched in their place, in float32;
- afterwards every weight is what it was, also where the model raised an error, and PyTorch's random numbers continue as
  if there had been no run;
- a weight is seen by its memory: names of one tensor, and tensors that share memory, are one weight.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.weight_casts import METADATA
from precast.autocast_mode.region import autocast
from precast.errors import ConversionError, PrecastError
from precast.policy.module_names import named_tensors
from precast.shipping.function_calls import (
    Uses,
    address,
    casts_by_rule,
    is_same,
    quantises,
    region_dtype,
    watched,
)

__all__ = ["Example", "Weight", "observe_uses", "weights_of"]

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


@dataclass(eq=False)
class Weight:
    """Tensors of a model that share memory: one in most cases.

    Attributes:
        names: each name in the model -> the tensor that has it.
        uses: what was seen of it.
        fixed: why it stays as it is, whatever is seen; None where it need not.
    """

    names: dict[str, Tensor]
    uses: Uses = field(default_factory=Uses)
    fixed: str | None = None

    @property
    def name(self) -> str:
        """The first of the names."""
        return next(iter(self.names))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, each once."""
        return list({id(tensor): tensor for tensor in self.names.values()}.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors now."""
        return self.tensors[0].dtype

    @property
    def bytes(self) -> int:
        """How much memory the weight takes now."""
        return self.tensors[0].untyped_storage().nbytes()


def weights_of(model: nn.Module) -> list[Weight]:
    """The parameters and buffers of a model."""
    weights: dict[object, Weight] = {}
    for name, tensor in named_tensors(model):
        key = address(tensor) or id(tensor)
        weights.setdefault(key, Weight({})).names[name] = tensor
    fused = {
        id(p) for module in model.modules() if _may_be_fused(module) for p in module.parameters()
    }
    for weight in weights.values():
        weight.fixed = _reason_to_keep(weight)
        if weight.fixed is None and any(id(tensor) in fused for tensor in weight.tensors):
            weight.fixed = "PyTorch's fused kernel for attention takes it in float32"
    return list(weights.values())


def _may_be_fused(module: nn.Module) -> bool:
    """Whether a module of PyTorch's may hand its weights to one kernel, which no autocast reaches (2.13).

    It depends on each input, and on whether a weight is a subclass: as a stored weight, it would never be.
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
            return "it has no numbers in memory of its own"
        if not _torch.counts_versions(tensor):
            return "it was made in inference mode"
    return None


def observe_uses(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> None:
    """Calls the model with each example in the region, and notes the uses of the weights.

    Each example is called twice, with and without the weights being watched.

    Raises:
        ConversionError: the model fails on an example, or the two calls differ.
    """
    with _unchanged_buffers(model):
        plain = _run(model, weights, region, examples)
    with _unchanged_buffers(model), _watching(weights, region.device):
        seen = _run(model, weights, region, examples)
    if not is_same(plain, seen):
        raise ConversionError(
            f"two calls of this {type(model).__name__} with the same example gave different results, so it cannot be "
            "shown that a converted model gives the same ones. It keeps something from call to call outside of its "
            "buffers, or asks for the class of its parameters."
        )


def _run(
    model: nn.Module, weights: Sequence[Weight], region: autocast, examples: Sequence[Example]
) -> list[Any]:
    """What the model returns for each example; PyTorch's random numbers are as before."""
    device = region.device
    devices = [] if device == "cpu" else [weights[0].tensors[0].device]
    results = []
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for example in examples:
            args, kwargs = map(_copied, example)  # a cache among them grows with each call
            try:
                with region:
                    results.append(model(*args, **kwargs))
            except PrecastError:
                raise
            except Exception as error:
                raise ConversionError(
                    f"the model failed on the example, so nothing was converted: {type(error).__name__}: {error}. "
                    "Give the arguments of one call: a tensor, a tuple of positional arguments, or a dict of keyword "
                    "arguments; a list has one of these for each call."
                ) from error
    return [result if isinstance(result, Tensor) else _plain_values(result) for result in results]


def _plain_values(result: Any) -> Any:
    """The tensors in a result, which may be of a library's class."""
    return tensors_in(result) or tensors_in(list(getattr(result, "__dict__", {}).values()))


def _copied(value: Any) -> Any:
    value = map_tensors(value, _counted)
    try:
        return copy.deepcopy(value)
    except Exception:  # not all that models are called with can be copied
        return value


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Gives the buffers of a model back the numbers and the memory that they have now."""
    before = [(b, b.data, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, memory, numbers in before:
                buffer.data = memory
                buffer.copy_(numbers)


def _counted(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


class _Watched(Tensor):
    """A weight whose uses are noted."""

    weight: Weight
    device_type: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _torch.without_subclass_functions():
            found = [t for t in tensors_in((args, kwargs)) if isinstance(t, _Watched)]
            if func in METADATA or func == _DTYPE or not found:
                return func(*args, **kwargs)
            device = found[0].device_type
            dtype = region_dtype(device)
            if dtype is not None and casts_by_rule(func, args, kwargs, device):
                for each in found:
                    each.weight.uses.dtypes.add(dtype)
                return func(*args, **kwargs)
            return _watch(func, args, kwargs, found)


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
"""A stored weight answers this as its original does."""


class _WatchedParameter(_Watched, nn.Parameter):
    pass


def _watch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[_Watched]) -> Any:
    plain = functools.partial(map_tensors, fn=_plain)
    counted = [t for t in found if _torch.counts_versions(t)]
    versions = [_torch.version_of(t) for t in counted]
    result, uses, is_view = watched(func, plain(args), plain(kwargs), [_plain(t) for t in found])
    for each in found:
        seen = uses.get(address(each))
        if seen is not None:
            each.weight.uses.dtypes |= seen.dtypes
            found_out = [*seen.computed, *seen.refused]
            if seen.computed and quantises(func, each.device_type):
                found_out = [f"{func.__name__}, which quantises it to 8 bits at each use"]
            for what in found_out:
                each.weight.uses.note(what)
    for each, version in zip(counted, versions, strict=True):
        if _torch.version_of(each) != version:
            each.weight.uses.note("the model, which writes it")
    if not is_view:
        return result
    by_address = {address(each): each for each in found}

    def view(tensor: Tensor) -> Tensor:
        owner = by_address.get(address(tensor))
        return (
            tensor
            if owner is None or isinstance(tensor, _Watched)
            else _watched_view(tensor, owner)
        )

    return map_tensors(result, view)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach() if isinstance(tensor, _Watched) else tensor


def _watched_view(tensor: Tensor, owner: _Watched) -> Tensor:
    view = tensor.as_subclass(_Watched)
    view.weight, view.device_type = owner.weight, owner.device_type
    return view


@contextmanager
def _watching(weights: Sequence[Weight], device_type: str) -> Iterator[None]:
    """Has every weight that may be stored in another dtype note its uses."""
    changed: list[tuple[Tensor, type]] = []
    try:
        for weight in weights:
            if weight.fixed is not None:
                continue
            for tensor in weight.tensors:
                kind = type(tensor)
                changed.append((tensor, kind))
                tensor.__class__ = _Watched if kind is Tensor else _WatchedParameter
                tensor.weight, tensor.device_type = weight, device_type  # type: ignore[attr-defined]
        yield
    finally:
        for tensor, kind in changed:
            tensor.__class__ = kind
            for name in ("weight", "device_type"):
                vars(tensor).pop(name, None)
