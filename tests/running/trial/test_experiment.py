"""The sequence of trials, with a launcher whose outcomes are planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from precast.running.trial.answer import answer_of
from precast.running.trial.experiment import Experiment
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.process import Launcher
from tests.running.trial.test_comparison import outcome


class Planted(Launcher):
    """Returns an outcome in which a step takes `seconds`, by the plan."""

    def __init__(self, folder: Path, seconds: dict[str, float], **more: object) -> None:
        super().__init__(folder)
        self.seconds, self.more = seconds, more
        self.names: list[str] = []

    def run(self, plan: TrialPlan, limit: float) -> TrialOutcome:
        self.names.append(plan.name)
        shares = {"operation": 1e-6, "casts": 0.0} if plan.examines else {}
        return outcome(self.seconds[plan.name], shares=shares, **self.more)


def experiment(
    folder: Path, seconds: dict[str, float], **more: object
) -> tuple[Experiment, list[str]]:
    launcher = Planted(folder, seconds, **more)
    plan = TrialPlan("train.py", steps=10, warm_up=2)
    result = Experiment(plan, launcher, "bfloat16")
    result.run()
    return result, launcher.names


def test_float32_and_mixed_precision_run_in_turns(tmp_path: Path) -> None:
    result, names = experiment(tmp_path, {"float32 (as is)": 0.1, "bfloat16": 0.05})
    assert names == ["float32 (as is)", "bfloat16"] * 2
    assert answer_of(result).to_dict()["chosen"] == "bfloat16"


@pytest.mark.parametrize(("seconds", "is_named"), [(0.2, True), (0.4, False)])
def test_larger_batches_are_named_where_they_were_faster(
    seconds: float, is_named: bool, tmp_path: Path
) -> None:
    times = dict.fromkeys(("float32 (as is)", "bfloat16", "bfloat16, examined"), 0.1)
    times["bfloat16, compiled"] = 0.1
    times["float32 (as is), batches x 4"], times["bfloat16, batches x 4"] = 0.4, seconds
    result, names = experiment(tmp_path, times, has_loader=True)
    assert names[-4:] == ["float32 (as is), batches x 4", "bfloat16, batches x 4"] * 2
    reasons = answer_of(result).reasons
    assert any("4 times as large bfloat16 was 2.00 times as fast" in x for x in reasons) is is_named
    assert [each.name for each in result.settings] == ["bfloat16", "bfloat16, compiled"]


def test_a_program_with_regions_gets_reasons_and_no_further_setting(tmp_path: Path) -> None:
    names = (
        "float32 (as is)",
        "float32 (regions off)",
        "bfloat16 (as is)",
        "bfloat16 (as is), examined",
    )
    result, _ = experiment(tmp_path, dict.fromkeys(names, 0.1), region_dtypes={"bfloat16": 1})
    [setting] = result.settings
    assert setting.name == "bfloat16 (as is)"
    assert "The layers are small" in " ".join(answer_of(result).reasons)
