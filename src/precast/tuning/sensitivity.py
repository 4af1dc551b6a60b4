"""Measures what 16 bits cost in accuracy: the error that each site adds to the loss and to the gradients.

A group of sites runs in 16 bits, all others in float32, and the loss and the gradients of the copy are compared with
those in float32. A group is halved only while its error is more than its share of what is allowed, the group with most
to win first. Sites of one kind, which run the same operation on the same shapes, are together in groups for as long as
there are others: what is left when no more groups are measured shares its error among sites that are alike.

Invariants:
- at most `MOST_RUNS` groups are measured, however large the model is, so the time grows as that of a step does;
- errors are squares of relative errors, because those of independent roundings add up;
- a gradient's error is that of the parameter where it is largest. Parameters whose gradient in float32 is rounding
  noise itself are left out: it changes much if the weights move by `_UNIT`, as that of a bias before a norm does;
- float16 runs under the loss scale that a gradient scaler would reach with all sites in 16 bits, and under a lower one
  where gradients overflow; what overflows under every scale is barred;
- each run uses the same weights, buffers, batches and random numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from precast.attachment.attachment import attach
from precast.errors import PrecastWarning, TuningError
from precast.policy.module_names import named_parameters
from precast.policy.policy import Policy
from precast.tuning.calls import arguments_of
from precast.tuning.policy_text import policy_of
from precast.tuning.sites import Argument, Program, Site
from precast.tuning.training import (
    FLOAT32,
    NO_GRADIENT,
    Setup,
    Training,
    Workload,
    copied,
    move_weights,
    scalar_loss,
    seed_all,
)

__all__ = [
    "MOST_RUNS",
    "ErrorMeter",
    "Errors",
    "Meter",
    "Sensitivity",
    "SiteErrors",
    "measure_sensitivity",
]

MOST_RUNS: Final = 64
"""Groups that are measured at most. To find one site among 3,000 takes about 24."""
_UNIT: Final = 2.0**-22
_NOISE: Final = 1e-2
"""A gradient that changes by more than this share of itself, if weights move by `_UNIT`, is noise."""
_SILENT: Final = 0.99
"""A gradient of which more than this share becomes zero trains nothing."""
_FIRST_SCALE: Final = 2.0**16
_LARGEST_SCALE: Final = 2.0**24
_MOST_EXCESS: Final = 16.0
"""How many times its share the error of a group counts at most, when groups are compared; an overflow is infinite."""


@dataclass(frozen=True)
class Errors:
    """How much a group of sites in 16 bits changes, as squares of relative errors; infinite for what overflows."""

    loss: float
    gradient: float
    parameter: str = ""
    """The one whose gradient changes most."""
    flushed: float = 0.0
    """Which share of that gradient's numbers becomes zero and is not in float32."""
    silent: str = ""
    """A parameter whose gradient becomes zero, so that it is not trained; empty where there is none."""
    failure: str = ""
    """Why there are no numbers to compare."""

    def fits(self, loss: float, gradient: float) -> bool:
        """Whether both are at most so large."""
        return self.loss <= loss and self.gradient <= gradient


@dataclass(frozen=True)
class SiteErrors:
    """What is known of one site."""

    loss: float
    gradient: float
    barred: str = ""
    """Why it must not run in 16 bits."""
    measured: Errors | None = None
    """What was measured of it alone; None where its group was below its share."""
    is_inference: bool = False
    """Whether `loss` is the error of a metric, and `gradient` that of outputs."""


@dataclass
class Sensitivity:
    """What was measured of all sites.

    Attributes:
        sites: each site that may run in 16 bits, with its share of the error of the smallest group it was measured in.
        together: the errors of all sites together.
        scale: the loss scale that a gradient scaler would reach; 1 for bfloat16.
        runs: how many groups were measured.
        shared: how many sites have their share of the error of a group that was not halved although it is more than is
            allowed, because the time or the runs were used up.
        complete: whether there was time for all runs.
    """

    sites: dict[Site, SiteErrors] = field(default_factory=dict)
    together: Errors | None = None
    scale: float = 1.0
    runs: int = 0
    shared: int = 0
    complete: bool = True


@dataclass(frozen=True, eq=False)
class _Point:
    """One batch at one time in training, and what float32 gives there."""

    model: nn.Module
    buffers: dict[str, Tensor]
    batch: Any
    number: int
    loss: float
    gradients: dict[str, Tensor]


