"""The summary, the module tree and the page without a browser: every number is the document's, nothing is invented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precast import report
from precast.errors import MissingExtraError, OutputError, ReportError
from precast.report.page import html
from tests.support.documents import document, flat
from tests.support.reports import (
    numeric_findings,
    offender,
    ran_in,
    seconds_by_dtype,
    summary_of,
    summary_of_ranks,
    tree,
    worst,
)


def told(document: Any) -> str:
    summary = summary_of(document)
    sentences = [
        summary["headline"],
        *summary["precision"],
        *summary["problems"],
        *summary["notes"],
    ]
    return " ".join(sentences)


# --- what is wrong ---


def test_lost_steps_are_counted_and_the_first_module_is_named_with_what_to_do() -> None:
    made: Any = document(overflow_at=23)
    summary = summary_of(made)
    assert summary["level"] == "warning"
    assert "3 of 60 steps were lost" in summary["headline"]
    assert "`decoder.10.mlp.down`" in summary["headline"]
    assert "were skipped (5%)" in summary["problems"][0]
    assert "the first at step 23" in summary["problems"][0]
    assert summary["first"] is not None
    assert summary["first"]["gain"] == "up to 3 of 60 steps, lost now"
    assert '"decoder.10.mlp.down" = "fp32"' in str(summary["first"]["policy"])


def test_without_a_finding_the_offender_still_gets_advice_that_is_a_policy(tmp_path: Path) -> None:
    from precast import Policy

    made: Any = document()
    made["findings"] = []
    advice = summary_of(made)["first"]
    assert advice is not None
    path = tmp_path / "policy.toml"
    path.write_text(str(advice["policy"]))
    assert Policy.load(path).modules
    assert Policy.load(path).fingerprint == Policy.load("default").fingerprint


def test_all_skipped_steps_count_also_those_that_were_not_kept() -> None:
    made: Any = document()
    made["run"]["skipped"] = 40
    assert summary_of(made)["level"] == "bad"
    assert "40 of 60 steps" in told(made)


def test_a_healthy_run_is_said_to_be_healthy() -> None:
    made: Any = document(overflow_at=None)
    made["trace"]["findings"] = []
    summary = summary_of(made)
    assert summary["level"] == "good"
    assert summary["problems"] == []
    assert summary["first"] is None
    assert "nothing wrong was found" in summary["headline"]


def test_a_run_that_mostly_casts_is_no_success() -> None:
    made: Any = document(overflow_at=None)
    made["trace"]["findings"] = []
    totals = made["trace"]["totals"]
    totals["cast_seconds"] = 0.45 * totals["seconds"]
    summary: Any = summary_of(made)
    assert summary["level"] == "warning"
    assert summary["headline"].endswith("casts took 45% of the traced time.")
    assert "float32" in summary["first"]["text"]
    assert summary["first"]["gain"] == "at most 45% of the traced time"
    totals["cast_seconds"] = 0.1 * totals["seconds"]
    assert summary_of(made)["level"] == "good"


def test_what_was_not_watched_is_not_said_to_be_healthy() -> None:
    made: Any = document(overflow_at=None) | {"trace": None, "health": None}
    notes = " ".join(summary_of(made)["notes"])
    assert "`--steps 2:5`" in notes
    assert "`--health`" in notes


def test_what_other_threads_computed_is_not_said_to_be_in_float32() -> None:
    made: Any = flat()
    made["run"] |= {"steps": 9, "elsewhere": 0}
    assert summary_of(made)["first"] is not None
    made["run"]["elsewhere"] = 9
    summary = summary_of(made)
    assert "not known" in summary["headline"]
    assert summary["first"] is None
    assert "other threads" in " ".join(summary["notes"])


def test_steps_without_regions_are_told_how_to_open_one() -> None:
    made: Any = document(overflow_at=None)
    made["counts"], made["trace"]["findings"] = [], []
    made["run"]["devices"] = ["cpu", "cuda:0"]
    made["trace"]["totals"] |= {"casts": 0, "cached": 0, "cast_seconds": 0.0, "cast_bytes": 0}
    assert "Casts took" not in told(made)
    assert summary_of(made)["first"] is None  # it computes in 16 bits already, by hand
    made["trace"]["rows"] = []
    assert 'with precast.autocast("cuda")' in str(summary_of(made)["first"])
    made["run"]["devices"] = []
    assert 'with precast.autocast("cpu")' in str(summary_of(made)["first"])


@pytest.mark.parametrize(
    ("run", "level", "says"),
    [
        ({"ended": "exception", "message": "ValueError: no", "code": 1}, "bad", "ValueError: no"),
        ({"ended": "exit", "code": 3}, "bad", "exit code 3"),
        ({"ended": "exit", "code": 0}, "good", "nothing wrong was found"),
        ({"ended": "interrupted", "code": 130}, "warning", "was interrupted after 60 steps"),
    ],
)
def test_how_a_run_ended_is_said(run: dict[str, Any], level: str, says: str) -> None:
    made: Any = document(overflow_at=None)
    made["trace"]["findings"] = []
    made["run"] |= run
    assert summary_of(made)["level"] == level
    assert says in told(made)


def test_gradients_that_underflow_are_said_with_their_share() -> None:
    made: Any = document(overflow_at=None)
    gradients = [m for m in made["health"]["modules"] if m["kind"] == "parameter"]
    for module in gradients:
        module["underflow_zeros"] = [0] * len(module["steps"])
    gradients[0]["underflow_zeros"] = [None] * len(gradients[0]["steps"])  # nobody knows
    gradients[3]["underflow_zeros"] = [n // 2 for n in gradients[3]["elements"]]
    made["findings"] = numeric_findings(made)
    share = 0.5 / len(gradients)
    assert f"{100 * share:.1f}% of the gradients of parameters became zero" in told(made)
    assert f"most in `{gradients[3]['name']}` (50%)" in told(made)
    advice: Any = summary_of(made)["first"]
    assert "init_scale=" in advice["text"], "there is a scaler, and its scale is too low"
    for step in made["steps"]:
        step["scale"] = None
    advice = numeric_findings(made)[0]["suggestion"]
    assert "scaler.scale(loss).backward()" in advice


@pytest.mark.parametrize(
    ("what", "does", "policy"),
    [
        (
            {"kind": "output"},
            "Run `a.b` in float32",
            'base = "default"\n\n[modules]\n"a.b" = "fp32"\n',
        ),
        ({"kind": "output", "name": ""}, "Run in bfloat16", None),
        ({"kind": "input"}, "Look at the code before `a.b`", None),
        ({"kind": "gradient"}, "Leave it", None),
        ({"kind": "parameter", "name": "a.b.weight"}, "Leave it", None),
    ],
)
def test_what_to_do_depends_on_what_overflowed(
    what: dict[str, Any], does: str, policy: str | None
) -> None:
    made: Any = document(overflow_at=3)
    first = made["health"]["first"] | {"name": "a.b"} | what
    made["health"]["first"] = first
    for step in made["steps"]:
        step["first"] = None
    [finding] = numeric_findings(made)
    assert (finding["kind"], finding["title"]) == ("overflow", first["message"])
    assert does in finding["suggestion"]
    assert finding["policy"] == policy
    assert finding["where"]["module"] == ("" if what.get("name") == "" else "a.b")
    made["findings"] = [finding]
    assert told(made).count(first["message"]) == 1


def test_a_gradient_without_a_scaler_and_numbers_in_bfloat16_get_other_advice() -> None:
    made: Any = document(overflow_at=3)
    made["health"]["first"] |= {"kind": "parameter", "name": "a.weight"}
    for step in made["steps"]:
        step |= {"first": None, "scale": None}
    [finding] = numeric_findings(made)
    assert "Run in bfloat16" in finding["suggestion"]
    assert finding["policy"] is None
    made["health"]["format"] = "bfloat16"
    [finding] = numeric_findings(made)
    assert "learning rate" in finding["suggestion"]
    assert finding["policy"] is None


def test_the_costliest_finding_is_what_to_do_first() -> None:
    made: Any = document(overflow_at=None)
    [small] = made["trace"]["findings"]
    cost = {"seconds": 9.0, "bytes": None, "share": 0.2, "low": 0.1, "high": 0.2}
    made["findings"] = [small | {"title": "large", "suggestion": "mend it", "cost": cost}]
    advice = summary_of(made)["first"]
    assert advice is not None
    assert advice["text"] == "mend it."
    assert advice["gain"] == "10% to 20% of the traced time"


def test_the_earliest_offender_is_the_first() -> None:
    made: Any = document(overflow_at=23)
    made["health"]["first"] = made["health"]["first"] | {"step": 7, "name": "earlier"}
    assert offender(made) == made["health"]["first"]


# --- where time went ---


def test_sums_of_the_tree_are_those_of_the_rows() -> None:
    made: Any = document(layers=3)
    nodes, rows = tree(made["trace"]), made["trace"]["rows"]
    for node in nodes:
        inside = [
            r for r in rows if not node.name or (r["module"] + ".").startswith(node.name + ".")
        ]
        assert node.casts == sum(r["casts"] for r in inside)
        assert node.seconds == pytest.approx(sum(r["seconds"] for r in inside))
        assert sum(node.dtypes.values()) == pytest.approx(
            sum(r["seconds"] - r["cast_seconds"] for r in inside)
        )


def test_modules_stand_in_the_models_order_after_their_parents() -> None:
    made: Any = document(layers=12)
    nodes = tree(made["trace"])
    assert [n.name for n in nodes if n.depth == 2] == [f"decoder.{i}" for i in range(12)]
    for node in nodes[1:]:
        assert node.parent is not None
        parent = nodes[node.parent]
        assert node.name.startswith(parent.name)
        assert node.depth == parent.depth + 1


def test_rows_without_modules_and_modules_without_parents_have_a_place() -> None:
    made: Any = document(layers=1)
    row = made["trace"]["rows"][0]
    made["trace"]["modules"] = []
    made["trace"]["rows"] = [
        row | {"module": None},
        row | {"module": "a.b.c"},
        row | {"module": ""},
    ]
    nodes = {node.name: node for node in tree(made["trace"])}
    assert list(nodes) == ["", "a", "a.b", "a.b.c", "outside of all modules"]
    assert nodes[""].calls == 2 * row["calls"]
    assert nodes["outside of all modules"].calls == row["calls"]


@pytest.mark.parametrize(
    ("rule", "inputs", "output", "dtype"),
    [
        ("lower", ["float32", "float16"], ["float16"], "float16"),
        ("fp32", ["float16"], ["float32"], "float32"),
        ("fp32_set_dtype", ["float16"], ["float32"], "float32"),
        ("fp32_if_refused", ["bfloat16"], ["bfloat16"], "bfloat16"),
        ("fp32_if_refused", ["bfloat16"], ["float32"], "float32"),
        (None, ["int64", "bfloat16"], ["int64"], "bfloat16"),
        (None, ["float32"], ["float8_e4m3fn"], "float8_e4m3fn"),
        (None, ["int64"], ["bool"], "other"),
        (None, [], [], "other"),
    ],
)
def test_an_operation_worked_in(
    rule: str | None, inputs: list[str], output: list[str], dtype: str
) -> None:
    row: Any = {"rule": rule, "inputs": inputs, "output": output}
    assert ran_in(row) == dtype


def test_seconds_by_dtype_leave_casts_out() -> None:
    made: Any = document()
    sums = seconds_by_dtype(made["trace"]["rows"])
    totals = made["trace"]["totals"]
    assert sum(sums.values()) == pytest.approx(totals["seconds"] - totals["cast_seconds"])


# --- ranks ---


def ranks(*overflows: int | None) -> list[Any]:
    return [
        document(layers=2, rank=i, world_size=len(overflows), overflow_at=at)
        for i, at in enumerate(overflows)
    ]


def test_the_rank_that_failed_first_is_the_one_to_look_at() -> None:
    parts = ranks(None, 30, 12)
    assert worst(parts) == 2
    assert summary_of_ranks(parts)["headline"].startswith("Rank 2: ")
    assert summary_of_ranks(parts)["level"] == "warning"


def test_ranks_that_left_nothing_are_named() -> None:
    parts = [part for i, part in enumerate(ranks(None, None, None, None)) if i in (0, 2)]
    summary = summary_of_ranks(parts)
    assert summary["level"] == "bad"
    assert "Ranks 1 and 3 of 4 have no document here" in summary["problems"][0]


def test_what_all_ranks_say_is_said_once() -> None:
    parts = ranks(20, 20)
    for part in parts:
        part["trace"] = None
    summary = summary_of_ranks(parts)
    assert summary["headline"].startswith("All 2 ranks: ")
    assert len([s for s in summary["problems"] if "were skipped" in s]) == 1
    assert not any(s.startswith("Rank") for s in summary["problems"])


# --- the page ---


def test_the_page_is_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.write(document(), path)
    page = path.read_text()
    assert page.endswith("</html>")
    ours = page.replace(re.findall(r"<script>(.*?)</script>", page, re.S)[0], "")  # but for Plotly
    assert not re.findall(r"""(?:src|href)=["']?(?!#)[a-z/]""", ours)
    assert "url(" not in ours


