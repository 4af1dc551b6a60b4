"""The lines that mixed precision adds to a program: the region, and for float16 the calls of a scaler.

The lines that call the model, the backward pass and the optimizer were recorded while the program ran, so nothing is
guessed from names. A loop is plain enough for a patch if these calls are statements of one function, and the backward
pass and the step are on lines of their own. For other programs the lines are a recipe.

Invariants: nothing here imports torch; a patch only adds lines, indents lines, and changes `backward()` and `step()`.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from precast._internal.display import shown_path
from precast.running.trial.plan import TrialOutcome

__all__ = ["ProgramEdit", "edit_of"]

_RECIPES: Final = {
    "lightning": 'Trainer(precision="{0}-mixed")',
    "fabric": 'Fabric(precision="{0}-mixed")',
    "accelerate": 'Accelerator(mixed_precision="{1}")',
    "transformers": "TrainingArguments({1}=True)",
    "ignite": 'create_supervised_trainer(..., amp_mode="amp"{2})',
}
_BY_HAND: Final = {
    "backward": "scaler.scale(loss).backward()",
    "clip": "scaler.unscale_(optimizer)  # before this line",
    "step": "scaler.step(optimizer); scaler.update()  # without a closure",
}


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
        names = ("16", "fp16", ", scaler=True") if scales else ("bf16", "bf16", "")
        return ProgramEdit([_RECIPES[outcome.trainer].format(*names)])
    owner, more = ("torch", "") if policy == "torch" else ("precast", f', policy="{policy}"')
    region = f'with {owner}.autocast("{device}", dtype=torch.{dtype}{more}):'
    scaler = f'scaler = torch.amp.GradScaler("{device}")' if scales else ""
    try:
        if patches:
            return _Patch(outcome).edit(region, scaler)
    except (LookupError, OSError, SyntaxError, ValueError):  # the loop is not plain
        pass
    lines = {"model": f"{region}  # around the call of the model and the loss"}
    if scales:
        lines |= _BY_HAND
    placed = [
        f"{shown_path(path, Path.cwd())}:{number}: {line}"
        for event, line in lines.items()
        for path, numbers in outcome.lines.get(event, {}).items()
        for number in numbers[:3]
    ]
    return ProgramEdit([*([f"{scaler}  # before the loop"] if scales else []), *placed])


class _Patch:
    """The changes of a file with a plain loop; a `ValueError` or `LookupError` for another. Lines begin at 1."""

    def __init__(self, outcome: TrialOutcome) -> None:
        lines, calls, clips = outcome.lines, ("model", "callers"), outcome.lines.get("clip", {})
        [(self._path, [self._backward])] = lines["backward"].items()
        [self._step] = lines["step"][self._path]
        if {*lines["step"], *clips} != {self._path}:
            raise ValueError("several files")
        self._calls = {x for event in calls for x in lines.get(event, {}).get(self._path, [])}
        self._clips = clips.get(self._path, [])
        text = Path(self._path).read_text(encoding="utf-8")
        self._tree, self._old = ast.parse(text), ["", *text.splitlines()]
        self._added: dict[int, list[str]] = {}  # before lines
        self._removed: set[int] = set()

    def edit(self, region: str, scaler: str) -> ProgramEdit:
        """Return the edit. Without a scaler, `scaler` is empty."""
        imports = [each for each in self._tree.body if isinstance(each, ast.Import)]
        plain, *_ = (each for each in imports if "torch" in ast.unparse(each)[7:].split(", "))
        if "precast." in region:
            self._add(plain.lineno, "import precast")
        inside = self._lines_of_region()
        self._add(inside.start, region)
        if scaler:
            if self._loop_around(self._step) != (loop := self._loop_around(self._backward)):
                raise ValueError("several loops")
            self._add(loop, scaler)
            self._replace(self._backward, "backward", "scaler.scale({}).backward()")
            code = self._replace(self._step, "step", "scaler.step({})", "scaler.update()")
            for number in self._clips:
                self._add(number, f"scaler.unscale_({code})")
        return self._edited(inside)

    def _edited(self, inside: range) -> ProgramEdit:
        """Return the edit with all changes; lines in `inside` are indented."""
        name = str(shown_path(self._path, Path.cwd()))
        unit = "\t" if self._old[inside.start].startswith("\t") else "    "
        new: list[str] = []
        described = []
        for number, line in enumerate(self._old[1:], 1):
            for each in self._added.get(number, []):
                new.append(each)
                described.append(f"{name}:{len(new)}: {each.strip()}")
            if number not in self._removed:
                new.append(f"{unit}{line}" if number in inside and line.strip() else line)
        text = "\n".join(new) + "\n"
        compile(text, name, "exec", dont_inherit=True)
        diff = difflib.unified_diff(self._old[1:], new, f"a/{name}", f"b/{name}", lineterm="")
        return ProgramEdit(described, self._path, text, "\n".join(diff) + "\n")

    def _lines_of_region(self) -> range:
        """Return the lines of the statements from the call of the model up to the backward pass."""
        *_, parent, statement = [self._tree, *self._around(self._backward)]
        siblings = [each for each in ast.iter_child_nodes(parent) if isinstance(each, ast.stmt)]
        before = [each for each in siblings if _lines(each).stop <= self._backward]
        while ".zero_grad(" in ast.unparse(before[-1]):
            before.pop()
        first, *_ = (each for each in before if self._calls & set(_lines(each)))
        region = range(first.lineno, _lines(before[-1]).stop)
        texts = (mark in self._old[n] for n in region for mark in ('"""', "'''"))
        if any(texts) or not isinstance(statement, ast.Expr):
            raise ValueError("a text of several lines, or a backward pass in another statement")
        return region

    def _loop_around(self, number: int) -> int:
        """Return the outermost loop around a line, in its function."""
        loops: list[int] = []
        for each in self._around(number):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                loops.clear()
            elif isinstance(each, ast.For | ast.While):
                loops.append(each.lineno)
        return loops[0]

    def _around(self, number: int) -> list[ast.stmt]:
        """Return the statements around a line, the outermost first."""
        statements = (each for each in ast.walk(self._tree) if isinstance(each, ast.stmt))
        return [each for each in statements if number in _lines(each)]

    def _add(self, number: int, *lines: str) -> None:
        """Add lines before the one with a number, with its indent."""
        indent = self._old[number][: -len(self._old[number].lstrip())]
        self._added.setdefault(number, []).extend(f"{indent}{each}" for each in lines)

    def _replace(self, number: int, method: str, *lines: str) -> str:
        """Replace the statement ``x.method()``, which has a line of its own, by lines with `x`; return `x`."""
        line = re.fullmatch(rf"\s*([^;:=#]+)\.{method}\(\)\s*(#.*)?", self._old[number])
        if line is None:
            raise ValueError(f"no statement {method}()")
        self._removed.add(number)
        self._add(number, *(each.format(line[1]) for each in lines))
        return line[1]


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
