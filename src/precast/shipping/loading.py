"""`load_converted`: a converted model from a checkpoint on disk, without its float32 weights in memory.

Invariants:

- parameters are on the meta device while the model is created, so float32 weights are allocated only during the
  constructor of their module;
- float32 weights are pages of the file while the model runs on the example, which the system may drop; weights that
  stay in float32 are copied at the end, so the model does not depend on the file. Writes do not reach the file;
- every parameter and buffer of the state dict comes from the checkpoint, and the whole checkpoint is used.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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
from precast.shipping.conversion import Conversion, StoredAs
from precast.shipping.converted import convert, finish, store
from precast.shipping.observed_weights import weights_of
from precast.shipping.stored_weights import StoredWeight

__all__ = ["load_converted", "read_checkpoint"]

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
    on_meta = [name for name, tensor in named_tensors(model) if tensor.device.type == "meta"]
    if on_meta:
        raise ConversionError(
            f"{_listed(on_meta)} stayed on the meta device, because no state dict contains it. "
            f"{cures.LOAD_FUNCTION.text}"
        )
    del tensors, state
    if example is not None:
        convert(model, policy, dtype, example=example, in_place=True, methods=methods)
        _own_memory(model)
        return model
    region = autocast("cpu", dtype, policy=policy)
    return _stored_as_loaded(model, policy, region, methods)


def _own_memory(model: nn.Module) -> None:
    """Copy tensors that are still in the file."""
    for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        if not isinstance(tensor, StoredWeight):
            tensor.data = tensor.detach().clone()


def _created(make: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ConversionError(
            f"load_converted(make) got {type(make).__name__}. Pass a function that creates the model, or a "
            "torch.nn.Module."
        )
    handle = register_module_parameter_registration_hook(_on_meta)
    try:
        with SkipMetaRandom():
            model = make()
    except Exception as error:
        raise ConversionError(
            f"load_converted(make): make() raised {type(error).__name__}: {error}. While it runs, the model's "
            "parameters are on the meta device, without values."
        ) from error
    finally:
        handle.remove()
    if not isinstance(model, nn.Module):
        raise ConversionError(
            f"load_converted(make): it returned {type(model).__name__}, not a model."
        )
    return model


def _on_meta(_module: nn.Module, _name: str, parameter: Any) -> Any:
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _fitting(
    model: nn.Module, tensors: dict[str, Tensor], where: str, *, upcast: bool
) -> dict[str, Tensor]:
    """Return the state for the model to load: each tied weight is one tensor under all of its names."""
    expected = model.state_dict(keep_vars=True)
    unexpected = sorted(tensors.keys() - expected.keys())
    problem = f"{where} does not fit this {type(model).__name__}: "
    sources = _sources(expected, tensors, problem)
    missing = [name for name, value in expected.items() if id(value) not in sources]
    if missing or unexpected:
        problems = [f"lacks {_listed(missing)}"] * bool(missing)
        problems += [f"has {_listed(unexpected)}, which the model does not have"] * bool(unexpected)
        raise ConversionError(f"{problem}it {', and '.join(problems)}.")
    state: dict[str, Tensor] = {}
    created: dict[int, Tensor] = {}
    for name, value in expected.items():
        source = sources[id(value)]
        for verb, kind in (("has the shape", _shape), ("is", _layout)):
            if kind(source) != kind(value):
                raise ConversionError(
                    f"{problem}{name} {verb} {kind(source)} there, and {kind(value)} in the model."
                )
        state[name] = created.setdefault(id(value), _like(source, value, upcast))
    return state


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _layout(tensor: Tensor) -> str:
    """Return the kind of a tensor that no cast to another dtype changes."""
    is_other = tensor.is_quantized or tensor.is_complex()
    return dtype_name(tensor.dtype if is_other else tensor.layout)


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
                f"{problem}{first} and {name} are one tensor in the model, and differ there. Tie them in the model "
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
    dtypes = {source.dtype, value.dtype}
    is_stored = not upcast and torch.float32 in dtypes and not SIXTEEN_BIT.isdisjoint(dtypes)
    if not is_stored:
        source = source.to(value.dtype)
    return nn.Parameter(source, value.requires_grad) if isinstance(value, nn.Parameter) else source


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _stored_as_loaded(
    model: nn.Module, policy: Policy, region: autocast, methods: Sequence[str]
) -> nn.Module:
    """Return a converted model with its weights in their present dtypes."""
    planned = plan(model, policy)
    rows = []
    for weight in weights_of(model):
        is_low, size, name = weight.dtype in SIXTEEN_BIT, weight.bytes, dtype_name(weight.dtype)
        why = "it is in the checkpoint in this dtype"
        rows.append(StoredAs(weight.name, name, size, size * (1 + is_low), why))
        for tensor in weight.tensors if is_low else ():
            store(tensor, tensor.detach().clone(), weight.name, "cpu")
    _own_memory(model)
    if all(row.bytes == row.bytes_before for row in rows):
        raise ConversionError(
            "load_converted got a checkpoint with float32 weights only, and no example. "
            f"{cures.LOAD_EXAMPLE.text}"
        )
    report = Conversion(
        type(model).__name__, policy.name, dtype_name(region.fast_dtype), "cpu", tuple(rows)
    )
    return finish(model, region, planned, report, methods)


_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_ZIP: Final = b"PK\x03\x04"
_INDEX: Final = ".index.json"


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name: of one file, or of all files that an ``.index.json`` names."""
    source = Path(path)
    if not source.is_file():
        raise ConversionError(f"there is no checkpoint {source}")
    if source.name.endswith(_INDEX):
        return _sharded(source)
    with source.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    return _saved_by_torch(source) if is_zip else _safetensors(source)


