"""Where the nodes of a tree stand, in bytes; imported when a file has a finding, for it loads LibCST."""

from __future__ import annotations

from libcst import CSTNode, Module
from libcst.metadata import ByteSpanPositionProvider

from precast_lint.model import Span

__all__ = ["spans"]


def spans(module: Module) -> dict[CSTNode, Span]:
    """The span of every node, without the whitespace, comments and parentheses around it."""
    return _Provider().spans(module)


class _Provider(ByteSpanPositionProvider):
    def spans(self, module: Module) -> dict[CSTNode, Span]:
        """Without a `MetadataWrapper`, which walks the whole tree once more for nothing: half the time."""
        self._gen_impl(module)
        return {node: Span(s.start, s.start + s.length) for node, s in self._computed.items()}  # type: ignore[union-attr]
