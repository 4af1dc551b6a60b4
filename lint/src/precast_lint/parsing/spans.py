"""Positions of nodes in bytes; imported for files with a finding only, because it loads LibCST.

LibCST knows of a node's place only when it writes the tree as text again, which takes as long as parsing. A function
or a line is written alone here, and looked for in the file's text: a text that stands there once says where it stands.

Invariant: what stands there more than once, or not at all, is placed by the text of all.
"""

from __future__ import annotations

from collections.abc import Callable

from libcst import (
    BaseCompoundStatement,
    CSTNode,
    FunctionDef,
    IndentedBlock,
    Module,
    SimpleStatementLine,
)
from libcst.metadata import ByteSpanPositionProvider
from libcst.metadata.span_provider import SpanProvidingCodegenState

from precast_lint.model import Span

__all__ = ["Spans"]

_WHOLE = 4  # texts of more than a quarter of a file are not worth while


class Spans:
    """The spans of nodes, without the whitespace, comments and parentheses around them.

    Args:
        module: the tree.
        data: its text, in UTF-8.
        parents: the node around each node.
    """

    def __init__(self, module: Module, data: bytes, parents: dict[CSTNode, CSTNode]) -> None:
        self._module = module
        self._data = data
        self._parents = parents
        self._known: dict[CSTNode, Span] = {}
        self._tried: set[CSTNode] = set()
        self._written = 0

    def __getitem__(self, node: CSTNode) -> Span:
        if node not in self._known:
            self._place(node)
        return self._known[node]

    def _place(self, node: CSTNode) -> None:
        """Finds the place of the function or statement that a node is in, with all that is in it."""
        for unit, indents in self._units(node):
            if self._written * _WHOLE > len(self._data):
                break
            if unit in self._tried:
                continue
            self._tried.add(unit)
            provider = _Provider()
            text = provider.write(self._module, unit._codegen, indents)
            self._written += len(text)
            start = self._data.find(text)
            if start >= 0 and self._data.find(text, start + 1) < 0:
                self._known.update(provider.spans(start))
                return
        provider = _Provider()
        provider.write(self._module, self._module._codegen, [])
        self._known.update(provider.spans(0))

    def _units(self, node: CSTNode) -> list[tuple[CSTNode, list[str]]]:
        """The statements around a node, each with its indentation: its function or line first, then those around."""
        way = [node]
        while way[-1] in self._parents:
            way.append(self._parents[way[-1]])
        results: list[tuple[CSTNode, list[str]]] = []
        indents: list[str] = []
        for outer, inner in zip(reversed(way), reversed(way[:-1]), strict=False):
            if isinstance(outer, IndentedBlock):
                own = outer.indent
                indents = [*indents, self._module.default_indent if own is None else own]
            if isinstance(outer, (Module, IndentedBlock)):
                is_line = isinstance(inner, SimpleStatementLine)
                if is_line or isinstance(inner, BaseCompoundStatement):
                    results.append((inner, indents))
                if is_line or isinstance(inner, FunctionDef):
                    break
        return results[::-1]


class _Provider(ByteSpanPositionProvider):
    def write(
        self,
        module: Module,
        codegen: Callable[[SpanProvidingCodegenState], None],
        indents: list[str],
    ) -> bytes:
        """Write a node, and record the positions of all nodes in it.

        Without a `MetadataWrapper`, which walks the whole tree once more for nothing: half the time.
        """
        state = SpanProvidingCodegenState(
            default_indent=module.default_indent,
            default_newline=module.default_newline,
            indent_tokens=list(indents),
            provider=self,
            get_length=_length,
        )
        codegen(state)
        return "".join(state.tokens).encode("utf-8")

    def spans(self, start: int) -> dict[CSTNode, Span]:
        """The spans of the nodes of a text that stands somewhere."""
        return {
            node: Span(start + at.start, start + at.start + at.length)  # type: ignore[union-attr]
            for node, at in self._computed.items()
        }


def _length(token: str) -> int:
    return len(token) if token.isascii() else len(token.encode("utf-8"))
