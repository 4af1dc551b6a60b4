"""Optimizers that the tests train with: PyTorch's and others, elementwise and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer


class Lion(Optimizer):
    """Somebody's optimizer, which treats each number by itself."""

    def __init__(self, params: Any, lr: float = 1e-3, wd: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["average"], group["betas"]
                p.data.mul_(1 - group["lr"] * group["wd"])
                update = average.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Normalized(Optimizer):
    """One that counts its steps, and then looks at all numbers of a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("step", torch.zeros(())).add_(1)
                    p.mul_(0.99).sub_(
                        p.grad / p.grad.norm(), alpha=group["lr"] / state["step"].item()
                    )


class Counting(Optimizer):
    """One that counts the calls of its step in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


Make = Callable[[Any], Optimizer]
optim = torch.optim
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD, all": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
    "SGD, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=torch.tensor(0.01), amsgrad=True, maximize=True, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "another's": Lion,
}
NOT_ELEMENTWISE: dict[str, Make] = {
    "Adafactor": optim.Adafactor,
    "Rprop": optim.Rprop,
    "one that normalizes": Normalized,
    "one that counts": Counting,
}


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": first}, {"params": last, "lr": 0.003}]
