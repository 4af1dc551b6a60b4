"""Documents: what is refused and with which words, what is saved is read, ranks are merged, old files survive."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precast import report
from precast.errors import ReportError
from tests.support.documents import document, flat, with_rows
from tools.site import report_schema


def changed(*path: str | int, to: object) -> dict[str, Any]:
    """A document with another value at one place."""
    made: Any = document(layers=1, steps=20)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return made


def without_verdict(document: Any) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "summary"}


@pytest.mark.parametrize(
    "made", [document(), flat(), with_rows(30), document(rank=1, world_size=2)]
)
def test_what_is_saved_is_read(made: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    report.save(made, path)
    assert without_verdict(report.load(path)) == made


def test_a_key_that_is_not_known_is_kept() -> None:
    made = changed("trace", "rows", 0, to=document(layers=1)["trace"]["rows"][0] | {"later": 1})
    assert report.validate(made) == made


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([], 'has no "schema"'),
        ({}, 'has no "schema"'),
        (changed("schema", to=2), r"has schema 2, and precast .* reads schema 1"),
        (changed("schema", to=True), "has schema True"),
        (changed("run", to=...), "at run: missing, expected an object"),
        (
            changed("run", "steps", to=1.5),
            "at run.steps: expected a whole number, got 1.5",
        ),
        (changed("run", "steps", to=True), "run.steps: expected a whole number, got True"),
        (changed("run", "ended", to="died"), r'"exit" or "exception" .* got .died.'),
        (changed("run", "message", to=3), "run.message: expected text or null"),
        (
            changed("steps", 3, "loss", to=float("nan")),
            r"steps\[3\].loss: expected a number or null, got nan",
        ),
        (changed("steps", 3, "scale", to=float("inf")), r"steps\[3\].scale"),
        (
            changed("trace", "rows", 5, "calls", to="3"),
            r"trace.rows\[5\].calls: expected a whole number",
        ),
        (changed("trace", "rows", to={}), "trace.rows: expected a list, got an object"),
        (
            changed("trace", "flow", 0, "to", to=None),
            r"trace.flow\[0\].to: expected text, got null",
        ),
    ],
)
def test_what_is_not_as_the_schema_says_is_refused_with_the_place(made: object, says: str) -> None:
    with pytest.raises(ReportError, match=says):
        report.validate(made)


@pytest.mark.parametrize(
    "content", [b"", b'{"schema": 1, "run": {"comm', b"<!doctype html>", b"\xff\xfe"]
)
def test_a_file_that_is_no_whole_document_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(
        ReportError, match=r"run\.json is not a complete JSON file .*precast run --json"
    ):
        report.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read .*nowhere\.json: No such file"):
        report.load(tmp_path / "nowhere.json")


# --- ranks ---


def ranks(*numbers: int | None, size: int = 3) -> list[dict[str, Any]]:
    return [document(layers=1, steps=20, rank=number, world_size=size) for number in numbers]


def test_ranks_are_merged_in_their_order_and_are_what_they_were(tmp_path: Path) -> None:
    second, first = ranks(2, 0)  # rank 1 was killed
    merged = report.merge([second, first])
    assert merged["ranks"] == [first, second]
    report.save(merged, tmp_path / "all.json")
    assert without_verdict(report.load(tmp_path / "all.json")) == merged


def test_what_was_merged_can_be_merged_on() -> None:
    one, two, three = ranks(0, 1, 2)
    assert report.merge([report.merge([three, one]), two])["ranks"] == [one, two, three]


def test_a_single_document_is_merged_as_it_is() -> None:
    assert report.merge([flat()]) == flat()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "at least one document"),
        (ranks(0, 0), "rank 0 occurs 2 times"),
        (ranks(0, None), "has no rank"),
        (ranks(0) + ranks(1, size=2), "the world_size differs: 3 and 2"),
    ],
)
def test_what_is_not_of_one_run_is_not_merged(parts: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ReportError, match=says):
        report.merge(parts)


def test_other_commands_are_not_merged() -> None:
    first, second = ranks(0, 1)
    second["run"]["command"] = ["other.py"]
    with pytest.raises(
        ReportError, match=r"the command differs: .*'train.py'.* and \['other.py'\]"
    ):
        report.merge([first, second])


def test_merging_and_checking_change_nothing() -> None:
    parts = ranks(1, 0)
    before = copy.deepcopy(parts)
    report.merge(parts)
    assert parts == before


# --- broken output ---


def test_an_invalid_document_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    report.save(flat(), path)
    with pytest.raises(ReportError):
        report.save(flat() | {"counts": None}, path)
    assert without_verdict(report.load(path)) == flat()


# --- what it needs ---


def test_a_document_is_strict_json(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    report.save(document(), tmp_path / "run.json")
    strict: Callable[[str], Any] = lambda text: json.loads(text, parse_constant=refuse)  # noqa: E731
    assert strict((tmp_path / "run.json").read_text())["schema"] == 1


def test_the_lists_of_keys_name_the_types() -> None:
    assert "- `cast_seconds` (number): " in report_schema.sections()


def test_the_made_documents_have_every_key_of_the_schema() -> None:
    """So that what is tested with them is all there is."""
    made = json.dumps(document()) + json.dumps(report.merge(ranks(0, 1)))
    keys = set(re.findall(r"^- `(\w+)` \((?!.*, optional\):)", report_schema.sections(), re.M))
    of_summaries = {"level", "headline", "precision", "problems", "notes", "text", "gain", "first"}
    of_summaries |= {"eps", "optimizer"}  # of `BrokenState`, which `test_cures.py` makes
    assert not {key for key in keys - of_summaries if f'"{key}": ' not in made}
