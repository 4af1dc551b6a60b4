"""Whole training programs as PyTorch's pages teach them: no rule about the scaler or numbers finds anything in them."""

from __future__ import annotations

import textwrap

import pytest

from precast_lint.checking.engine import check
from precast_lint.parsing.text import decode
from precast_lint.selecting.registry import expand
from precast_lint.selecting.settings import LintSettings

START = """
import torch
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

PROGRAMS = {
    "plain": """
scaler = GradScaler("cuda", enabled=use_amp)
for epoch in range(epochs):
    for x, y in batches:
        with autocast("cuda", dtype=torch.float16, enabled=use_amp):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
state = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "scaler": scaler.state_dict(),
}
torch.save(state, path)
""",
    "clip": """
scaler = GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad(set_to_none=True)
    with autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "accumulate": """
scaler = GradScaler("cuda")
for i, (x, y) in enumerate(batches):
    with autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y) / every
    scaler.scale(loss).backward()
    if (i + 1) % every == 0:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "penalty": """
scaler = GradScaler("cuda")
for x, y in batches:
    optimizer.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    gradients = [g * inverse for g in scaled]
    with autocast("cuda", dtype=torch.float16):
        norm = 0
        for gradient in gradients:
            norm += gradient.pow(2).sum()
        loss = loss + norm.sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "several": """
other = torch.nn.Linear(8, 1).cuda()
second = torch.optim.SGD(other.parameters(), lr=0.01)
scaler = torch.amp.GradScaler()
for x, y in batches:
    optimizer.zero_grad()
    second.zero_grad()
    with autocast("cuda", dtype=torch.float16):
        a, b = model(x), other(x)
        first_loss = criterion(2 * a + 3 * b, y)
        second_loss = criterion(3 * a - 5 * b, y)
    scaler.scale(first_loss).backward(retain_graph=True)
    scaler.scale(second_loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
""",
    "adversarial": """
critic = torch.nn.Linear(1, 1).cuda()
second = torch.optim.SGD(critic.parameters(), lr=0.01)
scaler = GradScaler("cuda")
for x, y in batches:
    with autocast("cuda"):
        loss = critic(model(x).detach()).mean() - critic(y).mean()
    second.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(second)
    scaler.update()
    with autocast("cuda"):
        loss = -critic(model(x)).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "a class": """
class Trainer:
    def __init__(self, amp: bool, limit: float | None) -> None:
        self.scaler = GradScaler("cuda") if amp else None
        self.limit = limit

    def backward(self, loss):
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self):
        if self.limit is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), self.limit)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
""",
    "functions": """
def train_one_epoch(model, batches, optimizer, scaler=None, limit=0.0):
    for x, y in batches:
        with torch.autocast("cuda", enabled=scaler is not None):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if limit:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if limit:
                clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

def main(amp):
    scaler = torch.amp.GradScaler("cuda") if amp else None
    for epoch in range(10):
        train_one_epoch(model, batches, optimizer, scaler)
        if scaler is not None:
            print(scaler.get_scale())
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_is_found_right(name: str) -> None:
    text = decode((START + textwrap.dedent(PROGRAMS[name])).encode())
    settings = LintSettings(codes=expand(["AMP2", "AMP4"]))
    assert [f"{f.code} {f.message}" for f in check(text, "recipe.py", settings).findings] == []


# A recipe, what is taken out of it, what is put there, and the rule that finds it.
MISTAKES = [
    ("plain", "scaler.step(optimizer)", "optimizer.step()", "AMP205"),
    ("plain", '    "scaler": scaler.state_dict(),\n', "", "AMP210"),
    ("clip", "    scaler.unscale_(optimizer)\n", "", "AMP203"),
    ("accumulate", "    if (i", "    scaler.unscale_(optimizer)\n    if (i", "AMP208"),
    ("several", "    scaler.step(second)\n", "", None),
    (
        "several",
        "    scaler.step(second)\n",
        "    scaler.update()\n    scaler.step(second)\n",
        "AMP212",
    ),
    ("adversarial", "scaler.step(second)", "second.step()", "AMP205"),
    ("a class", "self.scaler.unscale_(optimizer)", "pass", None),
]


@pytest.mark.parametrize(("name", "old", "new", "code"), MISTAKES)
def test_a_mistake_in_a_recipe_is_found(name: str, old: str, new: str, code: str | None) -> None:
    """None: what is missing may be in code that is not seen."""
    assert old in PROGRAMS[name]
    text = decode((START + PROGRAMS[name].replace(old, new)).encode())
    found = check(text, "recipe.py", LintSettings(codes=expand(["AMP2"]))).findings
    assert {f.code for f in found} == ({code} if code else set())
