"""Batch normalization has a row, although PyTorch has a decomposition of it in Python."""

from __future__ import annotations

import torch
from torch import nn

import precast


def test_batch_norm_has_a_row():
    model = nn.BatchNorm2d(4)
    with precast.trace(model) as seen, precast.autocast("cpu"):
        model(torch.randn(2, 4, 3, 3))
    assert "native_batch_norm" in [row.op for row in seen.rows]
