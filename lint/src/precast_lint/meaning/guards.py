"""Detection of code for some versions of PyTorch only, for failed imports, or for expected failures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["is_guarded", "is_tried", "is_version_test"]

_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError"}
_FAILURES = {
    "TypeError",
    "ValueError",
    "RuntimeError",
    "AssertionError",
    "Exception",
    "BaseException",
}
_AMP = re.compile(r"autocast|GradScaler|custom_[fb]wd")
_VERSION = re.compile(
    r"__version__|torch_?version|pt_?version|torch_\d|torch_g[et]|_at_least|_greater|greater_equal|is_torch|"
    r"(has|have|supports?|new)_(native_|torch_|cuda_|new_)*(amp|autocast|grad_?scaler)|"
    r"(amp|autocast|grad_?scaler)_(available|exists)",
    re.IGNORECASE,
)


def is_guarded(source: Source, node: Node) -> bool:
    """Return True if a node is in a fallback of an import, or under a test of PyTorch's version or names.

    Both sides of such a test, both blocks of such a `try`, and what follows a test that leaves are guarded.
    """
    return any(
        _is_guard(source, outer) or _follows_guard(source, outer)
        for outer in [node, *source.around(node)]
    )


def is_tried(source: Source, node: Node) -> bool:
    """Return True if a node's function expects it to fail: in a `try` that catches it, or under `pytest.raises`."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.Try) and inner is outer.body:
            if any(
                handler.type is None or _names(handler) & _FAILURES for handler in outer.handlers
            ):
                return True
        elif isinstance(outer, cst.With):
            if any(_asks_for_failure(item.item) for item in outer.items):
                return True
        elif isinstance(outer, cst.FunctionDef) and inner is outer.body:
            return False
        inner = outer
    return False


def _asks_for_failure(item: Node) -> bool:
    """Return True for `pytest.raises(...)`, `self.assertRaisesRegex(...)`, `self.assertWarns(...)`, `suppress(...)`."""
    name = (dotted(item.func) or "") if isinstance(item, cst.Call) else ""
    last = name.rpartition(".")[2].lower()
    return "raises" in last or "warns" in last or last == "suppress"


def _is_guard(source: Source, node: Node) -> bool:
    if isinstance(node, cst.Try):
        if _only_imports(node):
            return bool(node.handlers)
        caught = _CAUGHT | {"TypeError"} if _tries_amp(node) else _CAUGHT
        return any(_catches(handler, caught) for handler in node.handlers)
    if isinstance(node, (cst.If, cst.IfExp, cst.While)):
        return is_version_test(source, node.test)
    if isinstance(node, cst.BooleanOperation):
        return is_version_test(source, node.left)
    return False


def _follows_guard(source: Source, node: Node) -> bool:
    """Return True if an `if` before a statement, in the same block, tests the version and leaves the block."""
    block = source.parents.get(node)
    if not isinstance(block, cst.IndentedBlock):
        return False
    before = itertools.takewhile(lambda statement: statement is not node, block.body)
    return any(
        isinstance(statement, cst.If)
        and isinstance(statement.body, cst.IndentedBlock)
        and isinstance(last := statement.body.body[-1], cst.SimpleStatementLine)
        and isinstance(last.body[-1], (cst.Return, cst.Continue, cst.Break))
        and is_version_test(source, statement.test)
        for statement in before
    )


def _only_imports(node: cst.Try) -> bool:
    return all(
        isinstance(line, cst.SimpleStatementLine)
        and all(isinstance(part, (cst.Import, cst.ImportFrom)) for part in line.body)
        for line in node.body.body
    )


def _tries_amp(node: cst.Try) -> bool:
    """Return True if a `try` block is one or two statements with AMP's names, which may raise TypeError."""
    names = (inner.value for inner in walk(node.body) if isinstance(inner, cst.Name))
    return len(node.body.body) <= 2 and any(_AMP.search(name) for name in names)


def _catches(handler: cst.ExceptHandler, caught: Collection[str]) -> bool:
    return bool(_names(handler) & set(caught))


def _names(handler: cst.ExceptHandler) -> set[str]:
    """Return the last names of the exceptions that a handler catches; empty for a bare `except`."""
    kinds = [handler.type] if handler.type is not None else []
    if isinstance(handler.type, cst.Tuple):
        kinds = [element.value for element in handler.type.elements]
    return {(dotted(kind) or "").rpartition(".")[2] for kind in kinds}


def is_version_test(source: Source, test: Node) -> bool:
    """Return True if an expression tests PyTorch's version, or whether PyTorch has a name."""
    return any(
        (
            isinstance(node, cst.Name)
            and (_VERSION.search(node.value) or _asks_by_name(source, node))
        )
        or (isinstance(node, cst.Call) and _asks_for_attribute(source, node))
        for node in walk(test)
    )


def _asks_for_attribute(source: Source, call: cst.Call) -> bool:
    """Return True for `hasattr(torch, "amp")` and `getattr`, but not for `hasattr(self, "scaler")`."""
    if source.names.builtin(call.func) not in ("hasattr", "getattr") or not call.args:
        return False
    owner = call.args[0].value
    return (source.origin(owner) or dotted(owner) or "").startswith("torch")


def _asks_by_name(source: Source, node: cst.Name) -> bool:
    """Return True for `NEW` after `NEW = hasattr(torch, "amp")`, or after a fallback of an import that sets it."""
    for binding in source.names.bindings(node):
        if isinstance(binding.node, cst.FunctionDef) and _reads_version(binding.node):
            return True
        if binding.kind != "assign" or binding.value is None or binding.value is node:
            continue
        inner = list(walk(binding.value))
        if any(isinstance(n, cst.Name) and _VERSION.search(n.value) for n in inner):
            return True
        if any(isinstance(n, cst.Call) and _asks_for_attribute(source, n) for n in inner):
            return True
        tries = (o for o in source.around(binding.node) if isinstance(o, cst.Try))
        if any(_is_guard(source, outer) and _is_of_torch(source, outer) for outer in tries):
            return True
    return False


def _reads_version(function: cst.FunctionDef) -> bool:
    """Return True if a function reads a version: `def torch_release(): return torch.__version__.split(".")`."""
    return any(
        isinstance(n, cst.Attribute) and n.attr.value == "__version__" for n in walk(function.body)
    )


def _is_of_torch(source: Source, node: cst.Try) -> bool:
    for inner in walk(node.body):
        if isinstance(inner, cst.ImportFrom) and f"{dotted(inner.module)}.".startswith("torch."):
            return True
        if isinstance(inner, cst.ImportAlias) and (dotted(inner.name) or "").startswith("torch."):
            return True
        if isinstance(inner, cst.Attribute) and (source.origin(inner) or "").startswith("torch."):
            return True
    return False
