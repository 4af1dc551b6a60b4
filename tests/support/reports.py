"""The computations of a report on documents in a file: plain dictionaries in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from precast._internal.records import as_json, from_json
from precast.report import document, numbers, ranks, run_summary, schema
from precast.report import tree as _tree
from precast.running import terminal_summary
from precast.running.run_observer import RunObserver
from tests.support.installed import uninstall_all

__all__ = [
    "document_of",
    "numeric_findings",
    "offender",
    "ran_in",
    "seconds_by_dtype",
    "seen",
    "summary",
    "summary_of",
    "summary_of_ranks",
    "tree",
    "worst",
]


_ROW: Any = as_json(schema.OperationRow(None, "", "forward", None, [], [], None, None, None, None))


def _read(plain: Any) -> schema.RunDocument:
    return from_json(schema.RunDocument, plain)


def summary_of(plain: Any) -> Any:
    return as_json(run_summary.summary_of(_read(plain)))


def summary_of_ranks(parts: Iterable[Any]) -> Any:
    return as_json(ranks.summary_of_ranks(list(map(_read, parts))))


def worst(parts: Iterable[Any]) -> int:
    return ranks.worst(list(map(_read, parts)))


def summary(plain: Any, where: list[str]) -> str:
    return terminal_summary.summary(_read(plain), where)


def document_of(watch: RunObserver, policy: str) -> Any:
    """The document of a program that was watched in this process, as `precast run` makes it."""
    made = document.blank(["train.py"], policy)
    made.run.seconds = 1.0
    watch.describe(made)
    return as_json(made)


def seen(
    program: Callable[[], object],
    policy: str = "torch",
    steps: tuple[int, int] = (2, 5),
    *,
    health: bool = False,
    measures: bool = False,
) -> Any:
    """The document of a program, which runs in this process as `precast run` would watch it."""
    watch = RunObserver(policy, steps, health=health)
    watch.start()
    try:
        program()
    finally:
        watch.stop()
        uninstall_all()
    made: Any = document_of(watch, policy)
    made["run"]["compiled"] = False  # what other tests of this process have compiled
    if not measures:
        made["run"]["speeds"] = {}  # those of the machine that runs the tests
    return made


def numeric_findings(plain: Any) -> Any:
    return as_json(numbers.numeric_findings(_read(plain)))


def offender(plain: Any) -> Any:
    return as_json(numbers.offender(_read(plain)))


def tree(trace: Any) -> list[_tree.TreeNode]:
    return _tree.tree(from_json(schema.TraceData, trace))


def ran_in(row: Any) -> str:
    plain = _ROW | row
    return _tree.ran_in(from_json(schema.OperationRow, plain))


def seconds_by_dtype(rows: Iterable[Any]) -> dict[str, float]:
    return _tree.seconds_by_dtype(from_json(schema.OperationRow, row) for row in rows)
