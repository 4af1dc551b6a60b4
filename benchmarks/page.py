"""The page docs/figures.md, tables and a chart, made from the JSON of `python -m benchmarks`.

The generated part of the page stands between two comments; what is around it is written by hand.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import chart
from benchmarks.models import title
from benchmarks.sections import put
from benchmarks.targets import MET, NOT_MET, summary, written
from benchmarks.variants import ACCUMULATION, BASELINE, INFERENCE, LEAN, TRAINING, kinds
from precast._internal.atomic_write import replace

__all__ = ["BEGIN", "DATA", "END", "PAGE", "render", "write"]

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE, DATA = (
    DOCS / "figures.md",
    DOCS / "images" / "models.png",
    DOCS / "data" / "benchmarks.json",
)
BEGIN = "<!-- made by `python -m benchmarks render`: begin -->"
END = "<!-- made by `python -m benchmarks render`: end -->"

Row = dict[str, Any]
_KINDS = [kind for kind in kinds(TRAINING) if kind != LEAN]
"""On a CPU, `lean` changes no operation of the networks."""
_CASTING = (BASELINE, "attached")
_MIB = 2**20


def write(data: dict[str, Any]) -> Iterator[Path]:
    """Puts the rows of `data` into the page, and draws the chart beside it; gives what it wrote."""
    put(PAGE, BEGIN, END, f"\n{render(data)}")
    yield PAGE
    replace(PICTURE, chart.png(_measured(data), data["machine"]))
    yield PICTURE


def render(data: dict[str, Any]) -> str:
    """The generated part of the page."""
    by_name: defaultdict[str, list[Row]] = defaultdict(list)
    for row in data["rows"]:
        if row.get("case") != "all":
            by_name[row["benchmark"]].append(row)
    machine = data["machine"]
    sections = (
        _section("## Targets", _targets, by_name["targets"]),
        _section(_CALLS, partial(_calls, engine=machine.get("engine")), by_name["overhead"]),
        _section(_GROWTH, _calls_growth, by_name["growth"]),
        _section(_MEMORY, _memory, by_name["memory"]),
        _section(_SHARED_PROCESS, _first_calls, by_name["shared process"]),
        _section(_CLIENTS, _clients, [row for row in by_name["clients"] if "ratio" in row]),
        _section(_NETWORKS, _times, by_name["models"]),
        _section(_NEEDS, _needs, by_name["models"]),
        _section(_WATCHING, _watching, by_name["observing"]),
    )
    head = "", _machine(machine), *_failed(data["rows"]), ""
    return "\n".join(itertools.chain(head, *sections))


_CALLS = """## A call

Microseconds of `torch.autocast`, with no kernel of precast on the dispatcher, and what precast adds."""
_GROWTH = (
    "`linear` with a cached weight, where there is more of something; the ratio is to the first."
)
_MEMORY = "Bytes by which the process grew over many regions, each of which casts a weight:"
_SHARED_PROCESS = "The first call of an attached model after other work in its process, as a ratio to the next call:"
_CLIENTS = """## Programs of other libraries

Models of transformers, with nothing but `precast.install()`, as ratios to the first `torch.autocast`."""
_NETWORKS = f"""## Whole networks

![Time of each variant as a ratio to torch.autocast; left is faster](images/models.png)

### Time

Milliseconds of `{BASELINE}`, and ratios to it (interquartile range)."""
_NEEDS = """### Memory and casts of one step

Peak of tensor memory in MiB, then the number of casts, with the MiB that they write in brackets. Without
`attach`, precast makes the casts of `torch.autocast`. Generation has the peaks of inference."""
_WATCHING = """## A step that is watched

A training step of the decoder with AdamW; ratios to the plain step. "ended" is after a trace has ended."""


def _section(
    head: str, lines: Callable[[Sequence[Row]], Iterable[str]], rows: Sequence[Row]
) -> Iterator[str]:
    """The head and the lines of some rows; nothing if there are none."""
    if rows:
        yield from (head, "", *lines(rows), "")


def _machine(machine: Row) -> str:
    amx = ", with AMX for bfloat16" if machine.get("amx_bf16") else ""
    amx = ", with AVX512_BF16" if not amx and machine.get("bfloat16_units") else amx
    engine = f", the {machine['engine']} engine" if "engine" in machine else ""
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"Measured on {machine['date']}: {machine['cpu']} ({machine['cpu_capability']}{amx}), {machine['cores']} "
        f"cores{gpu},\n{machine['threads']} thread(s), Python {machine['python']}, PyTorch {machine['torch']}{engine}; "
        f"load of the machine when it began: {machine['load']}."
    )


def _failed(rows: Sequence[Row]) -> Iterator[str]:
    """The kinds of measurement that gave nothing, or not all."""
    for row in rows:
        if row.get("case") == "all":
            yield f"\nNot all measured: {row['benchmark']}: {row['skipped']}."


def _calls(rows: Sequence[Row], engine: str | None) -> Iterator[str]:
    """A line for each call: the time of PyTorch, and what precast adds under each policy, on each engine."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    engines = list(dict.fromkeys(row.get("engine", engine) for row in rows))
    columns = [(each, policy) for each in engines for policy in policies]
    yield _line(["kind", "call", BASELINE, *(f"`{policy}`, {each}" for each, policy in columns)])
    yield "|---" * (3 + len(columns)) + "|"
    calls: dict[tuple[str, str], dict[tuple[str | None, str], Row]] = {}
    for row in rows:
        call = calls.setdefault((row["kind"], row["case"]), {})
        call[row.get("engine", engine), row["policy"]] = row
    for names, call in calls.items():
        time = next(iter(call.values()))["torch"]["median_us"]
        yield _line([*names, f"{time:.2f}", *(_added(call.get(each)) for each in columns)])


