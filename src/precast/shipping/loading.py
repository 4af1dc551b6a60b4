"""`load_converted`: a converted model from a checkpoint on disk, without its float32 weights in memory.

Invariants:

- parameters are on the meta device while the model is created, so float32 weights are allocated only during the
  constructor of their module;
- float32 weights are pages of the file while the model runs on the example; weights that stay in float32 are copied
  at the end, so the model does not depend on the file;
- every parameter and buffer of the state dict comes from the checkpoint, and the whole checkpoint is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from precast._internal import cures
from precast._internal.display import dtype_name
from precast._torch import SIXTEEN_BIT, SkipMetaRandom
from precast.autocast_mode.region import autocast
from precast.errors import ConversionError
from precast.policy.module_names import named_tensors
from precast.policy.module_plan import plan
from precast.policy.policy import Policy, as_policy
from precast.shipping.checkpoint_files import read_checkpoint
from precast.shipping.conversion import Conversion, StoredAs
from precast.shipping.converted import convert, finish, store
from precast.shipping.observed_weights import weights_of

__all__ = ["load_converted"]

_LISTED = 5  # names in a message


def load_converted(
    make: Callable[[], nn.Module] | nn.Module,
    checkpoint: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] = "default",
    dtype: torch.dtype | str | None = None,
    *,
    example: Any = None,
    methods: Sequence[str] = ("generate",),
) -> nn.Module:
    """Create a converted model from a checkpoint on disk, without its float32 weights in memory.

    With an example, the checkpoint is that of the float32 model, and the result equals that of `convert`. While the
    example runs, the weights are pages of the file, which the system may drop. Without an example, the checkpoint is
    the state dict of a converted model: weights are stored in their dtypes in the checkpoint.

    Args:
        make: a function that creates the model, such as its class, or a model with its parameters on the meta device.
            The function's parameters are created on the meta device; buffers are not.
        checkpoint: a safetensors file, a file of `torch.save` with a state dict, or the index (`.index.json`) of a
            sharded one.
        policy: as for `convert`.
        dtype: as for `convert`.
        example: as for `convert`; None for the checkpoint of a converted model.
        methods: as for `convert`.

    Returns:
        The converted model, on the CPU, in evaluation mode.

    Raises:
        ConversionError: the file is damaged or in another format, lacks a weight, or has an unknown one or one of
            another shape; a weight would stay on the meta device; or the model cannot be converted.
        PolicyError: the policy cannot be read or applied.
    """
    policy = as_policy(policy)
    tensors = read_checkpoint(checkpoint)
    model = _created(make).eval()
    state = _fitting(model, tensors, f"{os.fspath(checkpoint)}", upcast=example is not None)
    model.load_state_dict(state, strict=False, assign=True)
    _refuse_meta(model)
    del tensors, state
    if example is not None:
        convert(model, policy, dtype, example=example, in_place=True, methods=methods)
        _own_memory(model)
        return model
    region = autocast("cpu", dtype, policy=policy)
    return _stored_as_loaded(model, policy, region, methods)


def _created(make: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ConversionError(
            f"load_converted(make) got {type(make).__name__}. Pass a function that creates the model, or a "
            "torch.nn.Module."
        )
    try:
        with _parameters_on_meta():
            model = make()
    except Exception as error:
        raise ConversionError(
            f"load_converted(make): make() raised {type(error).__name__}: {error}. While it runs, the model's "
            "parameters are on the meta device, without values."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConversionError(
            f"load_converted(make): it returned {type(model).__name__}, not a model."
        )
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device in a block, when modules register them."""

    def moved(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)
    try:
        with SkipMetaRandom():
            yield
    finally:
        handle.remove()


