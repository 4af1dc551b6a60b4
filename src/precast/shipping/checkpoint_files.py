"""Memory-mapped tensors of checkpoints: safetensors files and files of `torch.save`, also sharded ones.

Invariant: tensors are not copied. Their values are pages of the file, which the system reads when they are used and may
drop; writes of the program do not reach the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from precast.errors import ConversionError

__all__ = ["read_checkpoint"]

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
    """Return the tensors of a checkpoint by name: of one file, or of all files that an ``.index.json`` names.

    Raises:
        ConversionError: there is no such file, or it is damaged or in another format.
    """
    source = Path(path)
    return _sharded(source) if source.name.endswith(_INDEX) else _read_file(source)


def _sharded(index: Path) -> dict[str, Tensor]:
    _check_exists(index)
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(file_of.values()))
        unusable = [shard for shard in shards if not _is_shard(shard)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(
            f"{index} is not an index of a checkpoint: it has no 'weight_map' of names to files"
        ) from error
    if unusable:
        raise ConversionError(
            f"{index} is damaged: its 'weight_map' has {unusable[0]!r} where the name of a safetensors file or a file "
            "of torch.save in the same folder is expected"
        )
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in _read_file(index.parent / shard).items():
            if file_of.get(name, shard) == shard:
                tensors[name] = tensor
    return tensors


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and not name.endswith(_INDEX)


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise ConversionError(f"there is no checkpoint {path}")


def _read_file(path: Path) -> dict[str, Tensor]:
    _check_exists(path)
    with path.open("rb") as file:
        start = file.read(4)
    return _saved_by_torch(path) if start == _ZIP else _safetensors(path)


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
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RuntimeError,  # RecursionError too: deeply nested JSON
    ) as error:
        raise ConversionError(
            f"{path} is neither a file of torch.save in its zip format nor a whole safetensors file: {error}"
        ) from error
    return tensors


def _tensor(memory: mmap.mmap, start: int, entry: Any) -> Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not all(type(number) is int and number >= 0 for number in numbers):
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
    end, last = 0, ""
    for (begin, stop), name in sorted(
        (entry["data_offsets"], name) for name, entry in entries.items()
    ):
        if begin < end:
            raise ValueError(f"{last} and {name} overlap")
        end, last = stop, name
