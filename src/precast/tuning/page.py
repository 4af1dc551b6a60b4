"""The result of a search as one HTML file that needs nothing else: no network, no server; light and dark.

Invariants: all text of the user's program is escaped, in HTML by the template and in the data as JSON without `<`; the
page's own policy (CSP) forbids every request. The answer, the policy and what was tried are there without a script.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from typing import Any

from precast._internal.display import milliseconds
from precast.diagnostics.report.page import needed
from precast.tuning.evidence import Compared, Evidence, ProofEvidence, Trial
from precast.tuning.intervals import mean_interval
from precast.tuning.words import words_for

__all__ = ["html", "points"]

_SCRIPTS = ("words.js", "table.js", "tree.js", "charts.js")
"""Those of the report of a run, which draw tables, trees and charts."""
_OUTSIDE = "outside of all modules"


def html(evidence: Evidence, policy: str) -> str:
    """The page.

    Args:
        evidence: what was measured.
        policy: the text of the policy's file.

    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    jinja2, plotly = needed()
    from markupsafe import Markup as AsItIs  # our own text, and JSON that `_json` made

    words = words_for(evidence.settings.task)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    data = {
        "objective": evidence.settings.objective,
        "tolerance": evidence.settings.tolerance,
        "answer": evidence.answer,
        "words": asdict(words),
        "points": points(evidence),
        "curves": _curves(evidence.proofs[-1]) if evidence.proofs else [],
        "nodes": _nodes(evidence),
        "sites": [
            {"dtype": search.dtype, **asdict(site)}
            for search in evidence.searches
            for site in search.sites
        ],
    }
    page: str = environment.from_string(_own("page.html.jinja")).render(
        evidence=evidence,
        words=words,
        is_training=evidence.settings.task == "training",
        facts=[(name, value) for name, value in _facts(evidence).items() if value],
        trials=[_row(proof, trial) for proof in evidence.proofs for trial in proof.trials],
        policy=policy,
        style=AsItIs(_shared("style.css") + _own("style.css")),
        data=AsItIs(_json(data)),
        plotly=AsItIs(plotly),
        script=AsItIs("\n".join([*map(_shared, _SCRIPTS), _own("tuning.js")])),
    )
    return page


def points(evidence: Evidence) -> list[dict[str, Any]]:
    """What was tried, as points of a chart: time or memory against the loss relative to float32, both with intervals.

    A setup that failed, or whose loss nobody knows yet, has no point.
    """
    found = []
    for number, proof in enumerate(evidence.proofs, 1):
        for trial in proof.trials:
            cost = _cost(trial, evidence.settings.objective)
            loss = _against_float32(proof, trial)
            if cost is None or loss is None or trial.failure:
                continue
            found.append(
                {
                    "name": trial.name,
                    "round": number,
                    "rounds": len(evidence.proofs),
                    "cost": cost,
                    "loss": loss,
                    "is_answer": trial.name == evidence.answer and number == len(evidence.proofs),
                }
            )
    return found


def _cost(trial: Trial, objective: str) -> list[float] | None:
    """The low end, the middle and the high end of what is made small."""
    if objective == "memory":
        kept = float(trial.kept_bytes)
        return [kept, kept, kept]
    if len(trial.seconds) < 2:
        return None
    return [float(each) for each in statistics.quantiles(trial.seconds, n=4)]


def _against_float32(proof: ProofEvidence, trial: Trial) -> list[float] | None:
    if trial.name == "float32":
        return [0.0, 0.0, 0.0]
    found = _compared(proof, trial)
    if found is None:
        return None
    ends = found.difference.low, found.difference.middle, found.difference.high
    return None if None in ends else [float(end) for end in ends if end is not None]


def _compared(proof: ProofEvidence, trial: Trial) -> Compared | None:
    return next(
        (c for c in proof.comparisons if (c.name, c.against) == (trial.name, "float32")), None
    )


