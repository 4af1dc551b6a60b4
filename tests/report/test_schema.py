"""A trace as plain values: to JSON and back, and errors that say what is wrong."""

from __future__ import annotations

import json

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


def test_what_is_no_trace_is_refused() -> None:
    message = r"trace\.rows\[0\]\.module: missing, expected text or null"
    with pytest.raises(PrecastError, match=message):
        SavedTrace.from_dict({"rows": [{"op": "linear"}]})
