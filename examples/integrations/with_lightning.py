"""Lightning's Trainer on precast: the policy, a scaler that says which gradients overflowed, and a monitor.

    python examples/integrations/with_lightning.py

Needs `pip install lightning`. One batch is broken on purpose: its step is skipped, and named.
"""

from __future__ import annotations

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import precast
from precast.integrations.lightning import Precast

BROKEN = 5


class Waves(LightningModule):
    """Learns a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a batch: one tensor of shape (batch, 1)."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.layers(x).float(), x.sin())
        self.log("loss", loss)
        return loss * float("inf") if index == BROKEN else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main() -> None:
    """Trains, and tells what the scaler and the monitor saw."""
    torch.manual_seed(0)
    model = Waves()
    policy = precast.Policy.load("default").replace(modules={"layers.2": "fp32"})
    scaler = precast.GradScaler("cpu", growth_interval=50)
    plugin = Precast("16-mixed", scaler=scaler, policy=policy)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[plugin],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x = torch.rand(3200, 1) * 6.28 - 3.14
    with precast.monitor(model) as monitor:
        trainer.fit(model, DataLoader(TensorDataset(x), batch_size=32))
    print(f"loss     {trainer.callback_metrics['loss']:.4f}")
    print(f"steps    {scaler.counters.steps}, skipped {scaler.counters.skipped}")
    for event in scaler.history:
        if event.skipped:
            print(f"step {event.step:3}  scale {float(event.scale):g}  {', '.join(event.names)}")
    print(f"first    {monitor.first.message if monitor.first else 'nothing overflowed'}")


if __name__ == "__main__":
    main()
