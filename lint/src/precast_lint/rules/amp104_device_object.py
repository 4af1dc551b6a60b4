"""AMP104: a device where a device type is expected."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.meaning.functions import NEW_CUSTOM
from precast_lint.meaning.guards import is_expected_to_fail
from precast_lint.meaning.kinds import is_device, texts
from precast_lint.meaning.regions import NEW_AUTOCASTS
from precast_lint.model import Applicability, Fix, LintFinding, LintRule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, string_value

__all__ = ["RULE"]

_INDEXED = "a device type has no index: older PyTorch raises, newer PyTorch does not check whether CUDA is available"
_NEVER_CAST = "a device type has no index: no tensor is on this one, so no input is cast"
_QUERIES = (
    "torch.is_autocast_enabled",
    "torch.set_autocast_enabled",
    "torch.get_autocast_dtype",
    "torch.set_autocast_dtype",
    "torch.amp.is_autocast_available",
)


def check(source: Source) -> Iterator[LintFinding]:
    """Yield a finding for each device that is passed as a device type."""
    for call, arguments in source.calls(*NEW_AUTOCASTS, *NEW_CUSTOM, *_QUERIES):
        origin = source.origin(call.func) or ""
        value = arguments.get("device_type", None if origin in NEW_CUSTOM else 0)
        if value is None or arguments.starred or is_expected_to_fail(source, call):
            continue
        if is_device(source, value):
            yield source.find(RULE, value, fix=_typed(source, call, value))
        elif origin not in _QUERIES and _is_indexed(source, value):
            mild = origin == "torch.amp.autocast"
            if mild and _is_one_of_several(source, value):
                continue
            message = _NEVER_CAST if origin in NEW_CUSTOM else _INDEXED
            severity = Severity.WARNING if mild else Severity.ERROR
            yield source.find(RULE, value, message, _without_index(source, call, value), severity)


def _is_indexed(source: Source, node: Node) -> bool:
    """Return True for `"cuda:0"`, `f"cuda:{rank}"`, `str(device)`, or a name with such a value."""
    if isinstance(node, cst.FormattedString):
        return _beginning(node) is not None
    if _described(source, node) is not None:
        return True
    values = [value for value, note in source.values.sources(node) if note is None]
    if _beginning(node) is not None or (values and all(_beginning(v) is not None for v in values)):
        return True
    return any(":" in text for text in texts(source, node))


def _beginning(node: Node | None) -> str | None:
    """Return the first part of `f"cuda:{rank}"`, `"cuda:%d" % rank`, `"cuda:{}".format(rank)`."""
    if isinstance(node, cst.FormattedString):
        first = node.parts[0] if node.parts else None
        text = first.value if isinstance(first, cst.FormattedStringText) else None
    elif isinstance(node, cst.BinaryOperation):
        text = string_value(node.left) if isinstance(node.operator, (cst.Add, cst.Modulo)) else None
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        text = string_value(node.func.value) if node.func.attr.value == "format" else None
    else:
        text = None
    return text if text is not None and ":" in text else None


def _is_one_of_several(source: Source, node: Node) -> bool:
    """Return True if a name has values with and without an index."""
    several = len(source.names.bindings(node)) > 1
    return several and not all(":" in text for text in texts(source, node))


def _described(source: Source, node: Node) -> Node | None:
    """Return the device in `str(device)`."""
    if (
        isinstance(node, cst.Call)
        and source.names.builtin(node.func) == "str"
        and len(node.args) == 1
    ):
        inner = node.args[0].value
        return inner if is_device(source, inner) else None
    return None


def _typed(source: Source, call: cst.Call, value: Node) -> Fix | None:
    if isinstance(value, cst.Call) and source.origin(value.func) == "torch.device":
        text = string_value(value.args[0].value) if len(value.args) == 1 else None
        if text is not None and _root(value.func) == _root(call.func):
            return _literal(source, value, text)
    if isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
        return source.fix("Use its type", source.after(value, ".type"), unsafe=True)
    return None


def _root(node: Node) -> str | None:
    if isinstance(node, cst.Name):
        return None
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else None


def _literal(source: Source, value: Node, text: str) -> Fix:
    kind = text.partition(":")[0]
    return source.fix("Use its type", source.replace(value, source.quoted(kind, value)))


def _without_index(source: Source, call: cst.Call, value: Node) -> Fix | None:
    text = string_value(value)
    if text is not None:
        return _literal(source, value, text)
    beginning = _beginning(value)
    if beginning is not None:
        kind = beginning.partition(":")[0]
        quoted = f"{source.quote}{kind}{source.quote}"
        return source.fix("Use its type", source.replace(value, quoted), unsafe=True)
    device = _described(source, value)
    if device is not None:
        edit = source.replace(value, f"{source.code(device)}.type")
        return source.fix("Use its type", edit, unsafe=True)
    named = name_for(source, "torch", call)
    if named is None or not isinstance(value, (cst.Name, cst.Attribute)):
        return None
    torch, added = named
    edit = source.replace(value, f"{torch}.device({source.code(value)}).type")
    return source.fix("Use its type", edit, added, unsafe=True)


RULE = LintRule(
    code="AMP104",
    name="device-for-device-type",
    severity=Severity.ERROR,
    fix=Applicability.SAFE,
    message="this is a torch.device; PyTorch expects its type, a string, and raises",
    what=(
        'A `torch.device`, or a string with an index such as `"cuda:0"`, where a device type is expected: in regions, '
        "in `custom_fwd` and `custom_bwd`, and (devices only) in functions like `torch.is_autocast_enabled`."
    ),
    why=(
        "A `torch.device` raises. A string with an index raised before PyTorch 2.4. Since then a region accepts it, "
        "but does not check whether CUDA is available. `custom_fwd` casts no input: no device type equals it."
    ),
    fine="The string with an index is passed to a region only, the program needs a GPU, and PyTorch is 2.4 or newer.",
    words=("autocast", "custom_fwd", "custom_bwd"),
    check=check,
    example="""
 import torch

-with torch.autocast(device_type=torch.device("cuda")):
+with torch.autocast(device_type="cuda"):
     pass
""",
)
