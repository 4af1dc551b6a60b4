"""An Ignite engine on precast: an update in a region, the scaler's figures as metrics, all of it in a checkpoint.

    python examples/integrations/with_ignite.py

Needs `pip install pytorch-ignite`. One batch is broken on purpose: its step is skipped, and named.
"""

from __future__ import annotations

import tempfile

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn

import precast
from precast.integrations.ignite import ScalerMetrics, supervised_training_step

BROKEN = 50


def main() -> None:
    """Trains a sine, and tells what was seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.02)
    scaler = precast.GradScaler("cpu")
    step = supervised_training_step(
        model,
        optimizer,
        nn.functional.mse_loss,
        precast.autocast("cpu", torch.float16, policy="default"),
        scaler=scaler,
        max_norm=1.0,
    )
    trainer = Engine(step)
    ScalerMetrics(scaler).attach(trainer, Events.ITERATION_COMPLETED(every=25))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=25), show)
    x = torch.rand(100, 32, 1) * 6.28 - 3.14
    y = x.sin()
    y[BROKEN - 1] = float("inf")
    with tempfile.TemporaryDirectory() as folder, precast.observe(name_the_broken):
        checkpoint = Checkpoint({"model": model, "scaler": scaler}, DiskSaver(folder))
        trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
        trainer.run(zip(x, y, strict=True), epoch_length=100)
        print(f"saved    {checkpoint.last_checkpoint is not None}")


def show(engine: Engine) -> None:
    """Prints the loss and the metrics of the scaler."""
    metrics = engine.state.metrics
    print(
        f"step {engine.state.iteration:3}  loss {engine.state.output:.4f}  "
        f"scale {metrics['loss_scale']:g}  skipped {metrics['skipped_steps']}"
    )


def name_the_broken(event: object) -> None:
    """Prints which gradients were not finite."""
    if isinstance(event, precast.events.StepEvent) and event.skipped:
        print(f"skipped  {', '.join(event.names)}")


if __name__ == "__main__":
    main()
