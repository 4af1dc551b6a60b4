"""`python -m tools.gpu`: parts that fail, run out of time or are killed; the page; no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import gpu
from tools.gpu import Part

MACHINE = {"date": "2026-01-02", "gpu": "A GPU", "torch": "2.13.0", "python": "3.11.7"}


def python(name: str, code: str, share: float = 1.0) -> Part:
    return Part(name, ("-c", code), share, lambda out: (out / "said").read_text())


def test_parts_end_alone_and_keep_what_they_wrote(tmp_path: Path) -> None:
    write = f"open({str(tmp_path / 'said')!r}, 'w').write"
    these = [
        python("good", f"{write}('fine')"),
        python("bad", "raise SystemExit(3)"),
        python(
            "long",
            f"import time\ntry:\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  {write}('half')",
            share=0.1,  # starting Python takes part of it
        ),
        python("after", "print('here')"),
    ]
    done = list(gpu.run(these, tmp_path, seconds=60))
    assert [one.code for one in done] == [0, 3, 124, 0]
    assert [one.result for one in done] == [
        "fine",
        "exit code 3; fine",
        "out of time; half",
        "half",
    ]
    assert (tmp_path / "gpu-after.txt").read_text() == "here\n"
    page = gpu.table({"machine": MACHINE, "parts": [vars(one) for one in done]})
    assert "A GPU, PyTorch 2.13.0" in page
    assert page.count("\n| ") == 1 + len(these)


def test_a_part_without_its_file_says_so(tmp_path: Path) -> None:
    [done] = gpu.run([python("silent", "pass")], tmp_path, seconds=30)
    assert done.result == "no result: FileNotFoundError"


def test_every_part_starts_a_command_that_exists() -> None:
    from click.testing import CliRunner

    from benchmarks.__main__ import main as benchmarks
    from benchmarks.float8 import main as float8
    from precast.cli.main import main as precast

    for part in gpu.parts():
        module, *rest = part.arguments[1:]
        if module != "pytest":
            mains = {"precast": precast, "benchmarks": benchmarks, "benchmarks.float8": float8}
            commands = [word for word in rest[:1] if not word.startswith("-")]
            asked = CliRunner().invoke(mains[module], [*commands, "--help"])
            assert asked.exit_code == 0, asked.output
            assert all(a in asked.output for a in rest if a.startswith("--"))


def test_tests_are_those_of_the_files_that_have_one_for_a_gpu() -> None:
    """Other files may import what a GPU machine lacks, and one that cannot be read ends the whole run."""
    files = gpu._files_of_tests()
    assert "tests/float8/test_gpu.py" in files
    [part] = [part for part in gpu.parts() if part.name == "tests marked gpu"]
    assert part.arguments[-1] == "{files}"
    asked = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "--quiet"]
    said = subprocess.run(
        [*asked, *files], cwd=gpu.ROOT, capture_output=True, text=True, check=True
    )
    found = {line.partition("::")[0] for line in said.stdout.splitlines() if "::" in line}
    assert found == {*files}


def test_files_are_put_in_place_of_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_files_of_tests", lambda: ["one", "two"])
    part = Part("all", ("-c", "import sys; print(sys.argv[1:])", "{files}"), 1.0)
    [done] = gpu.run([part], tmp_path, seconds=30)
    assert (tmp_path / "gpu-all.txt").read_text() == "['one', 'two']\n"
    assert done.command.endswith("{files}")


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    rows = [
        {"kind": "attached", "ratio": 0.5},
        {"kind": "attached", "ratio": 0.75},
        {"kind": "by hand", "ratio": 2},
    ]
    (tmp_path / "models.json").write_text(json.dumps({"rows": rows}))
    assert gpu._models(tmp_path) == "3 rows; attached takes 0.50 to 0.75 of torch.autocast"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
