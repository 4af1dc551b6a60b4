"""Memory-mapped tensors of checkpoints: safetensors files and files of `torch.save`, also sharded ones.

Invariant: tensors are not copied. Their values are pages of the file, which the system reads when they are used and may
drop; writes of the program do not reach the file.
"""

from __future__ import annotations

import json
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


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name: of one file, or of all files that an ``.index.json`` names.

    Raises:
        ConversionError: there is no such file, or it is damaged or in another format.
    """
    source = Path(path)
    if not source.is_file():
        raise ConversionError(f"there is no checkpoint {source}")
    if source.name.endswith(".index.json"):
        return _sharded(source)
    with source.open("rb") as file:
        start = file.read(4)
    return _saved_by_torch(source) if start == _ZIP else _safetensors(source)


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{index} is not an index of a checkpoint: it has no 'weight_map' of names to files"
        ) from error
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read_checkpoint(index.parent / shard)
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
    if not tensors:
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
        return {name: _tensor(memory, 8 + length, entry) for name, entry in entries.items()}
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RuntimeError,
    ) as error:
        raise ConversionError(
            f"{path} is neither a file of torch.save in its zip format nor a whole safetensors file: {error}"
        ) from error


def _tensor(memory: mmap.mmap, start: int, entry: Any) -> Tensor:
    dtype, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
    if begin == end:
        return torch.empty(entry["shape"], dtype=dtype)
    offset = start + begin
    values = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=offset)
    if offset % dtype.itemsize:  # kernels need aligned values
        values = values.clone()
    return values.view(dtype).view(entry["shape"])
