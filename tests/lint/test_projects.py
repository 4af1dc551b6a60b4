"""`python -m tools.check_projects`: what it says of a project is so, and its page is that of its data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from precast_lint.selecting.registry import index
from precast_lint.selecting.settings import Settings
from tools import check_projects, check_projects_page
from tools.check_projects import Project, examine

OLD = "import torch\n\ndef region():\n    return torch.cuda.amp.autocast()\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("x = 1\n")
    (package / "missing.py").write_text("import absent_package\n" + OLD)
    (package / "left.py").write_text("import torch\nregion = torch.cuda.amp.autocast(*args)\n")
    return tmp_path / "site"


def test_a_project_is_checked_fixed_and_imported(site: Path) -> None:
    found = examine(Project("mine", "1.0", ("mine",)), site)
    assert (found["files"], found["fixed"], found["changed"]) == (4, 1, 1)
    assert Counter(finding["code"] for finding in found["findings"]) == {"AMP001": 2}
    assert found["findings"][1] == {
        "file": "mine/missing.py",
        "row": 5,
        "code": "AMP001",
        "line": "return torch.cuda.amp.autocast()",
    }
    assert (found["broken"], found["importable"], found["lost"]) == ([], 0, [])
    assert OLD in (site / "mine" / "missing.py").read_text(), "only copies are fixed"


def test_imports_are_compared_with_the_fixed_copies(site: Path, tmp_path: Path) -> None:
    path = str(site / "mine" / "good.py")
    (tmp_path / "copy.py").write_text("raise ValueError\n")
    assert check_projects._imported(site, {}, ["mine.good", "mine.missing"]) == {"mine.good"}
    assert check_projects._imported(site, {path: str(tmp_path / "copy.py")}, ["mine.good"]) == set()
    changed = {path: b"raise ValueError\n"}
    assert check_projects._imports(changed, site, site)["lost"] == ["mine.good"]


def test_what_is_wrong_with_a_fixed_file_is_said() -> None:
    changed = {"/x/a.py": b"def f(:\n", "/x/b.py": OLD.encode()}
    wrong = check_projects._broken(changed, Path("/x"), Settings())
    assert [text.partition(":")[0] for text in wrong] == ["a.py", "b.py"]


def test_precision_is_that_of_the_findings_that_were_read() -> None:
    places = [("a.py", 1), ("a.py", 2), ("a.py", 3), ("b.py", 1)]
    findings = [{"file": file, "row": row, "code": "AMP001", "line": ""} for file, row in places]
    results = {"projects": [{"name": "p", "findings": findings}]}
    read = [
        ("a.py", 1, True, True),
        ("a.py", 3, True, False),
        ("b.py", 1, False, False),
        ("b.py", 9, True, True),
    ]
    verdicts = [
        {
            "project": "p",
            "file": file,
            "row": row,
            "code": "AMP001",
            "right": right,
            "useful": useful,
            "why": "",
        }
        for file, row, right, useful in read
    ]
    counts = check_projects_page.judged(results, verdicts)
    assert counts == {"AMP001": {"useful": 1, "noise": 1, "wrong": 1, "unread": 1}}
    assert "| 4 | 1 | 1 | 1 | 1 | 67% | 33% |" in check_projects_page._row("x", counts["AMP001"])


def test_each_run_is_named_with_its_date_and_its_findings() -> None:
    finding = {"file": "a.py", "row": 1, "code": "AMP001", "line": ""}
    rest = {"version": "1", "files": 1, "lines": 1, "fixed": 0, "changed": 0}
    rest |= {"broken": [], "importable": 0, "lost": []}
    results = {
        "projects": [
            {"name": "old", "date": "2026-01-01", "findings": [finding], **rest},
            {
                "name": "new",
                "date": "2026-02-02",
                "only_counted": True,
                "findings": [finding] * 2,
                **rest,
            },
        ]
    }
    page = check_projects_page.text(results, [])
    assert "1 projects, with 1 findings, are of the checker as it was on 2026-01-01" in page
    assert "1 projects, with 2 findings, are of the checker as it was on 2026-02-02" in page
    assert "| old | 2026-01-01 | developed on |" in page
    assert "| new | 2026-02-02 | counted |" in page


def test_the_page_is_that_of_the_data_and_the_rules_are_good_enough() -> None:
    page = check_projects_page.PAGE.read_text(encoding="utf-8")
    between = page.partition(check_projects_page.BEGIN)[2].partition(check_projects_page.END)[0]
    results, verdicts = check_projects_page.load()
    written = check_projects_page.text(results, verdicts)
    assert between.strip() == written.strip(), "run: python -m tools.check_projects --render"
    done = {project["name"]: project["version"] for project in results["projects"]}
    wanted = {
        project.name: project.version
        for project in (*check_projects.PROJECTS, *check_projects.LATER)
    }
    assert done | {"torch": ""} == wanted | {"torch": ""}  # this environment may have another one
    assert not any(project["broken"] or project["lost"] for project in results["projects"])
    for verdict in verdicts:
        assert {"project", "file", "row", "code", "right", "useful", "why"} == verdict.keys()
        assert verdict["right"] or not verdict["useful"], "what is false is of no use"
        assert verdict["why"]
    counts = check_projects_page.judged(results, verdicts)
    total = sum(counts.values(), Counter())
    assert total["unread"] == 0
    assert check_projects_page.right(total) >= 0.95 * total.total()
    for code, count in counts.items():
        right = check_projects_page.right(count)
        is_on = code not in index() or index()[code].default
        assert not is_on or right >= 0.8 * (right + count["wrong"]), code
