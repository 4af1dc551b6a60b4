"""AMP009: Apex's mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_NEW = {
    "initialize": "`torch.autocast` around the forward pass, and `torch.amp.GradScaler`",
    "scale_loss": "`scaler.scale(loss).backward()`",
    "master_params": "`scaler.unscale_(optimizer)` and `model.parameters()`",
    "state_dict": "`scaler.state_dict()`",
    "load_state_dict": "`scaler.load_state_dict()`",
}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each function of apex.amp that is called or handed on."""
    for node in [*source.all(cst.Attribute), *source.all(cst.Name)]:
        if isinstance(node, cst.Name) and node not in source.scopes.scope_of:
            continue
        origin = source.origin(node) or ""
        name = origin.removeprefix("apex.amp.")
        if name == origin or "." in name or name.startswith("_"):
            continue
        if not _is_bound(source, node) and not is_guarded(source, node):
            new = _NEW.get(name, "PyTorch's own autocast and gradient scaler")
            yield source.find(RULE, node, RULE.message.format(old=origin, new=new))


def _is_bound(source: Source, node: Node) -> bool:
    return any(binding.node is node for binding in source.names.bindings(node))


VALID = (
    Case("""
        import amp

        amp.initialize(model, optimizer)
    """),
    Case("""
        from apex.normalization import FusedLayerNorm

        norm = FusedLayerNorm(64)
    """),
    Case("""
        try:
            from apex import amp
        except ImportError:
            amp = None
    """),
)

INVALID = (
    Case(
        """
        try:
            from apex import amp
        except ImportError:
            amp = None

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        """,
        count=2,
    ),
    Case("""
        import apex

        parameters = apex.amp.master_params(optimizer)
    """),
)

RULE = Rule(
    code="AMP009",
    name="apex-amp",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="`{old}` is Apex's, which is deprecated; use {new}",
    what="Functions of `apex.amp`.",
    why=(
        "Apex's mixed precision is deprecated in favour of PyTorch's own, patches PyTorch's functions for the whole "
        "process, and is removed from newer versions of Apex."
    ),
    fine="The code compares itself with Apex on purpose.",
    words=("apex amp",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
