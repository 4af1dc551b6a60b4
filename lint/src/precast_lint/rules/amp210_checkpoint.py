"""AMP210: checkpoints without the scaler's state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.functions import called_function
from precast_lint.model import Applicability, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, string_value, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow import FunctionFlow, flows
from precast_lint.training_step.flow_events import is_optimizer, key
from precast_lint.training_step.protocol import is_off, loop_around

__all__ = ["RULE"]

_MODELS = ("model", "net", "network", "model_state_dict", "state_dict", "weights", "ema")
_SCALER_NAME = re.compile(r"scal|\bamp\b", re.IGNORECASE)
_NOT_LOADED = "the scaler's state is saved, and not loaded with the optimizer's"
_OPTIMIZER = re.compile(r"optim|\bopt\w?$", re.IGNORECASE)


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each saved dictionary with the states of a model and an optimizer, but not the scaler's.

    And one for the optimizer's state that is loaded without the scaler's, which is saved.
    """
    loads = [(call, owner) for call, owner, _ in source.methods("load_state_dict")]
    resumed = [call for call, owner in loads if _is_named_optimizer(source, owner)]
    if any(
        _SCALER_NAME.search(key(source, owner) or "") and not _is_offered(source, call)
        for call, owner, _ in source.methods("state_dict")
    ):
        is_loaded = any(_SCALER_NAME.search(key(source, owner) or "") for _, owner in loads)
        if resumed and not is_loaded and not any(loop_around(source, call) for call, _ in loads):
            yield source.find(RULE, resumed[0], _NOT_LOADED)
        return
    severity = RULE.severity if resumed else Severity.INFORMATION
    for flow in flows(source):
        for call in _calls_of_save(source, flow):
            saved = _dictionary(source, call.args[0].value)
            if saved is None or not _is_training_state(source, flow, saved):
                continue
            place = saved.place
            node = _scaler(source, flow)
            if (node is not None and not is_off(source, node) and not _is_fixed(source)) or (
                node is None and _is_saved_for_scaler(source, flow)
            ):
                yield source.find(RULE, place, severity=severity)
        if (apart := _apart(source, flow)) is not None:
            yield source.find(RULE, apart, severity=severity)


def _is_offered(source: Source, call: Node) -> bool:
    """Return True if a call is in the `state_dict` method of a class, which only returns the scaler's state."""
    function = source.function(call)
    home = source.values.enclosing_class(call)
    is_own = function is not None and function.name.value == "state_dict"
    return is_own and isinstance(home, cst.ClassDef) and source.function(home) is not function


def _apart(source: Source, flow: FunctionFlow) -> Node | None:
    """Return the `torch.save` of only an optimizer's state, if no file gets the scaler's."""
    saving = _saves(source)
    saved = saving.get(flow, [])
    if len(saving) != 1 or len(saved) < 2:
        return None
    optimizers = [call for call, owner in saved if _is_optimizers(source, flow, owner)]
    scaler = _scaler(source, flow)
    if len(optimizers) != 1 or scaler is None or is_off(source, scaler):
        return None
    is_saved = any(_SCALER_NAME.search(key(source, o) or "") for _, o in saved)
    return None if is_saved or _is_fixed(source) else optimizers[0]


@once
def _saves(source: Source) -> dict[FunctionFlow, list[tuple[cst.Call, Node]]]:
    """Return the calls of `torch.save` that save one state, by function, each with the object of the state."""
    results: dict[FunctionFlow, list[tuple[cst.Call, Node]]] = {}
    for flow in flows(source):
        for call in _calls_of_save(source, flow):
            if (owner := _state_of(call.args[0].value)) is not None:
                results.setdefault(flow, []).append((call, owner))
    return results


def _calls_of_save(source: Source, flow: FunctionFlow) -> list[cst.Call]:
    calls = [n for n in flow.nodes if type(n) is cst.Call]
    return [call for call in calls if call.args and source.origin(call.func) == "torch.save"]


