"""The list of intended differences: each has its test and its line in the docs, is met, and explains no other thing."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from precast.weights.freshness import has_same_memory
from tests.conformance.differences import DIFFERENCES, Difference
from tests.conformance.programs.compare import compare, explain
from tests.conformance.programs.steps import (
    Case,
    Compute,
    Differentiate,
    Leave,
    Program,
    Reenter,
    Region,
    Write,
)
from tests.conformance.systems import SYSTEMS, TORCH, System, on_all_systems

ROOT = Path(__file__).parent.parent.parent
OURS = Region(torchs=False, device="cpu", dtype=torch.bfloat16, enabled=True, cache=None)
TORCHS = Region(torchs=True, device="cpu", dtype=torch.bfloat16, enabled=True, cache=None)
FLOAT16 = Region(torchs=False, device="cpu", dtype=torch.float16, enabled=True, cache=None)
LINEAR, MATMUL = Compute("linear", (8, 0, 0)), Compute("matmul", (9, 0, 0))
GRADIENTS = Differentiate((-1, -2, -3), None, True, False, True)

MET: dict[str, Program] = {
    "written": (OURS, LINEAR, Write("in place", 0), LINEAR, MATMUL, GRADIENTS),
    "dtype": (OURS, LINEAR, FLOAT16, LINEAR, Leave(), MATMUL, GRADIENTS),
    "own cache": (TORCHS, LINEAR, OURS, MATMUL, Leave(), LINEAR, GRADIENTS),
    "re-entered": (OURS, Reenter(0), LINEAR, Leave(), Leave(), LINEAR),
}
"""The shortest programs that come by each."""


@on_all_systems
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.point)
def test_each_difference_is_met_by_its_program(difference: Difference, system: System) -> None:
    installed = system.region is TORCH.region
    expected = () if installed and not difference.when_installed else (difference.point,)
    assert explain(Case(MET[difference.point], 3), system) == expected


CUDA, TORCHS_CUDA = replace(OURS, device="cuda"), replace(TORCHS, device="cuda")


@on_all_systems
@pytest.mark.parametrize(
    ("program", "points"),
    [
        ((TORCHS, CUDA, LINEAR, OURS, MATMUL, GRADIENTS), ("own cache",)),
        ((CUDA, TORCHS, LINEAR, Leave(), OURS, MATMUL, GRADIENTS), ("own cache",)),
        ((CUDA, OURS, LINEAR, Leave(), TORCHS, MATMUL, GRADIENTS), ("own cache",)),
        ((TORCHS_CUDA, OURS, LINEAR, Leave(), OURS, MATMUL, GRADIENTS), ("own cache",)),
        ((TORCHS_CUDA, OURS, LINEAR, Leave(), TORCHS, MATMUL, GRADIENTS), ("own cache",)),
        ((CUDA, OURS, LINEAR, Leave(), OURS, MATMUL, GRADIENTS), ()),
        ((OURS, LINEAR, CUDA, TORCHS, MATMUL, GRADIENTS), ()),
        ((TORCHS, LINEAR, CUDA, TORCHS, MATMUL, GRADIENTS), ()),
    ],
)
def test_regions_for_another_device_change_no_cache_and_may_keep_one(
    program: Program, points: tuple[str, ...], system: System
) -> None:
    installed = system.region is TORCH.region
    assert explain(Case(program, 3), system) == (() if installed else points)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.point)
def test_each_difference_has_its_test_and_its_line(difference: Difference) -> None:
    file, _, test = difference.test.partition("::")
    functions = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    assert test in {node.name for node in functions if isinstance(node, ast.FunctionDef)}
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    headings = re.split(r"^#+ (.+)$", page, flags=re.M)
    sections = dict(zip(headings[1::2], headings[2::2], strict=True))
    [heading] = [h for h in sections if h.lower().replace(" ", "-") == difference.anchor]
    assert difference.name in sections[heading] or difference.test in sections[heading]


@pytest.mark.parametrize("system", SYSTEMS[:2], ids=str)
def test_a_stale_copy_is_not_explained_by_pytorchs_own(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.weights.freshness.is_valid", has_same_memory)
    report = compare([Case((OURS, LINEAR, Write("in place", 0), LINEAR), 3)], [system])
    [(_, case, _)] = report.unexplained
    assert len(case.program) <= 4


@pytest.mark.parametrize("system", SYSTEMS[:2], ids=str)
def test_a_copy_without_its_gradient_is_not_explained(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "precast.weights.weight_cache._graph_cast", lambda t, dtype: t.detach().to(dtype)
    )
    padding = (Compute("gelu", (8, 8, 8)), Compute("cat", (8, 9, 8)))
    case = Case((OURS, *padding, LINEAR, *padding), 3)
    report = compare([case], [system])
    [(_, shrunk, _)] = report.unexplained
    assert LINEAR in shrunk.program
    assert len(shrunk.program) < len(case.program)
