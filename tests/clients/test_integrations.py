"""The programs and the page of integrations run where their libraries are, and print what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import _CHECKS, NOT_RUN, _blocks, _with_checks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"

PRINTED = {
    "with_accelerate": r"scaler +none in bfloat16\nlayer 2: 0% lost, 0% .*\nlayer 1: .*\nlayer 0: [1-9]\d?% lost, 0%",
    "with_lightning": r"steps +100, skipped 1\nstep +5 .* layers\.0\.weight, .*\nfirst +In step 5 the gradient of",
}

for library in ("accelerate", "ignite", "lightning", "transformers"):
    pytest.importorskip(library, reason="`make test-clients` runs these tests")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported by the model summary"),
]


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_the_examples_on_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"} | vars(_CHECKS)
    blocks = list(_blocks(PAGE, "python"))
    for line, text in blocks:
        exec(compile("\n" * line + _with_checks(text), str(PAGE), "exec"), namespace)
    assert len(blocks) == NOT_RUN["docs/integrations.md"], "what needs no library runs elsewhere"


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_what_it_should(name: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / "integrations" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert re.search(PRINTED[name], done.stdout), done.stdout
    loss = re.search(r"loss +(\d\.\d+)", done.stdout)
    assert loss, done.stdout
    assert float(loss[1]) < 0.05


def test_every_program_is_run_here() -> None:
    programs = (ROOT / "examples" / "integrations").glob("*.py")
    assert sorted(PRINTED) == sorted(program.stem for program in programs)
