"""Reports of programs that were run: what the browser shows is what the program did."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from precast import report
from tests.browser.conftest import go, leave
from tests.browser.test_report import ask, column, put

PROGRAM = '''\
"""Trains a few layers in float16; in step 6 the second overflows."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(9):
    inputs = torch.randn(4, 8)
    with torch.no_grad():
        model[2].weight.mul_({6: 2.0**18, 7: 2.0**-18}.get(step, 1.0))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(inputs).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
'''


def test_a_run_that_overflows_is_told_and_shown(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "precast", "run", "--health", "--steps", "2:4"]
    command += ["--report", "run.html", "--json", "run.json", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made: Any = report.load(tmp_path / "run.json")

    leave(browser)
    go(browser, tmp_path / "run.html")
    assert browser.get_log("browser") == []
    headline = ask(browser, "document.querySelector('#headline').textContent")
    assert headline == "1 of 9 steps was lost: the output of 2 was the first that was not finite."
    chart = "document.querySelector('[data-chart=steps]')"
    assert ask(browser, f"{chart}.data[1].x") == [6]
    assert column(browser, "skipped", "First that was not finite") == ["2"]

    linears = [row for row in made["trace"]["rows"] if row["op"] == "linear"]
    assert {row["module"] for row in linears} == {"0", "2", "4"}
    put(browser, "[data-table=rows] input", "linear forward lower")
    shown = Counter(
        zip(column(browser, "rows", "Module"), column(browser, "rows", "Casts"), strict=True)
    )
    assert shown == Counter((row["module"], str(row["casts"])) for row in linears)
    casts = column(browser, "flow", "Casts")
    assert sum(int(text.replace(",", "")) for text in casts) == made["trace"]["totals"]["casts"]
    assert len(ask(browser, "document.querySelector('[data-chart=exponents]').data[0].y")) > 0