class ErrorMeter(Protocol):
    """What measures the errors of setups against float32."""

    scale: float
    """The loss scale."""

    def errors(self, setup: Setup) -> Errors:
        """The errors under a setup; infinite where something overflows, or it cannot run."""

    def find_scale(self, setup: Setup) -> None:
        """Sets the loss scale to the largest under which no gradient overflows with this setup."""


class Meter:
    """Compares setups with float32 on a few batches, at the beginning of training and after some steps."""

    def __init__(self, workload: Workload, *, steps: int = 8, batches: int = 2) -> None:
        """Trains a copy in float32 for so many steps, and keeps its gradients on so many batches before and after.

        Raises:
            TuningError: the loss in float32 is not finite, or no parameter gets a gradient.
        """
        self.workload = workload
        self.scale = 1.0
        self._points: list[_Point] = []
        training = Training(workload, FLOAT32, 0)
        self._add_points(copied(training.model), batches)
        for _ in range(steps):
            training.step()
        if training.failure:
            raise TuningError(f"the training in float32 fails already: {training.failure}")
        if steps:
            self._add_points(copied(training.model), batches)
        self._reliable = self._found_reliable()

    def errors(self, setup: Setup) -> Errors:
        """The errors under a setup; infinite where the loss or a gradient is not finite, or it cannot run."""
        loss = 0.0
        wrong = dict.fromkeys(self._reliable, 0.0)
        norms = dict.fromkeys(self._reliable, 0.0)
        flushed = dict.fromkeys(self._reliable, 0.0)
        for point in self._points:
            try:
                found, gradients = self._run_scaled(setup, point)
            except TuningError:
                raise
            except Exception as error:
                return Errors(math.inf, math.inf, failure=f"{type(error).__name__}: {error}")
            if not math.isfinite(found):
                return Errors(math.inf, math.inf, failure=f"the loss is {found}")
            loss += ((found - point.loss) / (abs(point.loss) or 1.0)) ** 2
            for name in self._reliable:
                wanted = point.gradients[name]
                mine = gradients.get(name)
                mine = torch.zeros_like(wanted) if mine is None else mine
                if not bool(mine.isfinite().all()):
                    return Errors(
                        math.inf, math.inf, name, failure=f"the gradient of {name} overflows"
                    )
                wrong[name] += float((mine - wanted).double().square().sum())
                norms[name] += float(wanted.double().square().sum())
                flushed[name] += float(((mine == 0) & (wanted != 0)).float().mean())
        count = len(self._points)
        shares = {name: wrong[name] / norms[name] for name in self._reliable}
        worst = max(shares, key=shares.__getitem__, default="")
        silent = next((name for name in self._reliable if flushed[name] / count > _SILENT), "")
        share = flushed.get(worst, 0.0) / count
        return Errors(loss / count, shares.get(worst, 0.0), worst, share, silent)

    def find_scale(self, setup: Setup) -> None:
        """Sets the loss scale to the largest under which no gradient overflows with this setup, from 1 to 2**24."""
        self.scale = _FIRST_SCALE
        point = self._points[0]
        if not self._is_finite(setup, point):
            while self.scale > 1 and not self._is_finite(setup, point):
                self.scale /= 2
            if self.scale <= 1:  # something overflows forward, and no scale helps
                self.scale = _FIRST_SCALE
            return
        while self.scale < _LARGEST_SCALE:
            self.scale *= 2
            if not self._is_finite(setup, point):
                self.scale /= 2
                return

    def _is_finite(self, setup: Setup, point: _Point) -> bool:
        try:
            loss, gradients = self._run(setup, point, self.scale)
        except TuningError:
            raise
        except Exception:
            return False
        return math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients.values())

    def _run_scaled(self, setup: Setup, point: _Point) -> tuple[float, dict[str, Tensor]]:
        """Runs with the scale, and with lower ones while a gradient overflows and the loss does not."""
        scale = self.scale if setup.dtype is torch.float16 else 1.0
        while True:
            loss, gradients = self._run(setup, point, scale)
            finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
            if finite or not math.isfinite(loss) or scale <= 1:
                return loss, gradients
            scale /= 2

    def _run(self, setup: Setup, point: _Point, scale: float) -> tuple[float, dict[str, Tensor]]:
        """The loss and the gradients of one batch, the latter divided by the scale."""
        workload, model = self.workload, point.model
        attachment = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            if setup.policy is not None:
                attachment = attach(model, setup.policy, hold=False)
        try:
            seed_all(workload.seed, point.number)
            with setup.region(workload.device_type):
                loss = scalar_loss(workload, model, point.batch)
            if not loss.requires_grad:
                raise TuningError(NO_GRADIENT)
            (loss.float() * scale).backward()
            gradients = {
                name: parameter.grad.detach().to_dense() / scale
                for name, parameter in named_parameters(model)
                if parameter.grad is not None
            }
            if not gradients:
                raise TuningError(NO_GRADIENT)
            return float(loss.detach()), gradients
        finally:
            if attachment is not None:
                attachment.detach()
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in point.buffers and buffer.shape == point.buffers[name].shape:
                        buffer.copy_(point.buffers[name])

    def _add_points(self, model: nn.Module, batches: int) -> None:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for number, batch in enumerate(self.workload.batches[:batches]):
            bare = _Point(model, buffers, batch, number, 0.0, {})
            loss, gradients = self._run(FLOAT32, bare, 1.0)
            if not math.isfinite(loss) or not all(
                bool(g.isfinite().all()) for g in gradients.values()
            ):
                raise TuningError(
                    f"in float32 the loss of batch {number + 1} is {loss}"
                    + ("" if not math.isfinite(loss) else ", and a gradient is not finite")
                    + ": no precision can be compared with it. Find out why first, for example with "
                    "precast.monitor(model)."
                )
            self._points.append(_Point(model, buffers, batch, number, loss, gradients))

    def _found_reliable(self) -> tuple[str, ...]:
        """The parameters whose gradients are more than rounding noise in float32."""
        first = self._points[0]
        moved = copied(first.model)
        move_weights(moved, _UNIT, self.workload.seed, 1)
        bare = _Point(moved, first.buffers, first.batch, first.number, 0.0, {})
        _, others = self._run(FLOAT32, bare, 1.0)
        found = []
        for name, gradient in first.gradients.items():
            everywhere = all(name in point.gradients for point in self._points)
            if not everywhere or name not in others:
                continue
            if bool((others[name] - gradient).norm() < _NOISE * gradient.norm()):
                found.append(name)
        return tuple(found)


