"""A trace as plain values: to JSON and back, and errors that say what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from precast.errors import PrecastError
from precast.report.saved_trace import SavedTrace, data_of
from precast.report.schema import (
    CastFlow,
    Finding,
    FindingCost,
    FindingLocation,
    OperationRow,
    RuleCount,
    TraceData,
    TracedModule,
    TraceTotals,
)


def traced() -> SavedTrace:
    row = OperationRow(
        "encoder.0", "linear", "forward", "train.py:12 in loss", ["float32"], ["bfloat16"],
        "lower", "a reason", None, None, calls=2, casts=3, cast_bytes=40, seconds=0.5,
    )  # fmt: skip
    finding = Finding(
        "round-trip",
        "A round trip.",
        FindingCost(0.1, 20, None),
        "Leave it.",
        None,
        FindingLocation("a"),
    )
    return SavedTrace(TraceData(
        [row], TraceTotals(0.5, casts=3), [CastFlow("float32", "bfloat16", 3, 40, 0.1)], {"bfloat16": 8},
        [TracedModule("", "Net")], 1, [finding], [RuleCount("linear", "cpu", "lower", 2, 3)], ["a note"],
    ))  # fmt: skip


def test_a_trace_survives_json() -> None:
    text = json.dumps(traced().to_dict(), allow_nan=False)
    assert data_of(SavedTrace.from_dict(json.loads(text))) == data_of(traced())


def test_casts_flow_from_one_dtype_to_another() -> None:
    [flow] = traced().to_dict()["flow"]
    assert (flow["from"], flow["to"]) == ("float32", "bfloat16")


def test_what_a_later_version_says_more_is_left_out() -> None:
    plain = traced().to_dict() | {"later": 1}
    plain["rows"][0]["later"] = 2
    assert data_of(SavedTrace.from_dict(plain)) == data_of(traced())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": [{"op": "linear"}]}, r"trace\.rows\[0\]\.module: missing, expected text or null"),
        ({"rows": 3}, r"trace\.rows: expected a list, got 3"),
        (
            {"totals": {"casts": "many"}},
            r"trace\.totals\.casts: expected a whole number, got 'many'",
        ),
        ({"notes": [None]}, r"trace\.notes\[0\]: expected text, got null"),
        ({"saved": {"float32": 1.5}}, r"trace\.saved\.float32: expected a whole number, got 1\.5"),
        ({"totals": []}, r"trace\.totals: expected an object, got a list"),
    ],
)
def test_what_is_no_trace_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PrecastError, match=message):
        SavedTrace.from_dict(wrong)


def test_a_phase_that_there_is_not_is_refused() -> None:
    plain = traced().to_dict()
    plain["rows"][0]["phase"] = "sideways"
    with pytest.raises(PrecastError, match=r"phase: .*, got 'sideways'"):
        SavedTrace.from_dict(plain)


def test_rows_need_no_pytorch() -> None:
    code = "import sys, precast.report.schema; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
