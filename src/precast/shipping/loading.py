"""`load` makes a converted model from a checkpoint on disk, and never has its float32 weights in memory of its own.

Invariants:

- parameters are on the meta device while the model is made, so no float32 weight is allocated for longer than its
  module takes to be made;
- float32 weights are pages of the file while the model runs on the example; what stays in float32 is copied from there
  at the end, so nothing of the model depends on the file;
- every parameter and every buffer of the state dict comes from the checkpoint, and all of the checkpoint is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from precast._torch import WithoutDraws
from precast.autocast_mode.region import autocast
from precast.errors import ConversionError
from precast.policy.module_names import named_tensors
from precast.policy.module_plan import plan
from precast.policy.policy import Policy, as_policy
from precast.shipping.checkpoint_files import read_checkpoint
from precast.shipping.conversion import Conversion, StoredAs
from precast.shipping.converted import convert, finish
from precast.shipping.function_calls import LOW
from precast.shipping.observed_weights import weights_of
from precast.shipping.stored_weights import StoredParameter, stored_buffer

__all__ = ["load"]

_TOLD = 5


def load(
    make: Callable[[], nn.Module] | nn.Module,
    checkpoint: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] = "default",
    dtype: torch.dtype | str | None = None,
    *,
    example: Any = None,
    methods: Sequence[str] = ("generate",),
) -> nn.Module:
    """Makes a converted model straight from a checkpoint on disk, without its float32 weights in memory.

    With an example, the checkpoint is that of the float32 model, and the result is what `convert` makes of it. While
    the example runs, the weights are pages of the file, which the system may drop again. Without one, the checkpoint
    is the state dict of a converted model: weights are stored in the dtypes that they have there.

    Args:
        make: a function that makes the model, such as its class, or a model whose parameters are on the meta device.
            The parameters that it gets while it is made are put on the meta device; buffers are not.
        checkpoint: a safetensors file, a file of `torch.save` with a state dict, the index (`.index.json`) of a sharded
            one, or a folder that has one of these under the names that transformers gives them.
        policy: as for `convert`.
        dtype: as for `convert`.
        example: as for `convert`; None for the checkpoint of a converted model.
        methods: as for `convert`.

    Returns:
        The converted model, on the CPU, in evaluation mode.

    Raises:
        ConversionError: the file is damaged or of another format, lacks a weight, or has one too many or of another
            shape; a weight would stay on the meta device; or the model cannot be converted.
        PolicyError: the policy cannot be read or carried out.
    """
    policy = as_policy(policy)
    tensors = read_checkpoint(checkpoint)
    model = _made(make).eval()
    state = _fitting(model, tensors, f"{os.fspath(checkpoint)}", upcast=example is not None)
    model.load_state_dict(state, strict=False, assign=True)
    _refuse_meta(model)
    del tensors, state
    if example is not None:
        convert(model, policy, dtype, example=example, in_place=True, methods=methods)
        _own_memory(model)
        return model
    region = autocast("cpu", dtype, policy=policy)
    return _stored_as_they_are(model, policy, region, methods)


def _made(make: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ConversionError(
            f"load(make) got {type(make).__name__}. It takes a function that makes the model, or a torch.nn.Module."
        )
    with _parameters_on_meta():
        model = make()
    if not isinstance(model, nn.Module):
        raise ConversionError(f"load(make): it returned {type(model).__name__}, and no model.")
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Puts parameters on the meta device as modules get them; those that are there already stay the same."""

    def moved(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)
    try:
        with WithoutDraws():
            yield
    finally:
        handle.remove()


def _fitting(
    model: nn.Module, tensors: dict[str, Tensor], where: str, *, upcast: bool
) -> dict[str, Tensor]:
    """The state that the model is to load: each tied weight is one tensor under all of its names.

    Raises:
        ConversionError: a name is missing or unexpected, or a shape differs.
    """
    expected = model.state_dict(keep_vars=True)
    unexpected = sorted(tensors.keys() - expected.keys())
    found = {id(expected[name]): tensors[name] for name in expected if name in tensors}
    missing = [name for name, value in expected.items() if id(value) not in found]
    if missing or unexpected:
        said = [f"lacks {_listed(missing)}"] * bool(missing)
        said += [f"has {_listed(unexpected)}, which the model has not"] * bool(unexpected)
        raise ConversionError(
            f"{where} does not fit this {type(model).__name__}: it {', and '.join(said)}."
        )
    state: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for name, value in expected.items():
        given = found[id(value)]
        if given.shape != value.shape:
            raise ConversionError(
                f"{where} does not fit this {type(model).__name__}: {name} has the shape {tuple(given.shape)} there, "
                f"and {tuple(value.shape)} in the model."
            )
        state[name] = made.setdefault(id(value), _like(given, value, upcast))
    return state


def _like(given: Tensor, value: Tensor, upcast: bool) -> Tensor:
    """A tensor of the file, as the model is to have it."""
    is_stored = given.dtype in LOW and value.dtype is torch.float32 and not upcast
    if not is_stored:
        given = given.to(value.dtype)
    return nn.Parameter(given, requires_grad=False) if isinstance(value, nn.Parameter) else given


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more


def _refuse_meta(model: nn.Module) -> None:
    left = [name for name, tensor in named_tensors(model) if tensor.device.type == "meta"]
    if left:
        raise ConversionError(
            f"{_listed(left)} stayed on the meta device, because no state dict has it. Give load the function that "
            "makes the model, which then makes such buffers with their numbers, and not a model on the meta device."
        )


def _own_memory(model: nn.Module) -> None:
    """Copies what still lies in the file."""
    copied: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if type(tensor) in (nn.Parameter, Tensor):
            tensor.data = copied.setdefault(id(tensor), tensor.detach().clone())


def _stored_as_they_are(
    model: nn.Module, policy: Policy, region: autocast, methods: Sequence[str]
) -> nn.Module:
    """A converted model with its weights in the dtypes that they have."""
    planned = plan(model, policy)
    rows = []
    for weight in weights_of(model):
        name, low = weight.name, weight.dtype in LOW
        why = "so it is in the checkpoint"
        size = weight.bytes
        dtype = str(weight.dtype).removeprefix("torch.")
        rows.append(StoredAs(name, dtype, size, 2 * size if low else size, why))
        for tensor in weight.tensors:
            tensor.data = tensor.detach().clone()
            if low:
                stored = _stored(tensor, name)
                tensor.__class__ = type(stored)
                vars(tensor).update(vars(stored))
    if not any(row.bytes != row.bytes_before for row in rows):
        raise ConversionError(
            "load got a checkpoint in which all weights are float32, and no example. Give an example of a call, which "
            "shows the dtypes in which the policy uses the weights: load(..., example=...)."
        )
    dtype = str(region.fast_dtype).removeprefix("torch.")
    report = Conversion(type(model).__name__, policy.name, dtype, "cpu", tuple(rows))
    return finish(model, region, planned, report, methods)


def _stored(tensor: Tensor, name: str) -> Any:
    if isinstance(tensor, nn.Parameter):
        return StoredParameter(tensor.data, name, "cpu")
    return stored_buffer(tensor.data, name, "cpu")
