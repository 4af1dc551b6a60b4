"""What a model's sites run in under a policy, as a trace saw it: the oracle of the tests of choices and policies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import precast
from precast.tuning.sites import DtypeChoice, TunedProgram


def dtypes_traced(
    model: nn.Module, step: Callable[[nn.Module], Tensor], policy: precast.Policy, low: torch.dtype
) -> dict[tuple[str | None, str], set[str]]:
    """Module and operation -> the dtypes of the first result of each of its calls in forward."""
    found: dict[tuple[str | None, str], set[str]] = {}
    with precast.attach(model, policy), precast.trace(model) as seen:
        with precast.autocast("cpu", dtype=low, policy=policy):
            step(model)
    for row in seen.rows:
        floating = [dtype for dtype in row.output if "float" in dtype]
        if row.phase in ("forward", "other") and floating:
            found.setdefault((row.module, row.op.partition(".")[0]), set()).add(floating[0])
    return found


def assert_runs_as_chosen(
    model: nn.Module,
    step: Callable[[nn.Module], Tensor],
    policy: precast.Policy,
    choice: DtypeChoice,
    program: TunedProgram,
) -> None:
    """Every site runs in the dtype that the choice says, and in no other."""
    seen = dtypes_traced(model, step, policy, program.low)
    chosen = {(s.module, s.op): {str(choice[s]).removeprefix("torch.")} for s in program.sites}
    wrong = {key: (seen.get(key), chosen[key]) for key in chosen if seen.get(key) != chosen[key]}
    assert not wrong, wrong