def _added(row: Row | None) -> str:
    return "" if row is None else f"{row['difference_us']:+.2f} ({row['difference_us_iqr']:.2f})"


def _calls_growth(rows: Sequence[Row]) -> Iterator[str]:
    yield _line(["with", "engine", "ratio"])
    yield "|---|---|---|"
    for row in rows:
        ratios = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in row["ratio_to_first"].items())
        yield _line([row["kind"], row.get("engine", ""), ratios])


def _memory(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        grown = "unknown" if row["grown_bytes"] is None else f"{row['grown_bytes']:+,}"
        yield f"- {row['regions']:,} of {row['case']}, {row['engine']} engine: {grown}"


def _first_calls(rows: Sequence[Row]) -> Iterator[str]:
    yield _line(["attached", "after", "of the next call", "casts"])
    yield "|---|---|---|---|"
    for row in rows:
        yield _line([row["kind"], row["case"], f"{row['of_next']:.2f}", f"{row['casts']:g}"])


def _targets(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{summary(rows)}. Not met, with the spread in brackets:"
    yield ""
    yield "| work | case | | measured | at most |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if row["verdict"] == NOT_MET:
            figures = row["figure"], written(row, "value"), written(row, "limit")
            yield _line([row["work"], row["case"], *figures])
    yield ""
    for row in rows:
        if row["verdict"] not in {MET, NOT_MET}:
            yield f"Not judged: {row['work']}, {row['case']}, {row['figure']}: {row['reason']}."


def _clients(rows: Sequence[Row]) -> Iterator[str]:
    shown = list(dict.fromkeys(row["kind"] for row in rows))
    yield _line(["size", "model", "work", *shown])
    yield "|---|---|---|" + "---|" * len(shown)
    for size, case, work in dict.fromkeys((r["size"], r["case"], r["work"]) for r in rows):
        variants = {
            r["kind"]: r
            for r in rows
            if (r["case"], r.get("size"), r.get("work")) == (case, size, work)
        }
        cells = [_figure(variants.get(kind), "ratio") for kind in shown]
        cells[shown.index(BASELINE)] = f"{variants[BASELINE]['median_ms']:.2f} ms"
        yield _line([size, case, work, *cells])


def _times(rows: Sequence[Row]) -> Iterator[str]:
    others = [kind for kind in kinds(ACCUMULATION) if kind not in {BASELINE, LEAN}]
    yield _line(["network", "work", f"`{BASELINE}`, ms", *others])
    yield "|---|---|" + "---|" * (len(others) + 1)
    for network, work, variants in _groups(rows):
        if base := variants.get(BASELINE):
            time = f"{base['median_ms']:.2f}"
            figures = (_figure(variants.get(kind), "ratio") for kind in others)
            yield _line([network, work, time, *figures])
    yield from _left_out(rows)


def _needs(rows: Sequence[Row]) -> Iterator[str]:
    yield _line(["network", "work", *_KINDS, *(f"casts, {kind}" for kind in _CASTING)])
    yield "|---|---|" + "---|" * (len(_KINDS) + len(_CASTING))
    for network, work, by_kind in _groups(rows):
        if by_kind and work in {INFERENCE, TRAINING}:
            peaks = (_peak(by_kind.get(kind)) for kind in _KINDS)
            casts = (_casts(by_kind.get(kind)) for kind in _CASTING)
            yield _line([network, work, *peaks, *casts])


def _watching(rows: Sequence[Row]) -> Iterator[str]:
    yield _line(["network", "step", "ms", "ratio (spread)", "at most"])
    yield "|---|---|---|---|---|"
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        time = "" if row["median_ms"] is None else f"{row['median_ms']:.1f}"
        yield _line([row["case"], row["kind"], time, _figure(row, "ratio"), target])


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, dict[str, Row]]]:
    """The measured rows of each network, work and setting, by variant."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        group = groups.setdefault((title(row), row["work"]), {})
        if "ratio" in row:
            group[row["kind"]] = row
    for (network, work), group in groups.items():
        yield network, work, group


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the skipped measurements, once for each reason."""
    for reason in dict.fromkeys(row["skipped"] for row in rows if "skipped" in row):
        skipped = [row for row in rows if row.get("skipped") == reason]
        titles = {row["kind"] if row["kind"] != "all" else title(row) for row in skipped}
        networks = sorted({title(row) for row in skipped})
        where = "" if len(networks) > 3 or titles == set(networks) else f" on {', '.join(networks)}"
        yield f"\nSkipped: {', '.join(sorted(titles))}{where}: {reason}."


def _figure(row: Row | None, figure: str) -> str:
    return "" if row is None else f"{row[figure]:.3f} ({row[f'{figure}_iqr']:.3f})"


def _peak(row: Row | None) -> str:
    if row is None:
        return ""
    # The profiler can lose an allocation and report its release: the sum is then negative and means nothing.
    return f"{row['peak_bytes'] / _MIB:.1f}" if row["peak_bytes"] >= 0 else "not measured"


def _casts(row: Row | None) -> str:
    return "" if row is None else f"{row['casts']} ({row['cast_bytes'] / _MIB:.1f})"


def _measured(data: dict[str, Any]) -> list[Row]:
    return [row for row in data["rows"] if row["benchmark"] == "models" and "ratio" in row]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
