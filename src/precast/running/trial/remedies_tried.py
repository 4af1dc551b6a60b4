"""Reasons for settings that are not better than float32, and remedies, each tried before it is named.

Invariants: nothing here imports torch. A reason is a sentence on what a trial measured; a remedy is one more setting,
which is compared as the others are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from precast.report.words import duration, share
from precast.running.trial.comparison import Comparison, Setting, region_changes
from precast.running.trial.plan import TrialOutcome
from precast.running.trial.program_edit import ProgramEdit

__all__ = ["cure_of", "first_difference", "reasons_for_speed", "variants_of", "waiting_share"]

_MOST_WAITING: Final = 0.3
_MOST_FLOAT32: Final = 0.3
_MOST_CASTS: Final = 0.1
_SMALL: Final = 30e-6
"""Seconds of an operation below which the calls of operations take longer than their computation."""
_DIFFERENT: Final = 0.05


def waiting_share(base: Setting, first: int) -> float:
    """Return the share of a step in float32 that passes before its first call of a model."""
    outcome = base.outcomes[0]
    total = sum(outcome.seconds[first:])
    return sum(outcome.input_seconds[first:]) / total if total else 0.0


def reasons_for_speed(
    comparison: Comparison, waiting: float, examined: TrialOutcome | None
) -> Iterator[str]:
    """Yield sentences on why a setting is not faster than float32."""
    name = comparison.setting.name
    if waiting > _MOST_WAITING:
        yield (
            f"{share(waiting)} of a step in float32 pass before the model is called: data are loaded and moved then, "
            "which mixed precision does not make faster."
        )
    shares = {} if examined is None else examined.shares
    if not shares:
        return
    if shares["operation"] < _SMALL:
        yield (
            f"The layers are small: an operation takes {duration(shares['operation'])} on average in {name}, so calls "
            "take most of the time, not arithmetic."
        )
    if shares.get("float32", 0.0) > _MOST_FLOAT32:
        yield (
            f"{share(shares['float32'])} of the time of operations in {name} are spent in operations that run in "
            "float32."
        )
    if shares["casts"] > _MOST_CASTS:
        yield f"{share(shares['casts'])} of the time of operations in {name} are spent on casts."


def variants_of(comparison: Comparison, examined: TrialOutcome) -> Iterator[Setting]:
    """Yield settings that may be faster, by what slows a setting down."""
    setting, shares = comparison.setting, examined.shares
    if not shares:
        return
    changes = region_changes(setting.dtype)
    if shares["casts"] > _MOST_CASTS:
        lines = [*(setting.edit.lines if setting.edit else []), "precast.attach(model)"]
        yield Setting(
            f"{setting.name}, attached",
            setting.dtype,
            {**changes, "variant": "attach"},
            edit=ProgramEdit(lines),
        )
    if shares["operation"] < _SMALL:
        lines = [*(setting.edit.lines if setting.edit else []), "model.compile()"]
        yield Setting(
            f"{setting.name}, compiled",
            setting.dtype,
            {**changes, "variant": "compile"},
            edit=ProgramEdit(lines),
        )


def first_difference(float32: TrialOutcome, mixed: TrialOutcome) -> tuple[str, float | None] | None:
    """Return the first module whose output differs from that of float32, and by which share; None: not finite."""
    for name, value in mixed.modules.items():
        expected = float32.modules.get(name)
        if expected is None or expected < 0:
            continue
        if value < 0:
            return name, None
        difference = abs(value - expected) / (expected or 1.0)
        if difference > _DIFFERENT:
            return name, difference
    return None


def cure_of(setting: Setting, module: str) -> Setting:
    """Return the setting with one module in float32."""
    rules = f'precast.Policy.load("torch").replace(modules={{"{module}": "fp32"}})'
    lines = [*(setting.edit.lines if setting.edit else []), f"precast.attach(model, {rules})"]
    return Setting(
        f"{setting.name}, {module} in float32",
        setting.dtype,
        {**region_changes(setting.dtype), "float32_modules": [module]},
        edit=ProgramEdit(lines),
    )
