"""AMP208: gradients that are unscaled twice before an update."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.lines import block_of
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.counters import counts
from precast_lint.training_step.flow import Flow, Say
from precast_lint.training_step.flow_events import Event
from precast_lint.training_step.protocol import (
    comes_each_time,
    followed,
    hides,
    leading_to,
    loop_around,
    loops_around,
    only_here,
)

__all__ = ["RULE"]

_State = frozenset[tuple[str, Node]]
_AGAIN = (
    "the next batch comes here before `update` was called: `unscale_` belongs where the step is"
)


class _Follower:
    """Follows one scaler, and remembers at which `unscale_` which optimizer was unscaled already."""

    def __init__(self, source: Source, scaler: str) -> None:
        self.source = source
        self.scaler = scaler
        self.first: set[Node] = set()
        self.second: set[Node] = set()
        self.again: set[Node] = set()
        self.pairs: set[tuple[Node, Node]] = set()
        self.left: set[Node] = set()  # with no update when the function ends

    def on(self, state: _State, event: Event, _: Say) -> _State:
        if hides(self.source, event, self.scaler):
            return frozenset()
        if event.kind == "return":
            self.left |= {node for _, node in state}
        if event.kind == "assign":
            word = re.compile(rf"(?<![\w.]){re.escape(event.assigned or '')}\b")
            return frozenset(pair for pair in state if not word.search(pair[0]))
        if event.scaler != self.scaler or event.kind not in ("update", "unscale"):
            return state
        if event.kind == "update":
            return frozenset()
        before = dict(state).get(event.optimizer or "")
        if before is None:
            self.first.add(event.node)
            return state | {(event.optimizer or "", event.node)}
        (self.again if before is event.node else self.second).add(event.node)
        self.pairs.add((before, event.node))
        return state


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `unscale_` of an optimizer whose gradients are unscaled."""
    for flow, scaler in followed(source):
        if not flow.comes_by(("unscale", scaler)) or not only_here(flow, scaler, "update"):
            continue
        follower = _Follower(source, scaler)
        start: _State = frozenset()
        list(flow.run(start, follower.on))
        behind = {
            second
            for first, second in follower.pairs
            if any(_comes_always(source, at, second) for at in leading_to(flow, first))
        }
        for node in follower.second - follower.first | behind:
            yield source.find(RULE, node)
        for node in follower.again:
            if _is_each_time(source, flow, scaler, node):
                yield source.find(RULE, node, _AGAIN)
        for node in follower.left - follower.again - follower.second:
            if _is_in_each_call(source, flow, scaler, node):
                yield source.find(RULE, node, _AGAIN)


def _comes_always(source: Source, first: Node, second: Node) -> bool:
    """Whether the second comes whenever the first did, under a test: the test stands before it in the same block."""
    block = block_of(source, source.statement(second))
    before = (
        block[: block.index(source.statement(second))] if source.statement(second) in block else []
    )
    inner = first
    for outer in source.around(first):
        if outer in before:
            return isinstance(outer, cst.If) and inner is not outer.test
        if isinstance(
            outer, (cst.FunctionDef, cst.For, cst.While, cst.Try, cst.TryStar, cst.Match)
        ):
            return False
        inner = outer
    return False


def _is_each_time(source: Source, flow: Flow, scaler: str, node: Node) -> bool:
    """Whether each round of the loop comes by, and the update is not in a loop inside it."""
    way = list(leading_to(flow, node))
    at = next((one for one in way if loop_around(source, one) is not None), node)
    loop = loop_around(source, at)
    updates = [e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler]
    if loop is None or not updates:
        return False
    around = [
        [outer for one in leading_to(flow, update) for outer in loops_around(source, one)]
        for update in updates
    ]
    if any(loop in loops and loops[0] is not loop for loops in around):
        return False
    inside = way[: way.index(at)]
    return comes_each_time(source, at, loop) and all(_always_runs(source, one) for one in inside)


def _is_in_each_call(source: Source, flow: Flow, scaler: str, node: Node) -> bool:
    """Whether each call of a function comes by, and only every so many calls come by the update."""
    if not isinstance(flow.node, cst.FunctionDef):
        return False
    updates = [e.node for e in flow.events() if e.kind == "update" and e.scaler == scaler]
    is_all = not flow.called_elsewhere(scaler, "update")
    is_all = is_all and ("." not in scaler or flow.has_all(scaler, "update"))
    way = list(leading_to(flow, node))
    if not updates or not is_all or any(loops_around(source, one) for one in way):
        return False
    return all(_always_runs(source, one) for one in way) and all(
        any(_is_counted(source, one) for one in leading_to(flow, update)) for update in updates
    )


def _is_counted(source: Source, node: Node) -> bool:
    """Whether a node runs in every so many calls of its function: a test of a counter stands around or before it."""
    function = source.function(node)
    inner = node
    for outer in source.around(node):
        if outer is function or loop_around(source, node) is not None:
            return False
        if isinstance(outer, cst.If) and inner is not outer.test and counts(source, outer.test):
            return True
        if isinstance(outer, cst.IndentedBlock):
            block: list[Node] = list(outer.body)
            before = block[: block.index(inner)]
            if any(_leaves(line) and counts(source, line.test) for line in before):  # type: ignore[attr-defined]
                return True
        inner = outer
    return False


def _leaves(line: Node) -> bool:
    """Whether a statement is a test that ends the function."""
    if not isinstance(line, cst.If) or not isinstance(line.body, cst.IndentedBlock):
        return False
    last = line.body.body[-1]
    return isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)


