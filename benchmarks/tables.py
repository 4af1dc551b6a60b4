"""The rows of every measurement as tables on the terminal, and the machine they are from."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import clients, models, targets, variants
from precast.engine import registration

__all__ = ["about", "print_rows"]


_BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""As `torch.cpu.get_capabilities` names them: what computes in bfloat16, on x86 and on ARM."""


def about() -> dict[str, Any]:
    """The machine, now."""
    capabilities = torch.cpu.get_capabilities()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": capabilities.get("cpu_name", capabilities.get("architecture", "a CPU")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx_bf16": bool(capabilities.get("amx_bf16", False)),
        "bfloat16_units": [unit for unit in _BFLOAT16_UNITS if capabilities.get(unit)],
        "engine": registration.engine(),
        "load": round(os.getloadavg()[0], 2),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def print_rows(machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One table for each kind of measurement among the rows."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    tables = {
        "overhead": _overhead,
        "growth": _growth,
        "shared process": _shared_process,
        "memory": _memory,
        "clients": _clients,
        "models": _models,
        "observing": _observing,
        "targets": _targets,
    }
    for benchmark, fill in tables.items():
        chosen = [row for row in rows if row["benchmark"] == benchmark]
        for row in chosen:
            if row.get("case") == "all":
                console.print(f"skipped: {benchmark}: {escape(row['skipped'])}")
        chosen = [row for row in chosen if row.get("case") != "all"]
        if chosen:
            console.print(fill(chosen))


def _overhead(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Overhead of a call, us (median; difference: median of rounds, and its spread)"
    )
    for heading in ("engine", "kind", "call", "policy"):
        table.add_column(heading)
    for heading in ("torch", "precast", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        difference = f"{row['difference_us']:+.2f} ({row['difference_us_iqr']:.2f})"
        medians = [f"{row[name]['median_us']:.2f}" for name in ("torch", "precast")]
        named = [str(row[name]) for name in ("engine", "kind", "case", "policy")]
        table.add_row(*named, *medians, difference)
    return table


def _growth(rows: list[dict[str, Any]]) -> Table:
    title = "How the cost of a call grows"
    table = _table(title, ("engine", "call", "with", ""), ("us", "ratio"))
    for row in rows:
        for name, ratio in row["ratio_to_first"].items():
            named = row["engine"], row["case"], row["kind"], name
            table.add_row(*named, f"{row[name]['median_us']:.2f}", f"{ratio:.2f}")
    return table


def _shared_process(rows: list[dict[str, Any]]) -> Table:
    title = "The first call of an attached model after other work in its process"
    table = _table(title, ("engine", "with", "after"), ("us", "next call", "ratio", "casts"))
    for row in rows:
        ratio = f"{row['of_next']:.2f} ({row['of_next_iqr']:.2f})"
        times = f"{row['first_us']:,.0f}", f"{row['next_us']:,.0f}"
        table.add_row(row["engine"], row["kind"], row["case"], *times, ratio, f"{row['casts']:g}")
    return table


def _memory(rows: list[dict[str, Any]]) -> Table:
    table = _table("What regions leave in memory", ("engine", "regions of"), ("regions", "bytes"))
    for row in rows:
        grown = "" if row["grown_bytes"] is None else f"{row['grown_bytes']:+,}"
        table.add_row(row["engine"], row["case"], f"{row['regions']:,}", grown)
    return table


def _targets(rows: list[dict[str, Any]]) -> Table:
    table = _table(f"Targets: {targets.summary(rows)}", ("work", "case", ""), ("is", "at most"))
    table.add_column("verdict", overflow="fold")
    for row in rows:
        figures = targets.written(row, "value"), targets.written(row, "limit")
        told = f"{row['verdict']}{': ' if row['reason'] else ''}{escape(row['reason'])}"
        table.add_row(row["work"], row["case"], row["figure"], *figures, told)
    return table


def _clients(rows: list[dict[str, Any]]) -> Table:
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != clients.BASELINE))
    table = Table(
        title="Models and trainers of other libraries (ratios to torch.autocast, and their spread)"
    )
    for heading in ("size", "client", "work"):
        table.add_column(heading, overflow="fold")
    for heading in (f"{clients.BASELINE}, ms", *kinds):
        table.add_column(heading, justify="right", overflow="fold")
    for case in dict.fromkeys((row["size"], row["case"], row["work"]) for row in rows):
        found = {r["kind"]: r for r in rows if (r["size"], r["case"], r["work"]) == case}
        ratios = [
            f"{found[kind]['ratio']:.3f} ({found[kind]['ratio_iqr']:.3f})" if kind in found else ""
            for kind in kinds
        ]
        table.add_row(*case, f"{found[clients.BASELINE]['median_ms']:.2f}", *ratios)
    return table


def _models(rows: list[dict[str, Any]]) -> Table:
    kinds = _distinct(row["kind"] for row in rows if "ratio" in row)
    others = [kind for kind in kinds if kind != variants.BASELINE]
    reasons = _distinct(escape(row["skipped"]) for row in rows if "skipped" in row)
    table = Table(
        title="Whole networks (ratios to torch.autocast, and their spread)",
        caption="\n".join(f"skipped: {reason}" for reason in reasons),
    )
    for heading in ("network", "work"):
        table.add_column(heading, overflow="fold")
    for heading in (f"{variants.BASELINE}, ms", *others):
        table.add_column(heading, justify="right", overflow="fold")
    for name, work in _distinct((models.title(row), row["work"]) for row in rows):
        chosen = [row for row in rows if (models.title(row), row["work"]) == (name, work)]
        found = {row["kind"]: row for row in chosen}
        base = found.get(variants.BASELINE, {})
        time = f"{base['median_ms']:.2f}" if "median_ms" in base else "skipped"
        table.add_row(name, work, time, *(_ratio(found.get(k)) for k in others))
    return table


def _observing(rows: list[dict[str, Any]]) -> Table:
    title = "A training step that is watched (ratio: to the plain step, and its spread)"
    table = _table(title, ("network", "step"), ("ms", "ratio", "at most"))
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        time = "" if row["median_ms"] is None else f"{row['median_ms']:.2f}"
        table.add_row(row["case"], row["kind"], time, _ratio(row), target)
    return table


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """An empty table; columns of numbers are on its right, and end at one place."""
    table = Table(title=title)
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None or "ratio" not in row:
        return ""
    return f"{row['ratio']:.3f} ({row['ratio_iqr']:.3f})"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
