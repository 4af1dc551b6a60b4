"""Arguments with which each operation of PyTorch's autocast tables can be called.

Invariants:
    - `samples(name)` takes the dispatcher's name (`aten::softmax.int`, no suffix for the default
      overload) and gives at least one sample for every row of all its tables; the arguments are
      those of `torch.ops.aten.<name>.<overload>`.
    - All floating tensors are float32, on the CPU and without `requires_grad`; the values are
      fresh for each seed and the same for the same seed.
    - `NOT_ON_CPU` names the operations that no CPU tensor can reach, with the reason.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any, NamedTuple

import torch

from precast import _torch
from tests.support.op_samples import math as _math
from tests.support.op_samples import nn as _nn
from tests.support.op_samples import promoted as _promoted
from tests.support.op_samples.draw import Draw

__all__ = ["NOT_ON_CPU", "Sample", "call", "named", "promoted", "samples"]

NOT_ON_CPU = {
    "aten::_cudnn_rnn": "cuDNN only",
    "aten::_mps_convolution": "Metal only",
    "aten::_scaled_dot_product_flash_attention": "CUDA kernel; the CPU has an operation of its own",
    "aten::_thnn_fused_gru_cell": "CUDA kernel",
    "aten::_thnn_fused_lstm_cell": "CUDA kernel",
    "aten::cudnn_convolution": "cuDNN only",
    "aten::cudnn_convolution_transpose": "cuDNN only",
    "aten::miopen_rnn": "MIOpen only",
}


_TABLES = _math.BUILDERS | _nn.BUILDERS
_PROMOTED = _promoted.BUILDERS


class Sample(NamedTuple):
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012


def samples(name: str, seed: int = 0) -> list[Sample]:
    """Fresh arguments for an operation.

    Raises:
        KeyError: there are none for that name: write some in this file.
    """
    build = (_TABLES | _PROMOTED)[name.removeprefix("aten::")]
    return [_sample(item) for item in build(Draw(seed * 100_003 + zlib.crc32(name.encode())))]


def named() -> frozenset[str]:
    """The operations of PyTorch's tables that there are samples for, as far as the installed PyTorch has them."""
    names = (f"aten::{name}" for name in _TABLES)
    return frozenset(name for name in names if _torch.find_overload(name) is not None)


def promoted() -> frozenset[str]:
    """The operations outside PyTorch's tables that there are samples for, some with `out=`."""
    return frozenset(f"aten::{name}" for name in _PROMOTED)


def call(name: str, sample: Sample) -> Any:
    """Call an operation by the dispatcher's name.

    What an operation warns of (that it is old, that it is slow) is none of the questions here. It reaches Python since
    2.15; before, it was printed.
    """
    operation, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, operation)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"(?s).*Triggered internally at ", category=UserWarning
        )
        return getattr(packet, overload or "default")(*sample.args, **sample.kwargs)


def _sample(item: Any) -> Sample:
    """A sample from a tuple of arguments, the last of which may be a dict of keywords."""
    if isinstance(item[-1], dict):
        return Sample(item[:-1], item[-1])
    return Sample(item)
