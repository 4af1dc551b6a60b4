"""`tune`: the search for the best policy of a model on this machine, and its proof.

1. The model's operations are recorded, and their errors, time and memory in 16 bits are measured.
2. The policy with the least cost within the allowed errors is chosen.
3. Copies of the model are trained in float32, under the base policy, the chosen policy and each preset with other rules
   for the model's operations. For inference, copies are run instead, and compared by a metric.

Invariants:
- only copies of the model are run, and the model does not change;
- the result has trained as well as float32, within the tolerance, and is proven to be better at the objective than
  float32 and the base policy. If there is no such policy, the result is the better one of these two;
- a policy under which a parameter has a gradient of zero, and another gradient in float32, is never the result;
- the search ends within the budget, except for the step that runs then and one traced step. A budget that is too small
  for any proof is refused;
- after Ctrl-C the result is the best policy that is proven by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast._internal.display import dtype_name
from precast.errors import TuningError
from precast.policy.policy import Policy, Rule, as_policy, expanded_rules
from precast.policy.rows import FLOAT8_RULES
from precast.tuning.chooser import choose, reason_of
from precast.tuning.costs import ProgramCosts, measure_costs
from precast.tuning.evidence import SearchSettings, TuningEvidence
from precast.tuning.inference import InferenceTask
from precast.tuning.judging import Judge
from precast.tuning.options import (
    Objective,
    TuningOptions,
    TuningProgress,
    check_arguments,
    checked_candidates,
)
from precast.tuning.policy_rows import PolicyRow, policy_of
from precast.tuning.products import choose_products, choose_results, products_of
from precast.tuning.proof import prove
from precast.tuning.result import TuningResult, evidence_of
from precast.tuning.sensitivity import Sensitivity, measure_sensitivity
from precast.tuning.setups import FLOAT32, Setup, Workload, preserved_random_states, workload_of
from precast.tuning.sites import DtypeChoice, TunedProgram
from precast.tuning.tasks import LEAST_PAIRS, TuningTask
from precast.tuning.training import TrainingTask

__all__ = ["SearchBudget", "duration_text", "evidence_of", "task_of", "tune"]

# Shares of the budget for: errors, costs, each float8 rule, each choice of a policy.
_ERRORS_SHARE: Final = 0.3
_COSTS_SHARE: Final = 0.15
_PRODUCTS_SHARE: Final = 0.1
_CHOICE_SHARE: Final = 0.05
_PROOF_SHARE: Final = 0.8
"""The share of the remaining time for a proof up to its first comparison."""
_SLOWDOWN: Final = 2
"""The factor by which steps under a policy may be slower than in float32; the time is planned for this."""
_TOLERATED_SHARES: Final = (1.0, 0.5, 0.25)
"""Shares of the allowed errors for the choice of a policy: the next one is tried if its measured error is too large."""
_FEWEST_SETUPS: Final = 3
"""Float32, the base policy and the chosen policy."""
_END_REASONS: Final = {"interrupted": "the search was interrupted", "time": "the budget ended"}
_PRESETS: Final = ("default", "lean", "torch")
"""Presets that are compared. `torch` gives the same bits as `torch.autocast`."""


def tune(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor] | None,
    batches: Any,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    objective: Objective = "time",
    tolerance: float = 0.01,
    budget: float = 300.0,
    options: TuningOptions | None = None,
) -> TuningResult:
    """Find the best policy for a model on this machine, and prove it by training or running copies of the model.

    Args:
        model: The model, on its device. It is copied and does not change; nor do random states.
        step: ``step(model, batch)`` runs its model on a batch and returns the loss. It opens no region and does not
            call backward. None searches for inference: copies are run without gradients, and compared by the metric in
            `options`. Under a policy they are converted, as by `precast.convert`, or attached where they cannot be.
        batches: A list of batches or a data loader, or a function that returns an iterator. The first 32 are used, and
            used again where a training needs more.
        optimizer: Makes an optimizer of parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``; AdamW by
            default.
        objective: The quantity to minimize: "time" of a training step, or "memory" that autograd keeps for the backward
            pass. For inference: "time" of the model's calls, or "memory" of its weights with the results of operations.
        tolerance: The relative difference of the loss, after training, or of the metric, that does not count.
        budget: The time limit of the search in seconds. It is refused at once if it is too small for any comparison.
        options: Rarely used arguments: a metric, candidates, the base policy, the random seed.

    Returns:
        The policy with its evidence. If no better policy is proven, it is that of float32 or the base policy. If the
        measurements cannot tell whether another policy is better than float32, `is_decided` is False.

    Raises:
        TuningError: The model cannot be copied, the step returns no scalar loss, there are no batches, the loss reaches
            no parameter, the training or the metric in float32 is not finite, the budget is too small, or an argument
            is impossible.
        PolicyError: The base policy cannot be read.

    Examples:
        >>> import precast
        >>> model = nn.Linear(8, 1)
        >>> batches = [torch.randn(4, 8) for _ in range(4)]
        >>> result = precast.tune(model, lambda model, x: model(x).square().mean(), batches, budget=60.0)
        >>> result.name in ("float32", "default", "tuned")
        True
    """
    options = options or TuningOptions()
    functions = {"step": step, "optimizer": optimizer, "metric": options.metric}
    check_arguments(model, functions, objective, tolerance, budget)
    candidates = checked_candidates(options.candidates, is_training=step is not None)
    base = as_policy(options.base)
    with preserved_random_states():  # a data loader draws a seed when it is iterated
        workload = workload_of(
            model, step, batches, optimizer=optimizer, metric=options.metric, seed=options.seed
        )
        settings = SearchSettings(
            objective,
            tolerance,
            budget,
            [dtype_name(candidate) for candidate in candidates],
            base.name,
            workload.device_type,
            options.seed,
            workload.task,
        )
        search = _PolicySearch(task_of(workload), base, settings, options.progress)
        return search.run(candidates)


def task_of(workload: Workload) -> TuningTask:
    """Return the task of a workload: training if it has a step, else inference."""
    if workload.step is not None:
        return TrainingTask(workload)
    task, count = InferenceTask(workload), len(workload.batches)
    if count < LEAST_PAIRS:
        raise TuningError(
            f"batches has {count}: for inference, the metrics of at least {LEAST_PAIRS} batches are compared. "
            "Divide them into more"
        )
    return task


class SearchBudget:
    """The time limit of a search, and the number of steps in a proof that fit into the remaining time."""

    def __init__(self, task: TuningTask, seconds: float) -> None:
        self._start = time.monotonic()
        self._task = task
        self._seconds = seconds
        self._step_seconds = 0.0
        """The time of a step in float32."""

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def share(self, share: float) -> float:
        """Return the deadline, on the clock of `time.monotonic`, at which this share of the budget is used."""
        return self._start + share * self._seconds

    def measure_step(self, setups: int) -> None:
        """Measure a step in float32, and raise an error if the budget is too small for a proof alone.

        The time before this call is not counted here, because it is mostly spent to load code.
        """
        self._step_seconds = self._task.seconds()
        if self._seconds < self._proof_seconds(self._task.steps[0], setups):
            needed = duration_text(self.sufficient(setups))
            raise TuningError(
                f"the budget of {self._seconds:g} s is too small: a {self._task.words.run} of this model in float32 "
                f"takes {self._step_seconds:.2g} s now, so a search takes about {needed}. Pass a budget of {needed} or "
                "more"
            )

    def sufficient(self, setups: int) -> float:
        """Return a budget that suffices to compare this number of setups by the shortest trainings."""
        proof = _SLOWDOWN * self._proof_seconds(self._task.steps[0], setups) / _PROOF_SHARE
        return max(proof / (1 - _ERRORS_SHARE - _COSTS_SHARE), proof + self.elapsed())

    def steps_for(self, setups: int) -> int:
        """Return the number of steps for which each training has time; 0 if it is below the minimum."""
        least, most = self._task.steps
        seconds = self._seconds - self.elapsed()
        steps = int(_PROOF_SHARE * seconds / (_SLOWDOWN * self._proof_seconds(1, setups)))
        return min(steps, most) if steps >= least else 0

    def _proof_seconds(self, steps: int, setups: int) -> float:
        """Return the time of a proof up to its first comparison, if all steps take as long as in float32."""
        return steps * self._step_seconds * setups * LEAST_PAIRS


class _PolicySearch:
    """One search with its evidence so far."""

    def __init__(
        self,
        task: TuningTask,
        base: Policy,
        settings: SearchSettings,
        progress: Callable[[TuningProgress], None] | None,
    ) -> None:
        self._budget = SearchBudget(task, settings.budget)
        self._task = task
        self._base = base
        self._settings = settings
        self._allowed = {"loss": settings.tolerance, "gradient": task.allowed_change}
        """The relative errors that a policy may have."""
        self._progress = progress
        model = task.workload.model
        self._evidence = TuningEvidence(
            model=type(model).__name__,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            settings=settings,
        )
        self._best: Setup = FLOAT32

    def run(self, candidates: Sequence[torch.dtype | str]) -> TuningResult:
        """Search, and return the result."""
        evidence = self._evidence
        try:
            self._search(candidates)
        except KeyboardInterrupt:
            evidence.interrupted = True
        best = self._best
        evidence.answer, evidence.dtype = best.name, dtype_name(best.dtype)
        evidence.seconds = self._budget.elapsed()
        if not evidence.interrupted:
            evidence.traced = self._task.traced(best)
        self._report_progress("done", evidence.because)
        policy = Policy("float32", {}, "promote") if best.policy is None else best.policy
        policy = evidence.measured_policy(policy)
        return TuningResult(policy, best.dtype, evidence.because, evidence)

    def _search(self, candidates: Sequence[torch.dtype | str]) -> None:
        task, budget, settings, evidence = self._task, self._budget, self._settings, self._evidence
        dtypes = [each for each in candidates if isinstance(each, torch.dtype)]
        rules = [str(each) for each in candidates if isinstance(each, str)]
        self._report_progress("record", f"a {task.words.run} in float32")
        budget.measure_step(_FEWEST_SETUPS)
        setups = self._setups(dtypes or [torch.bfloat16], rules)
        setup_count = next((n for n in range(len(setups), 0, -1) if budget.steps_for(n + 1)), 0)
        tried, untried = setups[:setup_count], [setup.name for setup in setups[setup_count:]]
        if not tried:
            evidence.because = "measuring errors and costs left no time to compare anything"
            evidence.undecided = untried
            evidence.would_decide = [self._sufficient_budget(_FEWEST_SETUPS)]
            return
        evidence.untried = untried
        evidence.proof = proof = prove(
            task,
            tried,
            steps=budget.steps_for(setup_count + 1) or task.steps[0],
            tolerance=settings.tolerance,
            deadline=budget.share(1.0),
            timed=settings.objective == "time",
            progress=partial(self._report_progress, "prove"),
        )
        judge = Judge(settings.objective, proof, task)
        self._best, text = judge.best(tried, {s.name for s in tried if s.policy is self._base})
        reasons = [text] if text else []
        names = {setup.name for setup in setups}
        reasons += [p.because for p in evidence.products if f"tuned with {p.rule}" not in names]
        if untried:
            reasons.append(f"there was no time to try {', '.join(untried)}")
        if proof.ended in _END_REASONS:
            reasons.append(_END_REASONS[proof.ended])
        evidence.because = "; ".join(reasons)
        evidence.interrupted = proof.ended == "interrupted"
        if self._best is FLOAT32 and not evidence.interrupted:
            undecided = judge.undecided(tried)
            evidence.undecided = [*undecided, *untried]
            evidence.would_decide = list(judge.deciding_changes(undecided))
            if untried:
                evidence.would_decide.append(self._sufficient_budget(len(setups) + 1))

    def _sufficient_budget(self, setups: int) -> str:
        return f"a budget of {duration_text(self._budget.sufficient(setups))} or more"

    def _setups(self, dtypes: Sequence[torch.dtype], rules: Sequence[str]) -> list[Setup]:
        """Return the setups of the base policy, then those of chosen policies, and last those of presets."""
        task, share = self._task, (_ERRORS_SHARE + _COSTS_SHARE) / len(dtypes)
        setups: list[Setup] = []
        presets: list[Setup] = []
        for number, dtype in enumerate(dtypes, 1):
            self._report_progress(
                "record", f"the operations of a {task.words.run}, in {dtype_name(dtype)}"
            )
            program = task.record(self._base, dtype)
            errors = measure_sensitivity(
                task.meter,
                program,
                self._base,
                **self._allowed,
                deadline=self._budget.share(number * share - _COSTS_SHARE / len(dtypes)),
                progress=partial(self._report_progress, "errors"),
            )
            costs = measure_costs(
                program,
                deadline=self._budget.share(number * share),
                progress=partial(self._report_progress, "costs"),
            )
            self._evidence.add_search(program, errors, costs)
            suffix = f" in {dtype_name(dtype)}" if len(dtypes) > 1 else ""
            for policy in (self._base, *_other_presets(self._base, program)):
                setup = Setup(f"{policy.name}{suffix}", policy, dtype)
                setup = replace(setup, silent=task.meter.errors(setup).silent)
                (setups if policy is self._base else presets).append(setup)
            choice, policy, silent = self._choose(program, errors, costs)
            if _rules_for(policy, program) != _rules_for(self._base, program):
                setups.append(Setup(f"tuned{suffix}", policy, dtype, silent))
            if number == 1:
                setups += self._with_products(program, setups, choice, policy, rules)
        return setups + presets

    def _choose(
        self, program: TunedProgram, errors: Sensitivity, costs: ProgramCosts
    ) -> tuple[DtypeChoice, Policy, str]:
        """Return the choice with the least cost within the allowed errors, its policy, and an untrained parameter.

        The error of all 16-bit operations together may be larger than the sum of errors that were measured in groups.
        """
        objective = self._settings.objective
        loss, gradient = (each**2 for each in self._allowed.values())
        for share in _TOLERATED_SHARES:
            choice = choose(
                program,
                costs,
                errors.sites,
                objective=objective,
                loss=loss * share**2,
                gradient=gradient * share**2,
                seconds=max(1.0, _CHOICE_SHARE * self._settings.budget),
            )

            def reason(row: PolicyRow, choice: DtypeChoice = choice) -> str:
                return reason_of(row, program, costs, errors.sites, choice, objective=objective)

            policy = policy_of(choice, program, self._base, reason=reason)
            errors_of_policy = self._task.meter.errors(Setup("tuned", policy, program.low))
            if errors_of_policy.fits(loss, gradient):
                break
        return choice, policy, errors_of_policy.silent

    def _with_products(
        self,
        program: TunedProgram,
        in_16_bits: Sequence[Setup],
        choice: DtypeChoice,
        policy: Policy,
        rules: Sequence[str],
    ) -> list[Setup]:
        """Return a setup for each rule for products that some products of the model can have.

        Float8 rules are added to the last 16-bit setup with products, and `lower_out_fp32` to the chosen policy.
        """
        meter, settings = self._task.meter, self._settings
        with_products = [s for s in in_16_bits if s.policy and products_of(program, s.policy)]
        changed_setup = [*in_16_bits, *with_products][-1]
        setups = []
        for rule in rules:
            self._report_progress("costs", f"products in {rule}")
            if rule in FLOAT8_RULES:
                setup, products = choose_products(
                    meter,
                    program,
                    changed_setup,
                    rule,
                    objective=settings.objective,
                    deadline=time.monotonic() + _PRODUCTS_SHARE * settings.budget,
                    **self._allowed,
                )
            else:
                setup, products = choose_results(meter, program, choice, policy, **self._allowed)
            self._evidence.products.append(products)
            setups += [setup] if setup is not None else []
        return setups

    def _report_progress(self, stage: Any, text: str) -> None:
        if self._progress is not None:
            elapsed, budget = self._budget.elapsed(), self._settings.budget
            self._progress(TuningProgress(stage, text, elapsed, budget, self._best.name))


def duration_text(seconds: float) -> str:
    """Return a time as the command line accepts it, rounded up to whole seconds or minutes."""
    whole = math.ceil(seconds)
    return f"{whole}s" if whole <= 90 else f"{math.ceil(seconds / 60)}m"


def _other_presets(base: Policy, program: TunedProgram) -> Iterator[Policy]:
    """Yield the presets whose rules for a program differ from those of the base policy and of earlier presets."""
    earlier = [_rules_for(base, program)]
    for name in _PRESETS:
        preset = Policy.load(name)
        rules = _rules_for(preset, program)
        if rules not in earlier:
            earlier.append(rules)
            yield preset


def _rules_for(policy: Policy, program: TunedProgram) -> object:
    """Return the rules of a policy that have an effect on a program."""
    table, _ = expanded_rules(policy, program.device)
    called = {call.overload for site in program.sites for call in site.calls}
    rules = {(name, table[name].rule) for name in called if name in table}
    rows = {
        (name, rule) for name, rule in rules if rule is not Rule.KEEP
    }  # `keep` is the same as no row
    modules = {pattern: repr(rule) for pattern, rule in policy.modules.items()}
    return policy.mixed, rows, modules