def _sharded(index: Path) -> dict[str, Tensor]:
    text = index.read_bytes()
    try:
        file_of: dict[str, Any] = json.loads(text)["weight_map"]
        shards = sorted(set(file_of.values()), key=str)
    except Exception as error:
        raise ConversionError(
            f"{index} is not an index of a checkpoint: it has no 'weight_map' of names to files"
        ) from error
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if type(shard) is not str or Path(shard).name != shard or shard.endswith(_INDEX):
            raise ConversionError(
                f"{index} is damaged: its 'weight_map' has {shard!r} where the name of a safetensors file or a file of "
                "torch.save in the same folder is expected"
            )
        own = read_checkpoint(index.parent / shard)
        tensors |= {name: t for name, t in own.items() if file_of.get(name, shard) == shard}
    return tensors


def _saved_by_torch(path: Path) -> dict[str, Tensor]:
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ConversionError(
            f"{path} cannot be read as a file of torch.save that contains only tensors: {first}"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    named = saved.items() if isinstance(saved, Mapping) else ()
    tensors = {name: v for name, v in named if isinstance(v, Tensor)}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise ConversionError(
            f"{path} has no state dict, a mapping of names to tensors. Save model.state_dict()."
        )
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Read the format of safetensors: the header's length in 8 bytes, the header as JSON, and the values."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            # Copy-on-write; the file is closed when all tensors are freed.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(memory, 8 + length, entry) for name, entry in entries.items()}
        _check_disjoint(entries)
    except Exception as error:
        raise ConversionError(
            f"{path} is neither a file of torch.save in its zip format nor a whole safetensors file: {error}"
        ) from error
    return tensors


def _tensor(memory: mmap.mmap, start: int, entry: Any) -> Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in [*shape, begin, end]):
        raise ValueError(f"the shape {shape} at {begin}:{end} has no size")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} in {entry['dtype']} has {end - begin} bytes")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    offset = start + begin
    values = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=offset)
    if offset % dtype.itemsize:  # kernels need aligned values
        values = values.clone()
    return values.view(dtype).view(shape)


def _check_disjoint(entries: Mapping[str, Any]) -> None:
    last, end = "", 0
    for (begin, stop), name in sorted((e["data_offsets"], name) for name, e in entries.items()):
        if begin < end:
            raise ValueError(f"{last} and {name} overlap")
        last, end = name, stop
