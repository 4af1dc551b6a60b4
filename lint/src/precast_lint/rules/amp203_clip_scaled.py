"""AMP203: gradients that are clipped or measured while they are scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from precast_lint.editing.lines import block_of, insert_before, line_of
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    hides,
    is_plain,
    judged,
    loop_around,
    only_here,
    scales_by_hand,
)

__all__ = ["RULE"]

_SCALED, _UNSCALED, _UNKNOWN = "scaled", "unscaled", "unknown"
# What depends on how large a gradient is; sums, copies, reductions over processes and `is None` do not.
_MEASURES = {"clamp", "clamp_", "clip", "clip_", "norm", "square"}
_ADDS = {"add", "add_", "sub", "sub_"}
_FUNCTIONS = {
    "torch.clamp",
    "torch.norm",
    "torch.linalg.norm",
    "torch.linalg.vector_norm",
    "torch.nn.utils.get_total_norm",
}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each clip and norm of gradients between a scaled backward and its step."""

    def follow(flow: Flow, scaler: str) -> tuple[str, Callable[[str, Event, Say], str]] | None:
        if scales_by_hand(flow, scaler) or not only_here(flow, scaler, "unscale_"):
            return None
        return _UNKNOWN, _follower(source, scaler)

    fixed: set[tuple[Flow, str]] = set()
    for flow, scaler, node, message in judged(source, follow):
        fix = None if (flow, scaler) in fixed else _fix(source, flow, scaler, node)
        fixed.add((flow, scaler))
        yield source.find(RULE, node, message, fix)


def _follower(source: Source, scaler: str) -> Callable[[str, Event, Say], str]:
    def on(state: str, event: Event, say: Say) -> str:
        if event.kind == "backward":
            return _SCALED if event.scaler == scaler else _UNKNOWN
        if event.kind == "unscale" and event.scaler == scaler:
            return _UNSCALED
        if event.kind in ("scaler_step", "zero_grad", "optimizer_step"):
            return _UNKNOWN
        if hides(source, event, scaler):
            return _UNKNOWN
        if _needs_size(source, event):
            if state == _SCALED:
                say.bad(event.node)
            elif state == _UNSCALED:
                say.good(event.node)
        return state

    return on


def _needs_size(source: Source, event: Event) -> bool:
    """Whether the size of gradients matters for what happens: they are clipped, measured, or something is added."""
    if event.kind == "grad_read":
        return _measures(source, event.node)
    return event.kind == "clip" or (event.kind == "assign" and _adds(source, event))


def _adds(source: Source, event: Event) -> bool:
    """`p.grad += 0.1 * p`, `p.grad = p.grad + noise`: what is added is not scaled, unless it is a gradient, too."""
    target, value = event.node, event.value
    if isinstance(target, cst.Attribute) and target.attr.value == "data":
        target = target.value
    if not isinstance(target, cst.Attribute) or target.attr.value != "grad" or value is None:
        return False
    statement = source.parents[event.node]
    if isinstance(statement, cst.AugAssign):
        is_sum = isinstance(statement.operator, (cst.AddAssign, cst.SubtractAssign))
        return is_sum and _is_foreign(value)
    if not isinstance(value, cst.BinaryOperation):
        return False
    sides = sorted(_is_foreign(side) for side in (value.left, value.right))
    return isinstance(value.operator, (cst.Add, cst.Subtract)) and sides == [False, True]


def _is_foreign(value: Node) -> bool:
    """Whether a value comes from no gradient: no name in it speaks of one."""
    names = [n.value.lower() for n in walk(value) if isinstance(n, cst.Name)]
    return bool(names) and not any("grad" in name or "scale" in name for name in names)


def _measures(source: Source, grad: Node) -> bool:
    """Whether the size of a gradient matters where it is read."""
    node = grad
    parent = source.parents[node]
    while isinstance(parent, cst.Attribute) and parent.attr.value in ("data", "detach", "float"):
        node, parent = parent, source.parents[parent]
        if isinstance(parent, cst.Call) and parent.func is node:
            node, parent = parent, source.parents[parent]
    if isinstance(parent, cst.Attribute) and parent.attr.value in _ADDS:
        outer = source.parents[parent]
        return isinstance(outer, cst.Call) and any(_is_foreign(arg.value) for arg in outer.args)
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in _MEASURES
    call = source.parents.get(parent)
    return (
        isinstance(parent, cst.Arg)
        and isinstance(call, cst.Call)
        and (source.origin(call.func) in _FUNCTIONS)
    )