def _fitting(
    model: nn.Module, tensors: dict[str, Tensor], where: str, *, upcast: bool
) -> dict[str, Tensor]:
    """Return the state for the model to load: each tied weight is one tensor under all of its names.

    Raises:
        ConversionError: a name is missing or unexpected, a shape or layout differs, or tied weights differ.
    """
    expected = model.state_dict(keep_vars=True)
    unexpected = sorted(tensors.keys() - expected.keys())
    sources = _sources(expected, tensors, f"{where} does not fit this {type(model).__name__}")
    missing = [name for name, value in expected.items() if id(value) not in sources]
    if missing or unexpected:
        problems = [f"lacks {_listed(missing)}"] * bool(missing)
        problems += [f"has {_listed(unexpected)}, which the model does not have"] * bool(unexpected)
        raise ConversionError(
            f"{where} does not fit this {type(model).__name__}: it {', and '.join(problems)}."
        )
    state: dict[str, Tensor] = {}
    created: dict[int, Tensor] = {}
    for name, value in expected.items():
        source = sources[id(value)]
        if source.shape != value.shape:
            raise ConversionError(
                f"{where} does not fit this {type(model).__name__}: {name} has the shape {tuple(source.shape)} there, "
                f"and {tuple(value.shape)} in the model."
            )
        if _layout(source) != _layout(value):
            raise ConversionError(
                f"{where} does not fit this {type(model).__name__}: {name} is {_layout(source)} there, and "
                f"{_layout(value)} in the model."
            )
        state[name] = created.setdefault(id(value), _like(source, value, upcast))
    return state


def _layout(tensor: Tensor) -> str:
    """Return the kind of a tensor that no cast to another dtype changes."""
    if tensor.is_quantized or tensor.is_complex():
        return dtype_name(tensor.dtype)
    return str(tensor.layout).removeprefix("torch.")


def _sources(
    expected: dict[str, Tensor], tensors: dict[str, Tensor], problem: str
) -> dict[int, Tensor]:
    """Return the tensor of the file for each tensor of the model, by its id."""
    sources: dict[int, Tensor] = {}
    first_names: dict[int, str] = {}
    for name in filter(tensors.__contains__, expected):
        key = id(expected[name])
        first = first_names.setdefault(key, name)
        if not _has_same_bytes(sources.setdefault(key, tensors[name]), tensors[name]):
            raise ConversionError(
                f"{problem}: {first} and {name} are one tensor in the model, and differ there. Tie them in the model "
                "that is saved, or remove the wrong one from the file."
            )
    return sources


def _has_same_bytes(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.dtype is not other.dtype or one.shape != other.shape or _layout(one) != "strided":
        return False
    if one.data_ptr() == other.data_ptr():
        return one.stride() == other.stride()
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _like(source: Tensor, value: Tensor, upcast: bool) -> Tensor:
    """Return a tensor of the file as the model's."""
    dtypes = {source.dtype, value.dtype}
    is_stored = not upcast and torch.float32 in dtypes and not SIXTEEN_BIT.isdisjoint(dtypes)
    if not is_stored:
        source = source.to(value.dtype)
    return nn.Parameter(source, value.requires_grad) if isinstance(value, nn.Parameter) else source


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _refuse_meta(model: nn.Module) -> None:
    on_meta = [name for name, tensor in named_tensors(model) if tensor.device.type == "meta"]
    if on_meta:
        raise ConversionError(
            f"{_listed(on_meta)} stayed on the meta device, because no state dict contains it. "
            f"{cures.LOAD_FUNCTION.text}"
        )


def _own_memory(model: nn.Module) -> None:
    """Copy tensors that are still in the file."""
    copied: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if type(tensor) in (nn.Parameter, Tensor):
            tensor.data = copied.setdefault(id(tensor), tensor.detach().clone())


def _stored_as_loaded(
    model: nn.Module, policy: Policy, region: autocast, methods: Sequence[str]
) -> nn.Module:
    """Return a converted model with its weights in their present dtypes."""
    planned = plan(model, policy)
    rows = []
    for weight in weights_of(model):
        is_low = weight.dtype in SIXTEEN_BIT
        row = StoredAs(
            weight.name,
            dtype_name(weight.dtype),
            weight.bytes,
            weight.bytes * (1 + is_low),
            "it is in the checkpoint in this dtype",
        )
        rows.append(row)
        for tensor in weight.tensors:
            own = tensor.detach().clone()
            if is_low:
                store(tensor, own, weight.name, "cpu")
            else:
                tensor.data = own
    if not any(row.bytes != row.bytes_before for row in rows):
        raise ConversionError(
            "load_converted got a checkpoint with float32 weights only, and no example. "
            f"{cures.LOAD_EXAMPLE.text}"
        )
    report = Conversion(
        type(model).__name__, policy.name, dtype_name(region.fast_dtype), "cpu", tuple(rows)
    )
    return finish(model, region, planned, report, methods)
