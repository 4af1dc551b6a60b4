"""The quick scenarios of the attack hold; `make attack` runs all of them with fresh seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.attack.table import TABLE

ROOT = Path(__file__).parents[2]


def test_the_quick_scenarios_hold(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.attack", "--quick", "--json", str(outcomes)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert len(json.loads(outcomes.read_text())) == sum(one.quick for one in TABLE.values())
