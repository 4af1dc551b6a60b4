"""Ignite with precast's update function, scaler and metrics: PyTorch's bits, checkpoints, loggers.

Scenes of Ignite's own tests that are played here, in tests of our own (its `test_create_supervised.py` and
`test_checkpoint.py`): each way of calling a model and of transforming its output, accumulation, a loss that is told
unscaled and whole, predictions in the lower precision, what is refused, a scaler in a checkpoint. Ignite's mixed
precision is for CUDA alone, so the bits are those of the same loop written by hand with `torch.amp`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import precast
from precast.integrations.tensorboard import TensorBoard
from tests.clients.outcome import Outcome, differences, outcome
from tests.integrations.test_tensorboard import Writer

ignite = pytest.importorskip("ignite", reason="`make test-clients` runs these tests")

from ignite.engine import Engine, Events  # noqa: E402
from ignite.engine import supervised_training_step_amp as ignites_amp_step  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402

from precast.integrations.ignite import ScalerMetrics, supervised_training_step  # noqa: E402

BATCHES, BROKEN = 6, 2


def batches(broken: int = -1) -> list[tuple[Tensor, Tensor]]:
    sample = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 8, generator=sample) for _ in range(BATCHES)]
    return [
        (x, x.sum(1, keepdim=True) * (math.inf if n == broken else 1.0)) for n, x in enumerate(made)
    ]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_ignite(
    dtype: torch.dtype, steps: int, clip: float | None, data: list[tuple[Tensor, Tensor]]
) -> Outcome:
    model = net()
    scaler = precast.GradScaler("cpu", 2.0**10) if dtype is torch.float16 else None
    region = precast.autocast("cpu", dtype, policy="torch")
    trainer = Engine(
        supervised_training_step(
            model,
            adam(model),
            F.mse_loss,
            region,
            scaler=scaler,
            device="cpu",
            gradient_accumulation_steps=steps,
            max_norm=clip,
        )
    )
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: losses.append(e.state.output))
    trainer.run(data, max_epochs=2)
    return outcome(model, losses, scale=torch.tensor(scaler.get_scale() if scaler else 1.0))


def by_hand(
    dtype: torch.dtype, steps: int, clip: float | None, data: list[tuple[Tensor, Tensor]]
) -> Outcome:
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=dtype is torch.float16)
    losses = []
    for number, (x, y) in enumerate(data * 2):
        if number % steps == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.mse_loss(model(x), y) / steps
        scaler.scale(loss).backward()
        if number % steps == steps - 1:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        losses.append((loss * steps).item())
    return outcome(model, losses, scale=torch.tensor(scaler.get_scale()))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_update_has_the_bits_of_torchs_own_loop(
    dtype: torch.dtype, steps: int, clip: float | None
) -> None:
    data = batches(BROKEN if dtype is torch.float16 else -1)
    ours, theirs = (run(dtype, steps, clip, data) for run in (by_ignite, by_hand))
    broken = {name for name in theirs if name.startswith("loss") and not theirs[name].isfinite()}
    assert set(differences(ours, theirs)) <= broken
    assert float(theirs["output scale"]) == (2.0**8 if dtype is torch.float16 else 1.0)


def test_the_model_may_be_called_and_its_output_transformed_in_any_way() -> None:
    model = net()
    records: list[Any] = []

    def called(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(x), x]

    update = supervised_training_step(
        model,
        adam(model),
        F.mse_loss,
        precast.autocast("cpu"),
        prepare_batch=lambda batch, device, non_blocking: (batch["x"], batch["y"]),
        model_fn=called,
        model_transform=lambda output: output[0],
        output_transform=lambda x, y, y_pred, loss: records.append((y_pred.dtype, loss.dtype)) or 7,
    )
    state = Engine(update).run([{"x": x, "y": y} for x, y in batches()])
    assert state.output == 7
    assert set(records) == {(torch.bfloat16, torch.float32)}


def test_ignites_own_update_takes_precasts_scaler() -> None:
    model, scaler = net(), precast.GradScaler("cpu", 2.0**10)
    trainer = Engine(ignites_amp_step(model, adam(model), F.mse_loss, "cpu", scaler=scaler))
    with pytest.warns(UserWarning, match="CUDA is not available"):
        trainer.run(batches(BROKEN))
    assert (scaler.counters.steps, scaler.counters.skipped) == (BATCHES, 1)


def test_a_checkpoint_holds_the_scaler(tmp_path: Path) -> None:
    scaler = precast.GradScaler("cpu", 2.0**10, min_scale=4.0)
    model = net()
    region = precast.autocast("cpu", torch.float16)
    trainer = Engine(
        supervised_training_step(model, adam(model), F.mse_loss, region, scaler=scaler)
    )
    saved = {"model": model, "scaler": scaler}
    handler = Checkpoint(saved, DiskSaver(str(tmp_path), require_empty=False), filename_prefix="x")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    trainer.run(batches(BROKEN))
    again = {"model": net(), "scaler": precast.GradScaler("cpu")}
    Checkpoint.load_objects(again, checkpoint=str(tmp_path / str(handler.last_checkpoint)))
    assert again["scaler"].state_dict() == scaler.state_dict()
    assert again["scaler"].get_scale() == 2.0**9
    theirs = torch.amp.GradScaler("cpu")
    Checkpoint.load_objects({"scaler": theirs}, checkpoint=torch.load(handler.last_checkpoint))
    assert theirs.get_scale() == 2.0**9


def test_metrics_events_and_a_monitor_tell_what_was_skipped() -> None:
    model, scaler, writer = net(), precast.GradScaler("cpu", 2.0**10), Writer()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1e-2)
    region = precast.autocast("cpu", torch.float16)
    trainer = Engine(supervised_training_step(model, optimizer, F.mse_loss, region, scaler=scaler))
    ScalerMetrics(scaler).attach(trainer)
    ScalerMetrics(scaler, "late/").attach(trainer, Events.ITERATION_COMPLETED(every=BATCHES))
    reports: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: reports.append(dict(engine.state.metrics))
    )
    with precast.monitor(model) as monitor, precast.observe(TensorBoard(writer)):
        trainer.run(batches(BROKEN))
    assert [entry["loss_scale"] for entry in reports] == [1024.0] * 2 + [512.0] * 4
    assert [entry["skipped_steps"] for entry in reports] == [0] * 2 + [1] * 4
    assert [entry.get("late/skipped_steps") for entry in reports] == [None] * 5 + [1]
    assert monitor.first.step == BROKEN
    assert any("0.weight" in text for _, text, _ in writer.texts)


def test_what_cannot_be_is_refused() -> None:
    model, region = net(), precast.autocast("cpu")
    with pytest.raises(ValueError, match="1 or more; got 0"):
        supervised_training_step(
            model, adam(model), F.mse_loss, region, gradient_accumulation_steps=0
        )
    with pytest.raises(precast.errors.ScalerError, match=r"precast\.GradScaler"):
        supervised_training_step(model, adam(model), F.mse_loss, region, scaler=True)  # type: ignore[arg-type]
    with pytest.raises(precast.errors.ScalerError, match=r"precast\.GradScaler"):
        ScalerMetrics(torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
