"""The lines that mixed precision adds to a program: the region, and for float16 the calls of a scaler.

The lines that call the model, the backward pass and the optimizer were recorded while the program ran, so nothing is
guessed from names. A loop is plain enough for a patch if these calls are statements of one function, and the backward
pass and the step are on lines of their own. For other programs the lines are a recipe.

Invariants: nothing here imports torch; a patch only adds lines, indents lines, and changes `backward()` and `step()`.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from precast.running.trial.plan import TrialOutcome

__all__ = ["ProgramEdit", "edit_of"]

_RECIPES: Final = {
    "lightning": ('Trainer(precision="bf16-mixed")', 'Trainer(precision="16-mixed")'),
    "fabric": ('Fabric(precision="bf16-mixed")', 'Fabric(precision="16-mixed")'),
    "accelerate": ('Accelerator(mixed_precision="bf16")', 'Accelerator(mixed_precision="fp16")'),
    "transformers": ("TrainingArguments(bf16=True)", "TrainingArguments(fp16=True)"),
    "ignite": (
        'create_supervised_trainer(..., amp_mode="amp")',
        'create_supervised_trainer(..., amp_mode="amp", scaler=True)',
    ),
}
"""Maps a library to its argument for bfloat16 and for float16."""
_BY_HAND: Final = {
    "backward": "scaler.scale(loss).backward()",
    "clip": "scaler.unscale_(optimizer)  # before this line",
    "step": "scaler.step(optimizer); scaler.update()",
}
_IMPORT: Final = re.compile(r"import (\w+, *)*torch *(,|#|$)")
_BLANK: Final = re.compile(r"\s*(#|$)")
_CONTINUED: Final = re.compile(r"\s*([)\]}#]|(else|elif|except|finally)\b)")
"""A line that does not begin a statement."""


@dataclass(frozen=True)
class ProgramEdit:
    """The lines to add, for a person, and the edited file if the program is plain enough for a patch."""

    lines: list[str] = field(default_factory=list)
    path: str | None = None
    text: str = ""
    patch: str = ""


def edit_of(outcome: TrialOutcome, dtype: str, policy: str, *, patches: bool = True) -> ProgramEdit:
    """Return the lines that a region needs in the program of a trial, with a patch if the program is plain enough."""
    scales, device = dtype == "float16", outcome.device
    if outcome.trainer is not None:
        return ProgramEdit([_RECIPES[outcome.trainer][scales]])
    owner, more = ("torch", "") if policy == "torch" else ("precast", f', policy="{policy}"')
    region = f'with {owner}.autocast("{device}", dtype=torch.{dtype}{more}):'
    scaler = f'scaler = torch.amp.GradScaler("{device}")' if scales else ""
    try:
        if patches:
            return _Patch(outcome).edit(region, scaler)
    except (LookupError, OSError, SyntaxError, ValueError):  # the program is not plain
        pass
    lines = {"model": f"{region}  # around the call of the model and the loss"}
    if scales:
        lines |= _BY_HAND
    placed = [
        f"{_short(place)}: {line}"
        for event, line in lines.items()
        for place in outcome.lines.get(event, [])[:3]
    ]
    return ProgramEdit([*([f"{scaler}  # before the loop"] if scales else []), *placed])


def _short(place: str) -> str:
    """Return "path:number" with a path relative to the current folder, if it is below that."""
    path, _, number = place.rpartition(":")
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{number}"


class _Patch:
    """The changes of a file with a training loop in one function, found by the indents of its lines.

    Its methods raise a `ValueError` or `LookupError` if the loop is not plain. Line numbers begin at 1.
    """

    def __init__(self, outcome: TrialOutcome) -> None:
        events = {
            event: [(path, int(number)) for path, _, number in (x.rpartition(":") for x in places)]
            for event, places in outcome.lines.items()
        }
        [(self._path, self._backward)], [(_, self._step)] = events["backward"], events["step"]
        if any(path != self._path for path, _ in [*events["step"], *events.get("clip", [])]):
            raise ValueError("several files")
        calls = [*events.get("model", []), *events.get("callers", [])]
        self._calls = [number for path, number in calls if path == self._path]
        self._clips = [number for _, number in events.get("clip", [])]
        self._old = ["", *Path(self._path).read_text(encoding="utf-8").splitlines()]
        self._added: dict[int, list[str]] = {}
        """Maps a line to the lines that are added before it."""
        self._replaced: dict[int, list[str]] = {}
        """Maps a line to those in its place."""

    def edit(self, region: str, scaler: str) -> ProgramEdit:
        """Return the edit. Without a scaler, `scaler` is empty."""
        first = next((n for n, line in enumerate(self._old) if _IMPORT.match(line)), None)
        if first is None:
            raise ValueError("the program does not name torch")
        if "precast." in region:
            self._add(first, "import precast")
        inside = self._lines_of_region()
        self._add(inside.start, region)
        if scaler:
            loop = self._loop_around(self._backward)
            if self._loop_around(self._step) != loop:
                raise ValueError("several loops")
            self._add(loop, scaler)
            self._replace(self._backward, "backward", "scaler.scale({}).backward()")
            code = self._replace(self._step, "step", "scaler.step({})", "scaler.update()")
            for number in self._clips:
                self._add(number, f"scaler.unscale_({code})")
        return self._edited(inside)

    def _edited(self, inside: range) -> ProgramEdit:
        """Return the edit with all changes; lines in `inside` are indented."""
        name = _short(f"{self._path}:0").rpartition(":")[0]
        unit = "\t" if self._old[inside.start].startswith("\t") else "    "
        new: list[str] = []
        described = []
        for number, line in enumerate(self._old[1:], 1):
            for each in [*self._added.get(number, []), *self._replaced.get(number, [])]:
                new.append(each)
                described.append(f"{name}:{len(new)}: {each.strip()}")
            if number not in self._replaced:
                new.append(f"{unit}{line}" if number in inside and line.strip() else line)
        text = "\n".join(new) + "\n"
        compile(text, name, "exec", dont_inherit=True)
        diff = difflib.unified_diff(self._old[1:], new, f"a/{name}", f"b/{name}", lineterm="")
        return ProgramEdit(described, self._path, text, "\n".join(diff) + "\n")

    def _lines_of_region(self) -> range:
        """Return the lines of the statements from the call of the model up to the backward pass."""
        indent, first = self._indent(self._backward), self._backward
        while _BLANK.match(self._old[first - 1]) or self._indent(first - 1) >= indent:
            first -= 1  # to the beginning of the block
        block = range(first, self._backward)
        call = min(number for number in self._calls if number in block)
        begins = [n for n in range(first, call + 1) if self._indent(n) == indent and self._old[n]]
        start = [n for n in begins if not _CONTINUED.match(self._old[n])][-1]
        end = self._backward
        while _BLANK.match(self._old[end - 1]) or ".zero_grad(" in self._old[end - 1]:
            end -= 1
        if any(quotes in line for line in self._old[start:end] for quotes in ('"""', "'''")):
            raise ValueError("a text of several lines, which an indent would change")
        return range(start, end)

    def _loop_around(self, number: int) -> int:
        """Return the outermost loop around a line, in its function."""
        loop, indent = 0, self._indent(number)
        for each in range(number - 1, 0, -1):
            line = self._old[each]
            if not _BLANK.match(line) and self._indent(each) < indent:
                indent = self._indent(each)
                loop = each if re.match(r"(for|while)\b", line.strip()) else loop
                if re.match(r"(async )?def\b", line.strip()):
                    break
        if not loop:
            raise ValueError("no loop")
        return loop

    def _indent(self, number: int) -> str:
        line = self._old[number]
        return line[: len(line) - len(line.lstrip())]

    def _add(self, number: int, line: str) -> None:
        """Add a line before the one with a number, with its indent."""
        self._added.setdefault(number, []).append(self._indent(number) + line)

    def _replace(self, number: int, method: str, *lines: str) -> str:
        """Replace the statement ``x.method()``, which has a line of its own, by lines with `x`; return `x`."""
        line = re.fullmatch(rf"(\s*)([^;:=#]+)\.{method}\(\)\s*(#.*)?", self._old[number])
        if line is None:
            raise ValueError(f"no statement {method}()")
        self._replaced[number] = [f"{line[1]}{each.format(line[2])}" for each in lines]
        return line[2]
