"""The sequence of the trials of a program: float32 and mixed precision in turns, then other seeds where they decide.

Invariants: every trial of one setting is the same program on the same data with the same seed; no trial begins that the
time left does not allow. Where no setting is better, causes are looked for, and a remedy is one more setting.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from precast.running.trial.comparison import Comparison, TrialSetting, compare, unmeasured
from precast.running.trial.launcher import Launcher
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.program_edit import edit_of
from precast.running.trial.reasons import (
    LARGER,
    cure_of,
    first_difference,
    reasons_for_speed,
    variants_of,
    waiting,
)

__all__ = ["Experiment", "ExperimentResult"]

_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 5
_HOPELESS: Final = 0.8
"""A setting that is slower than this is not measured again."""
_EXAMINED_STEPS: Final = 5
_EMULATED: Final = 0.5
"""A CPU that multiplies matrices in a dtype at less than this share of its speed in float32 emulates the dtype."""


@dataclass
class ExperimentResult:
    """The trials of a program. The time of the plan is that for all trials."""

    plan: TrialPlan
    base: TrialSetting
    """Float32."""
    settings: list[TrialSetting] = field(default_factory=list)
    """Mixed precision in each dtype, or the program's own."""
    others: list[TrialOutcome] = field(default_factory=list)
    """Trials of float32 with other seeds."""
    seconds_needed: float | None = None
    """The time with which the trials that are missing could be made."""
    has_own_precision: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def first(self) -> TrialOutcome:
        """The first trial: the program as it is."""
        return (self.settings[0] if self.has_own_precision else self.base).first

    @property
    def is_repeatable(self) -> bool | None:
        """True if the first loss of float32 is the same to the bit in each trial; None if that was not tried."""
        losses = ([x for x in each.losses if x is not None] for each in self.base.outcomes)
        firsts = [each[0] for each in losses if each]
        return None if len(firsts) < 2 else len(set(firsts)) == 1

    @property
    def withheld(self) -> list[str]:
        """The files that the program wrote, and that went to a temporary folder."""
        outcomes = (each for x in [self.base, *self.settings] for each in x.outcomes)
        return sorted({path for outcome in outcomes for path in outcome.withheld})

    def comparisons(self) -> list[Comparison]:
        """Return each setting compared with float32."""
        return [compare(each, self.base, self.plan.warm_up, self.others) for each in self.settings]


