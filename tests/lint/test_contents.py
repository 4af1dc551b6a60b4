"""Parameters, items of tables, loops, configurations, parsed arguments and base classes of a file."""

from __future__ import annotations

import textwrap

import pytest

from precast_lint.checking.engine import check
from precast_lint.meaning.kinds import is_device
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.text import decode
from precast_lint.selecting.settings import LintSettings

SCALER = "torch.amp.GradScaler"
MADE = "torch.amp.GradScaler()"


def looked_at(text: str) -> tuple[Source, Node]:
    """Return the source, and the argument of `look(...)`."""
    source = Source(decode(textwrap.dedent("import torch\n" + text).encode()))
    call = next(c for c in source.all(cst.Call) if source.code(c.func) == "look")
    return source, call.args[0].value


FUNCTION = "def f(x, s, *, k=None):\n    look(s)\n"
KNOWN = (
    FUNCTION + f"f(1, {MADE})",
    FUNCTION + f"f(1, s={MADE}, k=2)",
    FUNCTION + "made = torch.GradScaler()\nf(1, made)\nf(2, made)",
    FUNCTION + f"def g(t):\n    f(1, t)\ng({MADE})",
    f"class A:\n    def a(self, s):\n        look(s)\n    def b(self):\n        self.a({MADE})",
    "class A:\n    def __init__(self, s):\n        self.s = s\n    def b(self):\n        look(self.s)\n"
    f"A({MADE})",
    "@torch.no_grad()\n" + FUNCTION + f"f(1, {MADE})",
    f"for s in ({MADE}, {MADE}):\n    look(s)",
    f"made = [{MADE} for _ in range(3)]\nfor i, s in enumerate(made):\n    look(s)",
    f"made = []\nmade.append({MADE})\nfor s in made:\n    look(s)",
    f"made = {{'a': {MADE}}}\nlook(made['a'])",
    f"made = {{'a': {MADE}, 'b': 1}}\nlook(made['a'])",
    f"made = {{}}\nmade['a'] = {MADE}\nfor name, s in made.items():\n    look(s)",
    f"made = dict(a={MADE})\nlook([look(s) for s in made.values()])\nlook(made['a'])",
    f"for n, s in zip([1, 2], [{MADE}, {MADE}]):\n    look(s)",
    f"def make():\n    return [{MADE}]\nfor s in make():\n    look(s)",
    f"class A:\n    def __init__(self):\n        self.s = {MADE}\nclass B(A):\n    def b(self):\n        look(self.s)",
    f"class A:\n    def b(self):\n        look(self.s)\nclass B(A):\n    def __init__(self):\n        self.s = {MADE}",
    f"class A:\n    @property\n    def s(self):\n        return {MADE}\n    def b(self):\n        look(self.s)",
    f"class A:\n    s = {MADE}\nlook(A.s)",
    f"class A:\n    def __init__(self):\n        self.s = {MADE}\na = A()\nlook(a.s)",
    f"def make():\n    return 1, {MADE}\na, s = make()\nlook(s)",
    f"class A:\n    def make(self):\n        return {MADE}\nclass B(A):\n    def b(self):\n        look(self.make())",
    f"class A:\n    @staticmethod\n    def f(x, s):\n        look(s)\nA.f(1, {MADE})",
    f"class A:\n    @classmethod\n    def f(cls, s):\n        look(s)\n    def g(self):\n        self.f({MADE})",
    f"def make():\n    return {{'s': {MADE}, 'n': 1}}\ndef f(t):\n    look(t['s'])\nf(make())",
)
UNKNOWN = (
    FUNCTION,
    FUNCTION + f"f(1, {MADE})\nf(2, other)",
    FUNCTION + f"f(1, {MADE})\nrun(f)",
    FUNCTION + f"f(*rest)\nf(1, {MADE})",
    "@wrapped\n" + FUNCTION + f"f(1, {MADE})",
    "def f(s):\n    g(s)\n    look(s)\ndef g(s):\n    f(s)\n",
    f"def make():\n    if x:\n        return 1, {MADE}\n    return two\na, s = make()\nlook(s)",
    f"class A:\n    @wrapped\n    def f(self, s):\n        look(s)\n    def g(self):\n        self.f({MADE})",
    f"for s in ({MADE}, other):\n    look(s)",
    f"made = [{MADE}, *others]\nfor s in made:\n    look(s)",
    f"made = [{MADE}]\nmade.append(other)\nfor s in made:\n    look(s)",
    f"made = {{'a': {MADE}, 'b': 1}}\nlook(made[name])",
    f"made = {{'a': {MADE}}}\nmade['a'] = other\nlook(made['a'])",
    "for s in s:\n    look(s)",
    "made = made[0]\nlook(made)",
    "a, b = b, a\nfor s in a:\n    look(s)",
    f"class A:\n    s = {MADE}\nlook(A.s)\nother.s = 1",
    f"class A:\n    def __init__(self):\n        self.s = {MADE}\nlook(a.s)",
    f"class A(B):\n    def b(self):\n        look(self.s)\nclass B(A):\n    def c(self):\n        self.s = 1, {MADE}",
    "class A(B):\n    def b(self):\n        look(self.b())\n        super().d()\nclass B(A):\n    pass",
)


@pytest.mark.parametrize("text", KNOWN)
def test_what_a_file_puts_somewhere_is_known_where_it_is_taken_out(text: str) -> None:
    source, node = looked_at(text.replace("look([look(s) for s in made.values()])\n", ""))
    assert source.instance(node) == SCALER


@pytest.mark.parametrize("text", UNKNOWN)
def test_one_value_that_is_not_known_is_enough_to_say_nothing(text: str) -> None:
    source, node = looked_at(text)
    assert source.instance(node) is None


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def a(self, x):\n        self.a = -self.a\n        return x.half() + self.a",
        "def f(x, m):\n    e = torch.exp(x)\n    for _ in m:\n        e = e * m\n    return e / e.sum(1)",
        "e = e * m\nw = e / e.sum(1)\nx = -x\ny = torch.zeros(3).half() + x",
        "def region(a):\n    return region(a) if a else torch.autocast('cuda')\nwith region(1):\n    loss.backward()",
        "class A(A): pass\nclass A(A):\n    def f(self):\n        with self.a.b.c: super().f()",
    ],
)
def test_what_refers_to_itself_ends(text: str) -> None:
    settings = LintSettings()
    result = check(
        decode(f"import torch\nautocast = softmax = None\n{text}\n".encode()), "a.py", settings
    )
    assert "AMP900" not in [finding.code for finding in result.findings]


def test_a_device_that_is_stored_on_arguments_is_one() -> None:
    stored = "def main(args):\n    args.device = torch.device(args.device)\n    run(args)\n"
    assert is_device(*looked_at(stored + "def run(options):\n    look(options.device)"))
