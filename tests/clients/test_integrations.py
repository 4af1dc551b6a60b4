"""The programs and the page of integrations run where their libraries are, and print what they should."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import CHECKS, NOT_RUN, with_checks
from tests.support.pages import blocks as blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"

PRINTED = {
    "with_lightning": r"loss +0\.0.*\nsteps +100, skipped 1\nstep +5 .*\nfirst +In step 5 the gradient of",
    "with_accelerate": r"loss +0\.0.*\nscaler +none .*\nlayer 2: 0% .*\nlayer 1: .*\nlayer 0: [1-9]\d?% lost, 0%",
    "with_transformers": r"loss +0\.0.*\nlogged +epoch, grad_norm, .*\nlargest +\d+\.\d in the output of lm_head",
    "with_ignite": r"skipped +0\.weight, .*\nstep +50 +loss inf .*\n(.*\n)*step 100 +loss 0\.0.*\nsaved +True",
}

for library in ("accelerate", "ignite", "lightning", "transformers"):
    pytest.importorskip(library, reason="`make test-clients` runs these tests")

pytestmark = [
    pytest.mark.usefixtures("one_accelerator"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Precision 16-mixed is not supported by the model summary"),
]


def test_the_examples_on_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"} | vars(CHECKS)
    blocks = list(blocks_of(PAGE, "python"))
    for line, text in blocks:
        if "wandb" in text and importlib.util.find_spec("wandb") is None:
            continue  # tested with a stand-in, as it is in no environment of ours
        exec(compile("\n" * line + with_checks(text), str(PAGE), "exec"), namespace)
    marked = [text for _, text in blocks if text.startswith("# not run")]
    assert len(marked) == NOT_RUN["docs/integrations.md"], "what needs no library runs elsewhere"


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_what_it_should(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "integrations" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTED[name], printed), printed


def test_every_program_is_run_here() -> None:
    programs = (ROOT / "examples" / "integrations").glob("*.py")
    assert sorted(PRINTED) == sorted(program.stem for program in programs)
