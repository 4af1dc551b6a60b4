"""Reads the tensors of a checkpoint where they lie on disk: safetensors files and those of `torch.save`, in shards too.

Invariants:

- no tensor is copied: its numbers are pages of the file, which the system reads when they are used and may drop again;
- a file that is not what it says, or not all there, is an error before any tensor is given out.
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
"""What a folder of a model is searched for."""
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
"""What the format allows."""
_ZIP: Final = b"PK\x03\x04"


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Name -> tensor of a checkpoint: a file, the index of a sharded one, or a folder with one of these.

    Raises:
        ConversionError: there is no such file, or it is damaged, or of another format.
    """
    found = _file(Path(path))
    if found.name.endswith(".index.json"):
        return _sharded(found)
    with found.open("rb") as file:
        start = file.read(4)
    if start == _ZIP:
        return _saved_by_torch(found)
    return _safetensors(found)


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
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(placed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{index} is no index of a checkpoint: it has no 'weight_map' of names to files"
        ) from error
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        file = index.parent / shard
        if not file.is_file():
            raise ConversionError(f"{index} names {shard}, which is not beside it")
        tensors |= read_checkpoint(file)
    missing = sorted(placed.keys() - tensors.keys())
    if missing:
        raise ConversionError(
            f"{index} says that {missing[0]} is in {placed[missing[0]]}; it is not"
        )
    return tensors


def _saved_by_torch(path: Path) -> dict[str, Tensor]:
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ConversionError(
            f"{path} cannot be read as a file of torch.save with tensors alone: {first}"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    tensors = {k: v for k, v in saved.items() if isinstance(v, Tensor)} if _is_named(saved) else {}
    if not tensors:
        raise ConversionError(
            f"{path} holds no state dict, of names to tensors. Save model.state_dict()."
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
                f"{path} is neither a safetensors file nor one of torch.save in its present format"
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
        # Copied on write, so that what the program writes stays its own; the file is closed when all tensors are gone.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _tensor(memory, 8 + length, *place) for name, place in places.items()}


_Place = tuple[torch.dtype, tuple[int, ...], int, int]
"""Dtype, shape, and where the numbers begin and end after the header."""


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
    if (start + begin) % dtype.itemsize:  # kernels want numbers at multiples of their size
        return (
            _tensor_at(memory, start + begin, end - begin, torch.uint8)
            .clone()
            .view(dtype)
            .view(shape)
        )
    return _tensor_at(memory, start + begin, (end - begin) // dtype.itemsize, dtype).view(shape)


def _tensor_at(memory: mmap.mmap, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
