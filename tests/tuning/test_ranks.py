"""Two processes search together: they get one answer, the slowest counts, and an error or Ctrl-C in one ends both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import precast
from tests.tuning.test_tuner import Wide

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and gloo as on Linux")
SECONDS = 240
ROOT = Path(__file__).parents[2]
CASES = (
    "ddp",
    "fsdp",
    "inference",
    "time_of_the_slowest",
    "fails_on_one",
    "batches_on_one",
    "no_batches_on_one",
    "ctrl_c_on_one",
    "ctrl_c_of_the_first",
    "many_ends",
)


def run(folder: Path, *cases: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the cases in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.tuning.rank_cases", str(folder), *cases]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=SECONDS)
            done.append(subprocess.CompletedProcess([], process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return done


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found, for each case."""
    folder = tmp_path_factory.mktemp("ranks")
    for process in run(folder, *CASES):
        assert process.returncode == 0, process.stderr[-3000:]
    results: dict[str, list[Any]] = {
        case: [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(2)]
        for case in CASES
    }
    results["files"] = sorted(path.name for path in folder.glob("tuned*"))
    return results


@pytest.mark.parametrize("case", ["ddp", "fsdp", "inference", "time_of_the_slowest"])
def test_all_get_the_same_answer(found: dict[str, list[Any]], case: str) -> None:
    first, second = found[case]
    for key in ("name", "policy", "because", "finals", "interrupted"):
        assert first[key] == second[key], key
    assert len(first["finals"]) >= 2
    assert not first["interrupted"]
    assert (first["is_saved_here"], second["is_saved_here"]) == (True, False)


def test_a_copy_is_wrapped_where_it_is_trained(found: dict[str, list[Any]]) -> None:
    first, second = found["ddp"]
    assert first["kinds"] == ["DistributedDataParallel", "Wide"]
    assert first["name"] in ("default", "tuned", "tuned for memory")
    assert (first["is_written"], second["is_written"]) == (True, False)
    assert found["files"] == ["tuned0.json", "tuned0.toml"]


def test_the_slowest_counts(found: dict[str, list[Any]]) -> None:
    assert found["time_of_the_slowest"][0]["name"] == "float32"
    assert "is slower: it takes" in found["time_of_the_slowest"][0]["because"]


def test_no_thread_outlives_its_search(found: dict[str, list[Any]]) -> None:
    assert found["many_ends"] == [0, 0]


def test_an_error_in_one_ends_all(found: dict[str, list[Any]]) -> None:
    first, second = found["fails_on_one"]
    assert first.startswith("TuningError: rank 1 failed: LookupError: of the program")
    assert second == "LookupError: of the program"
    first, second = found["no_batches_on_one"]
    assert "rank 1 failed: TuningError: batches ended before the first batch" in first
    assert "rank" not in second
    for said in found["batches_on_one"]:
        assert "all processes need as many batches: rank 0 has 3, rank 1 has 4" in said


@pytest.mark.parametrize("case", ["ctrl_c_on_one", "ctrl_c_of_the_first"])
def test_ctrl_c_in_one_ends_all_with_what_is_known(found: dict[str, list[Any]], case: str) -> None:
    first, second = found[case]
    assert first["interrupted"]
    assert second["interrupted"]
    assert first["because"] == second["because"]
    assert first.get("is_restored", True)


def test_who_waits_for_one_that_has_failed_ends_with_a_message(tmp_path: Path) -> None:
    first, second = run(tmp_path, "stuck")
    assert first.returncode == -signal.SIGTERM
    assert "precast.tune: rank 0 ends: another one has failed" in first.stderr
    said = json.loads((tmp_path / "stuck.1.json").read_text())
    assert said == "LookupError: of the program"
    assert second.returncode == 0


def test_what_wraps_a_copy_is_a_function() -> None:
    model = Wide()
    with pytest.raises(precast.errors.TuningError, match="prepare is int"):
        precast.tune(model, lambda m, b: m(b).sum(), [1], prepare=5)  # type: ignore[arg-type]
