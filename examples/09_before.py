"""A program as it was written for PyTorch 1.12; `09_fix.py` runs it and has it fixed."""

# mypy: ignore-errors
# Programs of that time have no types.

import torch
from torch import nn
from torch.cpu import amp as cpu_amp
from torch.cuda.amp import GradScaler, autocast, custom_bwd, custom_fwd


class Mixed(torch.autograd.Function):
    """x @ w, with gradients by hand."""

    @staticmethod
    @custom_fwd
    def forward(ctx, x, w):
        """(n, a), (a, b) -> (n, b)."""
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        """The gradients of x and w."""
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


def train(steps=20):
    """The loss of each step, on a GPU if there is one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    mixing = nn.Parameter(torch.eye(4, device=device))
    optimizer = torch.optim.Adam([mixing, *model.parameters()], lr=1e-2)
    scaler = GradScaler(enabled=device == "cuda")
    x = torch.randn(64, 4, device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        mixed = Mixed.apply(x, mixing)
        with autocast(device == "cuda"), cpu_amp.autocast(device == "cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(mixed), x[:, :1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(train()[-1])
