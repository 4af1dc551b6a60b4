"""The sequence of the trials of a program: float32 and mixed precision in turns, then other seeds where they decide.

Invariants: nothing here imports torch. Every trial of one setting is the same program on the same data with the same
seed; no trial begins that the time left does not allow. Where no setting is better, reasons are looked for: a reason is
a sentence on what a trial measured, and a remedy is one more setting, which is tried before it is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from precast.report.words import duration, share
from precast.running.trial.comparison import Comparison, TrialSetting, compare
from precast.running.trial.plan import TrialOutcome, TrialPlan
from precast.running.trial.process import Launcher
from precast.running.trial.program_edit import edit_of

__all__ = ["Experiment"]

_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 5
_EMULATED: Final = (
    0.5  # a CPU whose speed in a dtype is a smaller part of float32's emulates the dtype
)
_EXAMINED_STEPS: Final = 5
_LARGER: Final = 4  # the factor of the batch size with which a setting is tried again
_MOST_WAITING: Final = 0.3
_MOST_FLOAT32: Final = 0.3
_MOST_CASTS: Final = 0.1
_SMALL: Final = 30e-6  # seconds of an operation; below, calls take longer than computation
_DIFFERENT: Final = 0.05


@dataclass
class Experiment:
    """The trials of a program. The time of the plan is that for all trials."""

    plan: TrialPlan
    launcher: Launcher
    dtype: str = "auto"
    seeds: int = 3  # for float32, besides the program's
    base: TrialSetting = field(default_factory=lambda: TrialSetting("float32 (as is)", "float32"))
    settings: list[TrialSetting] = field(default_factory=list)
    """Mixed precision in each dtype, or the program's own, and remedies."""
    others: list[TrialOutcome] = field(default_factory=list)  # float32 with other seeds
    has_own_precision: bool = False
    reasons: list[str] = field(default_factory=list)
    missing_seconds: float = 0.0  # of trials for which no time was left, estimated

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.plan.seconds
        self._trials = 0
        self._longest = 0.0  # seconds of a trial

    @property
    def first(self) -> TrialOutcome:
        """The first trial: the program as it is."""
        return (self.settings[0] if self.has_own_precision else self.base).first

    @property
    def steps(self) -> int:
        """The number of steps that all settings without an error made."""
        settings = [self.base, *self.settings]
        return min((each.steps for each in settings if each.steps and not each.error), default=0)

    @property
    def measured(self) -> int:
        """The number of these steps that are measured."""
        return self.steps - self.base.first.unmeasured(self.steps)

    @property
    def is_repeatable(self) -> bool:
        """False if the first loss of float32 differed, if only by one bit, between two trials."""
        losses = ([x for x in each.losses if x is not None] for each in self.base.outcomes)
        return len({each[0] for each in losses if each}) < 2

    @property
    def withheld(self) -> list[str]:
        """The files that the program wrote, and that went to a temporary folder."""
        outcomes = [each for x in [self.base, *self.settings] for each in x.outcomes]
        return sorted({path for each in outcomes for path in each.withheld})

    def comparisons(self) -> list[Comparison]:
        """Return each setting compared with float32."""
        return [compare(each, self.base, self.others) for each in self.settings]

    def run(self) -> None:
        """Run the trials."""
        first = self._trial(self.base) or TrialOutcome()
        if first.ended == "error" or not first.seconds:
            return
        if first.ended == "time":  # the other trials make as many steps
            steps = max(1, len(first.seconds) - self.plan.warm_up)
            self.plan = replace(self.plan, steps=steps)
        self.settings = self._settings(first)
        for number in range(1, _ROUNDS + 1):
            self._round(number, [x.setting for x in self.comparisons() if not x.is_hopeless])
        self._try_seeds()
        for number in range(_ROUNDS + 1, _MOST_ROUNDS + 1):
            comparisons = self.comparisons()
            unclear = [each.setting for each in comparisons if each.is_open]
            is_better = any(each.is_better for each in comparisons)
            if is_better or not unclear or not self._round(number, unclear):
                break
        comparisons = self.comparisons()
        if not any(each.speed == "faster" for each in comparisons):
            self.reasons += _waiting(self.base.first)
        if first.trains and not any(each.is_better for each in comparisons):
            self._find_reasons()

    def _settings(self, first: TrialOutcome) -> list[TrialSetting]:
        """Return the settings to compare with float32, by what the first trial showed."""
        if not first.region_dtypes:
            is_emulated = bool(first.speeds) and first.speeds.get("float16", 0.0) < _EMULATED
            auto = ["bfloat16"] if is_emulated else ["bfloat16", "float16"]
            return [self._mixed(each) for each in (auto if self.dtype == "auto" else [self.dtype])]
        *_, dtype = ["float16", *(each for each in first.region_dtypes if each != "scaler")]
        scaler = " + scaler" if "scaler" in first.region_dtypes else ""
        own = replace(self.base, name=f"{dtype}{scaler} (as is)", dtype=dtype)
        self.base = TrialSetting("float32 (regions off)", "float32", {"disables": True})
        self.has_own_precision = True
        return [own]

    def _mixed(self, dtype: str) -> TrialSetting:
        """Return the setting of a dtype: the program with the lines added where it is plain enough for a patch."""
        edit = edit_of(self.first, dtype, self.plan.policy)
        changes = {"dtype": dtype} if edit.path is None else {"sources": {edit.path: edit.text}}
        name = f"{dtype} + scaler" if dtype == "float16" else dtype
        return TrialSetting(name, dtype, changes, edit=edit)

    def _round(self, number: int, settings: list[TrialSetting]) -> bool:
        """Run float32, and each of the settings, that has had fewer trials; return False if none was run."""
        due = [x for x in (self.base, *settings) if x.error is None and len(x.outcomes) < number]
        outcomes = [self._trial(each) for each in due]
        return any(outcomes)

    def _try_seeds(self) -> None:
        """Run float32 with other seeds, if the loss of a setting differs from that of float32."""
        if all(x.learns is not None or x.difference is None for x in self.comparisons()):
            return
        for seed in range(1, self.seeds + 1):
            setting = replace(self.base, changes={**self.base.changes, "seed": seed}, outcomes=[])
            if self._trial(setting) is not None and setting.error is None:
                self.others += setting.outcomes

    # --- reasons and remedies ---

    def _find_reasons(self) -> None:
        """Examine the settings that are not better, and try remedies."""
        is_waiting = bool(self.reasons)
        for comparison in self.comparisons():
            setting, speedup = comparison.setting, comparison.speedup or 1
            is_slow = comparison.speed in {"slower", "same"} and speedup > _EMULATED
            if setting.error is None and comparison.learns is False:
                self._cure(setting)
            elif is_slow and not is_waiting and (examined := self._examine(setting)):
                self._explain_speed(setting, examined)

    def _explain_speed(self, setting: TrialSetting, examined: TrialOutcome) -> None:
        """Say why a setting is not faster, and try what may make it faster."""
        shares, time = examined.shares, f"of the time of operations in {setting.name} are spent"
        if (operation := shares.get("operation", 1.0)) < _SMALL:
            self.reasons.append(
                f"The layers are small: an operation takes {duration(operation)} on average in {setting.name}, so "
                "calls take most of the time, not arithmetic."
            )
            self._try(setting.variant("compiled", "model.compile()", variant="compile"))
        if (float32 := shares.get("float32", 0.0)) > _MOST_FLOAT32:
            self.reasons.append(f"{share(float32)} {time} in operations that run in float32.")
        if (casts := shares.get("casts", 0.0)) > _MOST_CASTS:
            self.reasons.append(f"{share(casts)} {time} on casts.")
            self._try(setting.variant("attached", "precast.attach(model)", variant="attach"))
        if examined.has_loader:
            self._enlarge_batches(setting)

    def _enlarge_batches(self, setting: TrialSetting) -> None:
        """Compare a setting with float32 on larger batches, and say so if it is faster there."""
        name = f"batches x {_LARGER}"
        base, larger = (x.variant(name, batch_factor=_LARGER) for x in (self.base, setting))
        for each in (base, larger) * _ROUNDS:
            self._trial(each)
        comparison = compare(larger, base)
        if comparison.speed == "faster" and larger.error is None:
            self.reasons.append(
                f"With batches {_LARGER} times as large {setting.name} was {comparison.speedup:.2f} times as fast as "
                "float32 with these. Larger batches may need another learning rate."
            )

    def _cure(self, setting: TrialSetting) -> None:
        """Name the first module whose output is at fault, and run it in float32; bfloat16 in place of float16."""
        float32, mixed = self._examine(self.base), self._examine(setting)
        for module, how in _differences(float32, mixed) if float32 and mixed else ():
            name = setting.name
            self.reasons.append(
                f"In {name} the first output that {how} is that of the module `{module}`."
            )
            rules = f'precast.Policy.load("torch").replace(modules={{"{module}": "fp32"}})'
            line = f"precast.attach(model, {rules})"
            self._try(setting.variant(f"{module} in float32", line, float32_module=module))
            break
        if setting.dtype == "float16" and "bfloat16" not in {s.dtype for s in self.settings}:
            self._try(self._mixed("bfloat16"))

    def _examine(self, setting: TrialSetting) -> TrialOutcome | None:
        """Run an examined trial of a setting."""
        examined = setting.variant("examined", examines=True, steps=_EXAMINED_STEPS, warm_up=0)
        outcome = self._trial(examined)
        return None if outcome is None or outcome.ended == "error" else outcome

    def _try(self, setting: TrialSetting) -> None:
        """Run two trials of a setting, and add it if there was time for one. A program's own regions get none."""
        if not self.has_own_precision and self._trial(setting) is not None:
            self._trial(setting)
            self.settings.append(setting)

    # --- trials ---

    def _trial(self, setting: TrialSetting) -> TrialOutcome | None:
        """Run one trial of a setting and return its outcome; None if no time is left for it."""
        total, began = self.plan.seconds, time.monotonic()
        remaining, is_first = self._end - began, self._trials == 0
        if self._longest > remaining:
            self.missing_seconds += self._longest
            return None
        self._trials += 1
        limit = total / (2 * _ROUNDS) if is_first else max(remaining / 2, remaining - 30.0)
        plan = replace(
            self.plan,
            name=setting.name,
            folder=str(self.launcher.folder / f"trial{self._trials}"),
            seconds=min(limit, total / 3),
            is_first=is_first,
        )
        plan = replace(plan, **setting.changes)
        outcome = self.launcher.run(plan, max(remaining, 1.0))
        self._longest = max(time.monotonic() - began, self._longest)
        if outcome.ended == "error" and plan.sources:
            # The patch does not fit the program after all: its models run in regions without it.
            setting.changes = {"dtype": setting.dtype}
            setting.edit = edit_of(self.first, setting.dtype, self.plan.policy, patches=False)
            return self._trial(setting)
        setting.outcomes.append(outcome)
        return outcome


def _waiting(outcome: TrialOutcome) -> Iterator[str]:
    """Yield a sentence on the time before the call of a model, unless that is short."""
    first = outcome.unmeasured(len(outcome.seconds))
    waiting = sum(outcome.input_seconds[first:]) / (sum(outcome.seconds[first:]) or 1.0)
    if waiting > _MOST_WAITING:
        yield (
            f"{share(waiting)} of a step in float32 pass before the model is called, which mixed precision does not "
            "make faster: in the input pipeline, and in what the script does between two steps."
        )


def _differences(float32: TrialOutcome, mixed: TrialOutcome) -> Iterator[tuple[str, str]]:
    """Yield the modules whose output differs from that of float32 in the order of the calls, and how it differs."""
    for name, value in mixed.modules.items():
        expected = float32.modules.get(name, -1.0)
        difference = abs(value - expected) / (expected or 1.0)
        if expected >= 0 and (value < 0 or difference > _DIFFERENT):
            yield name, "is not finite" if value < 0 else f"differs by {difference:.0%}"