def _state_of(value: Node) -> Node | None:
    """The model or optimizer of `model.state_dict()`."""
    func = value.func if isinstance(value, cst.Call) else None
    is_state = isinstance(func, cst.Attribute) and func.attr.value == "state_dict"
    return func.value if is_state and isinstance(func, cst.Attribute) else None


def _is_optimizers(source: Source, flow: FunctionFlow, owner: Node) -> bool:
    return key(source, owner) in flow.optimizers or _is_named_optimizer(source, owner)


def _is_named_optimizer(source: Source, owner: Node) -> bool:
    is_named = _OPTIMIZER.search(key(source, owner) or "") is not None
    return is_named or is_optimizer(source, owner)


def _is_fixed(source: Source) -> bool:
    """Return True if scalers only scale in this file, and optimizers step by themselves."""
    called = {
        call.func.attr.value
        for call, owner, _ in source.methods("scale", "step", "update", "unscale_")
        if source.instance(owner) in SCALERS and isinstance(call.func, cst.Attribute)
    }
    steps = any(is_optimizer(source, owner) for _, owner, _ in source.methods("step"))
    return called == {"scale"} and steps


@dataclass(frozen=True)
class _Saved:
    """A saved dictionary: its place and its entries."""

    place: Node
    entries: tuple[tuple[str, Node], ...]


def _dictionary(source: Source, node: Node) -> _Saved | None:
    """Return the saved dictionary: a literal, `dict(...)`, the result of a function, or the value of a name.

    Its entries include those that are added later.
    """
    added: list[tuple[str, Node]] = []
    if isinstance(node, cst.Name):
        visited = values_seen(source, node)
        value = visited[0].value if len(visited) == 1 and visited[0].kind == "assign" else None
        if value is None or (more := _added(source, node)) is None:
            return None
        node, added = value, more
    returned = source.values.results(node) if isinstance(node, cst.Call) else []
    if len(returned) == 1:
        node = returned[0]
    entries = _entries(source, node)
    return _Saved(node, (*entries, *added)) if entries is not None else None


def _added(source: Source, name: cst.Name) -> list[tuple[str, Node]] | None:
    """Return the entries added by `state["key"] = value`; None if other code may add entries."""
    home = source.scopes.scope_of[name].home(name.value)
    results: list[tuple[str, Node]] = []
    for node in source.scopes.references(home, name.value) if home is not None else ():
        parent = source.parents[node]
        if isinstance(parent, cst.AssignTarget):
            continue
        target = source.parents.get(parent)
        statement = source.parents.get(target) if target is not None else None
        if isinstance(parent, cst.Subscript) and isinstance(target, cst.AssignTarget):
            index = parent.slice[0].slice
            text = string_value(index.value) if isinstance(index, cst.Index) else None
            if text is None or not isinstance(statement, cst.Assign):
                return None
            results.append((text, statement.value))
        elif (updated := _updated(source, parent, target)) is not None:
            results += updated
        elif _may_grow(source, parent, target):
            return None
    return results


def _updated(source: Source, parent: Node, call: Node | None) -> list[tuple[str, Node]] | None:
    """Return the entries of `state.update(optimizer=...)` and `state.update({"optimizer": ...})`; None: unknown."""
    is_update = isinstance(parent, cst.Attribute) and parent.attr.value == "update"
    if not is_update or not isinstance(call, cst.Call) or call.func is not parent:
        return None
    results: list[tuple[str, Node]] = []
    for arg in call.args:
        if arg.keyword is not None:
            results.append((arg.keyword.value, arg.value))
            continue
        entries = _entries(source, arg.value) if arg.star in ("", "**") else None
        if entries is None:
            return None
        results += entries
    return results


def _may_grow(source: Source, parent: Node, call: Node | None) -> bool:
    """Return True if a method or another function may add entries to a dictionary."""
    if isinstance(parent, cst.Attribute):
        return parent.attr.value in ("update", "setdefault")
    if not isinstance(parent, cst.Arg) or not isinstance(call, cst.Call):
        return False
    return source.origin(call.func) != "torch.save"


