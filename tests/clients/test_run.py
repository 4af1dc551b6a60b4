"""precast run on programs of other libraries' users: the casts in the document are those that somebody else counts.

They need the libraries of the extra `test-clients`: `make test-clients` installs them, and runs these tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.running.test_run import ended, start
from tests.running.test_run_training import assert_counted, counted_program

ROOT = Path(__file__).parents[2]

for library in ("lightning", "transformers"):
    pytest.importorskip(library, reason="`make test-clients` runs these tests")

CASES = (
    "transformers, GPT-2: Trainer, bfloat16",
    "lightning, T5: Trainer, bfloat16",
)


@pytest.mark.parametrize("case", CASES)
def test_the_casts_of_a_client_are_counted_right(tmp_path: Path, case: str) -> None:
    counted_program(
        tmp_path,
        f"""
        os.environ["HF_HUB_OFFLINE"] = "1"
        from tests.clients.clients import CASES
        client, dtype = CASES[{case!r}]
        with counted():
            client.run(dtype)
        """,
    )
    command = [sys.executable, "-m", "precast", "run", "--steps", "1:3", "--json", "out.json"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = start([*command, "program.py"], tmp_path, PYTHONPATH=path)
    assert_counted(ended(process, tmp_path), (1, 3))
