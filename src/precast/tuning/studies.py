"""Spreads the trainings of a proof over machines, by a journal of Optuna that all of them can read and write.

A trial is all setups trained with one seed, because what is compared is paired. The search asks for the trials of the
next seeds, runs some itself, and looks at the results in the order of the seeds; workers run what is waiting.

Invariants:
- a seed's losses are the same wherever it is trained, and a ratio of times is between steps on one machine;
- only machines of the same kind, with the same PyTorch and the same model, work on a search;
- all that is shared is in the journal, which Optuna reads and writes; a trial that a worker does not finish is run
  again by the search.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from precast._internal.missing import missing_extra
from precast.diagnostics.records import as_json, from_json
from precast.errors import TuningError
from precast.policy.policy import Policy
from precast.tuning import evidence as files
from precast.tuning.evidence import Evidence, Trial
from precast.tuning.proof import LOOKS, Figures, Proof, train_seed
from precast.tuning.result import TuningResult
from precast.tuning.training import FLOAT32, Setup, Workload, random_states_kept

__all__ = ["Journal", "Study", "work", "work_for"]

_NAME: Final = "precast.tune"
_SEEDS: Final = 10_000
_POLLED: Final = 0.2
_OVERDUE: Final = 4.0
"""A trial that takes so many times as long as the longest that is finished is run again."""
_SHORTEST: Final = 30.0  # seconds, before a trial can be overdue


class Journal:
    """A journal file of Optuna."""

    def __init__(self, where: str) -> None:
        """Opens it.

        Args:
            where: the file's path, which may begin with `file:`.

        Raises:
            MissingExtraError: optuna is not installed.
            TuningError: its folder is not there.
        """
        try:
            import optuna
            import optuna.storages.journal
        except ModuleNotFoundError as error:
            raise missing_extra("precast.tune(study=...)", "optuna", "tune-study") from error
        path = Path(where.removeprefix("file://").removeprefix("file:"))
        if not path.parent.is_dir():
            raise TuningError(f"there is no folder {path.parent} for the journal {path.name}")
        self._optuna = optuna
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        self._storage = optuna.storages.JournalStorage(backend)

    def study(self, name: str) -> Any:
        """The study of that name, which is made if there is none."""
        with self._quiet():
            return self._optuna.create_study(
                storage=self._storage, study_name=name, load_if_exists=True
            )

    def names(self) -> list[str]:
        """The names of all studies."""
        return list(self._optuna.get_all_study_names(self._storage))

    def waiting(self, study: Any) -> bool:
        """Whether a trial waits for somebody who runs it."""
        state = self._optuna.trial.TrialState.WAITING
        return bool(study.get_trials(deepcopy=False, states=(state,)))

    def take(self, study: Any) -> Any:
        """A waiting trial; None where another one was quicker."""
        numbers = self._optuna.distributions.IntDistribution(0, _SEEDS)
        with self._quiet():
            trial = study.ask({"seed": numbers})
            if "setups" in trial.user_attrs:
                return trial
            study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        return None

    def fail(self, study: Any, trial: Any) -> None:
        """Gives a trial up."""
        with self._quiet():
            study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def finish(self, study: Any, trial: Any, value: float) -> None:
        """Ends a trial."""
        with self._quiet():
            study.tell(trial, value)

    def finished(self, study: Any) -> list[Any]:
        """The trials that have ended well."""
        state = self._optuna.trial.TrialState.COMPLETE
        return list(study.get_trials(deepcopy=False, states=(state,)))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Optuna writes a line for each trial otherwise."""
        before = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        try:
            yield
        finally:
            self._optuna.logging.set_verbosity(before)


