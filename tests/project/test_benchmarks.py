"""`python -m benchmarks models`: that what is compared is comparable, and that what is counted is counted right."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from benchmarks import (
    elsewhere,
    models,
    networks,
    observe,
    observing,
    overhead,
    page,
    shared_process,
    targets,
)
from benchmarks.__main__ import main
from benchmarks.interleave import Variant, compare
from benchmarks.machine import about
from benchmarks.networks import Network
from benchmarks.targets import MET, NOT_JUDGED, NOT_MET, TARGETS, judged
from benchmarks.variants import (
    ACCUMULATION,
    BASELINE,
    BY_HAND,
    INFERENCE,
    TRAINING,
    Prepared,
    Setting,
    kinds,
    prepare,
)

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.bfloat16)
MIB = 2**20
NETWORKS = {
    "decoder": lambda: networks.decoder(64, 2, 8, layers=1),
    "convolutional": lambda: networks.convolutional(8, 4, 16),
    "mlp": lambda: networks.mlp(8, 4, layers=3),
    "digits": lambda: networks.digits(CPU),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]()


def _ready(
    network: Network, work: str, setting: Setting = SETTING
) -> Iterator[tuple[str, Prepared]]:
    """All variants, one after the other."""
    for kind in kinds(work):
        prepared = prepare(kind, network, work, setting)
        yield kind, prepared
        prepared.close()


# --- variants ---


@pytest.mark.parametrize("work", [INFERENCE, TRAINING, ACCUMULATION])
def test_variants_compute_the_same_within_16_bits(network: Network, work: str) -> None:
    results = {}
    for kind, prepared in _ready(network, work):
        outputs = [prepared.work().float() for _ in range(5)]
        results[kind] = torch.stack(outputs)
        assert results[kind].isfinite().all()
    scale = results["float32"].abs().max()
    for kind, value in results.items():
        # bfloat16 has 8 bits: 2 ** -8 a rounding, and a few dozen of them follow each other.
        assert (value - results["float32"]).abs().max() < 0.04 * scale, kind
    for kind in ("precast", "attached"):
        assert torch.equal(results[kind], results[BASELINE]), kind
    if work != INFERENCE:
        assert (results["float32"][0] != results["float32"][-1]).all(), "it trains"


# --- what is observed ---


def _observed(make: Callable[[], Prepared]) -> observe.Observation:
    return observe.observe(make, CPU)


def test_peak_memory_is_what_is_held_and_the_most_on_top() -> None:
    def make() -> Prepared:
        held = torch.empty(MIB)  # float32: 4 MiB

        def work() -> Tensor:
            first = torch.empty(MIB)
            del first
            second = torch.empty(2 * MIB)
            return held[:1] + second[:1]

        return Prepared(work)

    results = _observed(make)
    assert 12 * MIB <= results.peak_bytes < 12 * MIB + 4096
    assert (results.casts, results.cast_bytes) == (0, 0)


def test_a_cast_is_a_copy_between_floating_dtypes_whoever_asks() -> None:
    def make() -> Prepared:
        single, half, whole = torch.ones(100), torch.ones(100).bfloat16(), torch.ones(100).long()

        def work() -> Tensor:
            half.copy_(single)  # 200 bytes
            torch._foreach_copy_([single, single], [half, half])  # 2 of 400 bytes
            half.half()  # 200 bytes
            single.clone(), whole.float(), half.contiguous()
            return half

        return Prepared(work)

    results = _observed(make)
    assert (results.casts, results.cast_bytes) == (4, 1200)


# --- turns ---


def test_a_turn_has_untimed_calls_and_waits_before_the_clock_starts_and_stops() -> None:
    log: list[str] = []
    variant = Variant(
        lambda: log.append("work"),
        before=lambda: log.append("before"),
        finish=lambda: log.append("finish"),
        after=lambda: log.append("after"),
    )
    compare({"a": variant}, rounds=1, calls=2, untimed=1)
    assert log == ["before", "work", "finish", "work", "work", "finish", "after"]
    log.clear()
    compare({"a": variant}, rounds=1, calls=2, untimed=0)
    assert log.count("work") == 2


# --- rows ---

TINY: dict[str, models.Case] = {
    "MLP": models.Case(lambda _: networks.mlp(8, 4, layers=1), (ACCUMULATION,)),
    "transformers": models.Case(lambda _: networks.transformers_gpt2("tiny"), (INFERENCE,)),
}
FIGURES = {"median_ms", "iqr_ms", "ratio", "ratio_iqr", "by_hand", "by_hand_iqr"}
COUNTS = {"peak_bytes", "casts", "cast_bytes", "rounds", "calls"}


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is found: Dynamo asks when it is loaded, and never again."""
    results = importlib.util.find_spec

    def find_spec(name: str, *package: Any) -> Any:
        return None if name == "transformers" else results(name, *package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_TURN", 1e-4)
    monkeypatch.setattr(models, "_COMPARISON", 0.1)


# --- targets and the page ---


def _row(kind: str, ratio: float, **others: Any) -> dict[str, Any]:
    return {
        "benchmark": "models",
        "case": "decoder 512, 1x1",
        "work": INFERENCE,
        "kind": kind,
        "device": "cpu",
        "dtype": "bfloat16",
        "compiled": False,
        "median_ms": 10 * ratio,
        "iqr_ms": 0.1,
        "ratio": ratio,
        "ratio_iqr": 0.012,
        "by_hand": ratio / 0.4,
        "by_hand_iqr": 0.03,
        "peak_bytes": 3 * MIB,
        "casts": 7,
        "cast_bytes": MIB // 2,
        **others,
    }


def _verdict(
    target: int, *rows: dict[str, Any], units: bool = True, engine: str = "native"
) -> tuple[str, str]:
    """Of `TARGETS[target]`, from these rows."""
    machine = {"bfloat16_units": ["amx_bf16"] if units else [], "engine": engine}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "TARGETS", (TARGETS[target],))
        [results] = judged(machine, rows)
    return results["verdict"], results["reason"]


