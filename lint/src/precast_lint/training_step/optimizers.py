"""Detection of optimizers, by their class or by their name and use.

Invariant: an object of a known class that is not an optimizer's is not an optimizer, whatever its name.
"""

from __future__ import annotations

import re

from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, cst, dotted

__all__ = ["acts_as_optimizer", "is_scheduler"]

_NAME = re.compile(r"(^|_)(optim(izer)?|opt)(?![a-z])", re.IGNORECASE)
_MAKER = re.compile(r"(^|[._])(build|create|get|make|configure)_optim", re.IGNORECASE)
_SCHEDULER = re.compile(r"lr_scheduler|(transformers|diffusers)\..*\bget_\w*schedule\w*$")


def acts_as_optimizer(source: Source, node: Node) -> bool:
    """Return True if the name, `step` and `zero_grad` show that something is an optimizer."""
    last = node.attr if isinstance(node, cst.Attribute) else node
    if not isinstance(last, cst.Name) or not _NAME.search(last.value):
        return False
    definition = source.values.constructed(node)
    if isinstance(definition, cst.Call) and not _MAKER.search(dotted(definition.func) or ""):
        return False
    entry = source.instance(node)
    return (entry is None or _MAKER.search(entry) is not None) and dotted(node) in _used(source)


def is_scheduler(instance: str | None) -> bool:
    """Return True if a class, or the function that creates an object, is a learning rate scheduler's."""
    return _SCHEDULER.search(instance or "") is not None


@once
def _used(source: Source) -> set[str]:
    """Return the objects, as texts, with calls of `step` and `zero_grad`, but not of `backward`, `train`, `update`."""
    called: dict[str, set[str]] = {"step": set(), "zero_grad": set(), "other": set()}
    for call, owner, _ in source.methods("step", "zero_grad", "backward", "train", "update"):
        assert isinstance(call.func, cst.Attribute)
        called.get(call.func.attr.value, called["other"]).add(dotted(owner) or "")
    return called["step"] & called["zero_grad"] - called["other"] - {""}
