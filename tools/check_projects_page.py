"""The section of docs/check.md about other people's projects, from results and verdicts.

A verdict is a dictionary: project, file, row, code, right (true or false), why. It counts for the finding in
that place; where somebody moved the line, the finding has no verdict any more.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.sections import put

__all__ = ["DATA", "PAGE", "judged", "text", "write"]

_ROOT = Path(__file__).parent.parent
DATA = _ROOT / "docs" / "data"
PAGE = _ROOT / "docs" / "check.md"
BEGIN = "<!-- written by: python -m tools.check_projects -->\n"
END = "<!-- end of what it writes -->"


def load() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and verdicts."""
    results = json.loads((DATA / "check_projects.json").read_text(encoding="utf-8"))
    path = DATA / "check_verdicts.json"
    verdicts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return results, verdicts


def judged(results: dict[str, Any], verdicts: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """For each rule: how many findings are right, wrong, and not read."""
    known = {(v["project"], v["file"], v["row"], v["code"]): v["right"] for v in verdicts}
    counts: dict[str, Counter[str]] = {}
    for project in results["projects"]:
        for found in project["findings"]:
            key = (project["name"], found["file"], found["row"], found["code"])
            verdict = {True: "right", False: "wrong", None: "unread"}[known.get(key)]
            counts.setdefault(found["code"], Counter())[verdict] += 1
    return dict(sorted(counts.items()))


def text(results: dict[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """The section."""
    projects = results["projects"]
    counts = judged(results, verdicts)
    total = sum(counts.values(), Counter())
    broken = sum(len(p["broken"]) + len(p["lost"]) for p in projects)
    unseen = [p for p in projects if p.get("only_counted")]
    earlier = [p for p in projects if "only_counted" not in p]
    right, wrong = _halves(projects, verdicts)
    lines = [
        f"{len(projects)} projects, {sum(p['lines'] for p in projects):,} lines, {total.total()} findings of the rules "
        f"that are on, on {results['date']}. Safe fixes changed {sum(p['changed'] for p in projects)} files. All of",
        f"them compile, a second run changes none, and all {sum(p['importable'] for p in projects)} that could be "
        "imported still are."
        if not broken
        else f"{broken} of them are wrong afterwards: see docs/data/check_projects.json.",
        "",
        f"{len(unseen)} of them are only counted: no rule is mended for what is found there. They are chosen by a hash",
        "of the name,",
        f"among those that were added on 2026-11-23; the rules were developed on the others. In the {len(unseen)}, "
        f"{right['unseen']} of",
        f"{right['unseen'] + wrong['unseen']} findings are right, in the others {right['seen']} of "
        f"{right['seen'] + wrong['seen']}. A project's oldest PyTorch is the one that its metadata allows",
        f"(of {len(earlier)} projects the counts are of a run before that).",
        "",
        "| project | half | version | files | lines | findings | fixed | files changed | importable before, after |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {p['name']} | {_half(p)} | {p['version']} | {p['files']:,} | {p['lines']:,} | "
            f"{len(p['findings'])} | {p['fixed']} | "
            f"{p['changed']} | {p['importable']}, {p['importable'] - len(p['lost'])} |"
            for p in projects
        ),
        "",
        "Findings were read by hand; `docs/data/check_verdicts.json` has each verdict with its reason. A rule that is",
        "right in less than 80% of its findings is mended, or off unless it is asked for. What was wrong in earlier",
        "runs became a valid case of its rule. Rules that are not in the table find nothing in these projects.",
        "",
        "| rule | findings | right | wrong | not read | precision |",
        "|---|---|---|---|---|---|",
        *(_row(f"[{code}](rules/{_page(code)})", count) for code, count in counts.items()),
        _row("all", total),
    ]
    return "\n".join(lines) + "\n"


def _halves(
    projects: list[dict[str, Any]], verdicts: list[dict[str, Any]]
) -> tuple[Counter[str], Counter[str]]:
    """The findings that are right, and those that are wrong, in projects that are only counted and in others."""
    known = {(v["project"], v["file"], v["row"], v["code"]): v["right"] for v in verdicts}
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for project in projects:
        half = "unseen" if project.get("only_counted") else "seen"
        for found in project["findings"]:
            verdict = known.get((project["name"], found["file"], found["row"], found["code"]))
            right[half] += verdict is True
            wrong[half] += verdict is False
    return right, wrong


def _half(project: dict[str, Any]) -> str:
    return "counted" if project.get("only_counted") else "developed on"


def _row(name: str, count: Counter[str]) -> str:
    read = count["right"] + count["wrong"]
    precision = f"{count['right'] / read:.0%}" if read else ""
    cells = [name, count.total(), count["right"], count["wrong"], count["unread"], precision]
    return "| " + " | ".join(map(str, cells)) + " |"


def _page(code: str) -> str:
    return "README.md" if code.startswith("AMP9") else f"{code}.md"


def write() -> None:
    """Puts the section into docs/check.md."""
    put(PAGE, BEGIN, END, f"\n{text(*load())}\n")
