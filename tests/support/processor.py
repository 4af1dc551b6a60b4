"""Abilities of the processor that tests run on."""

from __future__ import annotations

import functools

import torch
from torch import nn

__all__ = ["has_bfloat16", "runs_lstm_in_bfloat16"]


def has_bfloat16() -> bool:
    """Return False where the processor has no instructions for bfloat16, which is then slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def runs_lstm_in_bfloat16() -> bool:
    """Return False where oneDNN has no kernel for an LSTM in bfloat16, so that a region of PyTorch raises (2.13)."""
    try:
        with torch.random.fork_rng(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(8, 8)(torch.ones(2, 1, 8))
    except RuntimeError:
        return False
    return True
