"""`precast tune`: what it writes and prints, exit codes, Ctrl-C, and one message for each wrong input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import precast
from precast.cli import tune_inputs
from precast.cli.main import main
from precast.tuning import checking, tuner
from precast.tuning.options import checked_candidates
from precast.tuning.proof import Proof
from precast.tuning.training import TrainingTask

MODELS_FILE = """
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(64, 8, generator=generator)
        yield x, x.sum(1, keepdim=True).sin() + 2

few = [torch.ones(4, 8)]
number = 7

def loss(output, target):
    return F.mse_loss(output.float(), target)

def step(model, batch):
    return loss(model(batch[0]), batch[1])

chances = random.Random(0)

def pauses(model, batch):
    time.sleep(0.02 * chances.random())
    return step(model, batch)

def metric(model, batch):
    return 1.0

def error(model, batch):
    return step(model, batch)

def none(model, batch):
    return step(model, batch) * float("nan")

def fails():
    raise LookupError("of the program")

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""
ASKED = ("tuned_models:make", "--data", "batches", "--loss", "loss", "--objective", "memory")
ASKED += ("--tolerance", "5%", "--optimizer", "SGD,lr=0.05")
RUN = ("tuned_models:make", "--data", "batches", "--metric", "error", "--objective", "memory")


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tuned_models.py").write_text(MODELS_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrainingTask, "steps", (8, 12))
    yield
    sys.modules.pop("tuned_models", None)


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("tune", *arguments))


def interrupt_at(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presses Ctrl-C when a search says this."""
    tell = tuner._PolicySearch._report_progress

    def told(search, stage, what: str) -> None:
        tell(search, stage, what)
        if what.startswith(said):
            raise KeyboardInterrupt

    monkeypatch.setattr(tuner._PolicySearch, "_report_progress", told)


def evidence() -> dict:
    return json.loads(Path("tuned.json").read_text())


# --- what is found ---


def test_a_policy_and_its_evidence_are_written_and_said() -> None:
    done = tune(*ASKED, "--budget", "1m", "--seed", "3")
    assert done.exit_code == 0, done.output
    policy = precast.Policy.load("tuned.toml")
    assert policy.measured["dtype"] == "bfloat16"
    assert policy.measured["objective"] == "memory"
    text = Path("tuned.toml").read_text()
    assert "# precast tune tuned_models:make --data batches" in text
    settings = evidence()["settings"]
    assert (settings["tolerance"], settings["budget"], settings["seed"]) == (0.05, 60.0, 3)
    for word in (
        "float32",
        "default",
        "policy   tuned.toml",
        "evidence tuned.json",
        "page     tuned.html",
    ):
        assert word in done.stdout
    assert [line.split("s  ")[1] for line in done.stderr.splitlines()] == [
        "recording",
        "measuring errors",
        "measuring time and memory",
        "proving",
    ]


def test_an_undecided_answer_has_its_own_exit_code_and_says_what_would_decide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random pauses in three seeds, after which no more are trained, leave open which setup is faster."""
    monkeypatch.setattr(TrainingTask, "looks", (3,))
    arguments = ["step" if word == "loss" else word for word in ASKED]
    arguments[arguments.index("--loss")] = "--step"
    arguments[arguments.index("step")] = "pauses"
    arguments[arguments.index("memory")] = "time"
    done = tune(*arguments)
    assert done.exit_code == 4, done.output
    for text in (done.stdout, Path("tuned.toml").read_text()):
        assert "undecided: float32, because nothing better is proven" in text
    printed = " ".join(done.stdout.split())
    [name, *_] = evidence()["undecided"]
    assert f"could not tell whether {name} is faster than float32: it takes " in printed
    assert "It would be decided by: - a quieter machine, as the times varied too much" in printed
    page = Path("tuned.html").read_text()
    assert '<div class="summary undecided">' in page
    assert '<p class="level">Undecided</p>' in page
    assert "a quieter machine, " in page


def test_a_budget_in_which_nothing_can_be_compared_is_refused() -> None:
    done = tune(*ASKED, "--budget", "0.001s")
    assert done.exit_code == 1
    error = " ".join(done.stderr.split())
    assert (
        "Error: the budget of 0.001 s is too small: a step of this model in float32 takes " in error
    )
    assert re.search(r"Pass a budget of \d+[sm] or more", error)
    assert done.stdout == ""
    assert not Path("tuned.toml").exists()


def test_json_is_one_object() -> None:
    done = tune(*ASKED, "--step", "step", "--json")
    assert done.exit_code == 2  # a loss is named too
    arguments = ["step" if word == "loss" else word for word in ASKED]
    arguments[arguments.index("--loss")] = "--step"
    done = tune(*arguments, "--metric", "metric", "--optimizer", "tuned_models:sgd", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["answer"] in ("default", "tuned")
    assert said["policy"] == "tuned.toml"
    assert [trial["loss"] for trial in said["trials"]] == [1.0] * len(said["trials"])
    assert {each["against"] for each in said["comparisons"]} >= {"float32"}


def test_ctrl_c_writes_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at("round 3", monkeypatch)
    done = tune(*ASKED)
    assert done.exit_code == 1
    assert evidence()["interrupted"]
    assert evidence()["proof"]["seeds"] == 2
    assert precast.Policy.load("tuned.toml").measured["dtype"] == "float32"


def test_a_metric_alone_asks_for_inference() -> None:
    done = tune(*RUN, "--tolerance", "5%", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert evidence()["settings"]["task"] == "inference"
    assert "default needs 0." in said["because"]
    held = tune(*RUN, "--check", "tuned.toml")
    assert held.exit_code == 0, held.output
    assert "the metric of default differs from that of float32 by" in held.stdout
    assert "3 batches, run " in held.stdout


# --- what is given wrongly ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Name a model and its --data"),
        (("tuned_models:make",), 2, "Name a model and its --data"),
        (("tuned_models:make", "--data", "batches"), 2, "Name either a --loss"),
        ((*ASKED, "--step", "step"), 2, "Name either a --loss"),
        ((*RUN, "--optimizer", "SGD,lr=0.1"), 2, "--optimizer is for training"),
        (("nowhere:make", *ASKED[1:]), 2, "no module named 'nowhere'"),
        (("tuned_models:nothing", *ASKED[1:]), 2, "tuned_models has no attribute 'nothing'"),
        (("make", *ASKED[1:]), 2, "expected MODULE:FACTORY"),
        (("tuned_models:fails", *ASKED[1:]), 1, "LookupError: of the program"),
        (("tuned_models:number", *ASKED[1:]), 2, "got int"),
        ((*ASKED, "--data", "nothing"), 2, "has no attribute 'nothing'"),
        ((*ASKED, "--data", "fails"), 1, "LookupError: of the program"),
        ((*ASKED, "--data", "few"), 1, "each batch of --data has to be a pair (input, target)"),
        ((*ASKED, "--loss", "number"), 2, "--loss number is of type int"),
        ((*ASKED, "--metric", "nothing"), 2, "has no attribute 'nothing'"),
        ((*ASKED, "--optimizer", "SDG"), 2, "--optimizer 'SDG' is not in torch.optim"),
        ((*ASKED, "--optimizer", "SGD,lr"), 2, "'lr' is not a setting"),
        ((*ASKED, "--optimizer", "SGD,lr=much"), 2, "'lr=much' is not a setting"),
        ((*ASKED, "--optimizer", "SGD,rate=1"), 2, "unexpected keyword argument 'rate'"),
        ((*ASKED, "--optimizer", "SGD,lr=-1"), 2, "Invalid learning rate"),
        ((*ASKED, "--objective", "speed"), 2, "'speed' is not one of"),
        (
            (*ASKED, "--tolerance", "0"),
            2,
            "expected a share between 0 and 1, such as 1% or 0.01, got '0'",
        ),
        ((*ASKED, "--tolerance", "a%"), 2, "got 'a%'"),
        ((*ASKED, "--budget", "0s"), 2, "expected a time above 0, such as 90s, 5m or 1h, got '0s'"),
        ((*ASKED, "--budget", "5 weeks"), 2, "got '5 weeks'"),
        ((*ASKED, "--base", "nothing"), 2, "nothing"),
        ((*ASKED, "--out", "tuned_models.py"), 2, "the file exists and was not written by precast"),
        ((*ASKED, "--out", "a.json"), 2, "expected a TOML file"),
        ((*ASKED, "--report", "tuned_models.py"), 2, "cannot write tuned_models.py"),
        (
            ("tuned_models:make", "--data", "batches", "--step", "none"),
            1,
            "in float32 the loss of batch 1 is nan",
        ),
    ],
)
def test_wrong_input_is_one_message(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = tune(*arguments)
    assert done.exit_code == code, done.output
    assert message in done.stderr.replace("\n", " ")
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1
    assert not Path("tuned.toml").exists()


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (tune_inputs.tolerance, "1%", 0.01),
        (tune_inputs.tolerance, "0.5 %", 0.005),
        (tune_inputs.tolerance, "0.02", 0.02),
        (tune_inputs.budget, "90", 90.0),
        (tune_inputs.budget, "1.5m", 90.0),
        (tune_inputs.budget, "2h", 7200.0),
        (
            lambda text: checked_candidates(text.split(",")),
            "float16, torch.bfloat16,float16",
            [torch.float16, torch.bfloat16],
        ),
    ],
)
def test_shares_times_and_dtypes(read, text: str, value: object) -> None:
    assert read(text) == value


