"""The lines that mixed precision adds to a program: the region, and for float16 the calls of a scaler.

The lines that call the model, the backward pass and the optimizer were recorded while the program ran, so nothing is
guessed from names. A loop is plain enough for a patch if these calls are statements of one function, each on lines
without another statement. For other programs the lines are a recipe.

Invariants: nothing here imports torch; a patch only adds lines, indents lines, and changes `backward()` and `step()`.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from precast.running.trial.plan import TrialOutcome

__all__ = ["ProgramEdit", "edit_of"]

_RECIPES: Final = {
    "lightning": ('Trainer(precision="bf16-mixed")', 'Trainer(precision="16-mixed")'),
    "fabric": ('Fabric(precision="bf16-mixed")', 'Fabric(precision="16-mixed")'),
    "accelerate": (
        'Accelerator(mixed_precision="bf16")',
        'Accelerator(mixed_precision="fp16")',
    ),
    "transformers": ("TrainingArguments(bf16=True)", "TrainingArguments(fp16=True)"),
    "ignite": (
        'create_supervised_trainer(..., amp_mode="amp")',
        'create_supervised_trainer(..., amp_mode="amp", scaler=True)',
    ),
}
"""Maps a library to its argument for bfloat16 and for float16."""


@dataclass(frozen=True)
class ProgramEdit:
    """The lines to add, and the edited file if the program is plain enough.

    Attributes:
        lines: the lines for a person, with file and line number.
        path: the absolute path of the edited file; None without a patch.
        text: the edited text.
        patch: the difference as a unified diff.
    """

    lines: list[str] = field(default_factory=list)
    path: str | None = None
    text: str = ""
    patch: str = ""


class _NotPlainError(Exception):
    """The program is not plain enough for a patch."""


def edit_of(outcome: TrialOutcome, dtype: str, policy: str) -> ProgramEdit:
    """Return the lines that a region of a dtype needs in the program of a trial.

    Args:
        outcome: a trial of the program as it is.
        dtype: "bfloat16" or "float16".
        policy: the policy of the region; another than "torch" needs precast.
    """
    if outcome.trainer is not None:
        return ProgramEdit([_RECIPES[outcome.trainer][dtype == "float16"]])
    region = _region(outcome.device, dtype, policy)
    try:
        return _PlainLoop(outcome, dtype, region).edit()
    except (_NotPlainError, OSError, SyntaxError, UnicodeDecodeError):
        return ProgramEdit([*_recipe(outcome, dtype, region)])


def _region(device: str, dtype: str, policy: str) -> str:
    if policy == "torch":
        return f'with torch.autocast("{device}", dtype=torch.{dtype}):'
    return f'with precast.autocast("{device}", dtype=torch.{dtype}, policy="{policy}"):'


def _recipe(outcome: TrialOutcome, dtype: str, region: str) -> Iterator[str]:
    """Yield the lines for a program that is edited by hand."""
    for place in outcome.lines.get("model", [])[:3]:
        yield f"{_short(place)}: {region}  # around the call of the model and the loss"
    if dtype == "float16":
        yield f'scaler = torch.amp.GradScaler("{outcome.device}")  # before the loop'
        for place in outcome.lines.get("backward", [])[:3]:
            yield f"{_short(place)}: scaler.scale(loss).backward()"
        for place in outcome.lines.get("clip", [])[:3]:
            yield f"{_short(place)}: scaler.unscale_(optimizer)  # before this line"
        for place in outcome.lines.get("step", [])[:3]:
            yield f"{_short(place)}: scaler.step(optimizer); scaler.update()"


def _short(place: str) -> str:
    """Return "path:number" with a path relative to the current folder, if it is below that."""
    path, _, number = place.rpartition(":")
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{number}"


class _PlainLoop:
    """A training loop in one function, and its edit."""

    def __init__(self, outcome: TrialOutcome, dtype: str, region: str) -> None:
        self._region, self._device, self._scales = region, outcome.device, dtype == "float16"
        places = {
            event: [each.rpartition(":") for each in lines]
            for event, lines in outcome.lines.items()
        }
        if any(len(places.get(event, [])) != 1 for event in ("backward", "step")):
            raise _NotPlainError
        self._path = places["backward"][0][0]
        self._numbers = {
            event: [int(number) for path, _, number in parts if path == self._path]
            for event, parts in places.items()
        }
        for event in ("step", "clip"):
            if len(self._numbers.get(event, [])) != len(places.get(event, [])):
                raise _NotPlainError
        self._old = Path(self._path).read_text(encoding="utf-8").splitlines()
        self._tree = ast.parse("\n".join(self._old))
        self._added: dict[int, list[str]] = {}
        """Maps a line to the lines that are added before it."""
        self._replaced: dict[int, list[str]] = {}
        """Maps a line to those in its place."""
        self._indented = range(0)

    def edit(self) -> ProgramEdit:
        """Return the edit."""
        imports = [
            node
            for node in self._tree.body
            if isinstance(node, ast.Import)
            and any(name.name == "torch" and not name.asname for name in node.names)
        ]
        [backward], [step] = self._numbers["backward"], self._numbers["step"]
        self._add_region(backward)
        if self._scales:
            self._add_scaler(backward, step)
        if not imports:
            raise _NotPlainError
        if "precast." in self._region:
            self._check_alone(imports[0])
            self._add(imports[0], "import precast")
        return self._edited()

    def _edited(self) -> ProgramEdit:
        """Return the edit with all changes."""
        name = _short(f"{self._path}:0").rpartition(":")[0]
        new: list[str] = []
        described = []
        unit = "\t" if self._old[self._indented.start - 1].startswith("\t") else "    "
        for number, line in enumerate(self._old, 1):
            changed = [*self._added.get(number, []), *self._replaced.get(number, [])]
            for each in changed:
                new.append(each)
                described.append(f"{name}:{len(new)}: {each.strip()}")
            if number not in self._replaced:
                is_indented = number in self._indented and line.strip()
                new.append(f"{unit}{line}" if is_indented else line)
        text = "\n".join(new) + "\n"
        ast.parse(text)
        diff = difflib.unified_diff(self._old, new, f"a/{name}", f"b/{name}", lineterm="")
        return ProgramEdit(described, self._path, text, "\n".join(diff) + "\n")

    # --- changes ---

    def _add_region(self, backward: int) -> None:
        """Put the statements from the call of the model up to the backward pass into the region."""
        block = self._blocks(backward)[-1]
        calls = [*self._numbers.get("model", []), *self._numbers.get("callers", [])]
        before = [each for each in block if (each.end_lineno or 0) < backward]
        while before and not any(_has(before[0], number) for number in calls):
            before.pop(0)
        while before and _calls(before[-1], "zero_grad"):
            before.pop()
        if not before:
            raise _NotPlainError
        for each in before:
            self._check_alone(each)
        self._indented = range(before[0].lineno, (before[-1].end_lineno or 0) + 1)
        self._add(before[0], self._region)

    def _add_scaler(self, backward: int, step: int) -> None:
        """Create a scaler before the loop, and call it in place of `backward()` and `step()`."""
        loop = self._loop_around(backward)
        if self._loop_around(step) is not loop:
            raise _NotPlainError
        self._add(loop, f'scaler = torch.amp.GradScaler("{self._device}")')
        self._replace(backward, "backward", "scaler.scale({}).backward()")
        optimizer = self._replace(step, "step", "scaler.step({})", "scaler.update()")
        for number in self._numbers.get("clip", []):
            clip = self._statement(number)
            self._check_alone(clip)
            self._add(clip, f"scaler.unscale_({optimizer})")

    def _add(self, statement: ast.stmt, line: str) -> None:
        """Add a line before a statement."""
        space = self._old[statement.lineno - 1][: statement.col_offset]
        self._added.setdefault(statement.lineno, []).append(f"{space}{line}")

    def _replace(self, number: int, method: str, *lines: str) -> str:
        """Replace the statement ``x.method()`` by lines with `x`; return `x`."""
        statement = self._statement(number)
        self._check_alone(statement)
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(value, attr), args=[], keywords=[])):
                if attr == method and statement.lineno == statement.end_lineno:
                    space, code = self._old[number - 1][: statement.col_offset], ast.unparse(value)
                    self._replaced[number] = [f"{space}{line.format(code)}" for line in lines]
                    return code
        raise _NotPlainError

    # --- statements ---

    def _blocks(self, number: int) -> list[list[ast.stmt]]:
        """Return the lists of statements that have one at a line, the outermost first."""
        blocks = [
            block
            for node in ast.walk(self._tree)
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(node, name, None), list)
            and any(isinstance(each, ast.stmt) and _has(each, number) for each in block)
        ]
        return sorted(blocks, key=lambda block: block[0].lineno)

    def _statement(self, number: int) -> ast.stmt:
        return next(each for each in self._blocks(number)[-1] if _has(each, number))

    def _loop_around(self, number: int) -> ast.stmt:
        """Return the outermost loop around a line, in its function."""
        loop: ast.stmt | None = None
        for block in self._blocks(number):
            statement = next(each for each in block if _has(each, number))
            if isinstance(statement, ast.FunctionDef):
                loop = None
            elif isinstance(statement, ast.For | ast.While):
                loop = loop or statement
        if loop is None:
            raise _NotPlainError
        return loop

    def _check_alone(self, statement: ast.stmt) -> None:
        """Refuse a statement that shares a line with another, or that contains text of several lines."""
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        before = self._old[first - 1][: statement.col_offset]
        after = self._old[last - 1].encode()[statement.end_col_offset :].decode().strip()
        texts = (n for n in ast.walk(statement) if isinstance(n, ast.Constant | ast.JoinedStr))
        if before.strip() or (after and not after.startswith("#")):
            raise _NotPlainError
        if any(n.end_lineno != n.lineno for n in texts):
            raise _NotPlainError


def _has(node: ast.AST, number: int) -> bool:
    return getattr(node, "lineno", 0) <= number <= (getattr(node, "end_lineno", None) or 0)


def _calls(statement: ast.stmt, method: str) -> bool:
    """Return True for a statement that only calls a method."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(attr=name))):
            return name == method
    return False
