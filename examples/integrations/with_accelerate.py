"""A loop of Accelerate's on precast: a policy with a rule for one module, the scaler, and a monitor.

    python examples/integrations/with_accelerate.py

Needs `pip install accelerate`. On a GPU it trains in float16 under a scaler, elsewhere in bfloat16, without.
The monitor says how much of the gradients would be lost in formats of 8 bits.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import precast
from precast.integrations.accelerate import use

EVERY = 50


def main() -> None:
    """Trains a sine, and tells what was seen."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "bf16")
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.rand(3200, 1) * 6.28 - 3.14
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    policy = precast.Policy.load("default").replace(modules={"2": "fp32"})
    with use(accelerator, model, policy=policy, every=EVERY) as used:
        prepared, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(TensorDataset(x), batch_size=32)
        )
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(prepared(batch), batch.sin())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
        print(f"loss     {loss.item():.4f}")
        print(f"scaler   {used.scaler.counters if used.scaler else 'none in bfloat16'}")
        [monitor] = used.monitors
        for entry in monitor.to_dict()["modules"]:
            if entry["kind"] == "gradient":
                what_if = entry["what_if"]["float8_e5m2"]
                print(f"layer {entry['name'] or 'all'}: {what_if['underflow']:.0%} lost", end=", ")
                print(f"{what_if['with_best']['underflow']:.0%} with the best scale")


if __name__ == "__main__":
    main()