def _always_runs(source: Source, node: Node) -> bool:
    """Whether a node runs whenever its function does: no test, `try` or way out stands before it."""
    function = source.function(node)
    line = source.statement(node)
    if (
        function is None
        or line not in block_of(source, line)
        or source.parents[line] is not function.body
    ):
        return False
    block = block_of(source, line)
    before = block[: block.index(line)]
    ends = (cst.Return, cst.Raise)
    return not any(isinstance(inner, ends) for one in before for inner in walk(one))


VALID = (
    Case(
        """
        import torch

        def step(model, opt, scaler, loss, clip, log):
            scaler.scale(loss).backward()
            if clip or log:
                scaler.unscale_(opt)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if log:
                print(sum(p.grad.norm() for p in model.parameters()))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        """,
    ),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            scaler.scale(model(batch)).backward()
            if (i + 1) % 4 == 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            last = (i + 1) % 4 == 0
            scaler.scale(model(batch)).backward()
            if last:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for batch in batches:
            scaler.scale(model(batch)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        if limit is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if log and limit is None:
            scaler.unscale_(optimizer)
            report(model)
        scaler.step(optimizer)
        scaler.update()
    """),
    Case("""
        def step(net, opt, loss, scaler, log):
            scaler.scale(loss).backward()
            if log:
                scaler.unscale_(opt)
                print(sum(p.grad.norm() for p in net.parameters()))
            if not log:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(first + second).backward()
        scaler.unscale_(optimizers[0])
        scaler.unscale_(optimizers[1])
        scaler.step(optimizers[0])
        scaler.step(optimizers[1])
        scaler.update()
    """),
    Case(
        """
        import torch

        class Helper:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, optimizer, parameters=None, limit=None):
                if limit is not None:
                    self.scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(parameters, limit)
                self.scaler.step(optimizer)
                self.scaler.update()

        def train(model, batches, optimizer, helper: Helper):
            for batch in batches:
                helper.scaler.scale(model(batch)).backward()
                helper.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                helper.step(optimizer)
        """,
        note="A call that gives no limit does not unscale again.",
    ),
    Case(
        """
        import torch

        def clip(scaler, optimizer, parameters, last):
            if not last:
                return None
            scaler.unscale_(optimizer)
            return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for step, batch in enumerate(batches):
                scaler.scale(model(batch)).backward()
                norm = clip(scaler, optimizer, model.parameters(), step % 4 == 3)
                if step % 4 == 3:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
    ),
    Case(
        """
        import torch

        class Step:
            def __init__(self, model, optimizer, every):
                self.model, self.optimizer, self.every = model, optimizer, every
                self.scaler = torch.amp.GradScaler("cuda")
                self.count = 0

            def __call__(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.count += 1
                if self.count < self.every:
                    return
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.count = 0
        """,
    ),
    Case(
        """
        import torch

        class Step:
            def __init__(self, model, optimizer):
                self.model, self.optimizer = model, optimizer
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch, is_last, limit=1.0):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.unscale_(self.optimizer)
                if limit is not None:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
                if is_last:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, opt, loader, k=4):
            scaler = torch.amp.GradScaler("cuda")
            n = 0
            for x in loader:
                n += 1
                with torch.autocast("cuda"):
                    loss = model(x) / k
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                if n % k != 0:
                    continue
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        for i, batch in enumerate(batches):
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.unscale_(optimizer)
        print(model.weight.grad.norm())
        scaler.step(optimizer)
        scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if not norm.isfinite():
                    optimizer.zero_grad()
                    continue
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
        note="Where nothing is stepped, `update` has to be called all the same.",
    ),
    Case(
        """
        def step(net, opt, loss, scaler, log):
            scaler.scale(loss).backward()
            if log:
                scaler.unscale_(opt)
                print(sum(p.grad.norm() for p in net.parameters()))
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        """,
        count=1,
        note="It raises whenever the first one ran.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        while True:
            for micro in range(8):
                scaler.scale(model(batch)).backward()
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def clip(scaler, optimizer, parameters):
            scaler.unscale_(optimizer)
            return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for step, batch in enumerate(batches):
                scaler.scale(model(batch)).backward()
                norm = clip(scaler, optimizer, model.parameters())
                if step % 4 == 3:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Accumulator:
            def __init__(self, model, optimizer, every):
                self.model, self.optimizer, self.every = model, optimizer, every
                self.scaler = torch.amp.GradScaler("cuda")
                self.count = 0

            def __call__(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.count += 1
                if self.is_last():
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad()

            def is_last(self):
                return self.count % self.every == 0

        """,
        count=1,
        note="A method that is called for each batch, of which only some are followed by `update`.",
    ),
    Case(
        """
        import torch

        def micro_step(model, optimizer, scaler, batch, index):
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            is_boundary = index % 4 == 3
            if not is_boundary:
                return
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def report(scaler, optimizer, model):
            scaler.unscale_(optimizer)
            print([p.grad.norm() for p in model.parameters()])

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for step, batch in enumerate(batches):
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                if step % 50 == 0:
                    report(scaler, optimizer, model)
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP208",
    name="unscaled-twice",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this optimizer's gradients are unscaled already: `unscale_` is called once before each `update`",
    what=(
        "`scaler.unscale_(optimizer)` twice before `scaler.update()`; in a loop that accumulates gradients, `unscale_` "
        "at each batch with `update` only at some."
    ),
    why="`unscale_` raises a RuntimeError the second time.",
    fine="`update` is called in code that the rule can't see.",
    words=("unscale_(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