def test_text_in_the_data_ends_no_script() -> None:
    made = document(layers=1)
    made["run"]["machine"] = "</script><!--<script>\u2028"
    page = html(made)
    assert page.count("</script>") == 3
    assert "<!--" not in page.split("<body>")[1].replace(_plotly(), "")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_a_page_is_not_written_of_what_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.write(flat(), path)
    before = path.read_bytes()
    with pytest.raises(ReportError):
        report.write(flat() | {"steps": None}, path)
    assert path.read_bytes() == before


def test_a_page_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*report\.html: .*an existing file is"):
        report.write(flat(), tmp_path / "file" / "report.html")


@pytest.mark.parametrize(
    ("module", "package"), [("jinja2", "jinja2"), ("plotly.offline", "plotly")]
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install {package}\."):
        html(flat())


@pytest.mark.parametrize("module", ["torch", "jinja2", "plotly"])
def test_what_is_loaded_when(module: str, tmp_path: Path) -> None:
    """A page is made without torch, and a document saved and read without jinja2 and plotly."""
    path = "sys.argv[1]"
    work = f"report.save(flat(), {path}); report.load({path})"
    code = (
        f"import sys; from precast import report; from tests.support.documents import flat\n"
        f"{f'report.write(flat(), {path})' if module == 'torch' else work}\n"
        f"sys.exit({module!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert done.returncode == 0