@dataclass
class Study:
    """The search's side: it asks for trials, and takes their results."""

    journal: Journal
    evidence: Evidence
    workload: Workload
    _proofs: dict[str, Any] = field(default_factory=dict)
    _asked: set[tuple[str, int]] = field(default_factory=set)

    def begin(self) -> None:
        """Says that a search has begun."""
        control = self.journal.study(_control(self.evidence))
        control.set_user_attr("where", _where(self.evidence))
        control.set_user_attr("state", "searching")

    def end(self) -> None:
        """Says that it has ended, and how."""
        control = self.journal.study(_control(self.evidence))
        control.set_user_attr("answer", files.text(self.evidence))
        control.set_user_attr("state", "interrupted" if self.evidence.interrupted else "done")

    def train(
        self,
        workload: Workload,
        setups: Sequence[Setup],
        seed: int,
        proof: Proof,
        deadline: float,
        **_: Any,
    ) -> bool:
        """Has a seed trained, and the others until the next look asked for; returns whether there was time for it."""
        name, study = self._study_of(setups, proof)
        self._ask(name, study, setups, seed)
        asked = time.monotonic()
        while True:
            found, longest = self._finished(study, seed)
            if found is not None:
                _note(proof, found, [setup.name for setup in setups])
                return True
            if time.monotonic() > deadline:
                return False
            if self.journal.waiting(study):
                _run_one(self.journal, study, workload, deadline)
            elif time.monotonic() - asked > max(_SHORTEST, _OVERDUE * longest):
                return train_seed(workload, setups, seed, proof, deadline)
            else:
                time.sleep(_POLLED)

    def _study_of(self, setups: Sequence[Setup], proof: Proof) -> tuple[str, Any]:
        """The study of a proof; the setups of its first seed name it."""
        for name, study in self._proofs.items():
            known = json.loads(study.user_attrs["setups"])
            if {s.name for s in setups} <= {each["name"] for each in known} and (
                study.user_attrs["steps"] == proof.steps
            ):
                return name, study
        told = json.dumps([_told(setup) for setup in setups])
        about = f"{_where(self.evidence)}{told}{proof.steps}{self.workload.seed}"
        name = f"{_NAME} proof {hashlib.sha256(about.encode()).hexdigest()[:16]}"
        study = self.journal.study(name)
        study.set_user_attr("where", _where(self.evidence))
        study.set_user_attr("control", _control(self.evidence))
        study.set_user_attr("setups", told)
        study.set_user_attr("steps", proof.steps)
        self._proofs[name] = study
        return name, study

    def _ask(self, name: str, study: Any, setups: Sequence[Setup], seed: int) -> None:
        """Asks for the trials up to the next look."""
        upto = next(look for look in (*LOOKS, seed + 1) if look > seed)
        known = {trial.params["seed"] for trial in self.journal.finished(study)}
        for number in range(seed, upto):
            if (name, number) not in self._asked and number not in known:
                self._asked.add((name, number))
                names = [setup.name for setup in setups]
                study.enqueue_trial(
                    {"seed": number}, user_attrs={"setups": names}, skip_if_exists=True
                )

    def _finished(self, study: Any, seed: int) -> tuple[list[Trial] | None, float]:
        """The results of a seed, if they are there; and how long the longest trial has taken, in seconds."""
        found, longest = None, 0.0
        for trial in self.journal.finished(study):
            longest = max(longest, trial.duration.total_seconds())
            if trial.params["seed"] == seed and found is None:
                found = [from_json(Trial, each) for each in json.loads(trial.user_attrs["trials"])]
        return found, longest


def work(
    journal: Journal,
    workload: Workload,
    evidence: Evidence,
    *,
    budget: float,
    told: Callable[[str], None] = lambda _: None,
) -> TuningResult | None:
    """Runs the trials of a search, until it ends; returns its result, or None where none has come.

    Args:
        journal: where the trials are.
        workload: what is trained, as in the search.
        evidence: what this process was asked, on which machine.
        budget: how many seconds it waits for something to do.
        told: called with what is done now.

    Raises:
        TuningError: the search is of another model, or runs on another kind of machine.
    """
    control = journal.study(_control(evidence))
    since, has_begun = time.monotonic(), False
    with random_states_kept():
        while time.monotonic() - since < budget:
            state = control.user_attrs.get("state")
            if has_begun and state in ("done", "interrupted"):
                return _result_of(from_json(Evidence, json.loads(control.user_attrs["answer"])))
            if state == "searching":
                has_begun = True
                _check(control.user_attrs["where"], evidence)
            for name in journal.names():
                if not name.startswith(f"{_NAME} proof "):
                    continue
                study = journal.study(name)
                if study.user_attrs.get("control") != _control(evidence):
                    continue
                while journal.waiting(study):
                    told("a seed")
                    _run_one(journal, study, workload, math.inf)
                    since = time.monotonic()
            told("waiting")
            time.sleep(_POLLED)
    return None


