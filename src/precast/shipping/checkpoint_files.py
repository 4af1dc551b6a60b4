"""Memory-mapped tensors of checkpoints: safetensors files and files of `torch.save`, also sharded ones.

Invariants:

- tensors are not copied: their values are pages of the file, which the system reads when they are used and may drop;
- a file in a wrong format, or a truncated one, raises an error before any tensor is returned.
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

_NAMES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The file names that a model's folder is searched for."""
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
_LONGEST_HEADER: Final = 100_000_000
"""The limit of the format."""
_ZIP: Final = b"PK\x03\x04"


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name: a file, the index of a sharded one, or a folder with one of these.

    Raises:
        ConversionError: there is no such file, or it is damaged or in another format.
    """
    source = _file(Path(path))
    if source.name.endswith(".index.json"):
        return _sharded(source)
    with source.open("rb") as file:
        start = file.read(4)
    return _saved_by_torch(source) if start == _ZIP else _safetensors(source)


def _file(path: Path) -> Path:
    if path.is_dir():
        for name in _NAMES:
            if (path / name).exists():
                return path / name
        raise ConversionError(f"{path} has none of the files {', '.join(_NAMES)}. Name the file.")
    if not path.exists():
        raise ConversionError(f"there is no checkpoint {path}")
    return path


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
        file = index.parent / shard
        if not file.is_file():
            raise ConversionError(f"{index} names {shard}, which is not in the same folder")
        tensors |= read_checkpoint(file)
    missing = sorted(file_of.keys() - tensors.keys())
    if missing:
        raise ConversionError(
            f"{index} says that {missing[0]} is in {file_of[missing[0]]}; it is not"
        )
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
    tensors = {k: v for k, v in saved.items() if isinstance(v, Tensor)} if _is_named(saved) else {}
    if not tensors:
        raise ConversionError(
            f"{path} has no state dict, a mapping of names to tensors. Save model.state_dict()."
        )
    return tensors


def _is_named(saved: Any) -> bool:
    return isinstance(saved, Mapping) and all(isinstance(key, str) for key in saved)


def _safetensors(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        if length > _LONGEST_HEADER:
            raise ConversionError(
                f"{path} is neither a safetensors file nor a file of torch.save in its zip format"
            )
        if 8 + length > size:
            raise ConversionError(f"{path} is truncated: it ends in its header")
        try:
            header = json.loads(file.read(length))
            assert isinstance(header, dict)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            places = {name: _place(entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ConversionError(f"{path} has no header of a safetensors file") from error
        data = size - 8 - length
        for name, (_, _, begin, end) in places.items():
            if not 0 <= begin <= end <= data:
                raise ConversionError(
                    f"{path} is truncated: {name} ends at byte {8 + length + end:,} of {size:,}"
                )
        # Copy-on-write: the program's writes do not reach the file, which is closed when all tensors are freed.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(memory, 8 + length, *place) for name, place in places.items()}


_Place = tuple[torch.dtype, tuple[int, ...], int, int]
"""Dtype, shape, and the first and last byte after the header."""


def _place(entry: Any) -> _Place:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("the size does not fit the shape")
    return dtype, shape, begin, end


def _tensor(memory: mmap.mmap, start: int, *place: Any) -> Tensor:
    dtype, shape, begin, end = place
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    if (start + begin) % dtype.itemsize:  # kernels need aligned values
        return (
            _tensor_at(memory, start + begin, end - begin, torch.uint8)
            .clone()
            .view(dtype)
            .view(shape)
        )
    return _tensor_at(memory, start + begin, (end - begin) // dtype.itemsize, dtype).view(shape)


def _tensor_at(memory: mmap.mmap, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
