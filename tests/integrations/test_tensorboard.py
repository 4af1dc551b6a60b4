"""What the scaler did, in TensorBoard's files."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast.diagnostics.numerics.monitoring import Monitor
from precast.errors import MissingExtraError
from precast.integrations.tensorboard import TensorBoard
from tests.support.scaling import make_parameter, sgd


def train(observer: Any) -> None:
    parameter = make_parameter()
    optimizer = sgd(parameter)
    scaler = precast.GradScaler("cpu", 8.0, max_consecutive_skips=2, on_diagnosis="ignore")
    with precast.observe(observer):
        observer(precast.events.OperationNote("mse_loss", "cpu", "not a step"))
        for gradient in (1.0, math.nan, math.nan):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.full_like(parameter, gradient)
            scaler.step(optimizer)
            scaler.update()


class Writer:
    def __init__(self) -> None:
        self.histograms: dict[str, Any] = {}
        self.scalars: list[Any] = []
        self.texts: list[Any] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def add_histogram_raw(self, name: str, **histogram: Any) -> None:
        self.histograms[name] = histogram

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
    assert writer.texts[-1][0] == "mine/diagnosis"
    assert "max_consecutive_skips" in writer.texts[-1][1]
    assert not writer.closed


def test_a_folder_gets_a_file_that_tensorboard_reads(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not here"
    )
    with TensorBoard(tmp_path) as board:
        train(board)
    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in read.Scalars("scaler/scale")] == [8.0, 8.0, 4.0]
    assert "scaler/diagnosis/text_summary" in read.Tags()["tensors"]


def watch(observer: Any) -> Monitor:
    """Two steps of a network whose output is powers of two, and zeros."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    model[0].weight.data = torch.diag(torch.tensor([0.75, 3.0, 0.0, 3.5]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with precast.monitor(model, every=1) as monitor, precast.observe(observer):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        monitor.end_step()
    return monitor


def test_a_monitors_counts_are_scalars_and_histograms() -> None:
    writer = Writer()
    watch(TensorBoard(writer))
    scalars = {name: value for name, value, step in writer.scalars if step == 1}
    assert scalars["health/maximum/output 0"] == 3.5
    assert scalars["health/zero/output 0"] == 0.25
    assert "health/lost/output 0" not in scalars, "float32: not known"
    assert {step for _, _, step in writer.scalars} == {0, 1}
    found = writer.histograms["health/exponents/output 0"]
    assert found["bucket_limits"] == [0.0, 1.0, 2.0]
    assert found["bucket_counts"] == [2, 0, 4]
    assert (found["num"], found["sum"], found["global_step"]) == (6, 2.0, 1)


def test_tensorboard_reads_a_monitors_histograms(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not here"
    )
    with TensorBoard(tmp_path) as board:
        watch(board)
    read = accumulators.EventAccumulator(str(tmp_path), {"histograms": 0}).Reload()
    [first, second] = read.Histograms("health/exponents/output 0")
    assert (first.step, second.step) == (0, 1)
    assert second.histogram_value.bucket == [2, 0, 4]
    assert [event.value for event in read.Scalars("health/rms/parameter 0.weight")]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install tensorboard"):
        TensorBoard(tmp_path)
    TensorBoard(Writer())