def _index(kind: str, figure: str, **row: str) -> int:
    expected = {"kind": kind, **row}
    return next(
        i
        for i, target in enumerate(TARGETS)
        if target.figure == figure and expected.items() <= target.row.items()
    )


def test_a_target_is_met_when_the_median_is_within_it() -> None:
    one_token = {"work": INFERENCE, "case": "decoder 512, 1x1"}
    ratio = _index("attached", "ratio", **one_token)
    assert TARGETS[ratio].limit == 0.45
    assert _verdict(ratio, _row("attached", 0.45)) == (MET, "")
    assert _verdict(ratio, _row("attached", 0.451)) == (NOT_MET, "")
    assert _verdict(ratio, _row("attached", float("nan"))) == (NOT_MET, "")
    by_hand = _index("attached", "by_hand", **one_token)
    assert _verdict(by_hand, _row("attached", 0.4, by_hand=1.08)) == (MET, "")
    assert _verdict(by_hand, _row("attached", 0.4, by_hand=1.09)) == (NOT_MET, "")


def test_what_a_machine_cannot_show_is_not_judged() -> None:
    one_token = {"work": INFERENCE, "case": "decoder 512, 1x1"}
    attached, drop_in = (_index(kind, "ratio", **one_token) for kind in ("attached", "precast"))
    reason = "this machine has no bfloat16 units"
    assert _verdict(attached, _row("attached", 0.4), units=False) == (NOT_JUDGED, reason)
    assert _verdict(drop_in, _row("precast", 1.01), units=False) == (MET, "")
    linear = _index("with a weight", "difference_us", case="linear")
    call = {"benchmark": "overhead", **TARGETS[linear].row, "difference_us_iqr": 0.1}
    assert _verdict(linear, call | {"difference_us": 0.4}, units=False) == (MET, "")
    assert _verdict(linear, call | {"difference_us": 0.5}, units=False) == (NOT_MET, "")


