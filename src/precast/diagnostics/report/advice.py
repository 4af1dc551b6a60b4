"""What to do first about a run, and what that is expected to gain.

Invariants: wrong numbers come before slow operations; a gain is what was measured to be lost, and never more.
"""

from __future__ import annotations

from precast.diagnostics.report.evidence import (
    dear_part,
    elsewhere,
    lost,
    nonfinite_losses,
    of_steps,
    ran_lower,
    rules_ran,
    was_traced,
)
from precast.diagnostics.report.numbers import offender, overflow
from precast.diagnostics.report.remedies import Remedy, all_findings, cost_words, is_numeric
from precast.diagnostics.report.tree import seconds_by_dtype
from precast.diagnostics.report.words import sentence, share
from precast.diagnostics.schema import Advice, Document, Finding

__all__ = ["advice"]

_GAIN = (
    "memory, and time where this machine computes faster in 16 bits; precast doctor measures that"
)


def advice(document: Document, costs: list[Remedy]) -> Advice | None:
    """What to do first; None where there is nothing to do.

    Args:
        document: of the run.
        costs: what would mend a cost that is worth it, the dearest first.
    """
    numeric = [each for each in all_findings(document) if is_numeric(each)]
    first, skipped = offender(document), lost(document)
    if numeric:
        back = "" if numeric[0].kind == "underflow" else _steps_back(document)
        return _from_finding(numeric[0], back or "numbers that are not lost")
    if first:
        gain = _steps_back(document) or "numbers that stay finite"
        return _from_finding(overflow(document, first), gain)
    if (skipped or nonfinite_losses(document)) and document.health is None:
        what = "overflows first" if skipped else "is infinite or NaN first"
        return Advice(
            text=f"Run it once more with `--health`: the report then names what {what}.",
            gain=_steps_back(document),
            policy=None,
        )
    if costs:
        gain = f"at most {cost_words(costs[0].cost)}"
        return _from_finding(costs[0].worst, gain)
    dear = dear_part(document)
    if dear:
        return Advice(
            text="Compare its time with float32's, and with that of weights which are held between regions: "
            "`precast.attach(model, optimizer=optimizer)`.",
            gain=f"at most {share(dear)} of the traced time",
            policy=None,
        )
    return _lower(document)


def _lower(document: Document) -> Advice | None:
    """How a run in float32 gets 16 bits."""
    dtypes = seconds_by_dtype(document.trace.rows if document.trace else [])
    is_float32 = not was_traced(document) or "float32" in dtypes
    if not document.run.steps or ran_lower(document) != "no" or not is_float32:
        return None
    if rules_ran(document):
        return Advice(
            text="If this is not what you want, look at the policy: operations with the rule `lower` run in 16 "
            'bits, and a policy file without `base = "default"` has no rules but its own.',
            gain=_GAIN,
            policy=None,
        )
    if elsewhere(document):
        return None
    return _open_a_region(document.run.devices)


def _open_a_region(devices: list[str]) -> Advice:
    kind = next((each.split(":")[0] for each in devices if not each.startswith("cpu")), "cpu")
    return Advice(
        text=f'Compute the forward pass and the loss inside `with precast.autocast("{kind}"):`, '
        "and run backward outside.",
        gain=_GAIN,
        policy=None,
    )


def _from_finding(finding: Finding, gain: str) -> Advice:
    return Advice(sentence(finding.suggestion), gain, finding.policy)


def _steps_back(document: Document) -> str:
    skipped = lost(document)
    return f"up to {of_steps(document, skipped)}, lost now" if skipped else ""