def _fix(source: Source, flow: Flow, scaler: str, node: Node) -> Fix | None:
    """`unscale_` before the clip, if the one step of the scaler follows in the same block."""
    steps = {e.optimizer: e.node for e in flow.events() if e.kind == "scaler_step"}
    line = line_of(source, node)
    if len(steps) != 1 or line is None or not is_plain(scaler):
        return None
    [(optimizer, step)] = steps.items()
    outer = {line, *source.around(line)}
    after = [step, *source.around(step)]
    siblings = next((b for b in (block_of(source, s) for s in after) if outer & {*b}), [])
    here = [i for i, s in enumerate(siblings) if s in outer]
    there = [i for i, s in enumerate(siblings) if s in after]
    together = here and there and here[0] < there[0]
    conditional = together and siblings[there[0]] is not line_of(source, step)
    if not together or conditional or loop_around(source, node) is not loop_around(source, step):
        return None
    if not is_plain(optimizer):
        return None
    edit = insert_before(source, line, f"{scaler}.unscale_({optimizer})")
    return source.fix("Unscale the gradients first", edit, unsafe=True)


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
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        for p in model.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad.div_(world_size)
        scaler.step(optimizer)
        scaler.update()
    """,
        note="A mean over processes is the same for scaled gradients.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad += q.grad
            p.grad.add_(momentum_grads[p])
            p.grad *= mask[p]
            p.grad = p.grad / world_size
        scaler.step(optimizer)
        scaler.update()
    """,
        note="Sums of scaled gradients, and factors.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    self.prepare(optimizer, scaler)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

            def prepare(self, optimizer, scaler):
                unscale(optimizer, scaler)
        """,
        note="What becomes of the scaler in `unscale` is not seen.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    self.prepare(optimizer, scaler)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()

            def prepare(self, optimizer, scaler):
                scaler.unscale_(optimizer)
        """,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(batch)).backward()
        norm = model.weight.grad.norm() / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    """
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def prepare(self):
                self.scaler.unscale_(self.optimizer)

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.prepare()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
    """,
        note="A method unscales them.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scale = scaler.get_scale()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scale)
                scaler.step(optimizer)
                scaler.update()
        """,
        note="The bound is scaled as the gradients are.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(batch)  # of scikit-learn, say
                model(batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def float32_step(self, batch):
                self.model(batch).backward()
                self.clip()
                self.optimizer.step()

            def float16_step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.unscale()
                self.clip()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def unscale(self):
                self.scaler.unscale_(self.optimizer)

            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
    ),
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
    Case(
        """
        import torch

        def train(model, batches, optimizer, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                if limit:
                    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, limit):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                if limit:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        print(sum(p.grad.data.norm() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        print(sum(p.grad.data.norm() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                print(scaler.get_scale())
        """,
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                print(scaler.get_scale())
        """,
        unsafe=True,
        note="Printing the scale unscales nothing.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        note="A scaler that comes from elsewhere is known by its use.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def train_step(self, batch):
                self.backward(self.model(batch))
                self.clip()
                self.step()

            def backward(self, loss):
                self.scaler.scale(loss).backward()

            def clip(self):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

            def step(self):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        count=1,
        note="Methods of the same class are followed.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

        def tune(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

        def tune(model, batches, optimizer, scaler):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def train_epoch(self, model, optimizer, scaler, batches):
                for i, batch in enumerate(batches):
                    loss = model(batch)
                    if self.use_fp16:
                        scaler.scale(loss).backward()
                    else:
                        loss.backward()
                    if i % self.every == 0:
                        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                        if not torch.isfinite(norm):
                            optimizer.zero_grad()
                            continue
                        if self.use_fp16:
                            scaler.step(optimizer)
                            scaler.update()
                        else:
                            optimizer.step()
                        optimizer.zero_grad()
                    self.save_checkpoint(model, optimizer, scaler=scaler)
        """,
        count=1,
        note="What saves the scaler's state does not unscale.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler, decay):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                for p in model.parameters():
                    p.grad += decay * p.data
                    p.grad = p.grad + torch.randn_like(p)
                    p.grad.data.add_(p.data, alpha=decay)
                scaler.step(optimizer)
                scaler.update()
        """,
        count=3,
        note="What is added to a scaled gradient is divided by the scale with it.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    self.backward(model, scaler, batch)
                    self.update(model, optimizer, scaler=scaler)

            def backward(self, model, scaler, batch):
                scaler.scale(model(batch)).backward()

            def update(self, model, optimizer, scaler):
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        class Trainer:
            def fit(self, model, optimizer, scaler, batches):
                for batch in batches:
                    self.backward(model, scaler, batch)
                    self.update(model, optimizer, scaler=scaler)

            def backward(self, model, scaler, batch):
                scaler.scale(model(batch)).backward()

            def update(self, model, optimizer, scaler):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.limit)
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
        count=1,
        note="A scaler that methods hand on to one another.",
    ),
)

RULE = Rule(
    code="AMP203",
    name="clip-scaled-gradients",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="gradients are still scaled here; call `scaler.unscale_(optimizer)` before",
    what=(
        "`clip_grad_norm_`, `clip_grad_value_`, the norm of a `.grad`, or something added to one, between a scaled "
        "backward and its step, no `unscale_` before."
    ),
    why=(
        "The gradients are those of the scaled loss, 65536 times too large with the default scale. Clipping them to "
        "norm 1 makes the step that much too small, and it changes whenever the scale does."
    ),
    fine="The gradients are unscaled in code that the rule can't see.",
    words=("clip_grad scale(", ".grad scale("),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
