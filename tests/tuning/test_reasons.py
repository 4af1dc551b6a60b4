"""Each reason has the figures of the sites that its row is for, and speaks of nothing that was not measured."""

from __future__ import annotations

import torch

from precast.policy.policy import Policy, Rule
from precast.tuning.choosing import Chosen
from precast.tuning.costs import Cost, Costs
from precast.tuning.fewest_rows import Row
from precast.tuning.policy_text import short_policy, text_of
from precast.tuning.reasons import header, reasons
from precast.tuning.sites import Edge, Program, Site
from precast.tuning.timing import Figure

F32, LOW = torch.float32, torch.bfloat16
ONE, TWO = Site("a", "softmax"), Site("b", "softmax")
BARRED = Site("c", "softmax", barred="raises in bfloat16: no kernel")
SITES = (ONE, TWO, BARRED)
PROGRAM = Program(SITES, tuple(Edge(None, site, 8, dtype=LOW) for site in SITES))
COSTS = Costs(
    {site: {F32: Cost(Figure(2e-3), Figure(1e-3)), LOW: Cost(Figure(1e-3))} for site in SITES}
)


def _reason(*sites, low=(), prices=None, errors=None):
    chosen = Chosen(PROGRAM.choose(low), 0.0, prices or {})
    return reasons(PROGRAM, COSTS, chosen, errors)(Row("a", "softmax", Rule.FP32, sites))


def test_what_16_bits_save():
    assert _reason(ONE, low=[ONE]) == "bfloat16 takes 1 ms a step, float32 3 ms"
    assert _reason(ONE, TWO, low=SITES) == "bfloat16 takes 2 ms a step, float32 6 ms (2 places)"


def test_what_held_a_site_back_and_its_price():
    said = _reason(ONE, prices={ONE: 2e-3}, errors={ONE: "adds 3.1% to the loss"})
    assert said == "bfloat16 adds 3.1% to the loss, and would save 2 ms a step"


def test_what_casts_would_cost():
    said = _reason(ONE, TWO, prices={ONE: -2e-3, TWO: -1e-3})
    assert said == "bfloat16 would cost 3 ms more a step, with its casts (2 places)"


def test_what_cannot_be():
    assert _reason(BARRED) == "bfloat16: raises in bfloat16: no kernel"


def test_figures_are_of_what_was_chosen_by():
    sizes = {F32: Cost(Figure(0.0), kept=8192), LOW: Cost(Figure(0.0), kept=4096)}
    costs = Costs(dict.fromkeys(SITES, sizes))

    def said(site, low, prices):
        chosen = Chosen(PROGRAM.choose(low), 0.0, prices)
        errors = {TWO: "adds 3.1% to the loss"}
        row = Row(site.module, "softmax", Rule.FP32, (site,))
        return reasons(PROGRAM, costs, chosen, errors, "memory")(row)

    assert said(ONE, [ONE], {}) == "bfloat16 keeps 4 KiB a step, float32 8 KiB"
    assert said(ONE, [], {ONE: -2048}) == "bfloat16 would cost 2 KiB more a step"
    assert (
        said(TWO, [], {TWO: 4096}) == "bfloat16 adds 3.1% to the loss, and would save 4 KiB a step"
    )


def test_a_short_policy_has_a_reason_for_each_row():
    chosen = Chosen(PROGRAM.choose([ONE]), 0.0, {TWO: 2e-3})
    why = reasons(PROGRAM, COSTS, chosen, {TWO: "adds 3.1% to the loss"})
    policy = short_policy(chosen.choice, PROGRAM, Policy.load("default"), reason=why)
    row = policy.modules["b"].ops["aten::softmax"]
    assert row.rule is Rule.FP32
    assert row.reason == "bfloat16 adds 3.1% to the loss, and would save 2 ms a step"


def test_what_was_not_measured_has_no_figures():
    chosen = Chosen(PROGRAM.choose([ONE]), 0.0)
    assert reasons(PROGRAM, Costs({}), chosen)(Row("a", "softmax", Rule.KEEP, (ONE,))) == ""


def test_a_file_with_header_and_reasons_is_a_policy(tmp_path):
    chosen = Chosen(PROGRAM.choose(), 0.0, {ONE: 1e-3})
    lines = header("precast tune my:model", seed=3, date="2026-11-23")
    errors = {ONE: 'adds "much"\nto the loss'}
    text = text_of(
        chosen.choice,
        PROGRAM,
        "default",
        reason=reasons(PROGRAM, COSTS, chosen, errors),
        header=lines,
    )
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    assert "seed 3" in text
    assert "# Command: precast tune my:model" in text
    assert Policy.load(path).resolve("softmax", "cpu", module="a").rule is Rule.FP32