def _curves(proof: ProofEvidence) -> list[dict[str, Any]]:
    """For each setup the mean loss of each step over the seeds, and where it lies with 95%."""
    found = []
    for trial in proof.trials:
        shortest = min(map(len, trial.curves), default=0)
        columns = [[curve[step] for curve in trial.curves] for step in range(shortest)]
        known = [[loss for loss in column if loss is not None] for column in columns]
        intervals = [mean_interval(column) if column else None for column in known]
        found.append(
            {
                "name": trial.name,
                "mean": [
                    i and _finite(statistics.fmean(c))
                    for i, c in zip(intervals, known, strict=True)
                ],
                "low": [i and _finite(i.low) for i in intervals],
                "high": [i and _finite(i.high) for i in intervals],
            }
        )
    return found


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _nodes(evidence: Evidence) -> list[dict[str, Any]]:
    """The modules as they ran under the answer, with the errors of 16 bits in them and in those inside."""
    names = [search.dtype for search in evidence.searches]
    dtype = evidence.dtype if evidence.dtype in names else (names or [""])[0]
    sites = [s for search in evidence.searches if search.dtype == dtype for s in search.sites]
    found = []
    for node in evidence.traced:
        inside = [site for site in sites if _is_in(site.module, node.name)]
        found.append(
            {
                **asdict(node),
                "loss": _sum(site.loss for site in inside),
                "gradient": _sum(site.gradient for site in inside),
                "barred": [f"{site.op}: {site.barred}" for site in inside if site.barred],
                "measured": bool(inside),
            }
        )
    return found


def _is_in(module: str | None, name: str) -> bool:
    if module is None or name == _OUTSIDE:
        return module is None and name == _OUTSIDE
    return not name or f"{module}.".startswith(f"{name}.")


def _sum(squares: Iterable[float | None]) -> float | None:
    """The relative error of several together; None where one of them is infinite."""
    known = list(squares)
    if None in known:
        return None
    return math.sqrt(math.fsum(each for each in known if each is not None))


def _facts(evidence: Evidence) -> dict[str, str]:
    asked = evidence.settings
    proof = evidence.proofs[-1] if evidence.proofs else None
    return {
        "Model": evidence.model,
        "Parameters": f"{evidence.parameters:,}",
        "Task": asked.task,
        "Objective": asked.objective,
        "Tolerance": f"{100 * asked.tolerance:.3g}%",
        "Region": evidence.dtype,
        "Proof": "" if proof is None else words_for(asked.task).extent(proof.seeds, proof.steps),
        "Ended": "" if proof is None else _ENDED[proof.ended],
        "Took": f"{evidence.seconds:.0f} s of {asked.budget:.0f} s",
        "Seed": str(asked.seed),
        "Machine": evidence.machine,
        "PyTorch": evidence.torch,
        "Date": evidence.date[:16].replace("T", " "),
    }


_ENDED = {
    "proven": "all was told apart",
    "time": "the budget was used up",
    "seeds": "all seeds or batches were used",
    "interrupted": "by Ctrl-C",
}


def _row(proof: ProofEvidence, trial: Trial) -> dict[str, str]:
    """A line of the table of what was tried."""
    found = _compared(proof, trial)
    difference = found.difference if found else None
    ratio = found.ratio if found else None
    return {
        "name": trial.name,
        "dtype": trial.dtype,
        "step": milliseconds(statistics.median(trial.seconds)) if trial.seconds else "-",
        "ratio": "-"
        if ratio is None or ratio.high is None
        else f"{ratio.low:.2f} to {ratio.high:.2f}",
        "kept": f"{trial.kept_bytes / 2**20:,.2f} MiB",
        "loss": f"{statistics.fmean(trial.finals):.5g}" if trial.finals else "-",
        "difference": "-"
        if difference is None or difference.high is None
        else f"{difference.low:+.2%} to {difference.high:+.2%}",
        "said": trial.failure or (found.loss if found else ""),
    }


def _own(name: str) -> str:
    return resources.files("precast.tuning").joinpath("assets", name).read_text("utf-8")


def _shared(name: str) -> str:
    return resources.files("precast.diagnostics.report").joinpath("assets", name).read_text("utf-8")


def _json(data: object) -> str:
    """JSON that nothing in an HTML script element can end."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # all beyond ASCII is escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