def test_what_was_skipped_is_told_and_what_was_not_asked_for_is_not() -> None:
    assert list(judged({}, [])) == []
    skipped = {"benchmark": "clients", "case": "all", "skipped": "no clients here"}
    results = list(judged({}, [skipped]))
    assert {row["reason"] for row in results} == {"no clients here"}
    assert {row["verdict"] for row in results} == {NOT_JUDGED}
    assert {row["work"] for row in results} == {"transformers under install()"}


def test_every_target_is_about_a_case_that_is_measured() -> None:
    cases = {
        case.make(CPU).case: case.works for name, case in models.CASES.items() if "GPT" not in name
    }
    for target in TARGETS:
        row = target.row
        if row["benchmark"] == "models":
            assert row["work"] in cases[row["case"]], target
            assert row["kind"] in kinds(row["work"])
        if row["benchmark"] == "clients":
            assert row["case"] in elsewhere._MODELS
            assert row["work"] in elsewhere._WORKS
            assert row["size"] in elsewhere._SIZES


_APART = {"models", "clients", "shared process"}
"""Benchmarks of other tests."""


def test_every_target_about_calls_is_measured() -> None:
    rows = list(overhead.run(rounds=1, calls=1, regions=10))
    results = list(judged({"engine": rows[0]["engine"]}, rows))
    expected = [t for t in TARGETS if t.row["benchmark"] not in _APART]
    assert [row["case"] for row in results] == [target.case for target in expected]
    assert {row["figure"] for row in results} == {targets._FIGURES[t.figure] for t in expected}
    for row in results:
        assert row["value"] is not None, row
    json.dumps(results)


def test_first_calls_after_other_work_cast_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_process, "WEIGHTS", {3: 16})
    rows = list(shared_process.run(rounds=2))
    assert len(rows) == len(shared_process.EVENTS) * len(shared_process.ATTACHED)
    for row in rows:
        assert row["casts"] == 0, row
        assert min(row["first_us"], row["next_us"], row["of_next"]) > 0
    assert "| 3 weights, 1 attached | nothing |" in page.render({"machine": about(), "rows": rows})


CALLS = [
    {
        "engine": engine,
        "kind": "with a weight",
        "case": "linear",
        "policy": "torch",
        "torch": {"median_us": 7.0},
        "precast": {"median_us": 7.0 + difference},
        "difference_us": difference,
        "difference_us_iqr": 0.05,
    }
    for engine, difference in (("native", 0.25), ("reference", 9.0))
]
DATA = {
    "machine": {
        "engine": "native",
        "bfloat16_units": ["avx512_bf16"],
        "date": "2026-01-02",
        "python": "3.11.7",
        "torch": "2.13.0",
        "cpu": "A CPU",
        "cores": 2,
        "threads": 1,
        "cpu_capability": "AVX512",
        "load": 0.1,
    },
    "rows": [
        _row(BASELINE, 1.0),
        _row("attached", 0.44, by_hand=1.2),
        _row("attached + lean", 0.4, casts=0),
        {
            "benchmark": "models",
            "case": "GPT",
            "work": INFERENCE,
            "kind": "all",
            "skipped": "no GPT",
        },
        _row(BASELINE, 1.0, device="cuda", compiled=True, dtype="float16"),
        *({"benchmark": "overhead", **call} for call in CALLS),
        *(
            _row(kind, ratio, benchmark="clients", size="small", case="Llama")
            for kind, ratio in ((BASELINE, 1.0), ("precast.install", 1.004))
        ),
        {
            "benchmark": "targets",
            "work": "a call",
            "case": "linear, torch",
            "figure": "us more than torch.autocast",
            "value": 0.5,
            "spread": 0.125,
            "limit": 0.4,
            "verdict": NOT_MET,
            "reason": "",
        },
        {
            "benchmark": "targets",
            "work": "inference",
            "case": "decoder",
            "figure": "of torch.autocast",
            "value": 0.5,
            "spread": 0.0,
            "limit": 0.4,
            "verdict": NOT_JUDGED,
            "reason": "no units",
        },
        {
            "benchmark": "targets",
            "work": "training",
            "case": "decoder",
            "figure": "of torch.autocast",
            "value": 0.3,
            "spread": 0.0,
            "limit": 0.4,
            "verdict": MET,
            "reason": "",
        },
    ],
}


