"""Makes documents of runs that never happened: a transformer of any depth in float16, healthy or with an overflow.

Invariants: everything follows from the arguments; sums in `totals`, `flow` and `counts` agree with the rows.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

__all__ = ["document", "flat", "with_rows"]

_OPERATIONS = [  # in a block: module, class, operation, rule, inputs, output, milliseconds, casts
    ("norm1", "LayerNorm", "layer_norm", "fp32", ["float16", "float32"], "float32", 0.21, 1),
    ("attention.qkv", "Linear", "linear", "lower", ["float32", "float16"], "float16", 0.9, 1),
    ("attention", "Attention", "softmax.int", "fp32", ["float16"], "float32", 0.35, 1),
    ("attention", "Attention", "matmul", "lower", ["float32", "float16"], "float16", 0.6, 1),
    ("attention.out", "Linear", "linear", "lower", ["float16", "float16"], "float16", 0.4, 0),
    ("", "Block", "add", None, ["float16", "float32"], "float32", 0.05, 0),
    ("norm2", "LayerNorm", "layer_norm", "fp32", ["float32", "float32"], "float32", 0.2, 0),
    ("mlp.up", "Linear", "linear", "lower", ["float32", "float16"], "float16", 1.3, 1),
    ("mlp.act", "GELU", "gelu", None, ["float16"], "float16", 0.2, 0),
    ("mlp.down", "Linear", "linear", "lower", ["float16", "float16"], "float16", 1.2, 0),
]
_REASONS = {
    "lower": "policy default: {op} = 'lower' (a matrix product: 16 bits are faster and exact enough)",
    "fp32": "policy default: {op} = 'fp32' (small differences of large numbers)",
    None: "no rule: runs in the dtypes it is given",
}
_FORMATS = {  # smallest subnormal, smallest normal and largest binary exponent
    "float16": (-24, -14, 15),
    "bfloat16": (-133, -126, 127),
    "float8_e4m3fn": (-9, -6, 8),
    "float8_e5m2": (-16, -14, 15),
}


def document(
    *,
    layers: int = 12,
    steps: int = 60,
    overflow_at: int | None = 23,
    rank: int | None = None,
    world_size: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """The document of a run that trains a transformer; at `overflow_at` the last but one block overflows."""
    draw = random.Random(seed + 1000 * (rank or 0))
    rows = _rows(layers, draw)
    first = _first(layers, overflow_at) if overflow_at is not None else None
    return {
        "schema": 1,
        "precast": "0.1.0",
        "made": "2026-11-21T22:00:00Z",
        "run": {
            "command": ["train.py", "--lr", "0.001"],
            "ended": "ended",
            "code": 0,
            "message": None,
            "seconds": round(0.11 * steps, 2),
            "rank": rank,
            "world_size": world_size,
            "torch": "2.13.0",
            "python": "3.11.7",
            "machine": "a machine that is made up",
            "devices": ["cpu"],
            "policy": {"name": "default", "fingerprint": "0123456789abcdef"},
            "steps": steps,
            "module_rules": {"models": {}, "problems": []},
            "traced": [2, 5],
        },
        "steps": _steps(steps, first, draw),
        "counts": _counts(rows, steps),
        "trace": _trace(rows, layers),
        "health": _health(layers, steps, first, draw),
        "findings": [_overflow(first)] if first else [],
    }


def with_rows(count: int) -> dict[str, Any]:
    """A document with so many rows in its trace."""
    layers = math.ceil(count / len(_OPERATIONS) / 2)
    made = document(layers=layers, steps=10, overflow_at=None)
    made["health"] = None
    made["trace"]["rows"] = made["trace"]["rows"][:count]
    assert len(made["trace"]["rows"]) == count
    return made


def flat() -> dict[str, Any]:
    """Return the document of the shortest run: no step, nothing traced, nothing watched."""
    made = document(layers=1, steps=0, overflow_at=None)
    return made | {
        "counts": [],
        "trace": None,
        "health": None,
        "run": made["run"] | {"traced": None},
    }


def _rows(layers: int, draw: random.Random) -> list[dict[str, Any]]:
    rows = []
    for block in range(layers):
        for phase, factor in (("forward", 1.0), ("backward", 1.9)):
            for place, (name, _, op, rule, inputs, output, milliseconds, casts) in enumerate(
                _OPERATIONS
            ):
                seconds = milliseconds / 1000 * factor * draw.uniform(0.8, 1.3) * 3
                size = 4 * 128 * 512 * 3 * casts
                rows.append(
                    {
                        "module": f"decoder.{block}" + (f".{name}" if name else ""),
                        "op": op,
                        "phase": phase,
                        "source": f"model.py:{40 + place} in forward",
                        "inputs": inputs,
                        "output": [output],
                        "rule": rule,
                        "reason": _REASONS[rule].format(op=op),
                        "region": "train.py:31",
                        "module_rule": None,
                        "calls": 3,
                        "casts": 3 * casts,
                        "cast_bytes": size,
                        "cached": 3 if op == "linear" and phase == "forward" else 0,
                        "seconds": seconds,
                        "cast_seconds": seconds * 0.25 * casts,
                    }
                )
    return rows


def _trace(rows: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    flow: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        if row["casts"]:
            way = ("float16", "float32") if row["rule"] == "fp32" else ("float32", "float16")
            into = flow.setdefault(way, Counter())
            into.update(casts=row["casts"], bytes=row["cast_bytes"])
            into["seconds"] += row["cast_seconds"]
    modules = [{"name": "", "type": "Decoder"}, {"name": "decoder", "type": "ModuleList"}]
    for block in range(layers):
        modules.append({"name": f"decoder.{block}", "type": "Block"})
        modules += [{"name": f"decoder.{block}.mlp", "type": "MLP"}]
        modules += [
            {"name": f"decoder.{block}.{name}", "type": kind}
            for name, kind in {o[0]: o[1] for o in _OPERATIONS if o[0]}.items()
        ]
    keys = ("seconds", "cast_seconds", "casts", "cast_bytes", "cached", "calls")
    totals = {key: sum(row[key] for row in rows) for key in keys} | {"steps": 3}
    return {
        "rows": rows,
        "totals": totals,
        "flow": [{"from": a, "to": b, **sums} for (a, b), sums in flow.items()],
        "saved": {"float16": layers * 3_000_000, "float32": layers * 1_400_000},
        "modules": modules,
        "dropped": 0,
        "findings": [_round_trip(rows, totals)] if rows else [],
    }


def _round_trip(rows: list[dict[str, Any]], totals: dict[str, Any]) -> dict[str, Any]:
    there = [row for row in rows if row["op"] == "softmax.int"]
    seconds = sum(row["cast_seconds"] for row in there)
    return {
        "kind": "round-trip",
        "title": "softmax.int gets float16, runs in float32, and its result is cast back to float16",
        "cost": {
            "seconds": seconds,
            "bytes": sum(row["cast_bytes"] for row in there),
            "share": seconds / totals["seconds"],
        },
        "suggestion": "Keep softmax in 16 bits: its kernel accumulates in float32.",
        "policy": '"softmax.int" = "keep"',
        "where": {"module": there[0]["module"], "op": "softmax.int", "source": there[0]["source"]},
    }


def _first(layers: int, step: int) -> dict[str, Any]:
    name = f"decoder.{max(0, layers - 2)}.mlp.down"
    return {
        "step": step,
        "kind": "output",
        "name": name,
        "what": "inf",
        "inputs": [
            {
                "dtype": "float16",
                "maximum": 61_000.0,
                "minimum": -12.5,
                "nonfinite": 0,
            }
        ],
        "message": f"In step {step} the output of {name} was the first to be infinite; its input "
        "went up to 61000. float16 ends at 65504.",
    }


def _overflow(first: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "overflow",
        "title": f"{first['name']} overflows float16 at step {first['step']}",
        "cost": {"seconds": None, "bytes": None, "share": None},
        "suggestion": "Run this module in bfloat16 or float32.",
        "policy": f'[modules]\n"{first["name"]}" = "fp32"',
        "where": {"module": first["name"], "op": "linear", "source": None},
    }


def _steps(steps: int, first: dict[str, Any] | None, draw: random.Random) -> list[dict[str, Any]]:
    scale, made = 65536.0, []
    for step in range(steps):
        skipped = first is not None and step in (
            first["step"],
            first["step"] + 1,
            first["step"] + 9,
        )
        made.append(
            {
                "step": step,
                "loss": None
                if skipped
                else 0.4 + 4 * math.exp(-step / 18) + draw.uniform(-0.05, 0.05),
                "scale": scale,
                "skipped": skipped,
                "names": [f"{first['name']}.weight"] if first is not None and skipped else [],
                "seconds": draw.uniform(0.1, 0.12),
                "first": first | {"step": step} if first is not None and skipped else None,
            }
        )
        scale = scale / 2 if skipped else scale
    return made


def _counts(rows: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str | None], Counter[str]] = {}
    for row in rows:
        into = sums.setdefault((row["op"], row["rule"]), Counter())
        into.update(calls=row["calls"] * steps // 3, casts=row["casts"] * steps // 3)
    return [
        {"op": op, "device_type": "cpu", "rule": rule, **sum_} for (op, rule), sum_ in sums.items()
    ]


def _health(
    layers: int, steps: int, first: dict[str, Any] | None, draw: random.Random
) -> dict[str, Any]:
    watched = list(range(0, steps, 10))
    modules = []
    for block in range(layers):
        for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down"):
            full = f"decoder.{block}.{name}"
            bad = first is not None and first["name"] == full
            for kind, middle in (("output", -1.0), ("gradient", -17.0), ("parameter", -15.0)):
                modules.append(
                    _watched(
                        full,
                        kind,
                        watched,
                        middle - block / 6,
                        first=first if bad else None,
                        draw=draw,
                    )
                )
    return {"format": "float16", "modules": modules, "first": first, "ring": []}


def _watched(
    name: str,
    kind: str,
    steps: list[int],
    middle: float,
    *,
    first: dict[str, Any] | None,
    draw: random.Random,
) -> dict[str, Any]:
    low, width, elements = -60, 90, 65_536
    counts = []
    for step in steps:
        center = (
            middle + step / 15 + (10 if first and kind == "output" else 0) + draw.uniform(-1, 1)
        )
        weights = [math.exp(-(((low + k - center) / 3.2) ** 2)) for k in range(width)]
        counts.append([int(elements * w / sum(weights)) for w in weights])
    last = counts[-1] if counts else []
    above = [sum(row[16 - low :]) for row in counts]
    return {
        "name": name,
        "kind": kind,
        "steps": steps,
        "histogram": {"low": low, "counts": counts},
        "zeros": [elements - sum(row) for row in counts],
        "underflow_zeros": [sum(row[: -24 - low]) for row in counts],
        "subnormal": [sum(row[-24 - low : -14 - low]) for row in counts],
        "overflow": above,
        "saturated": [0] * len(steps),
        "nan": [0] * len(steps),
        "maximum": [
            None if inf else 2.0 ** max(k + low for k, c in enumerate(row) if c)
            for inf, row in zip(above, counts, strict=True)
        ],
        "rms": [2.0**middle] * len(steps),
        "elements": [elements] * len(steps),
        "what_if": {name: _what_if(last, low, window) for name, window in _FORMATS.items()},
    }


def _what_if(counts: list[int], low: int, window: tuple[int, int, int]) -> dict[str, Any]:
    least, normal, most = window
    total = sum(counts) or 1

    def share(start: int | None, end: int | None, shift: int = 0) -> float:
        inside = (k for k in range(len(counts)) if start is None or k + low + shift >= start)
        return sum(counts[k] for k in inside if end is None or k + low + shift < end) / total

    top = max((k + low for k, count in enumerate(counts) if count), default=0)
    shift = most - top
    return {
        "underflow": share(None, least),
        "overflow": share(most + 1, None),
        "subnormal": share(least, normal),
        "best_scale": 2.0**shift,
        "with_best": {
            "underflow": share(None, least, shift),
            "overflow": share(most + 1, None, shift),
        },
    }
