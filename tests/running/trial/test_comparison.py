"""The comparison of settings and the answer, on outcomes with planted times, memory and losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from precast.running.trial.answer import answer_of
from precast.running.trial.comparison import TrialSetting, compare
from precast.running.trial.experiment import Experiment
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.process import Launcher
from precast.running.trial.program_edit import ProgramEdit

WARM_UP = 2


def outcome(
    seconds: float = 0.1,
    loss: float | None = 1.0,
    memory: int | None = 1000,
    steps: int = 12,
    **more: object,
) -> TrialOutcome:
    values = {"ended": "steps", "trains": True} | more
    return TrialOutcome(
        warm_up=WARM_UP,
        seconds=[9.0] * WARM_UP + [seconds] * (steps - WARM_UP),
        losses=[loss] * steps,
        peak_memory=memory,
        **values,  # type: ignore[arg-type]
    )


def result_of(*settings: TrialSetting, others: tuple[TrialOutcome, ...] = ()) -> Experiment:
    base = TrialSetting("float32 (as is)", "float32", {}, [outcome(), outcome()])
    plan = TrialPlan("train.py", steps=10, warm_up=WARM_UP)
    result = Experiment(plan, Launcher(Path()), base=base)
    result.settings, result.others = list(settings), list(others)
    return result


def bfloat16(*outcomes: TrialOutcome) -> TrialSetting:
    return TrialSetting("bfloat16", "bfloat16", {}, list(outcomes))


def test_a_faster_setting_that_learns_is_used() -> None:
    result = result_of(bfloat16(outcome(0.05, 1.001, 600), outcome(0.052, 1.001, 600)))
    answer = answer_of(result)
    assert answer.to_dict()["chosen"] == "bfloat16"
    assert answer.verdict == "use"
    assert answer.sentence == (
        "In 10 steps bfloat16 was 2.00 times as fast and needed 0.60 of the memory; its loss was that of float32."
    )


def test_a_smaller_setting_that_is_as_fast_is_used() -> None:
    answer = answer_of(result_of(bfloat16(outcome(0.1, memory=600), outcome(0.101, memory=600))))
    assert answer.verdict == "use"
    assert "was as fast and needed 0.60 of the memory" in answer.sentence


def test_a_smaller_setting_that_is_slower_is_not_used() -> None:
    answer = answer_of(result_of(bfloat16(outcome(0.2, memory=600), outcome(0.2, memory=600))))
    assert (answer.verdict, answer.chosen) == ("keep", None)
    assert "took 2.00 times as long and needed 0.60 of the memory" in answer.sentence


def test_a_faster_setting_whose_loss_differs_is_not_used() -> None:
    fast = bfloat16(outcome(0.05, 1.05), outcome(0.05, 1.05))
    others = (outcome(loss=1.01), outcome(loss=0.99))
    answer = answer_of(result_of(fast, others=others))
    assert answer.verdict == "keep"
    assert "its loss differed by 5.0%, more than with other seeds (1.0%)" in answer.sentence


def test_a_loss_within_the_spread_of_seeds_is_equal() -> None:
    fast = bfloat16(outcome(0.05, 1.05), outcome(0.05, 1.05))
    others = (outcome(loss=1.2), outcome(loss=0.9))
    assert answer_of(result_of(fast, others=others)).verdict == "use"


def test_the_noise_of_a_script_that_does_not_repeat_itself_counts() -> None:
    result = result_of(bfloat16(outcome(0.05, 1.05), outcome(0.05, 1.05)), others=(outcome(),))
    assert result.comparisons()[0].is_equal is False
    result.base.outcomes[1] = outcome(loss=1.2)
    assert result.comparisons()[0].is_equal


def test_a_difference_without_other_seeds_is_undecided() -> None:
    result = result_of(bfloat16(outcome(0.05, 1.05), outcome(0.05, 1.05)))
    answer = answer_of(result)
    assert answer.verdict == "undecided"
    assert "which may be noise" in answer.sentence
    assert "`--seconds" in answer.sentence
    assert result.comparisons()[0].is_equal is None


@pytest.mark.parametrize("seconds", [(0.05, 0.15), (0.08, 0.2)])
def test_a_time_within_the_noise_is_undecided(seconds: tuple[float, float]) -> None:
    result = result_of(bfloat16(*(outcome(each) for each in seconds)))
    result.base.outcomes = [outcome(0.1), outcome(0.2)]
    answer = answer_of(result)
    assert answer.verdict == "undecided"
    assert "within the noise" in answer.sentence


def test_a_step_counts_with_its_least_time() -> None:
    slow_once = outcome(0.1)
    slow_once.seconds[5] = 5.0
    setting = bfloat16(slow_once, outcome(0.1))
    assert setting.seconds(12) == pytest.approx((0.1, 0.245))


def test_a_setting_that_made_fewer_steps_is_compared_over_them() -> None:
    base = TrialSetting("float32", "float32", {}, [outcome(steps=12)])
    base.outcomes[0].seconds[9:] = [7.0] * 3
    comparison = compare(bfloat16(outcome(0.2, steps=8)), base)
    assert comparison.speedup == pytest.approx(0.5)


def test_many_skipped_steps_are_no_learning() -> None:
    result = result_of(bfloat16(outcome(0.05, skipped=12), outcome(0.05, skipped=12)))
    answer = answer_of(result)
    assert answer.verdict == "keep"
    assert "it skipped 12 steps" in answer.sentence


def test_a_loss_that_is_not_finite_is_no_learning() -> None:
    bad = outcome(0.05, None, nonfinite=[10, 11])
    assert answer_of(result_of(bfloat16(bad, bad))).verdict == "keep"


def test_a_setting_without_a_loss_is_not_used() -> None:
    result = result_of(bfloat16(outcome(0.05, None), outcome(0.05, None)))
    result.base.outcomes = [outcome(0.1, None), outcome(0.1, None)]
    answer = answer_of(result)
    assert answer.verdict == "undecided"
    assert "its loss could not be compared" in answer.sentence


def test_bfloat16_is_preferred_where_float16_is_as_fast() -> None:
    half = TrialSetting("float16 + scaler", "float16", {}, [outcome(0.05), outcome(0.05)])
    assert answer_of(result_of(half, bfloat16(outcome(0.051)))).to_dict()["chosen"] == "bfloat16"
    assert (
        answer_of(result_of(half, bfloat16(outcome(0.08)))).to_dict()["chosen"]
        == "float16 + scaler"
    )


def test_a_patch_is_printed_also_for_a_setting_that_is_not_better() -> None:
    edit = ProgramEdit(["a line"], "train.py", "", "the patch")
    faster = TrialSetting("bfloat16", "bfloat16", {}, [outcome(0.05), outcome(0.05)], edit)
    slower = TrialSetting("bfloat16", "bfloat16", {}, [outcome(0.2), outcome(0.2)], edit)
    assert answer_of(result_of(faster)).patch() == ("the patch", "")
    patch, note = answer_of(result_of(slower)).patch()
    assert patch == "the patch"
    assert note == "The patch is for bfloat16, which was not better here."
    nothing = result_of()
    nothing.base.outcomes[0] = TrialOutcome("error", "OSError: gone")
    assert answer_of(nothing).patch() == ("", "There is no patch: nothing was compared.")
    for setting, reason in [
        (bfloat16(outcome(0.05, None, nonfinite=[11])), "no setting learned as float32"),
        (
            replace(slower, edit=ProgramEdit(["a line"])),
            "add the lines for bfloat16 by hand:\n    a line",
        ),
    ]:
        patch, note = answer_of(result_of(setting)).patch()
        assert (patch, reason in note) == ("", True)


def test_the_json_has_the_documented_keys() -> None:
    result = result_of(bfloat16(outcome(0.05)))
    data = json.loads(json.dumps(answer_of(result).to_dict(), allow_nan=False))
    assert list(data) == ["settings", "verdict", "chosen", "reasons", "lines", "withheld_writes"]
    assert list(data["settings"][1]) == [
        *("name", "dtype", "seconds_per_step", "spread", "speedup", "peak_memory_bytes", "loss"),
        *("loss_equal", "skipped_steps", "nonfinite_steps", "error"),
    ]
    assert [row["name"] for row in data["settings"]] == ["float32 (as is)", "bfloat16"]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_table_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = result_of(bfloat16(outcome(0.05, 1.001, skipped=1)))
    text = answer_of(result).text()
    assert max(map(len, text.splitlines())) <= columns
    assert ("    step: 50.0 ms" in text) == (columns < 100)
    for part in ("float32 (as is)", "(equal", "1 of 12 steps skipped"):
        assert part in " ".join(text.split())


def test_the_page_shows_the_answer_and_escapes_the_program() -> None:
    pytest.importorskip("plotly")
    result = result_of(bfloat16(outcome(0.05, 1.001, withheld=["/a/<b>.pt"])))
    answer = answer_of(result)
    text = answer.page(["train.py", "<script>"])
    assert text.startswith("<!doctype html>")
    assert f"<h1>{answer.sentence}</h1>" in text
    assert "&lt;script&gt;" in text
    assert "/a/&lt;b&gt;.pt" in text
    assert "<td>1.001 (equal)</td>" in text