def test_the_page_says_what_the_rows_say() -> None:
    text = page.render(DATA)
    for line in (
        "| a call | linear, torch | us more than torch.autocast | +0.50 (0.125) | +0.40 |",
        "Not judged: inference, decoder, of torch.autocast: no units.",
        "| with a weight | linear | 7.00 | +0.25 (0.05) | +9.00 (0.05) |",
        "| decoder 512, 1x1 | inference | 10.00 |  |  | 0.440 (0.012) |  |  |",
        "| decoder 512, 1x1 | inference |  | 3.0 |  | 3.0 |  | 7 (0.5) | 7 (0.5) |",
        "| decoder 512, 1x1, float16, compiled | inference | 10.00 |  |  |  |  |  |",
        "| small | Llama | inference | 10.00 ms | 1.004 (0.012) |",
    ):
        assert line in text.splitlines()
    assert "Skipped: GPT: no GPT." in text
    assert "load of the machine when it began: 0.1" in text
    assert "(AVX512, with AVX512_BF16)" in text
    assert "the native engine" in text
    assert "1 met, 1 not met, 1 not judged" in text
    assert "| training | decoder | of torch.autocast" not in text


def test_writing_leaves_the_rest_of_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "picture.png")
    page.PAGE.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        assert list(page.write(DATA)) == [page.PAGE, page.PICTURE]
        text = page.PAGE.read_text(encoding="utf-8")
        assert text == f"before\n{page.BEGIN}\n{page.render(DATA)}{page.END}\nafter\n"
    assert page.PICTURE.read_bytes().startswith(b"\x89PNG")


def test_the_page_is_what_its_data_says() -> None:
    """Nothing, as long as there are no data."""
    _, _, rest = page.PAGE.read_text(encoding="utf-8").partition(page.BEGIN)
    made, end, _ = rest.partition(page.END)
    assert end, "the page has both comments"
    data = json.loads(page.DATA.read_text(encoding="utf-8")) if page.DATA.exists() else None
    expected = "" if data is None else page.render(data)
    assert made == f"\n{expected}", "run: python -m benchmarks render docs/data/benchmarks.json"


# --- the command ---


@pytest.mark.usefixtures("no_transformers", "short_turns")
def test_the_command_prints_and_writes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "CASES", TINY)
    path = tmp_path / "rows.json"
    arguments = ["models", "--only", "MLP", "--only", "transformers", "--rounds", "1"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "[test-clients]" in result.stdout.replace("\n", "")
    contents = json.loads(path.read_text(encoding="utf-8"))
    assert {row["case"] for row in contents["rows"]} == {"MLP 1 x 8, 4", "transformers"}
    measured = {row["kind"]: row for row in contents["rows"] if row["case"] != "transformers"}
    assert measured.keys() == set(kinds(ACCUMULATION))
    assert all(row.keys() >= FIGURES | COUNTS for row in measured.values())
    assert measured[BASELINE]["ratio"] == measured[BY_HAND]["by_hand"] == 1
    assert contents["machine"]["threads"] == torch.get_num_threads()
    assert page.render(contents)


def test_what_others_measured_is_kept_when_one_measurement_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**_: int) -> Iterator[dict[str, Any]]:
        yield DATA["rows"][0]
        raise RuntimeError("no more")

    monkeypatch.setattr(observing, "run", failing)
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(main, ["observing", "--json", str(path)])
    assert result.exit_code == 1
    assert "no more" in result.output
    contents = json.loads(path.read_text(encoding="utf-8"))
    assert contents["rows"] == [
        DATA["rows"][0],
        elsewhere.skipped("observing", "RuntimeError: no more"),
    ]
    assert "Not all measured: observing: RuntimeError: no more." in page.render(contents)
