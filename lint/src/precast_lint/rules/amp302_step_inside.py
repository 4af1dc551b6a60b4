"""AMP302: an optimizer's step inside a region."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.callers import is_called_in_region
from precast_lint.meaning.regions import AUTOCASTS, region_in_force
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import is_optimizer, key
from precast_lint.training_step.tail import end_before

__all__ = ["RULE"]

_NAMED = re.compile(r"(.*[._])?(optimizer|optim|opt)(_\w+|\d+)?(\[.*\])?", re.IGNORECASE)
_PYTORCHS = re.compile(r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)*[A-Z]\w*")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each step that a region of its own function is around."""
    for call, owner, arguments in source.methods("step"):
        by_scaler = source.instance(owner) in SCALERS and bool(arguments.positional)
        if not by_scaler and not _is_optimizer(source, owner):
            continue
        region = region_in_force(source, call, trainers=True)
        if region is None and is_called_in_region(source, call):
            yield source.find(RULE, call)
        if region is not None:
            edits = end_before(source, region.node, call)
            fix = source.fix("End the region before it", edits, unsafe=True) if edits else None
            yield source.find(RULE, call, fix=fix)


def _is_optimizer(source: Source, node: Node) -> bool:
    known = source.instance(node)
    if known is not None:
        return is_optimizer(source, node)
    home = source.values.object_class(node)
    if home is not None and _is_class_of_optimizers(source, home):
        return not _opens_region(source, home)
    name = key(source, node) or ""
    return _NAMED.fullmatch(name) is not None and "sched" not in name.lower()


def _is_class_of_optimizers(source: Source, home: cst.ClassDef) -> bool:
    """Whether a class of this file comes of an optimizer of PyTorch's."""
    bases = (
        source.origin(base.value) or ""
        for one in (home, *source.values.family.bases(home))
        for base in one.bases
    )
    return any(_PYTORCHS.fullmatch(base) is not None for base in bases)


def _opens_region(source: Source, home: cst.ClassDef) -> bool:
    """Whether a class, or its bases in this file, decides by itself what is cast in its step."""
    return any(
        source.origin(node) in AUTOCASTS
        for one in (home, *source.values.family.bases(home))
        for node in walk(one)
        if isinstance(node, (cst.Name, cst.Attribute))
    )


VALID = (
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda"):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
    """),
    Case("""
        import torch

        with torch.autocast("cuda", enabled=False):
            optimizer.step()
    """),
    Case(
        """
        import torch

        with torch.autocast("cuda"):
            env.step(action)
            latents = self.scheduler.step(noise, t, latents)
            profiler.step()
            self.optimizer_scheduler.step()
        """,
        note="Many things have a method of this name.",
    ),
    Case("""
        import torch

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with torch.autocast("cuda"):
            scheduler.step()
    """),
    Case(
        """
        import torch
        from torch.optim.lr_scheduler import LRScheduler

        class Warmup(LRScheduler):
            def step(self, epoch=None):
                self.last_epoch += 1

        class Muon(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure=None):
                with torch.autocast("cuda", enabled=False):
                    self.orthogonalise()

        class Simulation:
            def step(self):
                self.time += 1

        muon = Muon(model.parameters())
        warmup = Warmup(muon)
        world = Simulation()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            world.step()
            warmup.step()
            muon.step()
        """,
        note="An optimizer that opens a region of its own sees to that.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, x, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda"):
                scaler.scale(model(x).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, x, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda"):
                scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        opt = torch.optim.AdamW(model.parameters())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for x in batches:
                model(x).mean().backward()
                opt.step()
                self.optimizer_d.step()
        """,
        count=2,
    ),
    Case(
        """
        import torch
        from torch.optim import Optimizer

        class Orthogonal(Optimizer):
            def __init__(self, params, lr=0.02):
                super().__init__(params, dict(lr=lr))

        class Muon(Orthogonal):
            @torch.no_grad()
            def step(self, closure=None):
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad @ p.grad.T @ p.grad)

        def autocast():
            return torch.autocast("cuda", dtype=torch.bfloat16)

        def train(model, batches):
            muon = Muon(model.parameters())
            for x in batches:
                with autocast():
                    loss = model(x).mean()
                loss.backward()
                with autocast():
                    muon.step()
        """,
        count=1,
        note="An optimizer of the file's own, in a region that it does not need.",
    ),
)

RULE = Rule(
    code="AMP302",
    name="step-in-region",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="the optimizer steps inside a region; end the region before it",
    what="`optimizer.step()` or `scaler.step(optimizer)` inside a region that is not switched off.",
    why=(
        "The region's cache of cast weights lives until the outermost region ends. A region around a loop of forward, "
        "backward and step goes on with the weights of its first iteration: the loss does not move. And the step's own "
        "operations are cast, which matters to optimizers that multiply matrices (Muon, Shampoo)."
    ),
    fine="The optimizer works element by element, and the region ends before the next forward.",
    words=("autocast .step(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
