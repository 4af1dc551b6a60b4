"""`python -m tools.gpu`: parts that fail or run out of time, what is done again, the page; no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tools import gpu
from tools.gpu import Part

MACHINE = {"date": "2026-01-02", "gpu": "A GPU", "torch": "2.13.0", "python": "3.11.7"}


def python(name: str, code: str, seconds: int = 60, *, timed: bool = True) -> Part:
    return Part(name, ("-c", code), seconds, timed, lambda text: text.strip() or "nothing")


def test_parts_end_alone_and_each_row_is_written_at_once(tmp_path: Path) -> None:
    these = [
        python("good", "print('fine')", timed=False),
        python("bad", "raise SystemExit(3)", timed=False),
        python("long", "import time\nprint('half', flush=True)\ntime.sleep(60)", seconds=4),
        python("after", "print('FAILED tests/a.py::b[c d] - wrong - so')"),
    ]
    rows = list(gpu.run(these, tmp_path, minutes=9))
    assert [row["code"] for row in rows] == [0, 3, 124, 0]
    assert [row["result"] for row in rows[:2]] == ["fine", "exit code 3; nothing"]
    assert rows[2]["result"].startswith("out of time; half")
    assert (rows[3]["failed"], rows[3]["errors"]) == (["tests/a.py::b[c d]"], ["wrong - so"])
    assert [json.loads(line) for line in (tmp_path / gpu.STATE).read_text().splitlines()] == rows


def test_an_interrupt_ends_all_parts_at_once(tmp_path: Path) -> None:
    sleeps = "import time\nprint('begun', flush=True)\ntime.sleep(60)"
    these = [python(name, sleeps, timed=False) for name in ("one", "two")]

    def interrupt() -> None:
        while not all((tmp_path / "logs" / f"{part.name}.txt").exists() for part in these):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(gpu.run(these, tmp_path, minutes=9))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 30


def test_what_is_left_is_what_failed_and_what_did_not_run() -> None:
    done = {"section": "parts", "code": 0, "failed": []}
    before = [
        done | {"unit": "doctor"},
        done | {"unit": "tests", "code": 1, "failed": ["tests/a.py::b"]},
        done | {"unit": "eager"},
        {"section": "eager", "unit": "MLP", "ratio": 1.0},
        {"section": "eager", "unit": "decoder", "error": "RuntimeError: no"},
        done | {"unit": "scaler"},
    ]
    left = {part.name: part for part in gpu._left(before)}
    assert left.keys() == {part.name for part in gpu.parts()} - {"doctor", "scaler"}
    assert left["tests"].arguments[-1] == "tests/a.py::b"
    assert gpu._kept(before, left.values()) == [before[0], before[3], before[5]]


def test_every_part_starts_a_command_that_exists() -> None:
    from click.testing import CliRunner

    from benchmarks.cuda import SECTIONS
    from benchmarks.cuda import main as cuda
    from precast.cli.main import main as precast

    for part in gpu.parts():
        module, *rest = part.arguments[1:]
        if module == "pytest":
            continue
        if module == "benchmarks.cuda":
            assert rest[0] in SECTIONS
        commands = [word for word in rest[:1] if module == "precast"]
        requests = CliRunner().invoke(
            {"precast": precast, "benchmarks.cuda": cuda}[module], [*commands, "--help"]
        )
        assert requests.exit_code == 0, requests.output
        assert all(a in requests.output for a in rest if a.startswith("--"))


def test_tests_are_those_of_the_files_that_have_one_for_a_gpu() -> None:
    """Other files may import what a GPU machine lacks, and one that cannot be read ends the whole run."""
    files = gpu.files_of_tests()
    assert "tests/float8/test_gpu.py" in files
    requests = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "--quiet"]
    whole = {name: value for name, value in os.environ.items() if name != "PRECAST_DRAW"}
    message = subprocess.run(
        [*requests, *files], cwd=gpu.ROOT, env=whole, capture_output=True, text=True, check=True
    )
    collected = {line.partition("::")[0] for line in message.stdout.splitlines() if "::" in line}
    assert collected == {*files}


def test_the_page_has_every_row() -> None:
    captured = {"section": "captured", "unit": "a", "case": "decoder", "dtype": "float16"}
    float8 = {"section": "float8", "unit": "a", "tokens": 8, "inputs": 16, "outputs": 32}
    rows = [
        {"section": "parts", "unit": "tests", "seconds": 40, "result": "9 passed"},
        captured | {"kind": "torch.autocast", "ratio": 1.0, "ratio_iqr": 0.0, "median_ms": 2.5},
        captured | {"kind": "attached", "ratio": 0.5, "ratio_iqr": 0.012},
        {"section": "captured", "unit": "b", "error": "RuntimeError: no\nmore"},
        float8 | {"kind": "float8", "ratio": 0.9, "bfloat16_ms": 3.0},
        float8 | {"kind": "float8_rowwise", "ratio": 1.1, "bfloat16_ms": 3.0},
        {"section": "scaler", "unit": "c", "case": "Adam", "parameters": 9, "ratio": 1.2},
    ]
    page = gpu.page(MACHINE, rows)
    assert "A GPU, PyTorch 2.13.0" in page
    assert "| tests | 40 | 9 passed |" in page
    assert "| case | dtype | torch.autocast, ms | attached |" in page
    assert "| decoder | float16 | 2.5 | 0.5 (0.012) |" in page
    assert "| b: RuntimeError: no |  |" in page
    assert "| tokens | inputs | outputs | bfloat16, ms | float8 | float8_rowwise |" in page
    assert "| 8 | 16 | 32 | 3 | 0.9 | 1.1 |" in page
    assert "| Adam | 9 |  | 1.2 |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
