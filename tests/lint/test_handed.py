"""What a parameter is, by what the calls of its file hand to it."""

from __future__ import annotations

import textwrap

import pytest

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import cst
from precast_lint.parsing.text import decode

SCALER = "torch.amp.GradScaler"


def instance(text: str) -> str | None:
    """The class of what stands in `look(...)`."""
    source = Source(decode(textwrap.dedent("import torch\n" + text).encode()))
    call = next(c for c in source.all(cst.Call) if source.code(c.func) == "look")
    return source.instance(call.args[0].value)


FUNCTION = "def f(x, s, *, k=None):\n    look(s)\n"
KNOWN = (
    FUNCTION + "f(1, torch.amp.GradScaler())",
    FUNCTION + "f(1, s=torch.amp.GradScaler(), k=2)",
    FUNCTION + "made = torch.GradScaler()\nf(1, made)\nf(2, made)",
    FUNCTION + "def g(t):\n    f(1, t)\ng(torch.amp.GradScaler())",
    "class A:\n    def a(self, s):\n        look(s)\n    def b(self):\n        self.a(torch.amp.GradScaler())",
    "class A:\n    def __init__(self, s):\n        self.s = s\n    def b(self):\n        look(self.s)\n"
    "A(torch.amp.GradScaler())",
    "@torch.no_grad()\n" + FUNCTION + "f(1, torch.amp.GradScaler())",
)
UNKNOWN = (
    FUNCTION,
    FUNCTION + "f(1, torch.amp.GradScaler())\nf(2, other)",
    FUNCTION + "f(1, torch.amp.GradScaler())\nrun(f)",
    FUNCTION + "f(*rest)\nf(1, torch.amp.GradScaler())",
    "@wrapped\n" + FUNCTION + "f(1, torch.amp.GradScaler())",
    "def f(s):\n    g(s)\n    look(s)\ndef g(s):\n    f(s)\n",
)


@pytest.mark.parametrize("text", KNOWN)
def test_a_parameter_is_what_all_calls_hand_to_it(text: str) -> None:
    assert instance(text) == SCALER


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_parameter_is_unknown_where_a_call_is(text: str) -> None:
    assert instance(text) is None
