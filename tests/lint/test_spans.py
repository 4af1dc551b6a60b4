"""The positions of nodes are LibCST's."""

from __future__ import annotations

import pytest
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from precast_lint.model import Span
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import walk
from precast_lint.parsing.text import decode

PROGRAM = '''\
# A header.
import torch


class First:
    """A class."""

    def step(self, x):
        return (x + 1)  # größer

    @torch.no_grad()
    def other(self, x, y=None):

        # A comment before a line.
        if x:
            y = x
        elif y: y = x; x = y
        else:
            y = "ß" + f"{x!r:>{y}}"
        try:
            return x
        finally:
            del x


if First:
    import torch
    value = 1
value = 1
async def run(x): return [await y for y in x]
match value:
    case [1, *rest]:
        value = rest
'''
TABS = PROGRAM.replace("    ", "\t")
TEXTS = {
    "as it is": PROGRAM,
    "with tabs": TABS,
    "with CRLF": PROGRAM.replace("\n", "\r\n"),
    "without an end": PROGRAM.rstrip("\n"),
    "one line": "x = torch.amp.autocast",
    "empty": "",
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_node_stands_where_libcst_says(name: str) -> None:
    source = Source(decode(TEXTS[name].encode()))
    wrapper = MetadataWrapper(source.module, unsafe_skip_copy=True)
    whole = wrapper.resolve(ByteSpanPositionProvider)
    for node in walk(source.module):
        start, length = whole[node].start, whole[node].length  # type: ignore[union-attr]
        assert source.span(node) == Span(start, start + length)
