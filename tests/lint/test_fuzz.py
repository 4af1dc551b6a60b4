"""Any mixture of the rules' own cases, shuffled, nested and reformatted: fixes are final, exact and parse."""

from __future__ import annotations

import ast
import textwrap

import libcst
from hypothesis import given
from hypothesis import strategies as st

from precast_lint.checking.engine import check, fix
from precast_lint.parsing.text import decode
from precast_lint.selecting.registry import all_rules
from precast_lint.selecting.settings import LintSettings
from tests.lint.cases import ALL

CASES = [case.code for case in ALL]
_WRAPPERS = (
    "{}",
    "def outer(a, b):\n{}",
    "class Outer:\n{}",
    "for item in items:\n{}",
    "if condition():\n{}",
    "with something() as thing:\n{}",
    "try:\n{}\nfinally:\n    pass",
    "async def outer():\n{}",
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    pieces = draw(st.lists(st.sampled_from(CASES), min_size=1, max_size=4))
    return "\n".join(_nested(draw, piece) for piece in pieces)


def _nested(draw: st.DrawFn, piece: str) -> str:
    for wrapper in draw(st.lists(st.sampled_from(_WRAPPERS), max_size=3)):
        if wrapper != "{}":
            piece = wrapper.format(textwrap.indent(piece, "    ")) + "\n"
    return piece


@st.composite
def formatted(draw: st.DrawFn) -> bytes:
    text = draw(programs())
    try:
        ast.parse(text)
    except SyntaxError:  # a `from __future__` or `return` that is out of its place now
        text = CASES[0]
    if draw(st.booleans()):
        text = "\n".join(_tabs(line) for line in text.split("\n"))
    if draw(st.booleans()):
        text = text.replace(", ", " ,  ")
    if draw(st.booleans()):
        text = text.replace("()", "(  )")
    if draw(st.booleans()):
        text = "# ünïcode: \N{SNOWMAN}\n" + text
    if draw(st.booleans()):
        text = text.rstrip("\n")
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    mark = b"\xef\xbb\xbf" if draw(st.booleans()) else b""
    return mark + text.encode()


def _tabs(line: str) -> str:
    bare = line.lstrip(" ")
    depth = len(line) - len(bare)
    return "\t" * (depth // 4) + " " * (depth % 4) + bare


@given(formatted(), st.booleans())
def test_fixes_are_final_exact_and_parse(data: bytes, unsafe: bool) -> None:
    settings = LintSettings(codes=frozenset({*all_rules(), "AMP901"}), unsafe_fixes=unsafe)
    text = decode(data)
    libcst.parse_module(text.string)
    before = check(text, "example.py", settings)
    after = fix(text, "example.py", settings)
    libcst.parse_module(after.text.string)
    ast.parse(after.text.data)
    again = fix(after.text, "example.py", settings)
    assert again.text.data == after.text.data
    assert not again.fixed
    assert not any(f.code == "AMP900" for f in after.findings)
    assert (after.text.data == text.data) == (not after.fixed)
    if not after.fixed:
        assert after.findings == before.findings
    if b"\r\n" in data:
        assert after.text.data.count(b"\n") == after.text.data.count(b"\r\n")
