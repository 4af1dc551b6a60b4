"""Code in `except` blocks counts as if nothing in `try` had happened; what may have happened only excuses it."""

from __future__ import annotations

import textwrap

import pytest

from precast_lint.checking.engine import check
from precast_lint.parsing.text import decode
from precast_lint.selecting.settings import LintSettings

START = 'import torch\nscaler = torch.amp.GradScaler("cuda")\n'
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def rows(code: str) -> list[int]:
    text = decode((START + textwrap.dedent(code).format(clip=CLIP)).encode())
    result = check(text, "example.py", LintSettings(codes=frozenset({"AMP203"}))).findings
    return [text.position(finding.span.start)[0] - START.count("\n") for finding in result]


def test_a_mistake_in_a_handler_is_found() -> None:
    code = """\
        for batch in batches:
            try:
                loss = model(batch)
            except RuntimeError:
                scaler.scale(smaller(batch)).backward()
                {clip}
                scaler.step(optimizer)
                scaler.update()
        """
    assert rows(code) == [6]


@pytest.mark.parametrize("caught", ["except", "except*"])
def test_what_was_tried_may_excuse_the_handler(caught: str) -> None:
    code = f"""\
        scaler.scale(loss).backward()
        try:
            scaler.unscale_(optimizer)
            log(optimizer)
        {caught} ValueError:
            {{clip}}
        scaler.step(optimizer)
        scaler.update()
        """
    assert rows(code) == []
    assert rows(code.replace("scaler.unscale_(optimizer)", "pass")) == [6]


def test_a_handler_that_leaves_does_not_reach_what_follows() -> None:
    code = """\
        for batch in batches:
            try:
                scaler.scale(model(batch)).backward()
            except RuntimeError:
                continue
            scaler.unscale_(optimizer)
            {clip}
            scaler.step(optimizer)
            scaler.update()
        """
    assert rows(code) == []


FLAGGED = """
from torch.cuda.amp import custom_fwd

try:
    import {module}
    THERE = True
except ImportError:
    THERE = False

if THERE:
    run = custom_fwd(run)
"""


@pytest.mark.parametrize(("module", "found"), [("flash_attn", True), ("torch.amp", False)])
def test_that_another_package_is_there_says_nothing_of_pytorch(module: str, found: bool) -> None:
    text = decode(FLAGGED.format(module=module).encode())
    settings = LintSettings(codes=frozenset({"AMP004"}))
    assert bool(check(text, "example.py", settings).findings) is found
