"""The overhead of a trial of `precast try`: the steps of a script under `python`, and in a trial in float32, in turns.

`python -m benchmarks.trials` puts it into docs/performance.md. A step counts with its least time over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.importing import PAGE
from benchmarks.machine import about
from benchmarks.sections import put
from precast.running.trial.plan import TrialPlan
from precast.running.trial.process import Launcher

BEGIN = "<!-- figures: python -m benchmarks.trials -->\n"
END = "<!-- end of the overhead of a trial -->"
_PROGRAM = """
import time, torch; torch.set_num_threads(1)
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 256)
for _ in range(36):
    print(time.perf_counter(), flush=True)
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
"""


def overhead(rounds: int = 7) -> tuple[float, float]:
    """Return the seconds of a step of the script, and in a trial."""
    rows: list[list[list[float]]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(_PROGRAM)
        launcher = Launcher(Path(folder))
        for number in range(rounds):
            output = subprocess.check_output([sys.executable, str(program)], text=True)
            moments = map(float, output.split())
            rows[0].append([end - begin for begin, end in itertools.pairwise(moments)])
            plan = TrialPlan(str(program), folder=str(Path(folder, str(number))))
            Path(plan.folder).mkdir()
            outcome = launcher.run(plan, 300)
            assert outcome.ended == "steps", outcome
            rows[1].append(outcome.seconds)
    measured = [[steps[5:35] for steps in row] for row in rows]
    plain, trial = (statistics.fmean(map(min, zip(*row, strict=True))) for row in measured)
    return plain, trial


if __name__ == "__main__":
    plain, trial = overhead()
    machine = about()
    text = (
        f"A step of six layers of 256 took {1e3 * plain:.2f} ms under `python` and {1e3 * trial:.2f} ms in a trial in "
        f"float32: {trial / plain - 1:+.1%}. On {machine['date']}: {machine['cpu']}, load {machine['load']}.\n"
    )
    put(PAGE, BEGIN, END, text)
