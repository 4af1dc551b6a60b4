"""Writes what was measured as tables into docs/tune.md, in English and Chinese, between two comments.

Invariant: the tables depend on docs/data/tuning.json alone, but for the most runs of a search; a part that was not
measured has no table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from precast._internal import atomic_write
from precast.tuning.sensitivity import MOST_RUNS

__all__ = ["render", "tables"]

_DOCS: Final = Path(__file__).parents[2] / "docs"
_PAGES: Final = {"en": _DOCS / "tune.md", "zh": _DOCS / "tune.zh.md"}
_BEGINS: Final = "<!-- figures: python -m tools.tuning_proof render -->"
_ENDS: Final = "<!-- end of figures -->"
Data = Mapping[str, Any]

_WORDS: Final = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))


def render(measured: Data) -> None:
    """Writes the tables into both pages."""
    for language, page in _PAGES.items():
        before, begins, rest = page.read_text(encoding="utf-8").partition(_BEGINS)
        _, ends, after = rest.partition(_ENDS)
        if not begins or not ends:
            raise ValueError(f"{page} has no lines {_BEGINS} and {_ENDS}")
        found = "\n".join([begins, "", *tables(measured, language), ends])
        atomic_write.replace(page, f"{before}{found}{after}".encode())


def tables(measured: Data, language: str) -> Iterator[str]:
    """The lines of a page."""
    words = _WORDS[language]
    parts = [
        *(_real(measured.get(f"real {objective}", {}), words) for objective in ("time", "memory")),
        _search(measured.get("search"), words),
        _planted(measured.get("planted"), words),
        _exhaustive(measured.get("exhaustive"), words),
        *(_seeds(found, words) for _, found in sorted(measured.get("seeds", {}).items())),
        _growth(measured.get("growth"), words),
    ]
    lines = [line for part in parts for line in part]
    yield from lines or [words["none"], ""]


def _real(rows: Data, words: Mapping[str, str]) -> Iterator[str]:
    known = [row for row in rows.values() if "failure" not in row]
    if not known:
        return
    objective = known[0]["objective"]
    steps = sorted({row["steps"] for row in known})
    said = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    yield words["real"].format(
        objective=words[objective], tolerance=known[0]["tolerance"], steps=said
    )
    yield ""
    yield from _table(
        words["real_head"].split("|"),
        [_setup(row, setup, words) for row in known for setup in row["setups"]],
    )
    yield words["beside"]
    yield ""
    head = words["beside_head"].split("|")
    if objective == "memory":
        head[2] = words["memory_of"]
    yield from _table(head, [_beside(row, words) for row in known])
    for row in rows.values():
        if "failure" in row:
            yield f"{row['network']}: {words['failed'].format(failure=row['failure'])}"
            yield ""
    yield from _where(known[-1], words)


def _setup(row: Data, setup: Data, words: Mapping[str, str]) -> list[str]:
    step, ratio = setup["step"], setup["ratio"]
    is_float32 = setup["name"] == "float32"
    return [
        row["network"],
        f"`{setup['name']}`",
        "-" if step is None else f"{1e3 * step:.1f}",
        "1" if is_float32 else _between(ratio),
        f"{setup['kept_bytes'] / 2**20:.1f}",
        "0" if is_float32 else setup["failure"] or _percent(setup["loss_difference"]),
        words["answer"] if setup["name"] == row["is"] else "",
    ]


def _beside(row: Data, words: Mapping[str, str]) -> list[str]:
    found = row["beside"]
    ratio = words["of"].format(ratio=_between(found["ratio"]), best=found["best_of_the_others"])
    return [
        row["network"],
        f"`{row['answer']}`",
        ratio,
        words[found["within"]],
        f"{row['search_seconds']:.0f} s",
    ]


def _search(found: Data | None, words: Mapping[str, str]) -> Iterator[str]:
    if found:
        parts = {name: found["parts"].get(name, 0.0) for name in ("errors", "costs", "prove")}
        given = {name: found[name] for name in ("seconds", "budget")}
        said = words["search" if found["is_proven"] else "unproven"]
        yield said.format(**given, **parts, answer=f"`{found['answer']}`")
        yield ""
        yield from _where(found, words)


def _planted(found: Data | None, words: Mapping[str, str]) -> Iterator[str]:
    if found:
        rows = found["networks"]
        right = sum(row["is_right"] for row in rows)
        late = sum(not row["is_right"] and row["seconds"] >= found["budget"] for row in rows)
        more = words["late"].format(late=late, budget=found["budget"]) if late else ""
        yield words["planted"].format(count=len(rows), right=right, more=more)
        yield ""
        yield from _where(found, words)


def _exhaustive(found: Data | None, words: Mapping[str, str]) -> Iterator[str]:
    if found:
        rows = found["networks"]
        yield words["exhaustive"].format(
            count=len(rows),
            choices=sum(row["choices"] for row in rows),
            same=sum(row["is_right"] for row in rows),
            within=sum(row["within_noise"] and not row["is_right"] for row in rows),
            mixed=sum(0 < row["in_16_bits"] < row["operations"] for row in rows),
        )
        yield ""
        yield from _where(found, words)


def _seeds(found: Data, words: Mapping[str, str]) -> Iterator[str]:
    more = ""
    if not found["are_proven"]:
        proven = sum(each["is_proven"] for each in found["seeds"])
        more = words["proven"].format(proven=proven)
    elif not found["is_same"]:
        more = words["noise" if found["within_noise"] else "differ"].format(
            tolerance=found["tolerance"]
        )
    yield words["seeds"].format(
        count=len(found["seeds"]),
        objective=words[found["objective"]],
        policies=words["same" if found["is_same"] else "different"].format(
            count=found["different"]
        ),
        more=more,
    )
    yield ""
    yield from _where(found, words)


def _growth(found: Data | None, words: Mapping[str, str]) -> Iterator[str]:
    if not found:
        return
    yield words["growth"].format(most=MOST_RUNS)
    yield ""
    rows = [
        [
            f"{row['modules']:,}",
            f"{row['operations']:,}",
            words[row["case"]],
            str(row["runs"]),
            *(f"{row['seconds'][part]:.2f}" for part in ("record", "errors", "costs", "choice")),
            f"{row['total']:.1f}",
            f"{1e3 * row['total'] / row['modules']:.0f}",
        ]
        for row in found["sizes"]
    ]
    yield from _table(words["growth_head"].split("|"), rows)
    yield from _where(found, words)


def _where(found: Data, words: Mapping[str, str]) -> Iterator[str]:
    yield words["where"].format(**found["where"])
    yield ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _between(ends: Sequence[float | None]) -> str:
    low, middle, high = ends
    if middle is None:
        return "-"
    if low is None or high is None:
        return f"{middle:.2f}"
    return f"{middle:.3f}" if low == high else f"{middle:.3f} ({low:.3f}-{high:.3f})"


def _percent(ends: Sequence[float | None]) -> str:
    low, _, high = ends
    return "-" if low is None or high is None else f"{low:+.2%} … {high:+.2%}"
