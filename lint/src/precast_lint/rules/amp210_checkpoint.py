"""AMP210: checkpoints without the scaler's state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.lines import block_of
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, strings, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import Flow, flows
from precast_lint.training_step.flow_events import is_optimizer, key
from precast_lint.training_step.protocol import is_plain

__all__ = ["RULE"]

_SCALER = re.compile(r"scal|\bamp\b", re.IGNORECASE)
_MODELS = ("model", "net", "network", "model_state_dict", "state_dict", "weights", "ema")
_OPTIMIZER = re.compile(r"optim|\bopt\w?$", re.IGNORECASE)


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each saved dictionary with states of a model and an optimizer alone."""
    if any(
        _SCALER.search(key(source, owner) or "") for _, owner, _ in source.methods("state_dict")
    ):
        return
    for flow in flows(source):
        for call in [n for n in flow.nodes if isinstance(n, cst.Call)]:
            if source.origin(call.func) != "torch.save" or not call.args:
                continue
            saved = _dictionary(source, call.args[0].value)
            if saved is None or not _is_training_state(source, flow, saved):
                continue
            node = _scaler(source, flow)
            if node is not None and not _is_off(source, node):
                yield source.find(RULE, saved, fix=_fix(source, saved, node))


def _dictionary(source: Source, saved: Node) -> cst.Dict | None:
    """The literal that is saved: it, or the one that its name is given."""
    node: Node | None = saved
    if isinstance(saved, cst.Name):
        node = None if _grows(source, saved.value) else _latest(source, saved)
    return node if isinstance(node, cst.Dict) else None


def _grows(source: Source, name: str) -> bool:
    """Whether a dictionary of this name gets entries one by one, or many at once."""
    items = (
        s for s in source.all(cst.Subscript) if isinstance(source.parents[s], cst.AssignTarget)
    )
    owners: list[Node] = [item.value for item in items]
    owners += [owner for _, owner, _ in source.methods("update", "setdefault")]
    return any(isinstance(owner, cst.Name) and owner.value == name for owner in owners)


def _latest(source: Source, name: cst.Name) -> Node | None:
    """The only value of a name, or the one that it is given before in the same block or in one around it."""
    binding = source.names.only_binding(name)
    if binding is not None:
        return binding.value if binding.kind == "assign" else None
    line: Node = source.statement(name)
    while not isinstance(line, (cst.FunctionDef, cst.Module)):
        block = block_of(source, line)
        for statement in reversed(block[: block.index(line)] if line in block else []):
            if name.value in _assigned(statement):
                return _value(statement)
        line = source.parents[line]
    return None


def _assigned(statement: Node) -> set[str]:
    """The names that are assigned somewhere in a statement."""
    targets = (n.target for n in walk(statement) if isinstance(n, (cst.AssignTarget, cst.For)))
    return {target.value for target in targets if isinstance(target, cst.Name)}


def _value(statement: Node) -> Node | None:
    """The value of a statement that does nothing but assign one."""
    first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return first.value if isinstance(first, cst.Assign) else None


def _is_training_state(source: Source, flow: Flow, saved: cst.Dict) -> bool:
    """Whether it has the states of an optimizer and something else, and nothing that may be a scaler's."""
    states = []
    for element in saved.elements:
        if not isinstance(element, cst.DictElement):
            return False
        if _SCALER.search(strings(element.key) or "") or _SCALER.search(
            key(source, element.value) or ""
        ):
            return False
        value = element.value
        func = value.func if isinstance(value, cst.Call) else None
        if isinstance(func, cst.Attribute) and func.attr.value == "state_dict":
            states.append(func.value)
    optimizers = [
        owner
        for owner in states
        if is_optimizer(source, owner)
        or key(source, owner) in flow.optimizers
        or _OPTIMIZER.search(key(source, owner) or "")
    ]
    return bool(optimizers) and (len(states) > len(optimizers) or _has_model(saved))


def _has_model(saved: cst.Dict) -> bool:
    """Whether an entry is a model as a whole: `"model": deepcopy(model).half()`."""
    return any(
        isinstance(element, cst.DictElement) and strings(element.key) in _MODELS
        for element in saved.elements
    )


