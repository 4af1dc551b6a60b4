"""Recording of one training step, or one run, of a model as a program of operations.

Invariants:
- copies of the model run, first in float32; the model, its gradients and PyTorch's random state do not change;
- an operation that cannot run in 16 bits at its place in the program is found by running the program so, and excluded
  with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from precast._internal.display import dtype_name
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.tracing.listening import listen
from precast.policy.policy import Policy, expanded_rules
from precast.tuning.listener import ObservedCall, SiteListener
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.recorder import ProgramRecorder
from precast.tuning.setups import copy_model
from precast.tuning.sites import OperationSite, TunedProgram, first_floating

__all__ = ["record"]

Step = Callable[[nn.Module], Any]
"""Runs a model on a batch and returns the loss; called inside of a region."""

_ROUNDS: Final = 8
"""The most runs in 16 bits that look for operations to exclude."""


def record(
    model: nn.Module,
    step: Step,
    base: Policy,
    *,
    low: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    is_inference: bool = False,
) -> TunedProgram:
    """Run a step in float32, and as often as needed in 16 bits, and return its program.

    Copies of the model run. `step` returns the loss; it opens no region and does not call backward. `base` is the
    policy whose rules the operations have, and `low` the 16-bit dtype.

    Raises:
        TuningError: the model cannot be copied.
    """
    with autocast(device, dtype=low, policy=base):
        pass  # so that operations with rules in the base have kernels, which report them
    # Operations are reported as wholes if the base or PyTorch has a rule for them.
    ruled = frozenset(expanded_rules(base, device)[0]) | frozenset(
        expanded_rules(Policy.load("torch"), device)[0]
    )
    copied = copy_model(model)
    recorder = ProgramRecorder(copied, device, ruled)
    with autocast(device, dtype=low, policy=Policy("float32", {})):
        _run(copied, step, recorder)
    program = recorder.program(base, low, is_inference=is_inference)
    for _ in range(_ROUNDS):
        listener = _DtypeListener(copy_model(model), device, ruled)
        barred = _unable_sites(listener, step, program, base)
        if not barred:
            break
        sites = (replace(each, barred=barred.get(each, each.barred)) for each in program.sites)
        program = replace(program, sites=tuple(sites))
    return program


def _run(model: nn.Module, step: Step, listener: SiteListener) -> None:
    """Run the forward pass inside of the open region, and the backward pass outside of it."""
    with torch.random.fork_rng(), listen(listener):
        tensor = first_floating(step(model))
        if tensor is not None and tensor.requires_grad:
            with torch.autocast(listener.device, enabled=False):
                torch.autograd.backward(tensor, torch.ones_like(tensor))


class _DtypeListener(SiteListener):
    """Records the dtypes of the first result of each operation."""

    def __init__(self, model: nn.Module, device: str, ruled: Collection[str]) -> None:
        super().__init__(model, device, ruled)
        self.model = model
        self.dtypes: dict[OperationSite, set[torch.dtype]] = {}

    def after(self, call: ObservedCall, out: Any) -> None:
        first = first_floating(out)
        if first is not None and not call.is_view:
            self.dtypes.setdefault(call.site, set()).add(first.dtype)


def _unable_sites(
    listener: _DtypeListener, step: Step, program: TunedProgram, base: Policy
) -> dict[OperationSite, str]:
    """Return the operations that cannot run in 16 bits at their places in the program, with the reasons."""
    choice = program.choose(program.sites)
    policy = explicit_policy(choice, program, base)
    try:
        with (
            attach(listener.model, policy),
            autocast(program.device, dtype=program.low, policy=policy),
        ):
            _run(listener.model, step, listener)
    except Exception as error:
        failed = listener.failed_call
        if failed is None or choice.get(failed.site) is not program.low:
            raise
        return {failed.site: f"raises in the program: {str(error).partition(chr(10))[0]}"}
    barred = {}
    for site in program.sites:
        actual = listener.dtypes.get(site, {program.low})
        if choice[site] is program.low and actual != {program.low}:
            names = " and ".join(sorted(map(dtype_name, actual)))
            barred[site] = f"runs in {names} in the program"
    return barred