def measure_sensitivity(
    meter: ErrorMeter,
    program: Program,
    base: Policy,
    *,
    loss: float,
    gradient: float,
    deadline: float = math.inf,
    told: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Finds the sites whose errors are more than their share of what is allowed.

    Args:
        meter: compares with float32.
        program: whose sites.
        base: the policy that holds for all else.
        loss: the relative error of the loss that all sites together may add.
        gradient: that of the gradient of each parameter.
        deadline: on `time.monotonic`'s clock; groups that are not halved by then share their errors.
        told: called before each run with the number of sites that are open, and that of runs.
    """
    found = Sensitivity()
    base = _narrowed(base, program)
    sites = [site for site in program.sites if not site.barred]
    for site in list(sites):
        if reason := _beyond_range(site, program.low):
            found.sites[site] = SiteErrors(math.inf, math.inf, reason)
            sites.remove(site)
    if not sites:
        return found
    if program.low is torch.float16:
        meter.find_scale(_setup(program, base, sites))
        found.scale = meter.scale
    _Halving(meter, program, base, found, (loss**2, gradient**2)).run(sites, deadline, told)
    found.sites = {site: found.sites[site] for site in program.sites if site in found.sites}
    return found


class _Halving:
    """Measures groups of sites, and halves those whose error is more than their share, the worst first."""

    def __init__(
        self,
        meter: ErrorMeter,
        program: Program,
        base: Policy,
        found: Sensitivity,
        allowed: tuple[float, float],
    ) -> None:
        self._meter = meter
        self._program = program
        self._base = base
        self._found = found
        self._allowed = allowed
        """The errors of loss and gradients that all sites together may have."""
        self._waiting: list[tuple[float, int, list[Site], Errors]] = []
        self._count = itertools.count()

    def run(
        self, sites: list[Site], deadline: float, told: Callable[[int, int], None] | None
    ) -> None:
        """Settles what is known of each site."""
        found, left = self._found, len(sites)
        groups = [_by_kind(sites)]
        while groups:
            for group in groups:
                if told is not None:
                    told(left, found.runs)
                left -= self._measure(group, len(sites))
            if not self._waiting or found.runs + 2 > MOST_RUNS:
                break
            if time.monotonic() > deadline:
                found.complete = False
                break
            groups = _halves(heapq.heappop(self._waiting)[2])
        for _, _, group, errors in self._waiting:
            found.shared += len(group)
            _settle(found, group, errors, alone=False)

    def _measure(self, group: list[Site], count: int) -> int:
        """Measures a group; returns how many sites that settles."""
        found = self._found
        errors = self._meter.errors(_setup(self._program, self._base, group))
        found.runs += 1
        found.together = found.together or errors
        excess = self._excess(errors, len(group) / count)
        if len(group) > 1 and excess > 1:
            worth = len(group) * min(excess, _MOST_EXCESS)
            heapq.heappush(self._waiting, (-worth, next(self._count), group, errors))
            return 0
        _settle(found, group, errors, alone=len(group) == 1)
        return len(group)

    def _excess(self, errors: Errors, share: float) -> float:
        """How many times its share of what is allowed the error of a group is."""
        loss, gradient = self._allowed
        return max(errors.loss / (loss * share), errors.gradient / (gradient * share))


def _kind(site: Site) -> object:
    """What sites are alike in: the operation, and the shapes of its first call."""
    shapes = [argument.shape for call in site.calls[:1] for argument in arguments_of(call)]
    return site.op, tuple(shapes)


def _by_kind(sites: Sequence[Site]) -> list[Site]:
    """The sites, those of one kind beside each other, in the order in which they first run."""
    kinds: dict[object, list[Site]] = {}
    for site in sites:
        kinds.setdefault(_kind(site), []).append(site)
    return [site for group in kinds.values() for site in group]


def _halves(group: list[Site]) -> list[list[Site]]:
    """Two parts that divide no kind of sites, if there are several, and are of about the same size."""
    kinds = [_kind(site) for site in group]
    borders = [at for at in range(1, len(group)) if kinds[at] != kinds[at - 1]]
    middle = len(group) // 2
    at = min(borders, key=lambda border: abs(border - middle), default=middle)
    return [group[:at], group[at:]]


def _settle(found: Sensitivity, group: Sequence[Site], errors: Errors, *, alone: bool) -> None:
    """Gives each site of a group its share of the errors."""
    reason = ""
    if not math.isfinite(errors.gradient):
        unsure = "" if alone else f"; which of {len(group)} sites it is was not measured"
        reason = f"{errors.failure}{unsure}"
    for site in group:
        found.sites[site] = SiteErrors(
            errors.loss / len(group),
            errors.gradient / len(group),
            reason,
            errors if alone else None,
        )


def _narrowed(base: Policy, program: Program) -> Policy:
    """The policy with the rows of the program's operations alone, which all have sites.

    A policy is made for each module of each group, which takes ten times as long with all rows.
    """
    operations = {f"aten::{site.op}" if "::" not in site.op else site.op for site in program.sites}
    table = base.entries(program.device)
    rows = {key: entry for key, entry in table.items() if key.partition(".")[0] in operations}
    return Policy(base.name, {program.device: rows}, base.mixed)


def _setup(program: Program, base: Policy, group: Sequence[Site]) -> Setup:
    """A group of sites in 16 bits, and all others in float32."""
    return Setup(
        f"{len(group)} sites", policy_of(program.choose(group), program, base), program.low
    )


def _beyond_range(site: Site, dtype: torch.dtype) -> str:
    """Why the numbers that a site takes do not fit into float16; "" if they do, or may be rounded to infinity.

    What does not fit into bfloat16 stands for infinity, as in attention's masks.
    """
    if dtype is not torch.float16:
        return ""
    arguments = [
        argument
        for call in site.calls
        for argument in (*call.args, *call.kwargs.values())
        if isinstance(argument, Argument)
    ]
    largest = max((max(-each.low, each.high) for each in arguments), default=0.0)
    if largest <= torch.finfo(dtype).max:
        return ""
    return f"it takes numbers up to {largest:.3g}, and float16 ends at {torch.finfo(dtype).max:g}"
