"""What a report says is true: for each of its sentences, a run in which it would be false."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import report
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file
from precast.report.page import html
from precast.report.words import shortened
from precast.running import machine_speed
from precast.running.run_observer import RunObserver
from tests.support.documents import document, flat
from tests.support.installed import uninstall_all
from tests.support.reports import document_of, seen, summary, summary_of


def told(made: Any) -> str:
    summary = summary_of(made)
    parts = [summary["headline"], *summary["precision"], *summary["problems"], *summary["notes"]]
    first = summary["first"]
    return " ".join([*parts, *((first["text"], first["gain"]) if first else ())])


class Train:
    """A program that trains a small network."""

    def __init__(
        self,
        dtype: torch.dtype | None = torch.bfloat16,
        steps: int = 6,
        scaler: Callable[[], Any] = lambda: None,
        change: Callable[[int, nn.Sequential], object] = lambda step, model: None,
        of: torch.dtype = torch.float32,
    ) -> None:
        self.dtype, self.steps, self.scaler, self.change, self.of = dtype, steps, scaler, change, of

    def __call__(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(self.of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = self.scaler()  # made under the watch's eyes: it is then precast's
        for step in range(self.steps):
            self.change(step, model)
            optimizer.zero_grad()
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                loss = model(torch.randn(32, 8, dtype=self.of)).float().square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


def policy_of(folder: Path, text: str) -> str:
    path = folder / "policy.toml"
    path.write_text(text)
    return str(path)


# --- runs that are broken although no step shows it ---


class Broken(Train):
    """A float16 training with a batch norm, whose buffers `spoil` writes, and a validation."""

    def __init__(self, spoil: Callable[[nn.Sequential], object]) -> None:
        super().__init__()
        self.spoil = spoil

    def __call__(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        model.register_buffer("mask", torch.full((4,), -torch.inf))
        self.model = model  # a global of a script lives until the end
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(32, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            self.spoil(model)
            model.eval()(torch.randn(32, 8))
            model.train()


def test_a_sound_run_with_an_infinite_mask_and_a_validation_is_no_alarm() -> None:
    made = seen(Broken(lambda model: None), health=True)
    assert made["run"]["nonfinite"] == []
    assert made["run"]["evaluations"] == 1
    assert "infinite" not in told(made)


def test_a_buffer_that_is_not_finite_at_the_end_is_named() -> None:
    program = Broken(lambda model: model[1].running_var.fill_(torch.nan))
    made = seen(program)
    assert summary_of(made)["headline"] == "At the end the buffer `1.running_var` held NaN."
    assert summary_of(made)["level"] == "bad"
    assert "An output was infinite or NaN in 1 of 1 call without gradients" in told(made)


def test_a_parameter_that_the_last_step_spoilt_is_named() -> None:
    program = Broken(lambda model: model[0].weight[0, 0].fill_(torch.inf))
    made = seen(program)
    assert summary_of(made)["headline"] == "At the end the parameter `0.weight` held infinity."


def test_a_validation_that_is_nan_is_seen_although_the_training_is_well() -> None:
    def program() -> None:
        criterion = nn.MSELoss()
        Train()()
        with torch.no_grad():
            criterion(torch.tensor([torch.nan]), torch.zeros(1))
            criterion(torch.ones(1), torch.zeros(1))

    made = seen(program, health=True)
    summary = summary_of(made)
    assert summary["headline"].startswith("An output was infinite or NaN in 1 of 2 calls without")
    assert "`MSELoss`" in summary["headline"]
    assert summary["level"] == "bad"


def test_a_dtype_that_the_machine_emulates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, is_slow in ((0.3, True), (1.0, False)):
        monkeypatch.setattr(machine_speed, "matmul_speed", lambda *_, ratio=ratio: ratio)
        summary = summary_of(seen(Train(torch.float16), measures=True))
        assert ("makes this run slower" in summary["headline"]) is is_slow


# --- whether there is mixed precision ---


def test_a_run_in_16_bits_is_said_to_work() -> None:
    summary = summary_of(seen(Train()))
    assert summary["headline"].startswith("Mixed precision ")
    assert summary["level"] != "neutral"


def test_a_policy_that_lets_nothing_run_in_16_bits_does_not_work(tmp_path: Path) -> None:
    made = seen(Train(), policy_of(tmp_path, '[ops.cpu]\nlinear = "fp32"\n'))
    summary = summary_of(made)
    assert "works" not in told(made)
    assert summary["headline"].startswith("Nothing ran in 16 bits")
    assert summary["level"] == "neutral"
    assert summary["first"] is not None
    assert '`base = "default"`' in summary["first"]["text"]


def test_a_run_in_float32_is_not_said_to_be_well() -> None:
    made = seen(Train(None))
    assert summary_of(made)["level"] == "neutral"
    assert "works" not in told(made)
    page = html(made).split("<main>")[1].split('id="findings"')[0]
    assert "No mixed precision was seen" in page
    for praise in ("All is well", "Looks good"):
        assert praise not in page


def test_numbers_in_float64_are_in_no_mixed_precision() -> None:
    """The rule `lower` is asked for, and leaves float64 as it is."""
    for steps in ((2, 5), (50, 60)):
        made = seen(Train(of=torch.float64), steps=steps)
        assert any(each["rule"] == "lower" and each["calls"] for each in made["counts"])
        assert "works" not in told(made)
        assert summary_of(made)["level"] == "neutral"
        assert "% in bfloat16" not in told(made)
    assert "float32" not in str(summary_of(seen(Train(None, of=torch.float64)))["first"])


def test_a_model_in_16_bits_by_hand_is_no_autocast_and_no_float32() -> None:
    made = seen(Train(None, of=torch.bfloat16))
    assert summary_of(made)["headline"].startswith("This run computes in 16 bits by its own casts")
    assert summary_of(made)["first"] is None


def test_what_is_compiled_is_not_said_to_have_no_mixed_precision() -> None:
    def program() -> None:
        model = torch.compile(nn.Linear(8, 8), backend="aot_eager")
        with torch.autocast("cpu"):
            model(torch.randn(4, 8)).sum().backward()

    made = seen(Train(None), steps=(50, 60))
    made["run"]["compiled"] = True
    assert "not known" in summary_of(made)["headline"]
    assert summary_of(made)["first"] is None
    watch = RunObserver("torch", (2, 5), health=False)
    watch.start()
    try:
        program()
    finally:
        watch.stop()
        uninstall_all()
    assert document_of(watch, "torch")["run"]["compiled"]
    torch.compiler.reset()


@pytest.mark.parametrize("elsewhere", [3, 6])
def test_steps_of_other_threads_are_not_taken_for_float32(elsewhere: int) -> None:
    made = seen(Train(None))
    made["run"]["elsewhere"] = elsewhere
    assert summary_of(made)["first"] is None
    is_all = elsewhere == 6
    made |= {"trace": None}
    assert ("threads that were not watched" in summary_of(made)["headline"]) == is_all


# --- steps, and what was traced ---


@pytest.mark.parametrize("steps", [4, 5, 6, 9])
def test_steps_that_a_scaler_skipped_were_traced_too(steps: int) -> None:
    made = seen(
        Train(
            torch.float16,
            steps=steps,
            scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000),
        )
    )
    assert made["run"]["skipped"] == steps  # a scale that is far too high stays too high
    traced = min(steps, 5) - 2
    assert made["trace"]["totals"]["steps"] == traced
    assert f"in {traced} traced steps" in told(made)
    linear = [r for r in made["trace"]["rows"] if r["op"] == "linear" and r["rule"]]
    assert sum(row["calls"] for row in linear) == 2 * traced
    assert ("and after them" in told(made)) == (steps < 5)


def test_without_a_whole_step_none_is_said_to_be_traced() -> None:
    def program() -> None:
        Train(steps=2)()
        with torch.autocast("cpu"):
            nn.Linear(4, 4)(torch.ones(2, 4))

    made = seen(program)
    assert made["trace"]["totals"]["steps"] == 0
    assert "in what was traced, less than one step:" in told(made)
    assert "0 steps" not in told(made)


def test_a_short_run_is_told_of_steps_that_it_has() -> None:
    made = seen(Train(steps=1))
    assert "`--steps 0:1`" in told(made)
    assert seen(Train(steps=1), steps=(0, 1))["trace"]["rows"]
    made = seen(lambda: None)
    assert "--steps" not in told(made)


@pytest.mark.parametrize("traced", [(2, 3), (2, 5), (2, 12)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_kept_for_backward_is_of_one_step(
    traced: tuple[int, int], dtype: torch.dtype | None
) -> None:
    kept: list[int] = []

    class Counted(Train):
        def __call__(self) -> None:
            storages: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, nn.Parameter) and tensor.grad_fn is not None:
                    storages[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                super().__call__()
            kept.append(sum(storages.values()))

    made = seen(Counted(dtype, steps=14), steps=traced)
    one = seen(Train(dtype, steps=14), steps=(2, 3))["trace"]["saved"]
    assert made["trace"]["saved"] == one
    by_hand = 32 * (16 + 4) * 2  # two layers' outputs, in 16 bits
    assert sum(one.values()) >= by_hand
    assert "Peak memory saved for backward: " in told(made)


def test_what_two_backward_passes_keep_does_not_add_up() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(128, 64)

    def once() -> None:
        layer(x).tanh().sum().backward()

    with precast.trace() as one:
        once()
    with precast.trace() as several:
        for _ in range(5):
            once()
    assert several.saved == one.saved
    size = 4 * 128 * 64
    assert size <= one.saved["float32"] <= 2 * size + 4


# --- numbers ---


def nan_in_step(bad: int) -> Callable[[int, nn.Sequential], object]:
    def change(step: int, model: nn.Sequential) -> None:
        if step == bad:
            with torch.no_grad():
                model[0].weight.mul_(float("nan"))

    return change


def test_a_loss_that_is_nan_is_not_nothing_wrong() -> None:
    for dtype in (None, torch.bfloat16):
        made = seen(Train(dtype, change=nan_in_step(4)))
        summary = summary_of(made)
        assert (
            summary["headline"] == "The loss was infinite or NaN in 2 of 6 steps, first in step 4."
        )
        assert summary["level"] == "bad"
        assert "--health" in str(summary["first"])
    assert "nothing wrong" not in told(made)


def test_a_step_that_was_skipped_is_not_counted_as_a_loss_too() -> None:
    made = seen(
        Train(
            torch.float16,
            scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0),
            change=nan_in_step(5),
        )
    )
    assert (made["run"]["skipped"], made["run"]["nonfinite_losses"]) == (1, 0)


def test_gradients_that_are_all_nan_have_no_largest_number() -> None:
    made = seen(Train(change=nan_in_step(0), steps=1), health=True)
    for tensor in made["health"]["modules"]:
        if tensor["nan"][0] == tensor["elements"][0]:
            assert tensor["maximum"] == tensor["rms"] == [None]
    assert any(t["nan"][0] == t["elements"][0] for t in made["health"]["modules"])


def test_no_scale_is_advised_where_none_is_needed() -> None:
    made = seen(Train(), health=True)
    for tensor in made["health"]["modules"]:
        assert tensor["what_if"]["bfloat16"]["best_scale"] in (1.0, None)


def test_what_left_float32_is_not_told_to_run_in_float32() -> None:
    """The dtype that counts is that of the tensor, not the narrowest of the run."""
    made: Any = document(overflow_at=3)
    first = made["health"]["first"] | {"name": "head"}
    made["health"]["first"] = first
    for step in made["steps"]:
        step["first"] = None
    worst = {"kind": "output", "name": "head", "dtype": "float32", "maximum": None, "share": None}
    made["health"]["ring"] = [{"step": 3, "worst": [worst]}]
    made["findings"] = []
    advice = summary_of(made)["first"]
    assert advice is not None
    assert advice["policy"] is None
    assert "leaves float32's range" in advice["text"]
    worst["dtype"] = "float16"
    assert "in float32" in str(summary_of(made)["first"])
    first["what"] = "nan"
    assert "If it is NaN there too" in str(summary_of(made)["first"])


# --- sentences of documents that were changed so that one of them becomes false ---


def good() -> Any:
    made: Any = document(overflow_at=None)
    made["trace"]["findings"] = []
    return made


def finding(share: float | None, **more: Any) -> Any:
    seconds = None if share is None else share * 2
    cost = {"seconds": seconds, "bytes": None, "share": share}
    cost |= {} if share is None else {"low": share / 2, "high": share}
    where = {"module": "a", "op": "mm", "source": None}
    return {"kind": "round-trip", "title": "a casts", "cost": cost} | {
        "suggestion": "Mend it.", "policy": None, "where": where, **more}  # fmt: skip


def with_run(**run: Any) -> Any:
    made = good()
    made["run"] |= run
    return made


def with_state(*kinds: str) -> Any:
    state = {"name": "a.b", "what": "nan"}
    return with_run(nonfinite=[state | {"kind": kind} for kind in kinds])


def with_findings(*findings: Any) -> Any:
    return good() | {"findings": list(findings)}


def with_totals(**totals: Any) -> Any:
    made = good()
    made["trace"]["totals"] |= totals
    return made


@pytest.mark.parametrize(
    ("made", "false", "true"),
    [
        (with_run(ended="interrupted", code=130), "works", "Until then: mixed"),
        (with_run(ended="interrupted", code=130), "what follows", "this report covers that part"),
        (with_findings(finding(None)), "nothing wrong", "with problems: see below"),
        (with_findings(finding(0.2)), "works", "could save 10% to 20% of the traced time"),
        (with_findings(finding(0.9), finding(0.8, title="b")), "170%", "could save 85% to 100% of"),
        (with_findings(finding(0.0)), "look at", "nothing wrong was found"),
        (with_findings(finding(0.004)), "a casts", "nothing wrong was found"),
        (with_totals(casts=1, cached=1), "1 casts", "1 cast wrote"),
        (with_totals(casts=1, cached=1), "1 casts", "the weight cache saved 1 cast."),
        (with_totals(casts=1, cached=0), "cache saved", "1 cast wrote"),
        (with_totals(casts=0, cached=1), "Casts took", "Time of operations"),
        (with_totals(steps=1), "1 steps", "in 1 traced step:"),
        (with_totals(cast_seconds=1e9), "of its time", "may not pay"),
        (with_run(skipped=1), "1 of 60 steps were", "1 of 60 steps was lost"),
        (flat(), "1 calls", "No training step finished"),
        (good(), "works", "the numbers of 6 of 60 steps and the operations of 3."),
        (
            good() | {"health": None},
            "nothing wrong was found in the numbers",
            "of 3 of 60 steps; its",
        ),
        (good() | {"trace": None}, "operations of", "in the numbers of 6 of 60 steps."),
        (good() | {"trace": None, "health": None}, "nothing wrong", "neither its numbers nor its"),
        (good(), "faster", "`enabled=False` in its regions"),
        (with_state("parameter"), "restore_buffers", "At the end the parameter `a.b` held NaN."),
        (with_state("buffer"), "1 more", "restore_buffers=model"),
        (with_state("buffer", "buffer"), "mixed", "`a.b` held NaN, and so did 1 other tensor"),
        (
            with_run(evaluations=9, nonfinite_outputs=1, first_nonfinite_output="Net"),
            "1 calls",
            "in 1 of 9 calls without gradients, as in validation; the first was the output of `Net`",
        ),
        (with_run(speeds={"bfloat16": 0.2, "float16": 0.9}), "emulates", "nothing wrong"),
        (
            with_run(speeds={"bfloat16": 0.2, "float16": 0.25}),
            "emulates bfloat16",
            "makes this run slower: the CPU emulates float16, and multiplies matrices at 0.25 times",
        ),
        (with_run(speeds={"bfloat16": 0.2, "float16": 0.1}), "Use bfloat16", "Use float32"),
        (with_run(speeds={"bfloat16": 2.0, "float16": 0.1}), "Use float32", "Use bfloat16"),
    ],
)
def test_a_sentence_follows_the_document(made: Any, false: str, true: str) -> None:
    assert false not in told(made)
    assert true in told(made)


def test_an_underflow_gives_no_skipped_step_back() -> None:
    """The steps were lost to an overflow, which another finding mends."""
    made = with_run(skipped=3)
    made["findings"] = [finding(None, kind="underflow", title="Gradients became zero")]
    assert "lost now" not in str(summary_of(made)["first"])
    made["findings"] = [finding(None, kind="overflow", title="It overflows")]
    assert "up to 3 of 60 steps, lost now" in str(summary_of(made)["first"])


def test_casts_of_a_run_without_mixed_precision_are_not_its_price() -> None:
    made = with_totals(cast_seconds=0.9)
    made["trace"]["totals"]["seconds"] = 1.0
    made["counts"] = []
    assert "may not pay" not in told(made)
    assert "too small for 16 bits" not in told(made)


def test_a_trace_without_rows_has_no_share_in_16_bits() -> None:
    made = good()
    made["trace"]["rows"] = []
    facts = html(made).split('<dl class="facts">')[1].split("</dl>")[0]
    assert "In 16 bits" not in facts
    assert "On casts" not in facts
    assert "`--steps" in told(made)


def test_steps_that_are_not_shown_are_not_said_to_be_spread_evenly() -> None:
    """Those that were skipped are kept beside the others."""
    made = with_run(steps=5000)
    assert "evenly" not in told(made)
    assert "The page shows 60 of 5,000 steps." in told(made)


# --- names between backticks ---


@pytest.mark.parametrize("length", range(8, 60))
def test_a_headline_that_is_cut_has_whole_names(length: int) -> None:
    message = "RuntimeError: the output of `decoder.3.mlp` is not finite in `head` of step 3"
    short = shortened(message, length)
    assert short.count("`") % 2 == 0
    assert len(short) <= length


def test_no_backtick_reaches_the_reader() -> None:
    made: Any = document(layers=1)
    made["run"] |= {"ended": "exception", "code": 1, "message": "E: see `a.b" + 200 * "x" + "`"}
    page = html(made).split("<main>")[1].split('<script type="application/json"')[0]
    assert "`" not in page
    assert "`" not in summary(made, [])


# --- policy files ---

OVERFLOWS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(6):
    with torch.no_grad():
        model[2].weight.mul_({3: 2.0**18, 4: 2.0**-18}.get(step, 1.0))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def run(folder: Path, *options: str) -> Any:
    """The data of `precast run` on the program above."""
    (folder / "train.py").write_text(OVERFLOWS)
    command = [sys.executable, "-m", "precast", "run", "--health", "--json", "run.json"]
    done = subprocess.run(
        [*command, *options, "train.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return report.load(folder / "run.json")


@pytest.mark.trial("MODULE_IN_FLOAT32")
def test_the_policy_file_against_an_overflow_mends_it_under_run(tmp_path: Path) -> None:
    before = run(tmp_path)
    assert before["run"]["skipped"] == 1
    advice = before["summary"]["first"]
    assert advice["policy"] == 'base = "torch"\n\n[modules]\n"2" = "fp32"\n'
    (tmp_path / "pasted.toml").write_text(advice["policy"])
    after = run(tmp_path, "--policy", "pasted.toml")
    assert after["run"]["skipped"] == 0
    assert tomllib.loads(after["run"]["policy"]["file"]) == tomllib.loads(advice["policy"])
    lower = [r for r in after["trace"]["rows"] if r["op"] == "linear" and r["rule"] == "lower"]
    assert {row["module"] for row in lower} >= {"0", "4"}, "the other layers still run in 16 bits"


def test_the_policy_file_of_a_finding_mends_it_under_run(
    tmp_path: Path, faster_in_16_bits: None
) -> None:
    def program() -> None:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.autocast("cpu"), torch.no_grad():
            for _ in range(4):
                second(torch.sigmoid(first(torch.ones(4, 8))))

    policy = policy_of(
        tmp_path, 'base = "torch"\n[ops]\nsigmoid = "fp32"\n[modules]\n"x.*" = "keep"\n'
    )
    made = seen(program, policy, (0, 9))
    [found] = [f for f in made["trace"]["findings"] if f["kind"] == "float32-island"]
    made = seen(program, policy_of(tmp_path, found["policy"]), (0, 9))
    assert not [f for f in made["trace"]["findings"] if f["kind"] == "float32-island"]
    rows = {row["op"]: row["output"] for row in made["trace"]["rows"] if row["rule"]}
    assert rows["sigmoid"] == rows["linear"] == ["bfloat16"]
    assert '"x.*" = "keep"' in found["policy"], "what was in force stays in force"


@pytest.mark.parametrize("name", ["a.b", "linear", "2"])
def test_a_rule_for_a_module_is_added_to_the_policy_that_was_in_force(name: str) -> None:
    made: Any = document(overflow_at=3)
    made["findings"] = []
    for first in (made["health"]["first"], *(step["first"] for step in made["steps"])):
        if first:
            first["name"] = name
    policy = Policy.load("lean").replace(
        ops={"cpu": {"linear": "fp32"}}, modules={name: "keep", "x": "fp32"}
    )
    made["run"]["policy"] = {"name": "mine", "file": whole_file(policy)}
    file = str((summary_of(made)["first"] or {})["policy"])
    assert tomllib.loads(file) == {
        "base": "lean",
        "ops": {"cpu": {"linear": "fp32"}},
        "modules": {name: "fp32", "x": "fp32"},
    }


# --- findings ---


def test_findings_with_one_remedy_are_one_card_with_the_sum_of_their_costs() -> None:
    some = [finding(0.004 * (i + 1), title=f"place {i}") for i in range(3)]
    page = html(with_findings(*some, finding(0.05, title="other", suggestion="Do that.")))
    cards = page.split("<article>")[1:]
    assert len(cards) == 2
    assert "Do that." in cards[0]
    assert "2 more with the same remedy" in cards[1]
    assert "1.2% to 2.4% of the traced time" in cards[1]
    assert all(f"place {i}" in cards[1] for i in range(3))


def test_what_costs_next_to_nothing_has_no_card() -> None:
    some = [finding(0.002, title=f"place {i}") for i in range(3)]
    page = html(with_findings(*some))
    assert "<article>" not in page
    assert "3 findings about less than 1% of the traced time omitted." in page
    for no_cost in (None, 0.3):
        assert "<article>" in html(with_findings(finding(no_cost)))
    numeric = finding(0.0, kind="overflow")
    assert "<article>" in html(with_findings(numeric))
