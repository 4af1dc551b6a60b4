"""The sequence of the trials of a program: float32 and mixed precision in turns, then other seeds where they decide.

Invariants: every trial of one setting is the same program on the same data with the same seed; no trial begins that the
time left does not allow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from precast.running.target import Target
from precast.running.trial.comparison import (
    Comparison,
    Setting,
    compare,
    region_changes,
    unmeasured,
)
from precast.running.trial.launcher import Launcher
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.program_edit import ProgramEdit, edit_of
from precast.running.trial.remedies_tried import (
    cure_of,
    first_difference,
    reasons_for_speed,
    variants_of,
    waiting_share,
)

__all__ = ["Experiment", "ExperimentResult", "TrialOptions"]

_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 5
_HOPELESS: Final = 0.8
"""A setting that is slower than this is not measured again."""
_EXAMINED_STEPS: Final = 5
_EMULATED: Final = 0.5
"""A CPU that multiplies matrices in a dtype at less than this share of its speed in float32 emulates the dtype."""


@dataclass(frozen=True)
class TrialOptions:
    """The options of `precast try`, checked."""

    steps: int = 30
    warm_up: int = 5
    seconds: float = 180.0
    dtype: str = "auto"
    policy: str = "torch"
    seeds: int = 3
    step_function: str | None = None
    allows_writes: bool = False
    explains: bool = True
    """Examine settings that are not better, and try remedies."""


@dataclass
class ExperimentResult:
    """The trials of a program.

    Attributes:
        base: float32.
        settings: mixed precision in each dtype, or the program's own.
        others: trials of float32 with other seeds.
        is_repeatable: the first loss of float32 is the same to the bit in each trial; None if that was not tried.
        seconds_needed: the time with which the trials that are missing could be made.
        seconds: the time that all trials took.
        has_own_precision: the program has regions or a scaler.
        reasons: sentences on why a setting is not better.
    """

    options: TrialOptions
    base: Setting
    settings: list[Setting] = field(default_factory=list)
    others: list[TrialOutcome] = field(default_factory=list)
    is_repeatable: bool | None = None
    seconds_needed: float | None = None
    seconds: float = 0.0
    has_own_precision: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def first(self) -> TrialOutcome:
        """The first trial: the program as it is."""
        own = self.settings[0] if self.has_own_precision else self.base
        return own.outcomes[0]

    @property
    def withheld(self) -> list[str]:
        """The files that the program wrote, and that went to a temporary folder."""
        outcomes = [each for setting in [self.base, *self.settings] for each in setting.outcomes]
        return sorted({path for outcome in outcomes for path in outcome.withheld})

    def comparisons(self) -> list[Comparison]:
        """Return each setting compared with float32."""
        return [
            compare(each, self.base, self.options.warm_up, self.others) for each in self.settings
        ]


class Experiment:
    """Runs the trials of a program.

    Args:
        target: the program.
        options: the options.
        launcher: starts the processes.
    """

    def __init__(self, target: Target, options: TrialOptions, launcher: Launcher) -> None:
        self._target, self._options, self._launcher = target, options, launcher
        self._began = time.monotonic()
        self._trials = 0
        self._steps = options.steps
        self._costs: dict[str, float] = {}
        """Maps a setting to the duration of its longest trial."""
        self._missing = 0.0
        """The estimated seconds of trials for which no time was left."""
        self._result = ExperimentResult(options, Setting("float32 (as is)", "float32", {}))

    def run(self) -> ExperimentResult:
        """Run the trials."""
        result, options = self._result, self._options
        first = self._trial(result.base, is_first=True)
        if first is None or first.ended == "error" or not first.seconds:
            return self._finished()
        if first.ended == "time":  # the other trials make as many steps
            self._steps = max(1, len(first.seconds) - options.warm_up)
        result.settings = self._settings(first)
        for _ in range(_ROUNDS):
            self._round()
        result.is_repeatable = self._is_repeatable()
        self._try_seeds()
        while len(result.base.outcomes) < _MOST_ROUNDS and self._is_open():
            before = self._trials
            self._round(unclear_only=True)
            if self._trials == before:
                break
        if options.explains and not any(each.is_better for each in result.comparisons()):
            self._find_reasons()
        return self._finished()

    def _find_reasons(self) -> None:
        """Examine the settings that are not better, and try what may mend them."""
        result = self._result
        if result.has_own_precision or not result.first.trains:
            return
        waiting = waiting_share(result.base, unmeasured(result.base.steps, self._options.warm_up))
        for comparison in result.comparisons():
            if comparison.setting.error is None and comparison.learns is False:
                self._cure(comparison.setting)
            elif comparison.speed in {"slower", "same"} and (comparison.speedup or 1) > _EMULATED:
                examined = self._examine(comparison.setting)
                result.reasons += reasons_for_speed(comparison, waiting, examined)
                if examined is not None:
                    self._try_all(variants_of(comparison, examined))

    def _cure(self, setting: Setting) -> None:
        """Name the first module whose output is at fault, and run it in float32; bfloat16 in place of float16."""
        result = self._result
        examined = [self._examine(each) for each in (result.base, setting)]
        if examined[0] is not None and examined[1] is not None:
            difference = first_difference(examined[0], examined[1])
            if difference is not None:
                module, by = difference
                how = "is not finite" if by is None else f"differs by {by:.0%}"
                result.reasons.append(
                    f"In {setting.name} the first output that {how} is that of the module `{module}`."
                )
                self._try_all([cure_of(setting, module)])
        if setting.dtype == "float16" and "bfloat16" not in {s.dtype for s in result.settings}:
            self._try_all([self._mixed("bfloat16")])

    def _examine(self, setting: Setting) -> TrialOutcome | None:
        """Run an examined trial of a setting."""
        changes = setting.changes if setting.dtype == "float32" else region_changes(setting.dtype)
        examined = Setting(f"{setting.name}, examined", setting.dtype, dict(changes))
        examined.changes |= {"examines": True, "steps": _EXAMINED_STEPS, "warm_up": 0}
        outcome = self._trial(examined)
        return None if outcome is None or outcome.ended == "error" else outcome

    def _try_all(self, settings: Iterable[Setting]) -> None:
        """Add settings that get at least one trial."""
        for setting in settings:
            if self._trial(setting) is not None:
                self._trial(setting)
                self._result.settings.append(setting)

    def _finished(self) -> ExperimentResult:
        result = self._result
        result.seconds = time.monotonic() - self._began
        if self._missing:
            result.seconds_needed = self._options.seconds + 1.2 * self._missing
        return result

    def _settings(self, first: TrialOutcome) -> list[Setting]:
        """Return the settings to compare with float32, by what the first trial showed."""
        result = self._result
        dtypes = [each for each in first.region_dtypes if each != "scaler"]
        if first.region_dtypes:
            dtype = dtypes[0] if dtypes else "float16"
            scaler = " + scaler" if "scaler" in first.region_dtypes else ""
            own = Setting(f"{dtype}{scaler} (as is)", dtype, {}, result.base.outcomes)
            result.base = Setting("float32 (regions off)", "float32", {"disables": True})
            result.has_own_precision = True
            return [own]
        return [self._mixed(dtype) for dtype in self._dtypes(first)]

    def _mixed(self, dtype: str) -> Setting:
        """Return the setting of a dtype: the program with the lines added where it is plain enough for a patch."""
        setting = _mixed(dtype)
        setting.edit = edit_of(self._result.first, dtype, self._options.policy)
        if setting.edit.path is not None:
            setting.changes = {"sources": {setting.edit.path: setting.edit.text}}
        return setting

    def _dtypes(self, first: TrialOutcome) -> list[str]:
        if self._options.dtype != "auto":
            return [self._options.dtype]
        speeds = first.speeds
        if not speeds or speeds.get("float16", 0.0) >= _EMULATED:
            return ["bfloat16", "float16"]
        return ["bfloat16"]

    def _round(self, *, unclear_only: bool = False) -> None:
        """Run one trial of each setting that still matters."""
        result = self._result
        settings = [result.base, *result.settings]
        compared = {each.setting.name: each for each in result.comparisons()}
        rounds = min(len(each.outcomes) for each in settings if each.error is None)
        for setting in settings:
            comparison = compared.get(setting.name)
            if setting.error or len(setting.outcomes) > rounds:
                continue
            if comparison is not None and setting.outcomes:
                is_hopeless = (comparison.speedup or 1.0) < _HOPELESS or comparison.learns is False
                if is_hopeless or (unclear_only and not comparison.is_open):
                    continue
            self._trial(setting)

    def _is_open(self) -> bool:
        comparisons = self._result.comparisons()
        return any(each.is_open for each in comparisons) and not any(
            each.is_better for each in comparisons
        )

    def _is_repeatable(self) -> bool | None:
        outcomes = self._result.base.outcomes
        firsts = [next((x for x in each.losses if x is not None), None) for each in outcomes]
        if len(firsts) < 2 or firsts[0] is None:
            return None
        return len(set(firsts)) == 1

    def _try_seeds(self) -> None:
        """Run float32 with other seeds, if the loss of a setting differs from that of float32."""
        result = self._result
        if all(
            each.learns is not None or each.loss.difference is None for each in result.comparisons()
        ):
            return
        for seed in range(1, self._options.seeds + 1):
            setting = Setting("float32, another seed", "float32", dict(result.base.changes))
            setting.changes |= {"seed": seed, "is_reseeded": True}
            self._costs.setdefault(setting.name, self._costs.get(result.base.name, 0.0))
            if self._trial(setting) is not None and setting.error is None:
                result.others += setting.outcomes

    # --- trials ---

    def _left(self) -> float:
        return self._options.seconds - (time.monotonic() - self._began)

    def _trial(self, setting: Setting, *, is_first: bool = False) -> TrialOutcome | None:
        """Run one trial of a setting and return its outcome; None if no time is left for it."""
        cost = self._costs.get(setting.name, self._costs.get(self._result.base.name, 0.0))
        remaining = self._left()
        if not is_first and cost > remaining:
            self._missing += cost
            return None
        options = self._options
        folder = Path(self._launcher.folder, f"trial{self._trials}")
        folder.mkdir()
        self._trials += 1
        share = (
            options.seconds / (2 * _ROUNDS) if is_first else max(remaining / 2, remaining - 30.0)
        )
        plan = TrialPlan(
            name=setting.name,
            folder=str(folder),
            program=self._target.name,
            is_module=self._target.is_module,
            arguments=list(self._target.arguments),
            policy=options.policy,
            steps=self._steps,
            warm_up=options.warm_up,
            seconds=min(share, options.seconds / 3),
            step_function=options.step_function,
            allows_writes=options.allows_writes,
        )
        began, plan_changes = time.monotonic(), setting.changes
        outcome = self._launcher.run(
            replace(plan, **plan_changes), max(remaining, 1.0), shows_output=is_first
        )
        self._costs[setting.name] = max(
            time.monotonic() - began, self._costs.get(setting.name, 0.0)
        )
        if outcome.ended == "error" and "sources" in plan_changes:
            # The edit does not fit the program after all: its models run in regions without it.
            setting.changes = region_changes(setting.dtype)
            setting.edit = setting.edit and ProgramEdit(setting.edit.lines)
            return self._trial(setting)
        setting.outcomes.append(outcome)
        return outcome


def _mixed(dtype: str) -> Setting:
    name = "float16 + scaler" if dtype == "float16" else dtype
    return Setting(name, dtype, region_changes(dtype))
