"""Each reason has the figures of the sites that its row is for, and speaks of nothing that was not measured."""

from __future__ import annotations

import torch

from precast.policy.policy import Rule
from precast.tuning.chooser import reason_of
from precast.tuning.costs import CallCost, ProgramCosts
from precast.tuning.policy_rows import PolicyRow
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


def _reason(*sites, low=(), costs=COSTS, objective="time"):
    row, choice = PolicyRow("a", "softmax", Rule.FP32, sites), PROGRAM.choose(low)
    return reason_of(row, PROGRAM, costs, ERRORS, choice, objective=objective)


def test_the_costs_in_both_dtypes():
    assert _reason(ONE, low=[ONE]) == "bfloat16 takes 1 ms a step, float32 3 ms"
    assert _reason(ONE, TWO, low=SITES) == "bfloat16 takes 2 ms a step, float32 6 ms (2 places)"


def test_the_error_of_what_is_in_float32():
    assert _reason(TWO) == f"{TOO_WRONG}; bfloat16 takes 1 ms a step, float32 3 ms"
    assert _reason(TWO, costs=ProgramCosts({})) == TOO_WRONG


def test_an_operation_without_a_kernel():
    assert _reason(BARRED).startswith("bfloat16: raises in bfloat16: no kernel; ")


def test_bytes_where_memory_is_the_objective():
    sizes = {F32: CallCost(kept_bytes=8192), LOW: CallCost(kept_bytes=4096)}
    of = {"costs": ProgramCosts(dict.fromkeys(SITES, sizes)), "objective": "memory"}
    assert _reason(ONE, low=[ONE], **of) == "bfloat16 keeps 4 KiB a step, float32 8 KiB"


def test_without_measurements_there_are_no_figures():
    assert _reason(ONE, low=[ONE], costs=ProgramCosts({})) == ""
