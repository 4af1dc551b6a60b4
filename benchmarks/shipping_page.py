"""What was measured of models that are shipped, as a part of docs/performance.md; nothing if nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["shipped"]

Row = Mapping[str, Any]


def shipped(
    converted: Sequence[Row], packages: Sequence[Row], started: Sequence[Row]
) -> Iterator[str]:
    """The lines of the page: converted models, programs and packages, the start of a process."""
    if not (converted or packages or started):
        return
    yield "### Models that are shipped"
    yield ""
    dates = sorted({row["date"] for row in (*converted, *packages, *started) if "date" in row})
    if dates:
        yield f"Measured by themselves, on {' and '.join(dates)}, on the same machine."
        yield ""
    if converted:
        yield from _converted(converted)
    if packages:
        yield from _packages(packages)
    if started:
        yield from _started(started)


def _converted(rows: Sequence[Row]) -> Iterator[str]:
    yield "A converted model beside `model.to(torch.bfloat16)`, and beside the same with the policy's float32 written"
    yield "by hand too: its float32 weights, which the last column names, and casts before layers that get float32."
    yield "The peak is while it is converted in place, with what the model computes on the example; in brackets is that"
    yield "of one call of the float32 model in a region, which converting needs. The next column compares the peak with"
    yield "that of one call in float32."
    yield ""
    heads = [
        "network",
        "model",
        "ms",
        "time, of by hand",
        "with the same float32",
        "weights, of by hand",
        "with the same float32",
    ]
    heads += ["peak, of the float32 weights", "of the float32 call", "float32 weights"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        peak = f"{row['peak']:.2f}"
        if "call_peak" in row:
            peak += f" ({row['call_peak']:.2f})"
        peak += f" | {_figure(row, 'peak_of_call', 2)}"
        weights = f"{row['weights']:.3f} | {_figure(row, 'weights_same_islands')} | {peak}"
        islands = ", ".join(f"`{name}`" if name != "..." else name for name in row["islands"])
        time = f"{row['median_ms']:.2f} | {_ratio(row, 'by_hand')} | {_ratio(row, 'same_islands')}"
        yield f"| {row['case']} | {row['kind']} | {time} | {weights} | {islands} |"
    yield ""


def _packages(rows: Sequence[Row]) -> Iterator[str]:
    yield "Exported programs, run eagerly, and packages of AOTInductor, beside the 16-bit model exported and compiled"
    yield "likewise by hand. A package is compiled so that it rounds where the program does, and by hand as the"
    yield "compiler is set by itself."
    yield "The policy's float32 written by hand too is exported and compiled as by hand."
    yield ""
    heads = ["network", "shipped as", "ms", "time, of by hand", "with the same float32"]
    heads += ["file, of by hand", "with the same float32"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        start = f"| {row['case']} | {_kind(row)} |"
        if "by_hand" not in row:
            yield f"{start} skipped: {row['skipped']} | | | | |"
            continue
        times = f"{_ratio(row, 'by_hand')} | {_ratio(row, 'same_islands')}"
        files = [_figure(row, name) for name in ("file", "file_same_islands")]
        yield f"{start} {row['median_ms']:.2f} | {times} | {' | '.join(files)} |"
    yield ""


def _kind(row: Row) -> str:
    """How it was shipped; where a policy gives the program of another, that is said."""
    _, plus, policy = row["kind"].partition(" + ")
    same = plus and row["same_as"] != policy
    return f"{row['kind']} (the program of {row['same_as']})" if same else str(row["kind"])


def _started(rows: Sequence[Row]) -> Iterator[str]:
    yield f"From the start of a process to its first result, and the most memory that it had; {rows[0]['case']}."
    yield ""
    yield "| process | s | ratio (spread) | MiB |"
    yield "|---|---|---|---|"
    for row in rows:
        if "ratio" not in row:
            yield f"| {row['kind']} | skipped: {row['skipped']} | | |"
            continue
        figures = f"{row['median_s']:.2f} | {_ratio(row, 'ratio')} | {row['peak_mib']:.0f}"
        yield f"| {row['kind']} | {figures} |"
    yield ""


def _figure(row: Row, name: str, digits: int = 3) -> str:
    return f"{row[name]:.{digits}f}" if name in row else ""


def _ratio(row: Row, figure: str) -> str:
    if figure not in row:
        return ""
    return f"{row[figure]:.3f} ({row[f'{figure}_iqr']:.3f})"
