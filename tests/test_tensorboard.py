"""What the scaler did, in TensorBoard's files."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast.errors import MissingExtraError
from precast.integrations.tensorboard import TensorBoard
from tests.scaling import make_parameter, sgd


def train(observer: Any) -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = precast.GradScaler("cpu", init_scale=8.0, min_scale=4.0, on_verdict="ignore")
    with precast.observe(observer):
        observer(precast.Note("mse_loss", "cpu", "not a step"))
        for gradient in (1.0, math.nan, math.nan):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.full_like(parameter, gradient)
            scaler.step(optimizer)
            scaler.update()


class Writer:
    def __init__(self) -> None:
        self.scalars: list[Any] = []
        self.texts: list[Any] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def close(self) -> None:
        self.closed = True


def test_a_writer_of_your_own_gets_scalars_and_text_and_stays_open() -> None:
    writer = Writer()
    with TensorBoard(writer, prefix="mine") as board:
        train(board)
    assert [s for s in writer.scalars if "seconds" not in s[0]] == [
        ("mine/scale", 8.0, 0),
        ("mine/optimizer 0/skipped", 0.0, 0),
        ("mine/scale", 8.0, 1),
        ("mine/optimizer 0/skipped", 1.0, 1),
        ("mine/scale", 4.0, 2),
        ("mine/optimizer 0/skipped", 1.0, 2),
    ]
    assert writer.texts[0] == ("mine/optimizer 0/skipped", "not finite: group 0, parameter 0", 1)
    assert writer.texts[-1][0] == "mine/verdict"
    assert "at its floor" in writer.texts[-1][1]
    assert not writer.closed


def test_a_folder_gets_a_file_that_tensorboard_reads(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not here"
    )
    with TensorBoard(tmp_path) as board:
        train(board)
    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in read.Scalars("scaler/scale")] == [8.0, 8.0, 4.0]
    assert "scaler/verdict/text_summary" in read.Tags()["tensors"]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"precast\[tensorboard\]"):
        TensorBoard(tmp_path)
    TensorBoard(Writer())
