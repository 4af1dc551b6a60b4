"""The result of a search as one HTML file without any other file, network or server; light and dark.

Invariants: all text of the user's program is escaped, in HTML by the template and in the data as JSON without `<`; the
page's own policy (CSP) forbids every request. The answer, the policy and the figures are readable without a script.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from typing import Any

from precast.report.page import page_of
from precast.tuning.evidence import TuningEvidence, as_values, setup_cells
from precast.tuning.proof import Proof
from precast.tuning.words import words_for

__all__ = ["html"]

_OUTSIDE = "outside of all modules"
_ENDED = {
    "proven": "everything was decided",
    "time": "the budget was used up",
    "seeds": "all seeds or batches were used",
    "interrupted": "by Ctrl-C",
}


def html(evidence: TuningEvidence, policy: str) -> str:
    """Return the page; `policy` is the text of the policy's file."""
    settings, proof = evidence.settings, evidence.proof
    figures = [*proof.figures.values()] if proof else []
    data = {
        "objective": settings.objective,
        "tolerance": settings.tolerance,
        "words": asdict(words_for(settings.task)),
        "points": [*_points(evidence, proof)] if proof else [],
        "curves": [
            {"name": e.name, "mean": [*map(statistics.fmean, zip(*e.curves, strict=False))]}
            for e in figures
        ],
        "nodes": _nodes(evidence),
        "sites": [
            {"dtype": search.dtype, **asdict(site)}
            for search in evidence.searches
            for site in search.sites
        ],
    }
    return page_of(
        _asset("page.html.jinja"),
        as_values(data),
        script=_asset("tuning.js"),
        style=_asset("style.css"),
        title=f"{evidence.model} - precast tune",
        version=evidence.precast,
        evidence=evidence,
        words=words_for(settings.task),
        is_training=settings.task == "training",
        facts=_facts(evidence),
        rows=setup_cells(proof) if proof else [],
        policy=policy,
        charts=data,
    )


def _points(evidence: TuningEvidence, proof: Proof) -> Iterable[dict[str, Any]]:
    """Yield a point of the chart for each setup: its cost against its loss relative to float32, both with intervals.

    A setup that failed, or whose loss is unknown, has no point.
    """
    for figures in proof.figures.values():
        cost = [float(figures.kept_bytes)] * 3
        if evidence.settings.objective == "time":
            times = figures.seconds
            cost = statistics.quantiles(times, n=4) if len(times) > 1 else []
        loss = [0.0] * 3
        if figures.name != "float32":
            difference = proof.comparison(figures.name).difference
            loss = [difference.low, difference.middle, difference.high]
        if cost and not figures.failure and all(map(math.isfinite, loss)):
            is_answer = figures.name == evidence.answer
            yield {"name": figures.name, "cost": cost, "loss": loss, "is_answer": is_answer}


def _nodes(evidence: TuningEvidence) -> list[dict[str, Any]]:
    """Return the modules as they ran under the answer, with the errors of 16 bits in each and in the modules inside."""
    searches = {search.dtype: search.sites for search in evidence.searches}
    sites = searches.get(evidence.dtype, next(iter(searches.values()), []))
    nodes = []
    for node in evidence.traced:
        inside = [site for site in sites if _is_inside(site.module, node.name)]
        error = math.sqrt(math.fsum(site.gradient for site in inside)) if inside else None
        barred = [f"{site.op}: {site.barred}" for site in inside if site.barred]
        nodes.append({**asdict(node), "gradient": error, "barred": barred})
    return nodes


def _is_inside(module: str | None, name: str) -> bool:
    if module is None or name == _OUTSIDE:
        return module is None and name == _OUTSIDE
    return not name or f"{module}.".startswith(f"{name}.")


def _facts(evidence: TuningEvidence) -> dict[str, str]:
    settings, proof = evidence.settings, evidence.proof
    facts = {
        "Model": f"{evidence.model}, {evidence.parameters:,} parameters",
        "Task": f"{settings.objective} of {settings.task}",
        "Tolerance": f"{100 * settings.tolerance:.3g}%",
        "Region": evidence.dtype,
        "Took": f"{evidence.seconds:.0f} s of {settings.budget:.0f} s",
        "Seed": str(settings.seed),
        "Machine": evidence.machine,
        "PyTorch": evidence.torch,
    }
    if proof is not None:
        facts["Proof"] = words_for(settings.task).extent(proof.seeds, proof.steps)
        facts["Ended"] = _ENDED[proof.ended]
    return facts


def _asset(name: str) -> str:
    return resources.files("precast.tuning").joinpath("assets", name).read_text("utf-8")