def _scaler(source: Source, flow: Flow) -> Node | None:
    """A scaler that this function uses, or an attribute of its class that is one."""
    for node in flow.nodes:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            owner = node.func.value
            if node.func.attr.value == "scale" and source.instance(owner) in SCALERS:
                return owner
    module = source.scopes.module
    for _, used, _ in source.methods("scale"):
        if not isinstance(used, cst.Name) or source.instance(used) not in SCALERS:
            continue
        if source.scopes.scope_of[used].home(used.value) is module:
            return used
    home = source.values.enclosing_class(flow.node)
    for node in walk(home) if home is not None else ():
        is_of_self = isinstance(node, cst.Attribute) and key(source, node.value) == "self"
        if is_of_self and source.instance(node) in SCALERS:
            return node
    return None


def _is_off(source: Source, scaler: Node) -> bool:
    call = source.values.constructed(scaler)
    values = [a.value for a in call.args if a.keyword] if isinstance(call, cst.Call) else []
    return any(isinstance(value, cst.Name) and value.value == "False" for value in values)


def _fix(source: Source, saved: cst.Dict, scaler: Node) -> Fix | None:
    """One more entry, if the scaler is there in any case."""
    name = key(source, scaler)
    if not is_plain(name) or source.values.constructed(scaler) is None or not saved.elements:
        return None
    last = saved.elements[-1]
    first = saved.elements[0]
    assert isinstance(last, cst.DictElement)
    assert isinstance(first, cst.DictElement)
    entry = f"{source.quote}scaler{source.quote}: {name}.state_dict()"
    row = source.text.line_start(source.span(last.key).start)
    indent = source.text.data[row : source.span(last.key).start]
    several = row != source.text.line_start(source.span(saved).start) and not indent.strip()
    between = f",{source.text.newline}{indent.decode()}" if several else ", "
    end = source.span(last.value).end
    return source.fix(
        "Save the scaler's state as well", Edit(end, end, between + entry), unsafe=True
    )


VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            },
            path,
        )
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if amp:
            checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, path)
    """),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        torch.save({"model": model.state_dict(), "epoch": epoch}, path)
        """,
        note="Weights for inference.",
    ),
    Case("""
        import torch

        def save(model, optimizer, path):
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            torch.save(state, path)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
    """),
    Case(
        """
        import torch

        def train(model, optimizer, batches, path, amp):
            scaler = torch.amp.GradScaler("cuda")
            state = None
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                state = {"model": model, "optimizer": optimizer.state_dict()}
                state.update(extra(scaler))
                torch.save(state, path)
        """,
        note="More is put into it.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, optimizer, batches, path):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            torch.save(state, path)
        """,
        """
        import torch

        def train(model, optimizer, batches, path):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, path)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epoch": self.epoch,  # the next one
                }
                torch.save(state, path)
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epoch": self.epoch,
                    "scaler": self.scaler.state_dict(),  # the next one
                }
                torch.save(state, path)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def train(batch):
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

        def save(path):
            torch.save({"net": model.state_dict(), "sgd": optimizer.state_dict()}, path)
        """,
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def train(batch):
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

        def save(path):
            torch.save({"net": model.state_dict(), "sgd": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch
        from copy import deepcopy

        def train(model, optimizer, batches, last):
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(9):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                saved = {
                    "epoch": epoch,
                    "model": deepcopy(model).half(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(saved, last)
                del saved
        """,
        """
        import torch
        from copy import deepcopy

        def train(model, optimizer, batches, last):
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(9):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                saved = {
                    "epoch": epoch,
                    "model": deepcopy(model).half(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                }
                torch.save(saved, last)
                del saved
        """,
        unsafe=True,
        note="A model that is saved as a whole.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        checkpoint = torch.load(path) if resume else None
        while True:
            if step % 1000 == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(checkpoint, path)
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        checkpoint = torch.load(path) if resume else None
        while True:
            if step % 1000 == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                }
                torch.save(checkpoint, path)
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
        note="The name has had another value before.",
    ),
)

RULE = Rule(
    code="AMP210",
    name="checkpoint-without-scaler",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="the scaler's state is not saved with the optimizer's",
    what="`torch.save` of a model's and an optimizer's state in code with a `GradScaler` whose state is not in it.",
    why=(
        "A training that goes on from the checkpoint begins with the default scale. It skips steps until the scale "
        "fits again, and is not the training it would have been."
    ),
    fine="The state is saved elsewhere, or a few skipped steps do not matter.",
    words=("GradScaler torch.save state_dict", "GradScaler import save state_dict"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
