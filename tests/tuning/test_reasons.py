"""Each reason has the figures of the sites that its row is for, and speaks of nothing that was not measured."""

from __future__ import annotations

import torch

from precast.policy.policy import Policy, Rule
from precast.tuning.chooser import Chosen, RowReasons
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.policy_rows import PolicyRow, policy_of
from precast.tuning.sites import OperationSite, TensorEdge, TunedProgram
from precast.tuning.tasks import PrecisionErrors

F32, LOW = torch.float32, torch.bfloat16
ONE, TWO = OperationSite("a", "softmax"), OperationSite("b", "softmax")
BARRED = OperationSite("c", "softmax", barred="raises in bfloat16: no kernel")
SITES = (ONE, TWO, BARRED)
PROGRAM = TunedProgram(SITES, tuple(TensorEdge(None, site, 8, dtype=LOW) for site in SITES))
COSTS = ProgramCosts({site: {F32: CallCost(2e-3, 1e-3), LOW: CallCost(1e-3)} for site in SITES})


ERRORS = {TWO: PrecisionErrors(loss=0.0004, gradient=0.01)}
TOO_WRONG = "bfloat16 changes gradients by 10%, and the loss by 2%"


def _reason(*sites, low=(), prices=None, costs=COSTS, objective="time"):
    chosen = Chosen(PROGRAM.choose(low), prices or {})
    reasons = RowReasons(PROGRAM, costs, ERRORS, chosen, objective)
    return reasons(PolicyRow("a", "softmax", Rule.FP32, sites))


def test_the_costs_in_both_dtypes():
    assert _reason(ONE, low=[ONE]) == "bfloat16 takes 1 ms a step, float32 3 ms"
    assert _reason(ONE, TWO, low=SITES) == "bfloat16 takes 2 ms a step, float32 6 ms (2 places)"


def test_an_error_that_is_too_large_and_its_price():
    assert _reason(TWO, prices={TWO: 2e-3}) == f"{TOO_WRONG}, and would save 2 ms a step"


def test_the_price_of_casts():
    text = _reason(ONE, TWO, prices={ONE: -2e-3, TWO: -1e-3})
    assert text == "bfloat16 would cost 3 ms more a step, with its casts (2 places)"


def test_an_operation_without_a_kernel():
    assert _reason(BARRED) == "bfloat16: raises in bfloat16: no kernel"


def test_bytes_where_memory_is_the_objective():
    sizes = {F32: CallCost(kept_bytes=8192), LOW: CallCost(kept_bytes=4096)}
    of = {"costs": ProgramCosts(dict.fromkeys(SITES, sizes)), "objective": "memory"}
    assert _reason(ONE, low=[ONE], **of) == "bfloat16 keeps 4 KiB a step, float32 8 KiB"
    assert _reason(ONE, prices={ONE: -2048}, **of) == "bfloat16 would cost 2 KiB more a step"
    text = f"{TOO_WRONG}, and would save 4 KiB a step"
    assert _reason(TWO, prices={TWO: 4096}, **of) == text


def test_each_row_of_a_policy_has_its_reason():
    chosen = Chosen(PROGRAM.choose([ONE]), {TWO: 2e-3})
    reasons = RowReasons(PROGRAM, COSTS, ERRORS, chosen, "time")
    policy = policy_of(chosen.choice, PROGRAM, Policy.load("default"), reason=reasons)
    row = policy.resolve("softmax", "cpu", module="b")
    assert row.rule is Rule.FP32
    assert f"{TOO_WRONG}, and would save 2 ms a step" in row.reason


def test_without_measurements_there_are_no_figures():
    assert _reason(ONE, low=[ONE], costs=ProgramCosts({})) == ""
