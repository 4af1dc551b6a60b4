"""`python -m tools.conformance`: what it counts, what it shows, and that the page is what its data says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.differences import DIFFERENCES
from tools import conformance, conformance_tests
from tools.conformance_page import render

TESTS = '''\
"""Two sums and one more.

Not part of the title.
"""

import pytest


@pytest.mark.parametrize("n", [1, 2])
def test_a_sum(n):
    assert n + n == 2 * n


def test_many_sums(record_property):
    record_property("cases", 40)


def test_nothing():
    pytest.skip("needs a moon")


def test_wrong(record_property):
    record_property("cases", 3)
    assert not "right"
'''


def test_cases_are_counted_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_sums.py").write_text(TESTS)
    (tmp_path / "test_named.py").write_text('"""A."""\nSECTION = "B"\ndef test_b():\n    pass\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("ROOT", "TESTS"):
        monkeypatch.setattr(conformance_tests, name, tmp_path)
    code, [named, sums] = conformance_tests.run(0)
    assert code == 1
    assert (named["file"], named["title"], named["cases"]) == ("test_named.py", "B", 1)
    assert sums["title"] == "Two sums and one more"
    assert (sums["cases"], sums["equal"], sums["skipped"]) == (45, 42, 1)
    assert sums["reasons"] == {"needs a moon": 1}


def test_the_page_is_what_its_data_says() -> None:
    data = json.loads(conformance.DATA.read_text(encoding="utf-8"))
    page = conformance.PAGE.read_text(encoding="utf-8")
    assert page == render(data), "run: python -m tools.conformance --render"
    assert data["programs"]["unexplained"] == 0
    assert all(section["cases"] == section["equal"] for section in data["sections"])


def test_the_page_says_what_has_not_run_and_what_is_unexplained() -> None:
    data = json.loads(conformance.DATA.read_text(encoding="utf-8"))
    data |= {"clients": [], "versions": []}
    data["programs"]["unexplained"] = 2
    page = render(data)
    assert page.count("Not run.\n") == 2
    assert "Unexplained: 2." in page
    assert all(f"differences.md#{difference.anchor}" in page for difference in DIFFERENCES)