def _entries(source: Source, node: Node) -> tuple[tuple[str, Node], ...] | None:
    if isinstance(node, cst.Dict):
        results: list[tuple[str, Node]] = []
        for element in node.elements:
            if isinstance(element, cst.DictElement):
                results.append((string_value(element.key) or "", element.value))
                continue
            inner = _entries(source, element.value)
            if inner is None:
                return None
            results += inner
        return tuple(results)
    if not isinstance(node, cst.Call) or source.names.builtin(node.func) != "dict":
        return None
    named = [(arg.keyword.value, arg.value) for arg in node.args if arg.keyword]
    return tuple(named) if len(named) == len(node.args) else None


def _is_training_state(source: Source, flow: FunctionFlow, saved: _Saved) -> bool:
    """Return True if a dictionary has the states of an optimizer and of something else, and no scaler's state."""
    states = []
    for name, value in saved.entries:
        if _SCALER_NAME.search(name) or _SCALER_NAME.search(key(source, value) or ""):
            return False
        if (owner := _state_of(value)) is not None:
            states.append(owner)
    optimizers = [owner for owner in states if _is_optimizers(source, flow, owner)]
    whole = any(name in _MODELS for name, _ in saved.entries)  # `"model": deepcopy(model).half()`
    return bool(optimizers) and (len(states) > len(optimizers) or whole)


def _is_saved_for_scaler(source: Source, flow: FunctionFlow) -> bool:
    """Return True if a function with a scaler calls the saving function without passing the scaler."""
    if not isinstance(flow.node, cst.FunctionDef):
        return False
    for other in flows(source):
        for call in other.nodes:
            if not isinstance(call, cst.Call) or called_function(source, call) is not flow.node:
                continue
            scaler = _scaler(source, other)
            is_passed = any(_SCALER_NAME.search(key(source, arg.value) or "") for arg in call.args)
            if scaler is not None and not is_passed and not is_off(source, scaler):
                return True
    return False


@once
def _scaler(source: Source, flow: FunctionFlow) -> Node | None:
    for node in flow.nodes:
        if type(node) is cst.Call and isinstance(node.func, cst.Attribute):
            owner = node.func.value
            if node.func.attr.value == "scale" and source.instance(owner) in SCALERS:
                return owner
        if type(node) is cst.Arg and isinstance(node.value, cst.Name):
            call = source.parents[node]
            called = called_function(source, call)
            if called is not None and source.instance(node.value) in SCALERS:
                return node.value
    module = source.scopes.module
    for _, used, _ in source.methods("scale"):
        if not isinstance(used, cst.Name) or source.instance(used) not in SCALERS:
            continue
        if source.scopes.scope_of[used].home(used.value) is module:
            return used
    home = source.values.enclosing_class(flow.node)
    return _scaler_of_class(source, home) if home is not None else None


@once
def _scaler_of_class(source: Source, home: Node) -> Node | None:
    attributes = (node for node in walk(home) if isinstance(node, cst.Attribute))
    own = (node for node in attributes if key(source, node.value) == "self")
    return next((node for node in own if source.instance(node) in SCALERS), None)


RULE = LintRule(
    code="AMP210",
    name="checkpoint-without-scaler",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="the scaler's state is not saved with the optimizer's",
    what=(
        "`torch.save` of a model's and an optimizer's state in code with a `GradScaler` whose state is not in it. Or a "
        "scaler's state that is saved, and not loaded where the optimizer's is."
    ),
    why=(
        "A training that resumes from the checkpoint starts with the default scale. It skips steps until the scale "
        "fits again, so its results differ from those of an uninterrupted training."
    ),
    fine=(
        "Other code saves the state, or a few skipped steps do not matter. Where the file never loads an optimizer's "
        "state, the finding is an information."
    ),
    words=("GradScaler torch.save state_dict", "GradScaler import save state_dict"),
    check=check,
    example="""
 import torch

 def train(model, optimizer, batches, path):
     scaler = torch.amp.GradScaler("cuda")
     for batch in batches:
         scaler.scale(model(batch)).backward()
         scaler.step(optimizer)
         scaler.update()
-    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
+    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "scaler": scaler.state_dict()}
     torch.save(state, path)
""",
)
