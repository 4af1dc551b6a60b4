"""Reasons for settings that are not better than float32, and settings that may be better.

Invariants: nothing here imports torch. A reason is a sentence on what a trial measured; a remedy is one more setting,
which is tried before it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from precast.report.words import duration, share
from precast.running.trial.comparison import TrialSetting
from precast.running.trial.plan import TrialOutcome
from precast.running.trial.program_edit import ProgramEdit

__all__ = ["LARGER", "cure_of", "first_difference", "reasons_for_speed", "variants_of", "waiting"]

LARGER: Final = 4
"""The factor of the batch size with which a setting is tried again."""
_MOST_WAITING: Final = 0.3
_MOST_FLOAT32: Final = 0.3
_MOST_CASTS: Final = 0.1
_SMALL: Final = 30e-6
"""Seconds of an operation below which the calls of operations take longer than their computation."""
_DIFFERENT: Final = 0.05


def waiting(outcome: TrialOutcome, first: int) -> Iterator[str]:
    """Yield a sentence on the time before the call of a model, from step `first` on, unless that is short."""
    total = sum(outcome.seconds[first:])
    waiting = sum(outcome.input_seconds[first:]) / total if total else 0.0
    if waiting > _MOST_WAITING:
        yield (
            f"{share(waiting)} of a step in float32 pass before the model is called, which mixed precision does not "
            "make faster: in the input pipeline, and in what the script does between two steps."
        )


def reasons_for_speed(setting: TrialSetting, shares: dict[str, float]) -> Iterator[str]:
    """Yield sentences on why a setting is not faster than float32."""
    operation, time = shares["operation"], f"of the time of operations in {setting.name} are spent"
    if operation < _SMALL:
        yield (
            f"The layers are small: an operation takes {duration(operation)} on average in {setting.name}, so calls "
            "take most of the time, not arithmetic."
        )
    if shares.get("float32", 0.0) > _MOST_FLOAT32:
        yield f"{share(shares['float32'])} {time} in operations that run in float32."
    if shares["casts"] > _MOST_CASTS:
        yield f"{share(shares['casts'])} {time} on casts."


def variants_of(setting: TrialSetting, shares: dict[str, float]) -> Iterator[TrialSetting]:
    """Yield settings that may be faster, by what slows a setting down."""
    if shares["casts"] > _MOST_CASTS:
        yield _variant(setting, "attached", "precast.attach(model)", variant="attach")
    if shares["operation"] < _SMALL:
        yield _variant(setting, "compiled", "model.compile()", variant="compile")


def first_difference(float32: TrialOutcome, mixed: TrialOutcome) -> tuple[str, str] | None:
    """Return the first module whose output differs from that of float32, and how it differs."""
    for name, value in mixed.modules.items():
        expected = float32.modules.get(name, -1.0)
        if expected >= 0 and value < 0:
            return name, "is not finite"
        difference = abs(value - expected) / (expected or 1.0)
        if expected >= 0 and difference > _DIFFERENT:
            return name, f"differs by {difference:.0%}"
    return None


def cure_of(setting: TrialSetting, module: str) -> TrialSetting:
    """Return the setting with one module in float32."""
    rules = f'precast.Policy.load("torch").replace(modules={{"{module}": "fp32"}})'
    line = f"precast.attach(model, {rules})"
    return _variant(setting, f"{module} in float32", line, float32_module=module)


def _variant(setting: TrialSetting, name: str, line: str, **changes: Any) -> TrialSetting:
    """Return a setting whose models run in regions of the same dtype, with a further change and the line for it."""
    edit = ProgramEdit([*setting.edit.lines, line])
    changes = {"dtype": setting.dtype, **changes}
    return TrialSetting(f"{setting.name}, {name}", setting.dtype, changes, edit=edit)