def _run_one(journal: Journal, study: Any, workload: Workload, deadline: float) -> None:
    """Trains all setups of a proof with the seed of a waiting trial."""
    trial = journal.take(study)
    if trial is None:
        return
    known = {each["name"]: each for each in json.loads(study.user_attrs["setups"])}
    setups = [_setup(known[name]) for name in trial.user_attrs["setups"]]
    figures = {setup.name: Figures(setup.name) for setup in setups}
    proof = Proof(figures, [], study.user_attrs["steps"], 0, 0.0, "seeds")
    try:
        is_done = train_seed(workload, setups, trial.params["seed"], proof, deadline)
    except BaseException:
        with contextlib.suppress(Exception):
            journal.fail(study, trial)
        raise
    if not is_done:
        journal.fail(study, trial)
        return
    trials = files.proof_of(proof, setups, {}).trials
    trial.set_user_attr("trials", json.dumps(as_json(trials)))
    (final,) = figures[FLOAT32.name].finals
    journal.finish(study, trial, final)


def _note(proof: Proof, found: list[Trial], names: list[str]) -> None:
    """Adds the results of a seed, for the setups that are still of interest."""
    for trial in found:
        if trial.name not in names:
            continue
        figures = proof.figures[trial.name]
        figures.curves += [[math.nan if x is None else x for x in curve] for curve in trial.curves]
        figures.failure = trial.failure
        if not trial.failure:
            figures.finals += trial.finals
            figures.seconds += trial.seconds


def _told(setup: Setup) -> dict[str, str]:
    policy = "" if setup.policy is None else setup.policy.dump()
    return {"name": setup.name, "policy": policy, "dtype": str(setup.dtype)}


def _setup(told: dict[str, str]) -> Setup:
    if not told["policy"]:
        return FLOAT32
    dtype = getattr(torch, told["dtype"].removeprefix("torch."))
    return Setup(told["name"], _policy_in(told["policy"]), dtype)


def _policy_in(text: str) -> Policy:
    """The policy that a file with this text has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return Policy.load(path)


def _result_of(evidence: Evidence) -> TuningResult:
    """The result of which this is the evidence, where another process saves it."""
    trials = [trial for proof in evidence.proofs for trial in proof.trials]
    text = next((t.policy for t in reversed(trials) if t.name == evidence.answer), "")
    policy = _policy_in(text) if text else Policy("float32", {}, "promote")
    policy = policy.replace(measured=files.where_measured(evidence))
    dtype = getattr(torch, evidence.dtype)
    return TuningResult(policy, dtype, evidence.because, evidence, is_saved_here=False)


def _where(evidence: Evidence) -> str:
    """What has to be the same on all machines."""
    asked = evidence.settings
    machine = files.where_measured(evidence)["machine"]
    return (
        f"{evidence.model} of {evidence.parameters:,} parameters, PyTorch {evidence.torch}, {evidence.machine}, "
        f"{machine}, on {asked.device_type}"
    )


def _control(evidence: Evidence) -> str:
    """The name of the study that says whether a search has ended: by what was asked, and not by where."""
    asked = evidence.settings
    about = [evidence.model, evidence.parameters, asked.objective, asked.tolerance, asked.base]
    about += [asked.candidates, asked.seed]
    return f"{_NAME} search {hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"


def _check(searched: str, evidence: Evidence) -> None:
    here = _where(evidence)
    if searched != here:
        raise TuningError(
            f"the search is of {searched}; here it is {here}. Times of different machines cannot be compared, so only "
            "machines of the same kind can work on one search"
        )


def work_for(journal: Journal, workload: Workload, search: Any) -> TuningResult:
    """What a search has found that runs elsewhere, and for which this process has trained seeds."""
    found = work(
        journal,
        workload,
        search.evidence,
        budget=search.budget,
        told=lambda said: search.tell("prove", said),
    )
    if found is None:
        raise TuningError(
            f"no search with this model and these settings has come to the study within {search.budget:g} s"
        )
    return found
