"""Code that runs only on some versions, or where an import failed: old names in it are there on purpose."""

from __future__ import annotations

import re

from precast.rewrite.source import Source
from precast.rewrite.syntax import Node, cst, dotted, walk

__all__ = ["is_guarded", "is_version_test"]

_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError"}
_VERSION = re.compile(
    r"__version__|torch_?version|pt_?version|torch_\d|torch_g[et]|_at_least|_greater|greater_equal|is_torch|"
    r"(has|have|supports?|new)_(native_|torch_|cuda_|new_)*(amp|autocast|grad_?scaler)|"
    r"(amp|autocast|grad_?scaler)_(available|exists)",
    re.IGNORECASE,
)


def is_guarded(source: Source, node: Node) -> bool:
    """Whether a node is in a fallback of an import, or under a test of what PyTorch has.

    Both sides of such a test, and both blocks of such a `try`, are guarded.
    """
    return any(_is_guard(source, outer) for outer in [node, *source.around(node)])


def _is_guard(source: Source, node: Node) -> bool:
    if isinstance(node, cst.Try):
        return any(_catches(handler) for handler in node.handlers)
    if isinstance(node, (cst.If, cst.IfExp, cst.While)):
        return is_version_test(source, node.test)
    return False


def _catches(handler: cst.ExceptHandler) -> bool:
    """Whether a handler is for names that are missing."""
    if handler.type is None:
        return False
    kinds = [handler.type]
    if isinstance(handler.type, cst.Tuple):
        kinds = [element.value for element in handler.type.elements]
    return any((dotted(kind) or "").rpartition(".")[2] in _CAUGHT for kind in kinds)


def is_version_test(source: Source, test: Node) -> bool:
    """Whether an expression asks for PyTorch's version, or whether something exists in it."""
    return any(
        (
            isinstance(node, cst.Name)
            and (_VERSION.search(node.value) or _asks_by_name(source, node))
        )
        or (isinstance(node, cst.Call) and _asks_for_attribute(source, node))
        for node in walk(test)
    )


def _asks_for_attribute(source: Source, call: cst.Call) -> bool:
    """`hasattr(torch, "amp")`, and `getattr`; not `hasattr(self, "scaler")`."""
    if source.names.builtin(call.func) not in ("hasattr", "getattr") or not call.args:
        return False
    owner = call.args[0].value
    return (source.origin(owner) or dotted(owner) or "").startswith("torch")


def _asks_by_name(source: Source, node: cst.Name) -> bool:
    """`if NEW:` after `NEW = hasattr(torch, "amp")`, or one that a fallback of an import sets."""
    for binding in source.names.bindings(node):
        if binding.kind != "assign" or binding.value is None or binding.value is node:
            continue
        inner = list(walk(binding.value))
        if any(isinstance(n, cst.Name) and _VERSION.search(n.value) for n in inner):
            return True
        if any(isinstance(n, cst.Call) and _asks_for_attribute(source, n) for n in inner):
            return True
        if any(_is_guard(source, o) for o in source.around(binding.node) if isinstance(o, cst.Try)):
            return True
    return False
