"""Detection of code that runs only with some versions of PyTorch or after a failed import, or is expected to fail."""

from __future__ import annotations

import itertools
import re

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["is_expected_to_fail", "is_guarded", "is_version_test"]

_LOOKUP_ERRORS = {"ImportError", "ModuleNotFoundError", "AttributeError"}
_CALL_ERRORS = {
    "TypeError",
    "ValueError",
    "RuntimeError",
    "AssertionError",
    "Exception",
    "BaseException",
}
_AMP_NAME = re.compile(r"autocast|GradScaler|custom_[fb]wd")
_VERSION_NAME = re.compile(
    r"__version__|torch_?version|pt_?version|torch_\d|torch_g[et]|_at_least|_greater|greater_equal|is_torch|"
    r"(has|have|supports?|new)_(native_|torch_|cuda_|new_)*(amp|autocast|grad_?scaler)|"
    r"(amp|autocast|grad_?scaler)_(available|exists)",
    re.IGNORECASE,
)


def is_guarded(source: Source, node: Node) -> bool:
    """Return True if a node is in a fallback of an import, or under a test of PyTorch's version or names.

    Guarded are both branches of such a test, all blocks of such a `try`, and the statements after a test whose branch
    leaves the block by `return`, `continue` or `break`.
    """
    return any(
        _is_guard(source, outer) or _is_after_guard(source, outer)
        for outer in [node, *source.around(node)]
    )


def is_expected_to_fail(source: Source, node: Node) -> bool:
    """Return True if the function around a node expects an error: by a `try` that catches it, or by `pytest.raises`."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.Try) and inner is outer.body:
            if any(
                handler.type is None or _exception_names(handler) & _CALL_ERRORS
                for handler in outer.handlers
            ):
                return True
        elif isinstance(outer, cst.With):
            if any(_expects_exception(item.item) for item in outer.items):
                return True
        elif isinstance(outer, cst.FunctionDef) and inner is outer.body:
            return False
        inner = outer
    return False


def _expects_exception(item: Node) -> bool:
    """Return True for context managers such as `pytest.raises`, `self.assertRaisesRegex` and `suppress`."""
    name = (dotted(item.func) or "") if isinstance(item, cst.Call) else ""
    last = name.rpartition(".")[2].lower()
    return "raises" in last or "warns" in last or last == "suppress"


def _is_guard(source: Source, node: Node) -> bool:
    if isinstance(node, cst.Try):
        if _only_imports(node):
            return bool(node.handlers)
        errors = _LOOKUP_ERRORS | {"TypeError"} if _is_amp_call(node) else _LOOKUP_ERRORS
        return any(_exception_names(handler) & errors for handler in node.handlers)
    if isinstance(node, (cst.If, cst.IfExp, cst.While)):
        return is_version_test(source, node.test)
    if isinstance(node, cst.BooleanOperation):
        return is_version_test(source, node.left)
    return False


def _is_after_guard(source: Source, node: Node) -> bool:
    """Return True if an `if` before a statement, in the same block, tests the version and leaves the block."""
    block = source.parents.get(node)
    if not isinstance(block, cst.IndentedBlock):
        return False
    earlier = itertools.takewhile(lambda statement: statement is not node, block.body)
    return any(
        isinstance(statement, cst.If)
        and isinstance(statement.body, cst.IndentedBlock)
        and isinstance(last := statement.body.body[-1], cst.SimpleStatementLine)
        and isinstance(last.body[-1], (cst.Return, cst.Continue, cst.Break))
        and is_version_test(source, statement.test)
        for statement in earlier
    )


def _only_imports(node: cst.Try) -> bool:
    return all(
        isinstance(line, cst.SimpleStatementLine)
        and all(isinstance(part, (cst.Import, cst.ImportFrom)) for part in line.body)
        for line in node.body.body
    )


def _is_amp_call(node: cst.Try) -> bool:
    """Return True if a `try` block only uses AMP's names: a TypeError then means that PyTorch has another signature."""
    names = (inner.value for inner in walk(node.body) if isinstance(inner, cst.Name))
    return len(node.body.body) <= 2 and any(_AMP_NAME.search(name) for name in names)


def _exception_names(handler: cst.ExceptHandler) -> set[str]:
    """Return the names of the exceptions that a handler catches, without modules; empty for a bare `except`."""
    kinds = [handler.type] if handler.type is not None else []
    if isinstance(handler.type, cst.Tuple):
        kinds = [element.value for element in handler.type.elements]
    return {(dotted(kind) or "").rpartition(".")[2] for kind in kinds}


def is_version_test(source: Source, test: Node) -> bool:
    """Return True if an expression tests PyTorch's version, or whether PyTorch has a name."""
    return any(
        (
            isinstance(node, cst.Name)
            and (_VERSION_NAME.search(node.value) or _is_version_flag(source, node))
        )
        or (isinstance(node, cst.Call) and _is_attribute_test(source, node))
        for node in walk(test)
    )


def _is_attribute_test(source: Source, call: cst.Call) -> bool:
    """Return True for `hasattr(torch, "amp")` and `getattr`, but not for `hasattr(self, "scaler")`."""
    if source.names.builtin(call.func) not in ("hasattr", "getattr") or not call.args:
        return False
    owner = call.args[0].value
    return (source.origin(owner) or dotted(owner) or "").startswith("torch")


def _is_version_flag(source: Source, node: cst.Name) -> bool:
    """Return True for a variable with the result of such a test, or set in the `try` of an import: `HAS_AMP = True`."""
    for binding in source.names.bindings(node):
        if isinstance(binding.node, cst.FunctionDef) and _reads_version(binding.node):
            return True
        if binding.kind != "assign" or binding.value is None or binding.value is node:
            continue
        inner = list(walk(binding.value))
        if any(isinstance(n, cst.Name) and _VERSION_NAME.search(n.value) for n in inner):
            return True
        if any(isinstance(n, cst.Call) and _is_attribute_test(source, n) for n in inner):
            return True
        outer_tries = (o for o in source.around(binding.node) if isinstance(o, cst.Try))
        if any(_is_guard(source, o) and _uses_torch(source, o) for o in outer_tries):
            return True
    return False


def _reads_version(function: cst.FunctionDef) -> bool:
    return any(
        isinstance(n, cst.Attribute) and n.attr.value == "__version__" for n in walk(function.body)
    )


def _uses_torch(source: Source, node: cst.Try) -> bool:
    for inner in walk(node.body):
        if isinstance(inner, cst.ImportFrom) and f"{dotted(inner.module)}.".startswith("torch."):
            return True
        if isinstance(inner, cst.ImportAlias) and (dotted(inner.name) or "").startswith("torch."):
            return True
        if isinstance(inner, cst.Attribute) and (source.origin(inner) or "").startswith("torch."):
            return True
    return False
