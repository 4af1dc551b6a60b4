"""Recording of one training step, or one run, of a model as a program of operations.

Invariants:
- copies of the model run, first in float32; the model, its gradients and PyTorch's random state do not change;
- an operation that cannot run in 16 bits at its place in the program is found by running the program so, and excluded
  with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from precast._internal.display import dtype_name
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.tracing.listening import listen
from precast.policy.policy import Policy
from precast.tuning.calls import first_floating
from precast.tuning.listener import ModuleStack, ObservedCall, SiteListener
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.recorder import ProgramRecorder
from precast.tuning.setups import copy_model
from precast.tuning.sites import OperationSite, TunedProgram

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
) -> TunedProgram:
    """Run a step in float32, and as often as needed in 16 bits, and return its program.

    Args:
        model: the model, of which copies run.
        step: returns the loss of a model; it opens no region and does not call backward.
        base: the policy whose rules the operations have.
        low: the 16-bit dtype.
        device: the type of the model's device.

    Raises:
        TuningError: the model cannot be copied.
    """
    with autocast(device, dtype=low, policy=base):
        pass  # so that operations with rules in the base have kernels, which report them
    copied = copy_model(model)
    modules, recorder = ModuleStack(copied), ProgramRecorder(copied)
    listener = SiteListener(
        modules, device, _ruled_operations(base, device), recorder.before, recorder.after
    )
    with autocast(device, dtype=low, policy=Policy("float32", {})):
        _run(copied, step, listener)
    program = recorder.program(modules.names, base, low, device)
    for _ in range(_ROUNDS):
        barred = _unable_sites(copy_model(model), step, program, base)
        if not barred:
            break
        program = _with_barred(program, barred)
    return program


def _ruled_operations(base: Policy, device: str) -> frozenset[str]:
    """Return the operations that are reported as wholes, because the base or PyTorch has a rule for them."""
    return frozenset(base.expand(device)[0]) | frozenset(Policy.load("torch").expand(device)[0])


def _run(model: nn.Module, step: Step, listener: SiteListener) -> None:
    """Run the forward pass inside of the open region, and the backward pass outside of it."""
    with torch.random.fork_rng(), listen(listener):
        tensor = first_floating(step(model))
        if tensor is not None and tensor.requires_grad:
            with torch.autocast(listener.device, enabled=False):
                torch.autograd.backward(tensor, torch.ones_like(tensor))


def _unable_sites(
    model: nn.Module, step: Step, program: TunedProgram, base: Policy
) -> dict[OperationSite, str]:
    """Return the operations that cannot run in 16 bits at their places in the program, with the reasons."""
    choice = program.choose(program.sites)
    policy = explicit_policy(choice, program, base)
    dtypes: dict[tuple[str | None, str], set[torch.dtype]] = {}

    def after(call: ObservedCall, out: Any) -> None:
        first = first_floating(out)
        if first is not None and not call.is_view:
            dtypes.setdefault(call.key, set()).add(first.dtype)

    ruled = _ruled_operations(base, program.device)
    listener = SiteListener(ModuleStack(model), program.device, ruled, lambda _: None, after)
    try:
        with (
            attach(model, policy),
            autocast(program.device, dtype=program.low, policy=policy),
        ):
            _run(model, step, listener)
    except Exception as error:
        key = None if listener.failed_call is None else listener.failed_call.key
        site = next((site for site in program.sites if (site.module, site.op) == key), None)
        if site is None or choice[site] is not program.low:
            raise
        return {site: f"raises in the program: {str(error).partition(chr(10))[0]}"}
    barred = {}
    for site in program.sites:
        actual = dtypes.get((site.module, site.op), {program.low})
        if choice[site] is program.low and actual != {program.low}:
            names = " and ".join(sorted(map(dtype_name, actual)))
            barred[site] = f"runs in {names} in the program"
    return barred


def _with_barred(program: TunedProgram, barred: Mapping[OperationSite, str]) -> TunedProgram:
    changed = {site: replace(site, barred=why) for site, why in barred.items()}
    sites = {site: changed.get(site, site) for site in program.sites}
    edges = tuple(
        replace(
            edge,
            consumer=sites[edge.consumer],
            producer=None if edge.producer is None else sites[edge.producer],
        )
        for edge in program.edges
    )
    return replace(program, sites=tuple(sites.values()), edges=edges)
