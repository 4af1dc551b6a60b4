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
    if converted:
        yield from _converted(converted)
    if packages:
        yield from _packages(packages)
    if started:
        yield from _started(started)


def _converted(rows: Sequence[Row]) -> Iterator[str]:
    yield "A converted model beside `model.to(torch.bfloat16)`. The peak is while it is converted in place, with what"
    yield "the model computes on the example; in brackets is that of one call of the float32 model in a region, which"
    yield "converting needs."
    yield ""
    heads = [
        "network",
        "model",
        "ms",
        "time, of by hand",
        "weights, of by hand",
        "without the islands",
    ]
    heads += ["peak, of float32", "float32 islands"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        peak = f"{row['peak']:.2f}"
        if "call_peak" in row:
            peak += f" ({row['call_peak']:.2f})"
        weights = f"{row['weights']:.3f} | {row['weights_without_islands']:.3f} | {peak}"
        islands = ", ".join(f"`{name}`" if name != "..." else name for name in row["islands"])
        time = f"{row['median_ms']:.2f} | {_ratio(row, 'by_hand')}"
        yield f"| {row['case']} | {row['kind']} | {time} | {weights} | {islands} |"
    yield ""


def _packages(rows: Sequence[Row]) -> Iterator[str]:
    yield "Exported programs, run eagerly, and packages of AOTInductor, beside the 16-bit model exported and compiled"
    yield "likewise by hand. A package is compiled so that it rounds where the program does, and by hand as the"
    yield "compiler is set by itself."
    yield ""
    yield "| network | shipped as | ms | time, of by hand | file, of by hand |"
    yield "|---|---|---|---|---|"
    for row in rows:
        start = f"| {row['case']} | {_kind(row)} |"
        if "by_hand" not in row:
            yield f"{start} skipped: {row['skipped']} | | |"
            continue
        file = f"{row['file']:.3f}" if "file" in row else ""
        yield f"{start} {row['median_ms']:.2f} | {_ratio(row, 'by_hand')} | {file} |"
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


def _ratio(row: Row, figure: str) -> str:
    return f"{row[figure]:.3f} ({row[f'{figure}_iqr']:.3f})"
