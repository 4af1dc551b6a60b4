"""The lines to add: the patch of a plain loop, and the recipe for other programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from precast.running.trial.plan import TrialOutcome
from precast.running.trial.program_edit import ProgramEdit, edit_of

LOOP = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(data):
    for epoch in range(2):
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)  # forward
            loss = (output - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
"""
LINES = {"model": [10], "backward": [12], "clip": [13], "step": [14]}


def edit(
    folder: Path,
    text: str = LOOP,
    *,
    lines: dict[str, list[int]] = LINES,
    dtype: str = "float16",
    policy: str = "torch",
    trainer: str | None = None,
) -> ProgramEdit:
    path = folder / "train.py"
    path.write_text(text)
    places = {name: {str(path): numbers} for name, numbers in lines.items()}
    return edit_of(TrialOutcome(lines=places, device="cuda", trainer=trainer), dtype, policy)


def test_bfloat16_adds_the_region_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = edit(tmp_path, dtype="bfloat16")
    assert result.text == LOOP.replace(
        "            output = model(x)  # forward\n            loss = (output - y).square().mean()\n",
        '            with torch.autocast("cuda", dtype=torch.bfloat16):\n'
        "                output = model(x)  # forward\n"
        "                loss = (output - y).square().mean()\n",
    )
    assert result.lines == ['train.py:10: with torch.autocast("cuda", dtype=torch.bfloat16):']


def test_float16_adds_a_scaler_that_unscales_before_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = edit(tmp_path)
    assert textwrap.dedent(result.text.partition("def train(data):\n")[2]) == textwrap.dedent("""\
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(2):
            for x, y in data:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    output = model(x)  # forward
                    loss = (output - y).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        """)
    assert [line.partition(": ")[2] for line in result.lines] == [
        'scaler = torch.amp.GradScaler("cuda")',
        'with torch.autocast("cuda", dtype=torch.float16):',
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ]


def test_the_patch_gives_the_edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = edit(tmp_path)
    if shutil.which("patch"):
        subprocess.run(
            ["patch", "-p1"], input=result.patch, text=True, check=True, stdout=subprocess.DEVNULL
        )
        assert (tmp_path / "train.py").read_text() == result.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_checker_accepts_the_edited_file(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("precast_lint")
    (tmp_path / "edited.py").write_text(edit(tmp_path, dtype=dtype).text)
    command = [sys.executable, "-m", "precast", "check", str(tmp_path / "edited.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_another_policy_needs_precast(tmp_path: Path) -> None:
    text = edit(tmp_path, policy="lean", dtype="bfloat16").text
    assert "import precast\nimport torch\n" in text
    assert 'with precast.autocast("cuda", dtype=torch.bfloat16, policy="lean"):' in text


NOT_PLAIN = {
    "two statements on a line": LOOP.replace("loss.backward()", "loss.backward(); print()"),
    "a text of several lines": LOOP.replace(
        "model(x)  # forward", 'model(x) if """\n""" else 0'
    ).replace("            loss =", "            loss ="),
    "a closure": LOOP.replace("optimizer.step()", "optimizer.step(closure)"),
    "another name of torch": LOOP.replace("import torch\n", "import torch as torch_\n"),
    "code that cannot be read": LOOP + "(",
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_program_that_is_not_plain_gets_a_recipe(name: str, tmp_path: Path) -> None:
    result = edit(tmp_path, NOT_PLAIN[name])
    assert result.path is None
    assert result.patch == ""
    assert any("scaler.unscale_(optimizer)" in line for line in result.lines)


def test_two_backward_passes_get_a_recipe(tmp_path: Path) -> None:
    assert edit(tmp_path, lines=LINES | {"backward": [11, 12]}).path is None


@pytest.mark.parametrize(
    ("trainer", "dtype", "line"),
    [
        ("lightning", "bfloat16", 'Trainer(precision="bf16-mixed")'),
        ("accelerate", "float16", 'Accelerator(mixed_precision="fp16")'),
        ("transformers", "bfloat16", "TrainingArguments(bf16=True)"),
    ],
)
def test_a_trainer_has_an_argument(trainer: str, dtype: str, line: str, tmp_path: Path) -> None:
    assert edit(tmp_path, dtype=dtype, trainer=trainer) == ProgramEdit([line])
