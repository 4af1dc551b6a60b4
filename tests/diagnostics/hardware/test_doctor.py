"""Doctor measures, judges by what it measured, and recommends one thing, with the numbers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from precast.diagnostics.hardware import doctor
from precast.diagnostics.hardware.doctor import MachineDiagnosis, recommend
from precast.diagnostics.hardware.engine_report import EngineReport
from precast.diagnostics.hardware.float8 import RULES
from precast.diagnostics.hardware.machine import (
    DTYPES,
    interleaved_seconds,
    measure,
)
from tests.support.dtype_reports import report

CPU = torch.device("cpu")


# --- diagnoses ---


@pytest.mark.parametrize(
    ("ratio", "diagnosis"),
    [
        (8.0, "native"),
        (1.5, "native"),
        (1.0, "emulated"),
        (0.002, "emulated"),
        (None, "unsupported"),
    ],
)
def test_the_diagnosis_follows_from_the_measured_speed(ratio: float | None, diagnosis: str) -> None:
    assert report("bfloat16", ratio).diagnosis == diagnosis


# --- the recommendation ---


@pytest.mark.parametrize(
    ("bfloat16", "float16", "dtype", "reasons"),
    [
        (7.0, 7.5, "bfloat16", ["7.0x", "float16: 7.5x", "no scaler"]),
        (0.9, 3.0, "float16", ["needs a gradient scaler"]),
        (0.6, 0.03, "float32", ["bfloat16 0.6x", "float16 0.03x"]),
    ],
)
def test_the_recommendation_quotes_what_was_measured(
    bfloat16: float, float16: float, dtype: str, reasons: list[str]
) -> None:
    found = recommend([report("bfloat16", bfloat16), report("float16", float16)])
    assert (found.device, found.dtype, found.scaler) == ("cpu", dtype, dtype == "float16")
    assert all(reason in found.reason for reason in reasons)
    code = f'with precast.autocast("cpu", dtype=torch.{dtype}):'
    assert found.code == ("" if dtype == "float32" else code)


def test_the_accelerator_is_recommended_where_there_is_one() -> None:
    cpu = [report("bfloat16", 9.0)]
    gpu = [
        report("float16", 3.5, device="cuda:0"),
        report("bfloat16", 3.0, device="cuda:0"),
    ]
    found = recommend(cpu + gpu)
    assert (found.device, found.dtype) == ("cuda", "bfloat16")
    assert "3.0x" in found.reason


positive = st.floats(1e-4, 1e3)


@given(positive, positive)
def test_only_float16_needs_a_scaler_and_only_what_is_faster_is_recommended(
    of_bfloat16: float, of_float16: float
) -> None:
    found = recommend([report("bfloat16", of_bfloat16), report("float16", of_float16)])
    assert found.scaler == (found.dtype == "float16")
    speeds = {"float32": 1.0, "bfloat16": of_bfloat16, "float16": of_float16}
    chosen = speeds[found.dtype]
    assert chosen >= 1
    assert max(speeds.values()) <= max(chosen * 1.25, 1.1) * 1.0001


# --- what is measured here ---


@pytest.fixture(scope="module")
def here() -> MachineDiagnosis:
    return doctor.diagnose()


def test_every_dtype_of_every_device_is_measured(here: MachineDiagnosis) -> None:
    on_cpu = [each for each in here.reports if each.device == "cpu"]
    assert [each.dtype for each in on_cpu] == [*DTYPES, *RULES]
    for each in here.reports:
        assert (each.ratio is None) == (each.error is not None)
        assert each.ratio is None or 0 < each.ratio < 1e4
    assert here.torch == torch.__version__


def test_float32_is_its_own_measure(here: MachineDiagnosis) -> None:
    float32 = here.reports[0]
    assert float32.dtype == "float32"
    assert float32.diagnosis == "native"
    assert float32.ratio == 1.0


def test_what_pytorch_cannot_do_is_reported_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat a line")

    monkeypatch.setattr(torch.nn.functional, "linear", refused)
    found = measure(CPU, "float16")
    assert (found.error, found.ratio, found.diagnosis) == ("no such kernel", None, "unsupported")


def test_an_emulated_dtype_costs_no_more_time_to_measure(here: MachineDiagnosis) -> None:
    assert all(each.seconds is None or each.seconds < 2 for each in here.reports)


def test_measuring_leaves_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    measure(CPU, "bfloat16")
    assert torch.get_num_threads() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_too(here: MachineDiagnosis) -> None:
    on_gpu = {each.dtype: each for each in here.reports if each.device == "cuda:0"}
    assert set(on_gpu) == {*DTYPES, *RULES}
    assert here.recommendation.device == "cuda"


def test_runs_take_turns_and_each_begins_as_often() -> None:
    order: list[int] = []
    runs: list[Callable[[], None]] = [lambda i=i: order.append(i) for i in range(3)]  # type: ignore[misc]
    seconds = interleaved_seconds(runs, CPU, rounds=3)
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert [len(each) for each in seconds] == [3, 3, 3]


# --- what is said ---

GOLDEN = """\
torch   2.99 (Python 3.99)
cpu     a processor, 2 threads
engine  reference

cpu: speed of a linear layer beside float32 (higher is faster, one thread)

 dtype      computed       speed
 ───────────────────────────────
 float32    native          1.0x
 bfloat16   native          6.0x
 float16    emulated      0.032x
 float8     unsupported     none

float8: not implemented

Use bfloat16 on cpu; gradient scaler not needed.
Why: on cpu bfloat16 computes 6.0x as fast as float32 (float16: 0.032x), in
forward and backward of a linear layer; it has float32's range, so training
needs no scaler.
    with precast.autocast("cpu", dtype=torch.bfloat16):

cpu emulates float8, as cpu has no kernel for 8 bits.

precast runs on its reference engine, the slower one.
Why: there is no compiled library for PyTorch 2.99 on this machine.
    precast build
"""


def example() -> MachineDiagnosis:
    reports = (
        report("float32", 1.0),
        report("bfloat16", 6.0),
        report("float16", 0.032),
        report("float8", None),
    )
    devices = {"cpu": "a processor, 2 threads"}
    reason = "there is no compiled library for PyTorch 2.99 on this machine"
    engine = EngineReport("reference", reason, "precast build")
    in_8_bits = "cpu emulates float8, as cpu has no kernel for 8 bits."
    return MachineDiagnosis(
        "2.99", "3.99", devices, reports, recommend(reports), engine, (in_8_bits,)
    )


def test_all_of_it_is_readable_in_80_columns() -> None:
    file = io.StringIO()
    Console(width=80, file=file, color_system=None).print(doctor.render(example()))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "\n".join(line.rstrip() for line in lines) + "\n" == GOLDEN


def test_json_has_all_of_it(here: MachineDiagnosis) -> None:
    value = json.loads(json.dumps(here.to_dict(), allow_nan=False))
    keys = ["torch", "python", "devices", "dtypes", "recommendation", "engine", "float8"]
    assert list(value) == keys
    assert list(value["engine"]) == ["name", "reason", "remedy"]
    assert list(value["recommendation"]) == ["device", "dtype", "scaler", "reason", "code"]
    keys = ["device", "dtype", "seconds", "baseline_seconds", "error", "method"]
    assert all(list(each) == [*keys, "ratio", "diagnosis"] for each in value["dtypes"])
