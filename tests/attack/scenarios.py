"""Scenarios and their table: a name, an area, a claim, an oracle, a function that tries to break the claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["AREAS", "ORACLES", "TABLE", "Limit", "Oracle", "Scenario", "scenario"]

Oracle = Literal["float64", "by hand", "plain PyTorch"]
ORACLES: tuple[str, ...] = get_args(Oracle)
AREAS = (
    "regions",
    "weights",
    "attach",
    "threads",
    "scaler",
    "policies",
    "modules",
    "install",
    "compile",
    "run",
    "report",
    "trace",
    "monitor",
    "exit",
)


@dataclass(frozen=True)
class Limit:
    """The reason for which a scenario fails, and its message: one that no longer fails so is an error in the table."""

    reason: str
    shows: str
    """A regular expression that the failure's message has to match."""


@dataclass(frozen=True)
class Scenario:
    """One way to attack.

    Attributes:
        name: what it is called on the page and for `--name`.
        area: one of `AREAS`.
        claim: one sentence, which is true as long as the scenario holds.
        oracle: what says so.
        attack: raises an `AssertionError`, or anything else, where the claim is not true.
        quick: whether `make test` runs it, too.
        limit: why it fails, where it is known to.
    """

    name: str
    area: str
    claim: str
    oracle: Oracle
    attack: Callable[[], None]
    quick: bool
    limit: Limit | None


TABLE: dict[str, Scenario] = {}

Attack = Callable[[], None]


def scenario(
    area: str,
    claim: str,
    oracle: Oracle,
    *,
    name: str | None = None,
    quick: bool = True,
    limit: Limit | None = None,
) -> Callable[[Attack], Attack]:
    """Puts a function into the table, under its own name unless one is given."""

    def put(attack: Attack) -> Attack:
        called = name or attack.__name__.replace("_", " ")
        assert area in AREAS, area
        assert oracle in ORACLES, oracle
        assert called not in TABLE, called
        TABLE[called] = Scenario(called, area, claim, oracle, attack, quick, limit)
        return attack

    return put
