"""A node stands where the text of the whole file says, whatever was read to find its place."""

from __future__ import annotations

import pytest
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from precast_lint.parsing.source import Source
from precast_lint.parsing.spans import Spans
from precast_lint.parsing.syntax import walk
from precast_lint.parsing.text import decode

SAME = '''\
# A header.
import torch


class First:
    """The same method twice, and a line that stands in the text of another."""

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


class Second(First):
    def step(self, x):
        return (x + 1)  # größer

    class Third:
        def step(self, x):
            return (x + 1)  # größer


if First:
    import torch
    value = 1
value = 1
async def run(x): return [await y for y in x]
match value:
    case [1, *rest]:
        value = rest
'''
TABS = SAME.replace("    ", "\t")
TEXTS = {
    "as it is": SAME,
    "with tabs": TABS,
    "with CRLF": SAME.replace("\n", "\r\n"),
    "without an end": SAME.rstrip("\n"),
    "one line": "x = torch.amp.autocast",
    "in a function": "def f(x):\n    return x\n" + "\n" * 400,
    "empty": "",
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_node_stands_where_the_whole_file_says(name: str) -> None:
    source = Source(decode(TEXTS[name].encode()))
    wrapper = MetadataWrapper(source.module, unsafe_skip_copy=True)
    whole = wrapper.resolve(ByteSpanPositionProvider)
    together = Spans(source.module, source.text.data, source.parents)
    for node in walk(source.module):
        start, length = whole[node].start, whole[node].length  # type: ignore[union-attr]
        alone = Spans(source.module, source.text.data, source.parents)[node]
        assert (alone.start, alone.end) == (start, start + length)
        assert together[node] == alone


def test_only_the_function_in_which_a_node_stands_is_written() -> None:
    functions = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(200))
    source = Source(decode(functions.encode()))
    spans = Spans(source.module, source.text.data, source.parents)
    [plus] = [n for n in walk(source.module) if type(n).__name__ == "Integer" and n.value == "77"]  # type: ignore[attr-defined]
    at = functions.index("+ 77") + 2
    assert (spans[plus].start, spans[plus].end) == (at, at + 2)
    assert len(spans._known) < 40
