"""The seeds of a proof are trained on several machines through a journal of Optuna, and give what one would find."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import precast
from precast.errors import MissingExtraError, TuningError
from precast.tuning import proof, studies, tuner
from tests.tuning.test_tuner import SGD, Wide, batches, step

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "optimizer": SGD,
    "objective": "memory",
    "tolerance": 0.05,
    "budget": 60.0,
}
WORKER = """
import sys
from precast.tuning import tuner
import precast
from tests.tuning.test_studies import OPTIONS, Wide, batches, step

tuner._STEPS = (8, 12)
found = precast.tune(Wide(), step, batches, study=sys.argv[1], worker=True, **OPTIONS)
print(found.name, found.is_saved_here, found.policy.fingerprint, sep="|")
"""


@pytest.fixture(autouse=True)
def _short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_STEPS", (8, 12))


@pytest.fixture
def journal(tmp_path: Path) -> str:
    pytest.importorskip("optuna")
    return f"file:{tmp_path / 'study.log'}"


def finals(found: Any) -> list[list[float]]:
    return [trial.finals for trial in found.evidence.proofs[-1].trials]


def test_a_search_alone_finds_what_it_would_without_a_study(journal: str) -> None:
    alone, studied = (
        precast.tune(Wide(), step, batches, **OPTIONS),
        precast.tune(Wide(), step, batches, study=journal, **OPTIONS),
    )
    assert finals(alone) == finals(studied)
    assert alone.name == studied.name


def test_seeds_that_are_in_the_journal_are_not_trained_again(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precast.tune(Wide(), step, batches, study=journal, **OPTIONS)

    def never(*_: Any) -> bool:
        raise AssertionError("trained again")

    monkeypatch.setattr(studies, "train_seed", never)
    assert precast.tune(Wide(), step, batches, study=journal, **OPTIONS).evidence.proofs


def test_a_worker_trains_seeds_and_gets_the_answer(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, journal],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    here = []

    def leaves_some(workload: Any, setups: Any, seed: int, *rest: Any) -> bool:
        here.append(seed)
        done.wait(3.0 if len(here) == 1 else 0)  # so that the worker gets its turn
        return proof.train_seed(workload, setups, seed, *rest)

    monkeypatch.setattr(studies, "train_seed", leaves_some)
    try:
        while not Path(journal.removeprefix("file:")).exists():  # it is there
            assert process.poll() is None, process.communicate()[1][-2000:]
            done.wait(0.1)
        found = precast.tune(Wide(), step, batches, study=journal, **OPTIONS)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err[-2000:]
    name, is_saved_here, fingerprint = out.strip().split("|")
    assert (name, is_saved_here) == (found.name, "False")
    assert fingerprint == found.policy.fingerprint
    assert len(here) < found.evidence.proofs[-1].seeds
    monkeypatch.undo()
    monkeypatch.setattr(tuner, "_STEPS", (8, 12))
    assert finals(found) == finals(precast.tune(Wide(), step, batches, **OPTIONS))


def test_a_trial_that_nobody_finishes_is_run_by_the_search(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "_SHORTEST", 0.3)
    ask, taken = studies.Study._ask, []

    def lost(self: Any, name: str, study: Any, setups: Any, seed: int) -> None:
        ask(self, name, study, setups, seed)
        if not taken:
            taken.append(self.journal.take(study))  # by a worker that is switched off

    monkeypatch.setattr(studies.Study, "_ask", lost)
    found = precast.tune(Wide(), step, batches, study=journal, **OPTIONS)
    assert taken[0].params["seed"] == 0
    assert found.evidence.proofs[-1].seeds >= 3


def test_a_worker_on_another_kind_of_machine_is_refused(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(studies.Study, "end", lambda self: None)  # it goes on
        precast.tune(Wide(), step, batches, study=journal, **OPTIONS)
    monkeypatch.setattr(tuner.torch, "get_num_threads", lambda: 77)
    with pytest.raises(TuningError, match=r"77 threads.* Times of different machines"):
        precast.tune(Wide(), step, batches, study=journal, worker=True, **OPTIONS)


def test_a_worker_without_a_search_says_so(journal: str) -> None:
    with pytest.raises(TuningError, match="no search with this model and these settings has come"):
        precast.tune(
            Wide(), step, batches, study=journal, worker=True, **{**OPTIONS, "budget": 0.5}
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"worker": True}, "worker=True needs the study"),
        ({"study": "no/where.log"}, "there is no folder no"),
    ],
)
def test_bad_input_is_one_clear_error(options: dict[str, Any], said: str) -> None:
    if "study" in options:
        pytest.importorskip("optuna")
    with pytest.raises(TuningError, match=said):
        precast.tune(Wide(), step, batches, **options)
    with pytest.raises(TuningError, match="without a step nothing is trained"):
        precast.tune(Wide(), metric=step, batches=batches, study="a.log")


def test_without_optuna_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"pip install optuna\."):
        precast.tune(Wide(), step, batches, study="study.log")
