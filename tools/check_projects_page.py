"""The section of docs/check.md about other people's projects, from results and verdicts.

A verdict is a dictionary: project, file, row, code, right and useful (true or false), why. What is right and not
useful is noise. It counts for the finding in that place; where somebody moved the line, the finding has no verdict
any more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
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
    """For each rule: how many findings are useful, noise (true, but no reason to act), wrong, and not read."""
    known = {(v["project"], v["file"], v["row"], v["code"]): v for v in verdicts}
    counts: dict[str, Counter[str]] = {}
    for project in results["projects"]:
        for found in project["findings"]:
            verdict = known.get((project["name"], found["file"], found["row"], found["code"]))
            counts.setdefault(found["code"], Counter())[_kind(verdict)] += 1
    return dict(sorted(counts.items()))


def _kind(verdict: dict[str, Any] | None) -> str:
    if verdict is None:
        return "unread"
    if not verdict["right"]:
        return "wrong"
    return "useful" if verdict["useful"] else "noise"


def right(count: Counter[str]) -> int:
    """How many findings are true, useful or not."""
    return count["useful"] + count["noise"]


def text(results: dict[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """The section."""
    projects = results["projects"]
    counts = judged(results, verdicts)
    total = sum(counts.values(), Counter())
    lines = [
        *_what_was_run(projects, total),
        "",
        *_halves(projects, verdicts),
        "",
        "| project | run | part | version | files | lines | findings | fixed | files changed | "
        "importable before, after |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {p['name']} | {p['date']} | {_half(p)} | {p['version']} | {p['files']:,} | {p['lines']:,} | "
            f"{len(p['findings'])} | {p['fixed']} | "
            f"{p['changed']} | {p['importable']}, {p['importable'] - len(p['lost'])} |"
            for p in projects
        ),
        "",
        f"All {total.total() - total['unread']} findings, and not a sample of them, were read in their code; "
        f"{right(total)} are true, a precision of {_share(right(total), total)}.",
        f"Of all findings, {total['noise']} ({_share(total['noise'], total)}) are noise: what is said is true, but the "
        "project would change nothing for it.",
        "Noise is: a project that pins a PyTorch which does not warn, Apex that is offered beside `torch.amp` or",
        "used in functions that nothing calls, an import that is not used, a `-inf` or a scale that does no harm,",
        "a file that only the checker cannot read, and code that the project itself never runs in a region. One",
        "reader has judged; `docs/data/check_verdicts.json` has each verdict with its reason, for those who would",
        "judge otherwise. A rule that is right in less than 80% of its findings is mended, or off unless it is asked",
        "for. What was wrong in earlier runs became a valid case of its rule. Rules that are not in the table find",
        "nothing in these projects.",
        "",
        "| rule | findings | true and useful | true, but noise | false | not read | precision | noise |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(f"[{code}](rules/{_page(code)})", count) for code, count in counts.items()),
        _row("all", total),
    ]
    return "\n".join(lines) + "\n"


def _what_was_run(projects: list[dict[str, Any]], total: Counter[str]) -> Iterator[str]:
    """How large the runs were, each with its date, for rules change in between."""
    yield (
        f"{len(projects)} projects, {sum(p['lines'] for p in projects):,} lines, {total.total()} findings of the rules "
        "that are on:"
    )
    dates = sorted({p["date"] for p in projects})
    if len(dates) == 1:
        yield f"all counted on {dates[0]}. Rules that came, or were mended, after that are not in the counts."
    for date in dates if len(dates) > 1 else ():
        here = [p for p in projects if p["date"] == date]
        found = sum(len(p["findings"]) for p in here)
        yield f"the counts of {len(here)} projects, with {found} findings, are of the checker as it was on {date};"
    if len(dates) > 1:
        yield "the table says for each project which. Rules that came, or were mended, after a run are not in"
        yield "its counts."
    broken = sum(len(p["broken"]) + len(p["lost"]) for p in projects)
    yield f"Safe fixes changed {sum(p['changed'] for p in projects)} files."
    yield (
        f"{broken} of them are wrong afterwards: see docs/data/check_projects.json."
        if broken
        else "All of them compile, a second run changes none, and all "
        f"{sum(p['importable'] for p in projects)} that could be imported still are."
    )


def _halves(projects: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> Iterator[str]:
    """Which projects are only counted, and what was found in them and in the others."""
    parts = {
        kind: [p for p in projects if kind == _half(p)] for kind in ("counted", "developed on")
    }
    counts = {
        kind: sum(judged({"projects": part}, verdicts).values(), Counter())
        for kind, part in parts.items()
    }
    unseen, seen = counts["counted"], counts["developed on"]
    most = max(
        parts["counted"], key=lambda p: len(p["findings"]), default={"name": "", "findings": []}
    )
    yield f"{len(parts['counted'])} projects are only counted: rules are not developed on them. Since they were first"
    yield "counted, some findings there that were noise made rules narrower, and one that a bound on the work had"
    yield "hidden raised that bound. They were not"
    yield "drawn from all: of the projects that were added last, they are those whose name, in small"
    yield "letters, has an odd SHA-256; the rules were developed on all others. In those that are only counted,"
    yield (
        f"{right(unseen)} of {unseen.total()} findings are true and {unseen['useful']} useful, but "
        f"{len(most['findings'])} of them are in {most['name']} alone;"
    )
    yield f"in the others, {right(seen)} of {seen.total()} are true and {seen['useful']} useful. A project's oldest"
    yield "PyTorch is the one that its metadata allows."


def _half(project: dict[str, Any]) -> str:
    return "counted" if project.get("only_counted") else "developed on"


def _share(some: int, count: Counter[str]) -> str:
    read = count.total() - count["unread"]
    return f"{some / read:.0%}" if read else ""


def _row(name: str, count: Counter[str]) -> str:
    kinds = [count[kind] for kind in ("useful", "noise", "wrong", "unread")]
    cells = [
        name,
        count.total(),
        *kinds,
        _share(right(count), count),
        _share(count["noise"], count),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _page(code: str) -> str:
    return "README.md" if code.startswith("AMP9") else f"{code}.md"


def write() -> None:
    """Puts the section into docs/check.md."""
    put(PAGE, BEGIN, END, f"\n{text(*load())}\n")
