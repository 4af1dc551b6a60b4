"""What overflowed in code between two modules: the report names the operations, the lines, and what mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precast import report
from tests.support.documents import document
from tests.support.reports import numeric_findings

PROGRAM = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import precast


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(4, 1)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = self.scores(q, k)
        return self.out(scores.softmax(-1))

    def scores(self, q, k):
        return (q * 300) @ (k * 300).T / 3e5  # LINE


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.energy = nn.Linear(8, 8), Energy()

    def forward(self, x):
        return self.energy(self.first(x) * 4)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.001)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8) * 8).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
LINE = next(k for k, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# LINE"))
RAN = f"`mul.Tensor`, `matmul` and `div.Tensor` at train.py:{LINE} in scores"


def run(folder: Path, *changes: tuple[str, str], options: tuple[str, ...] = ()) -> Any:
    """The data of `precast run --health` on the program above, with parts of it replaced."""
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "precast", "run", "--health", "--json", "run.json"]
    done = subprocess.run(
        [*command, *options, "train.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return report.load(folder / "run.json")


IN_A_CHECKPOINT = (
    "self.energy(self.first(x) * 4)",
    "checkpoint(self.energy, self.first(x) * 4, use_reentrant=False)",
)
THE_MODEL_ITSELF = ("model = Net()", "model = Energy()")
IN_BFLOAT16 = ("torch.float16", "torch.bfloat16")
WITHOUT_REGION = (
    "        scores = self.scores(q, k)\n",
    "        with precast.disable():\n            scores = self.scores(q.float(), k.float())\n",
)


@pytest.mark.parametrize("changes", [(), (IN_A_CHECKPOINT,)], ids=["plain", "checkpointed"])
def test_the_operations_and_lines_are_named_and_the_file_mends_it(
    tmp_path: Path, changes: tuple[tuple[str, str], ...]
) -> None:
    made = run(tmp_path, *changes)
    assert made["run"]["skipped"] == 4
    advice = made["summary"]["first"]
    assert advice["text"].startswith(
        "Run `energy` in float32. This helps if its results are small enough for what follows"
    )
    traced = "In steps 2 to 3, which were traced, code of `energy` itself ran in float16"
    assert f"{traced}: {RAN}" in advice["text"]
    assert advice["policy"] == 'base = "torch"\n\n[modules]\n"energy" = "fp32"\n'
    [finding] = [each for each in made["findings"] if each["kind"] in {"nan", "overflow"}]
    assert finding["where"]["source"] == f"train.py:{LINE} in scores"
    (tmp_path / "pasted.toml").write_text(advice["policy"])
    mended = run(tmp_path, *changes, options=("--policy", "pasted.toml"))
    assert mended["run"]["skipped"] == 0
    assert numeric_findings(mended) == []
    lower = [r for r in mended["trace"]["rows"] if r["rule"] == "lower"]
    assert {row["module"] for row in lower} == {"first"}, "the rest still runs in 16 bits"


@pytest.mark.trial("MODULE_IN_FLOAT32")
def test_bfloat16_mends_it_as_is_said(tmp_path: Path) -> None:
    mended = run(tmp_path, IN_BFLOAT16)
    assert mended["run"]["skipped"] == 0
    assert numeric_findings(mended) == []


@pytest.mark.trial("CODE_IN_FLOAT32")
def test_code_of_the_model_itself_gets_no_rule_that_leaves_nothing_in_16_bits(
    tmp_path: Path,
) -> None:
    made = run(tmp_path, THE_MODEL_ITSELF)
    assert made["run"]["skipped"] == 4
    advice = made["summary"]["first"]
    assert advice["text"].startswith("Compute these lines in float32: put them into")
    assert f"code of the model itself ran in float16: {RAN}" in advice["text"]
    assert advice["policy"] is None
    for mend in (IN_BFLOAT16, WITHOUT_REGION):
        assert run(tmp_path, THE_MODEL_ITSELF, mend)["run"]["skipped"] == 0


@pytest.mark.trial("LOOK_BEFORE")
def test_without_a_trace_the_place_is_said_and_how_to_know_more(tmp_path: Path) -> None:
    made = run(tmp_path, options=("--steps", "50:51"))
    advice = made["summary"]["first"]
    assert advice["text"].startswith("Look at the code between `energy.k` and `energy.out`.")
    assert advice["text"].endswith("where a step is traced, as by `--steps 1:2`.")
    assert advice["policy"] is None
    advice = run(tmp_path, options=("--steps", "1:2"))["summary"]["first"]
    traced = "In step 1, which was traced, code of `energy` itself ran in float16"
    assert f"{traced}: {RAN}" in advice["text"]


# --- documents that are made up ---


def row(module: str | None, op: str, order: int, **more: Any) -> Any:
    made: Any = document(layers=1)["trace"]["rows"][0]
    source = f"t.py:{order} in f"
    known = {"module": module, "op": op, "order": order, "source": source, "output": ["float16"]}
    return made | known | {"phase": "forward"} | more


def with_input(name: str, *rows: Any, before: str | None = None, format: str = "float16") -> Any:
    """A document of a run in which an input of a module was infinite, with rows."""
    made: Any = document(overflow_at=3)
    for step in made["steps"]:
        step["first"] = None
    first = made["health"]["first"]
    inputs = [first["inputs"][0] | {"of": f"the output of `{before}`"}] if before else []
    first |= {"kind": "input", "name": name, "inputs": inputs, "message": "An input."}
    made["health"]["format"] = format
    made["trace"]["rows"] = list(rows)
    return made


def test_the_operations_are_those_of_the_innermost_module_around_both_before_the_input() -> None:
    rows = [
        row("", "exp", 0),
        row("m.a", "linear", 1),
        row("m", "log", 2, output=["float32"]),
        row("m", "mm", 3, phase="backward"),
        row("m", "pow", 4),
        row(None, "sum", 5),
        row("m.b", "linear", 6),
        row("m", "mul", 7),
    ]
    [finding] = numeric_findings(with_input("m.b", *rows, before="m.a"))
    assert "code of `m` itself ran in float16: `pow` at t.py:4 in f." in finding["suggestion"]
    assert finding["policy"].endswith('[modules]\n"m" = "fp32"\n')
    rows[4]["module"] = "m.other"
    [finding] = numeric_findings(with_input("m.b", *rows, before="m.a"))
    assert "code of the model itself ran in float16: `exp` at t.py:0" in finding["suggestion"]


def test_the_programs_own_cast_is_said_to_stay() -> None:
    rows = [row("", "_to_copy", 0), row("a", "linear", 1)]
    [finding] = numeric_findings(with_input("a", *rows))
    ran = "code of the model itself ran in float16: `_to_copy` at t.py:0 in f."
    assert ran in finding["suggestion"]
    assert "as `.half()`" in finding["suggestion"]


def test_in_bfloat16_no_format_is_blamed() -> None:
    rows = [
        row("m.a", "linear", 0),
        row("m", "div", 1, output=["bfloat16"]),
        row("m.b", "linear", 2),
    ]
    [finding] = numeric_findings(with_input("m.b", *rows, before="m.a", format="bfloat16"))
    assert finding["suggestion"].startswith("Look at what these lines divide by")
    assert "`div` at t.py:1 in f" in finding["suggestion"]
    assert finding["policy"] is None


def test_without_code_before_it_the_data_is_to_be_looked_at() -> None:
    rows = [row("a", "linear", 0), row("", "pow", 1)]
    [finding] = numeric_findings(with_input("a", *rows))
    assert finding["suggestion"] == (
        "Look at the code before `a`, and at the data that the model is given."
    )
    [finding] = numeric_findings(with_input("", *rows))
    assert finding["suggestion"] == "Look at the data that the model is given."


def test_no_more_than_four_lines_are_named() -> None:
    rows = [row("m.a", "linear", 0), *(row("m", "pow", k) for k in range(1, 8))]
    made = with_input("m.b", *rows, row("m.b", "linear", 9), before="m.a")
    assert "`pow` at t.py:4 in f; and 3 more lines." in numeric_findings(made)[0]["suggestion"]
