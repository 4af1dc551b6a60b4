"""The attack's own machinery: the runner tells what did not hold, and the table has every scenario, as has the page."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack import page
from tests.attack.runner import FAILED, HOLDS, LIMIT, Outcome, attack
from tests.attack.scenarios import AREAS, ORACLES, Limit, Scenario
from tests.attack.table import PARTS, TABLE

ROOT = Path(__file__).parents[2]


# --- the table and its page ---


def test_every_area_is_attacked_and_every_file_is_in_the_table() -> None:
    assert {one.area for one in TABLE.values()} == set(AREAS)
    assert {one.oracle for one in TABLE.values()} == set(ORACLES)
    files = {path.stem for path in (ROOT / "tests" / "attack").glob("*.py")}
    others = {
        "__init__",
        "__main__",
        "page",
        "runner",
        "scenarios",
        "table",
        "test_attack",
        "test_runner",
        "tools",
    }
    assert {part.__name__.rpartition(".")[2] for part in PARTS} == files - others


def test_each_claim_is_one_sentence_of_its_own() -> None:
    claims = [one.claim for one in TABLE.values()]
    assert [claim for claim in claims if claim.endswith(".") or "\n" in claim] == []
    assert len(set(claims)) == len(claims)


def test_the_page_has_the_table() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    contents = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert page.section() in contents, "run: make attack"


# --- the runner ---


def ran(function: Callable[[], None], limit: Limit | None = None, seconds: float = 60) -> Outcome:
    one = Scenario("one", "regions", "claim", "by hand", function, True, limit)
    [outcome] = attack([(one, 7)], jobs=1, seconds=seconds)
    return outcome


def fails() -> None:
    raise AssertionError("3 for 4")


def test_what_holds_and_what_does_not() -> None:
    assert ran(lambda: None).result == HOLDS
    failed = ran(fails)
    assert (failed.result, failed.seed) == (FAILED, 7)
    assert failed.message.startswith("AssertionError: 3 for 4")


def test_a_limit_must_fail_and_in_its_own_way() -> None:
    assert ran(fails, Limit("why", "3 for")).result == LIMIT
    reference = ran(lambda: None, Limit("why", "3 for"))
    assert (reference.result, "is gone" in reference.message) == (FAILED, True)
    other = ran(fails, Limit("why", "5 for"))
    assert (other.result, "another way" in other.message) == (FAILED, True)


def test_a_process_that_dies_or_hangs_has_failed() -> None:
    died = ran(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (died.result, died.message) == (FAILED, "signal 9")
    late = ran(lambda: time.sleep(600), seconds=0.5)
    assert (late.result, late.message) == (FAILED, "took longer than 0.5 s")


def test_a_seed_repeats_what_is_drawn() -> None:
    def draws() -> None:
        import random

        import numpy as np
        import torch

        raise AssertionError((random.random(), np.random.rand(), torch.rand(1).item()))

    assert ran(draws).message.split("\n")[0] == ran(draws).message.split("\n")[0]


@pytest.mark.parametrize("arguments", [["--name", "nothing is called so"], ["--area", "moon"]])
def test_a_wrong_question_is_a_usage_error(arguments: list[str]) -> None:
    from click.testing import CliRunner

    from tests.attack.__main__ import main

    assert CliRunner().invoke(main, arguments).exit_code == 2