class Experiment:
    """Runs the trials of a program, with a number of other seeds for float32."""

    def __init__(
        self, plan: TrialPlan, launcher: Launcher, *, dtype: str = "auto", seeds: int = 3
    ) -> None:
        self._plan, self._launcher, self._dtype, self._seeds = plan, launcher, dtype, seeds
        self._end = time.monotonic() + plan.seconds
        self._trials = 0
        self._steps = plan.steps
        self._costs: dict[str, float] = {}
        """Maps a setting to the duration of its longest trial."""
        self._missing = 0.0
        """The estimated seconds of trials for which no time was left."""
        self._result = ExperimentResult(plan, TrialSetting("float32 (as is)", "float32"))

    def run(self) -> ExperimentResult:
        """Run the trials."""
        result = self._result
        self._trial(result.base)
        if result.first.ended != "error" and result.first.seconds:
            if result.first.ended == "time":  # the other trials make as many steps
                self._steps = max(1, len(result.first.seconds) - self._plan.warm_up)
            self._compare()
        if self._missing:
            result.seconds_needed = self._plan.seconds + 1.2 * self._missing
        return result

    def _compare(self) -> None:
        """Run the trials after the first one."""
        result = self._result
        result.settings = self._settings(result.first)
        for _ in range(_ROUNDS):
            self._round(result.settings)
        self._try_seeds()
        comparisons = result.comparisons()
        while len(result.base.outcomes) < _MOST_ROUNDS:
            unclear, before = [each.setting for each in comparisons if each.is_open], self._trials
            if unclear and not any(each.is_better for each in comparisons):
                self._round(unclear)
            comparisons = result.comparisons()
            if self._trials == before:
                break
        if not any(each.speed == "faster" for each in comparisons):
            steps = unmeasured(result.base.steps, self._plan.warm_up)
            result.reasons += waiting(result.base.first, steps)
        is_better = any(each.is_better for each in comparisons)
        if result.first.trains and not is_better:
            self._find_reasons()

    def _settings(self, first: TrialOutcome) -> list[TrialSetting]:
        """Return the settings to compare with float32, by what the first trial showed."""
        result = self._result
        if first.region_dtypes:
            *_, dtype = ["float16", *(each for each in first.region_dtypes if each != "scaler")]
            scaler = " + scaler" if "scaler" in first.region_dtypes else ""
            own = TrialSetting(f"{dtype}{scaler} (as is)", dtype, {}, result.base.outcomes)
            result.base = TrialSetting("float32 (regions off)", "float32", {"disables": True})
            result.has_own_precision = True
            return [own]
        if self._dtype != "auto":
            return [self._mixed(self._dtype)]
        is_emulated = bool(first.speeds) and first.speeds.get("float16", 0.0) < _EMULATED
        return [self._mixed(each) for each in ("bfloat16", "float16")[: 1 if is_emulated else 2]]

    def _mixed(self, dtype: str) -> TrialSetting:
        """Return the setting of a dtype: the program with the lines added where it is plain enough for a patch."""
        edit = edit_of(self._result.first, dtype, self._plan.policy)
        changes = {"dtype": dtype} if edit.path is None else {"sources": {edit.path: edit.text}}
        name = f"{dtype} + scaler" if dtype == "float16" else dtype
        return TrialSetting(name, dtype, changes, edit=edit)

    def _round(self, settings: list[TrialSetting]) -> None:
        """Run one trial of float32, and of each setting that has as few and still matters."""
        result = self._result
        hopeless = {
            each.setting.name
            for each in result.comparisons()
            if each.setting.outcomes and (each.learns is False or (each.speedup or 1) < _HOPELESS)
        }
        settings = [result.base, *settings]
        rounds = min(len(each.outcomes) for each in settings if each.error is None)
        for each in settings:
            if not (each.error or len(each.outcomes) > rounds or each.name in hopeless):
                self._trial(each)

    def _try_seeds(self) -> None:
        """Run float32 with other seeds, if the loss of a setting differs from that of float32."""
        result = self._result
        if all(x.learns is not None or x.difference is None for x in result.comparisons()):
            return
        for seed in range(1, self._seeds + 1):
            changes = {**result.base.changes, "seed": seed}
            setting = TrialSetting(result.base.name, "float32", changes)
            if self._trial(setting) is not None and setting.error is None:
                result.others += setting.outcomes

    # --- causes and remedies ---

    def _find_reasons(self) -> None:
        """Examine the settings that are not better, and try remedies."""
        is_waiting = bool(self._result.reasons)
        for comparison in self._result.comparisons():
            if comparison.setting.error is None and comparison.learns is False:
                self._cure(comparison.setting)
            elif comparison.speed in {"slower", "same"} and not is_waiting:
                self._explain_speed(comparison)

    def _explain_speed(self, comparison: Comparison) -> None:
        """Say why a setting is not faster, and try what may make it faster."""
        setting = comparison.setting
        examined = self._examine(setting) if (comparison.speedup or 1) > _EMULATED else None
        if examined is not None and examined.shares:
            self._result.reasons += reasons_for_speed(setting, examined.shares)
            if not self._result.has_own_precision:
                self._try_all(variants_of(setting, examined.shares))
            if examined.has_loader:
                self._enlarge_batches(setting)

    def _enlarge_batches(self, setting: TrialSetting) -> None:
        """Compare a setting with float32 on larger batches, and say so if it is faster there."""
        base, larger = (
            TrialSetting(f"{each.name}, batches x {LARGER}", each.dtype, changes)
            for each in (self._result.base, setting)
            for changes in [{**each.changes, "batch_factor": LARGER}]
        )
        for each in (base, larger) * _ROUNDS:
            self._trial(each)
        comparison = compare(larger, base, self._plan.warm_up)
        if comparison.speed == "faster" and larger.error is None:
            self._result.reasons.append(
                f"With batches {LARGER} times as large {setting.name} was {comparison.speedup:.2f} times as fast as "
                "float32 with these. Larger batches may need another learning rate."
            )

    def _cure(self, setting: TrialSetting) -> None:
        """Name the first module whose output is at fault, and run it in float32; bfloat16 in place of float16."""
        result = self._result
        float32, mixed = self._examine(result.base), self._examine(setting)
        difference = first_difference(float32, mixed) if float32 and mixed else None
        cures = []
        if difference is not None:
            module, how = difference
            result.reasons.append(
                f"In {setting.name} the first output that {how} is that of the module `{module}`."
            )
            cures = [cure_of(setting, module)]
        if setting.dtype == "float16" and "bfloat16" not in {s.dtype for s in result.settings}:
            cures.append(self._mixed("bfloat16"))
        if not result.has_own_precision:  # whose regions are in the program
            self._try_all(cures)

    def _examine(self, setting: TrialSetting) -> TrialOutcome | None:
        """Run an examined trial of a setting."""
        changes = {"dtype": setting.dtype} if "sources" in setting.changes else setting.changes
        changes = {**changes, "examines": True, "steps": _EXAMINED_STEPS, "warm_up": 0}
        examined = TrialSetting(f"{setting.name}, examined", setting.dtype, changes)
        outcome = self._trial(examined)
        return None if outcome is None or outcome.ended == "error" else outcome

    def _try_all(self, settings: Iterable[TrialSetting]) -> None:
        """Add settings that get at least one trial."""
        for setting in settings:
            if self._trial(setting) is not None:
                self._trial(setting)
                self._result.settings.append(setting)

    # --- trials ---

    def _trial(self, setting: TrialSetting) -> TrialOutcome | None:
        """Run one trial of a setting and return its outcome; None if no time is left for it."""
        name, base_name = setting.name, self._result.base.name
        cost = self._costs.get(name, self._costs.get(base_name, 0.0))
        total, began = self._plan.seconds, time.monotonic()
        remaining, is_first = self._end - began, self._trials == 0
        if not is_first and cost > remaining:
            self._missing += cost
            return None
        folder = Path(self._launcher.folder, f"trial{self._trials}")
        folder.mkdir()
        self._trials += 1
        share = total / (2 * _ROUNDS) if is_first else max(remaining / 2, remaining - 30.0)
        plan = replace(
            self._plan,
            name=name,
            folder=str(folder),
            steps=self._steps,
            seconds=min(share, total / 3),
            is_first=is_first,
        )
        plan = replace(plan, **setting.changes)
        outcome = self._launcher.run(plan, max(remaining, 1.0))
        self._costs[name] = max(time.monotonic() - began, self._costs.get(name, 0.0))
        if outcome.ended == "error" and plan.sources:
            # The patch does not fit the program after all: its models run in regions without it.
            setting.changes = {"dtype": setting.dtype}
            setting.edit = edit_of(
                self._result.first, setting.dtype, self._plan.policy, patches=False
            )
            return self._trial(setting)
        setting.outcomes.append(outcome)
        return outcome
