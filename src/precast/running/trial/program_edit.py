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
from dataclasses import dataclass
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

    lines: list[str]
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
    """A loop of a training in one function, and its edit."""

    def __init__(self, outcome: TrialOutcome, dtype: str, region: str) -> None:
        self._region, self._device = region, outcome.device
        self._scales = dtype == "float16"
        places = outcome.lines
        backward, step = self._only(places, "backward"), self._only(places, "step")
        self._path = backward.rpartition(":")[0]
        self._numbers = {
            event: [int(each.rpartition(":")[2]) for each in lines if self._is_here(each)]
            for event, lines in places.items()
        }
        if not self._is_here(step) or len(self._numbers.get("clip", [])) != len(
            places.get("clip", [])
        ):
            raise _NotPlainError
        self._old = Path(self._path).read_text(encoding="utf-8").splitlines()
        self._new = list(self._old)
        self._tree = ast.parse("\n".join(self._old))
        self.lines: list[str] = []

    @staticmethod
    def _only(places: dict[str, list[str]], event: str) -> str:
        """Return the only line that makes a call."""
        lines = places.get(event, [])
        if len(lines) != 1:
            raise _NotPlainError
        return lines[0]

    def _is_here(self, place: str) -> bool:
        return place.rpartition(":")[0] == self._path

    def edit(self) -> ProgramEdit:
        """Return the edit."""
        if not any(
            isinstance(node, ast.Import)
            and any(a.name == "torch" and not a.asname for a in node.names)
            for node in self._tree.body
        ):
            raise _NotPlainError
        [backward], [step] = self._numbers["backward"], self._numbers["step"]
        body = self._block_of(backward)
        position = next(n for n, each in enumerate(body) if _has(each, backward))
        calls = [*self._numbers.get("model", []), *self._numbers.get("callers", [])]
        inside = [
            n
            for n, each in enumerate(body[:position])
            if any(_has(each, number) for number in calls)
        ]
        if not inside:
            raise _NotPlainError
        statements = body[inside[0] : position]
        while _calls(statements[-1], "zero_grad"):
            statements.pop()
        changes: list[tuple[int, int, list[str]]] = [self._indented(statements)]
        if self._scales:
            changes += self._scaler_changes(body[position], step)
        if "precast." in self._region:
            changes.append(self._import_of_precast())
        for first, last, lines in sorted(changes, reverse=True):
            self._new[first - 1 : last] = lines
        text = "\n".join(self._new) + "\n"
        ast.parse(text)
        name = _short(f"{self._path}:0").rpartition(":")[0]
        diff = difflib.unified_diff(self._old, self._new, f"a/{name}", f"b/{name}", lineterm="")
        return ProgramEdit(self._described(name), self._path, text, "\n".join(diff) + "\n")

    def _described(self, name: str) -> list[str]:
        """Return the added and changed lines, with their numbers in the edited file."""
        matcher = difflib.SequenceMatcher(None, self._old, self._new, autojunk=False)
        indented = {line.strip() for line in self._old}
        return [
            f"{name}:{number + 1}: {self._new[number].strip()}"
            for kind, _, _, first, last in matcher.get_opcodes()
            if kind in {"insert", "replace"}
            for number in range(first, last)
            if self._new[number].strip() not in indented
        ]

    # --- statements ---

    def _block_of(self, number: int) -> list[ast.stmt]:
        """Return the innermost list of statements that has one at a line."""
        blocks = [
            block
            for node in ast.walk(self._tree)
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(node, name, None), list)
            and any(isinstance(each, ast.stmt) and _has(each, number) for each in block)
        ]
        if not blocks:
            raise _NotPlainError
        return max(blocks, key=lambda block: block[0].lineno)

    def _statement(self, number: int) -> ast.stmt:
        return next(each for each in self._block_of(number) if _has(each, number))

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

    def _indented(self, statements: list[ast.stmt]) -> tuple[int, int, list[str]]:
        """Return the change that puts statements into the region."""
        for each in statements:
            self._check_alone(each)
        first, last = statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno
        space = self._space(statements[0])
        unit = "\t" if space.endswith("\t") else "    "
        inner = [f"{unit}{line}" if line.strip() else line for line in self._old[first - 1 : last]]
        return first, last, [f"{space}{self._region}", *inner]

    def _space(self, statement: ast.stmt) -> str:
        return self._old[statement.lineno - 1][: statement.col_offset]

    def _scaler_changes(
        self, backward: ast.stmt, step_line: int
    ) -> Iterator[tuple[int, int, list[str]]]:
        step = self._statement(step_line)
        loss, optimizer = _receiver(backward, "backward"), _receiver(step, "step")
        loop = self._loop_around(backward)
        if self._loop_around(step) is not loop:
            raise _NotPlainError
        for each in (backward, step):
            self._check_alone(each)
        scaler = f'{self._space(loop)}scaler = torch.amp.GradScaler("{self._device}")'
        yield loop.lineno, loop.lineno, [scaler, self._old[loop.lineno - 1]]
        yield self._replaced(backward, [f"scaler.scale({loss}).backward()"])
        yield self._replaced(step, [f"scaler.step({optimizer})", "scaler.update()"])
        for number in self._numbers.get("clip", []):
            clip = self._statement(number)
            self._check_alone(clip)
            first = clip.lineno
            unscale = f"{self._space(clip)}scaler.unscale_({optimizer})"
            yield first, first, [unscale, self._old[first - 1]]

    def _replaced(self, statement: ast.stmt, code: list[str]) -> tuple[int, int, list[str]]:
        space = self._space(statement)
        last = statement.end_lineno or statement.lineno
        return statement.lineno, last, [f"{space}{line}" for line in code]

    def _loop_around(self, statement: ast.stmt) -> ast.stmt:
        """Return the outermost loop around a statement, in its function."""
        scopes = [self._tree, *ast.walk(self._tree)]
        functions = [
            node
            for node in scopes
            if isinstance(node, ast.FunctionDef) and _has(node, statement.lineno)
        ]
        scope: ast.AST = max(functions, key=lambda node: node.lineno, default=self._tree)
        loops = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.For | ast.While) and _has(node, statement.lineno)
        ]
        if not loops:
            raise _NotPlainError
        return min(loops, key=lambda node: node.lineno)

    def _import_of_precast(self) -> tuple[int, int, list[str]]:
        node = next(
            node
            for node in self._tree.body
            if isinstance(node, ast.Import) and any(a.name == "torch" for a in node.names)
        )
        self._check_alone(node)
        return node.lineno, node.lineno, [self._old[node.lineno - 1], "import precast"]


def _has(node: ast.AST, number: int) -> bool:
    return getattr(node, "lineno", 0) <= number <= (getattr(node, "end_lineno", None) or 0)


def _calls(statement: ast.stmt, method: str) -> bool:
    """Return True for a statement that only calls a method."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(attr=name))):
            return name == method
    return False


def _receiver(statement: ast.stmt, method: str) -> str:
    """Return the code of `x` in the statement ``x.method()``."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(value=value, attr=name), args=[], keywords=[])):
            if name == method:
                return ast.unparse(value)
    raise _NotPlainError
