"""AMP203: gradients that are clipped or read while they are scaled."""

from __future__ import annotations

from collections.abc import Iterator

from precast.rewrite.flow import Say, flows
from precast.rewrite.flow_events import Event
from precast.rewrite.model import Applicability, Case, Finding, Rule, Severity
from precast.rewrite.source import Source

__all__ = ["RULE"]

_SCALED, _UNSCALED, _UNKNOWN = "scaled", "unscaled", "unknown"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each clip and read of `.grad` between a scaled backward and its step."""
    for flow in flows(source):
        for scaler in flow.scalers:
            if flow.leaks(scaler):
                continue

            def on(state: str, event: Event, say: Say, scaler: str = scaler) -> str:
                return _on(state, event, say, scaler)

            for node, message in flow.run(_UNKNOWN, on):
                yield source.find(RULE, node, message)


def _on(state: str, event: Event, say: Say, scaler: str) -> str:
    if event.kind == "backward":
        return _SCALED if event.scaler == scaler else _UNKNOWN
    if event.kind == "unscale" and event.scaler == scaler:
        return _UNSCALED
    if event.kind in ("scaler_step", "zero_grad", "optimizer_step"):
        return _UNKNOWN
    if event.kind == "clip" or (event.kind == "grad_read" and state == _SCALED):
        if state == _SCALED:
            say.bad(event.node)
        elif state == _UNSCALED:
            say.good(event.node)
    return state


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        import torch
        from torch.nn.utils import clip_grad_norm_

        def train(model, batches, optimizer, amp):
            scaler = torch.amp.GradScaler() if amp else None
            for i, batch in enumerate(batches):
                loss = model(batch)
                if scaler is not None:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if i % 4 == 0:
                    if scaler is not None:
                        scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 1.0)
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
    """),
)

INVALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        from torch.cuda.amp import GradScaler
        from torch.nn.utils import clip_grad_norm_

        class Trainer:
            def __init__(self, amp: bool):
                self.scaler = GradScaler() if amp else None

            def step(self, loss):
                if self.scaler:
                    loss = self.scaler.scale(loss)
                loss.backward()
                clip_grad_norm_(self.model.parameters(), 1.0)
                if self.scaler:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
    """),
)

RULE = Rule(
    code="AMP203",
    name="clip-scaled-gradients",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="gradients are still scaled here; call `scaler.unscale_(optimizer)` before",
    what="`clip_grad_norm_`, `clip_grad_value_` or `.grad` between a scaled backward and the step, without `unscale_`.",
    why=(
        "The gradients are those of the scaled loss, 65536 times too large with the default scale. Clipping them to "
        "norm 1 makes the step that much too small, and it changes whenever the scale does."
    ),
    fine="The gradients are unscaled in code that the rule can't see.",
    words=("GradScaler clip_grad", "GradScaler .grad"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