# --- checks of a policy ---


def test_a_policy_is_measured_again_for_what_it_was_found_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingTask, "steps", (4, 6))
    assert tune(*ASKED).exit_code == 0
    given = ASKED[:5]
    held = tune(*given, "--optimizer", "SGD,lr=0.05", "--check", "tuned.toml", "--json")
    assert held.exit_code == 0, held.output
    said = json.loads(held.stdout)
    assert said["outcome"] == "holds"
    assert any("of the memory of float32" in each for each in said["because"])
    policy = precast.Policy.load("tuned.toml")
    policy.replace(modules={"2": "fp32", "0": "fp32"}).save("worse.toml")
    lost = tune(*ASKED, "--check", "worse.toml")
    assert lost.exit_code == 1
    assert "worse.toml: it does not hold here" in lost.stdout
    assert "float32" in lost.stdout
    refused = tune(*ASKED, "--check", "tuned.toml", "--budget", "0.001s")
    assert refused.exit_code == 1
    assert (
        "the budget of 0.001 s is too small: a step of this model in float32 takes"
        in refused.stderr.replace("\n", " ")
    )
    unknown = checking.PolicyCheck(
        "cannot tell", ["could not tell whether tuned is faster"], Proof({}, [], 1, 0, 0.1, "time")
    )
    monkeypatch.setattr(checking, "check", lambda *_, **__: unknown)
    done = tune(*ASKED, "--check", "tuned.toml")
    assert done.exit_code == 4
    assert "could not tell whether it holds here" in done.stdout


def test_a_check_of_nothing_is_one_message() -> None:
    for arguments, message in (
        (("--check", "none.toml"), "--check none.toml: file not found"),
        (("--check", "tuned_models.py"), "tuned_models.py"),
    ):
        done = tune(*ASKED, *arguments)
        assert done.exit_code == 2, done.output
        assert message in done.stderr.replace("\n", " ")
