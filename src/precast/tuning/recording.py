"""Records one training step of a model: its sites, what they are called with, and how tensors flow between them.

Invariants:

- copies of the model run, first in float32; the model, its gradients and PyTorch's random state stay as they were;
- a site that cannot be in 16 bits where the program calls it is found by running it so, and barred with the reason.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from precast._internal.display import dtype_name
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.diagnostics.tracing.tracer import listening
from precast.errors import PrecastError
from precast.policy.module_names import name_of_each
from precast.policy.policy import Policy
from precast.tuning.policy_text import policy_of
from precast.tuning.probing import first_floating
from precast.tuning.recorder import Recorder
from precast.tuning.sites import Program, Site
from precast.tuning.watching import Happening, Listener, Owners, bare_name

__all__ = ["record"]

Step = Callable[[nn.Module], Any]
"""Runs a model on a batch and gives the loss; called inside of a region."""

_ROUNDS: Final = 8
"""How often the step runs in 16 bits until no more sites are found that cannot."""
_Key = tuple[str | None, str]
"""A site's module and operation."""


def record(
    model: nn.Module,
    step: Step,
    base: Policy,
    *,
    low: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Program:
    """Runs a step in float32, and as often as needed in 16 bits, and says what ran.

    Args:
        model: the model; a copy of it runs.
        step: gives the loss of the model that it is called with; it opens no region and does not call backward.
        base: the policy whose rules the sites have.
        low: the 16-bit dtype that sites may run in.
        device: the type of the model's device.

    Raises:
        PrecastError: the model cannot be copied.
    """
    with autocast(device, dtype=low, policy=base):
        pass  # so that operations for which the base has rules have kernels, which are listened to
    owners, recorder, calls = _recorded(_copied(model), step, low, device, _ruled(base, device))
    program = recorder.program(owners.names, base, low, device)
    program = replace(program, module_calls=calls)
    for _ in range(_ROUNDS):
        found = _barred_in_the_program(_copied(model), step, program, base)
        if not found:
            break
        program = _with_bars(program, found)
    return program


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a model's own code may raise anything
        raise PrecastError(
            f"tuning runs copies of the model, and {type(model).__name__} cannot be copied: {error}. "
            "Give it parameters and buffers that copy.deepcopy can copy."
        ) from error


def _ruled(base: Policy, device: str) -> frozenset[str]:
    """The operations that are told of as wholes, because the base or PyTorch has a rule for them."""
    return frozenset(base.expand(device)[0]) | frozenset(Policy.load("torch").expand(device)[0])


def _run(model: nn.Module, step: Step, listener: Listener) -> None:
    """Runs forward inside of the region around, and backward outside of it."""
    device = listener.device
    with torch.random.fork_rng(), listening(listener):
        loss = step(model)
        tensor = first_floating(loss)
        if tensor is not None and tensor.requires_grad:
            with torch.autocast(device, enabled=False):
                torch.autograd.backward(tensor, torch.ones_like(tensor))


def _recorded(
    model: nn.Module, step: Step, low: torch.dtype, device: str, ruled: frozenset[str]
) -> tuple[Owners, Recorder, dict[str, int]]:
    """Runs the step in float32; returns who ran what, and how often each module was called."""
    owners, recorder = Owners(model), Recorder(model)
    listener = Listener(owners, device, ruled, recorder.before, recorder.after)
    nothing = Policy("float32", {})
    calls: Counter[str] = Counter()
    for name, module in name_of_each(model):
        counted = functools.partial(_count, calls, name)
        nn.Module.register_forward_pre_hook(
            module, counted
        )  # a scripted module's own method refuses
    with autocast(device, dtype=low, policy=nothing):
        _run(model, step, listener)
    return owners, recorder, dict(calls)


def _count(calls: Counter[str], name: str, _module: nn.Module, _args: Any) -> None:
    calls[name] += 1


def _barred_in_the_program(
    model: nn.Module, step: Step, program: Program, base: Policy
) -> dict[Site, str]:
    """The sites that cannot run in 16 bits where the program calls them, with the reasons."""
    choice = program.choose(program.sites)
    policy = policy_of(choice, program, base)
    seen: dict[_Key, set[torch.dtype]] = {}

    def after(happening: Happening, out: Any) -> None:
        first = first_floating(out)
        if first is not None and not happening.is_view:
            key = happening.module, bare_name(happening.overload)
            seen.setdefault(key, set()).add(first.dtype)

    ruled = _ruled(base, program.device)
    listener = Listener(Owners(model), program.device, ruled, lambda _: None, after)
    try:
        with (
            attach(model, policy),
            autocast(program.device, dtype=program.low, policy=policy),
        ):
            _run(model, step, listener)
    except Exception as error:
        site = _failed(listener, program)
        if site is None or choice[site] is not program.low:
            raise
        return {site: f"raises in the program: {str(error).partition(chr(10))[0]}"}
    return {
        site: f"runs in {_names(seen.get((site.module, site.op)))} where the program calls it"
        for site in program.sites
        if choice[site] is program.low
        and seen.get((site.module, site.op), {program.low}) != {program.low}
    }


def _failed(listener: Listener, program: Program) -> Site | None:
    happening = listener.failed_at
    if happening is None:
        return None
    key = happening.module, bare_name(happening.overload)
    return next((site for site in program.sites if (site.module, site.op) == key), None)


def _with_bars(program: Program, barred: Mapping[Site, str]) -> Program:
    changed = {site: replace(site, barred=why) for site, why in barred.items()}
    sites = tuple(changed.get(site, site) for site in program.sites)
    by_key = {site: site for site in sites}
    edges = tuple(
        replace(
            edge,
            consumer=by_key[edge.consumer],
            producer=None if edge.producer is None else by_key[edge.producer],
        )
        for edge in program.edges
    )
    return replace(program, sites=sites, edges=edges)


def _names(dtypes: set[torch.dtype] | None) -> str:
    return " and ".join(sorted(dtype_name(dtype) for dtype in dtypes or ()))
