"""The verdict on a process: what precision does for it, what is wrong, and what to do first, in sentences.

Invariants: every number in a sentence is of the document; what was not watched is said, never taken for healthy; wrong
numbers come before slow operations. Names stand between backticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from precast.report.numbers import in_words, module_of, offender, overflow
from precast.report.schema import Advice, Document, Finding, Totals, Verdict
from precast.report.tree import seconds_by_dtype
from precast.report.words import count, duration, joined, plural, share, shortened, size

__all__ = ["all_findings", "beyond_scale", "cost_words", "lost", "rules_without_effect", "verdict"]

_NUMERIC = ("overflow", "underflow", "nonfinite", "nan", "inf", "saturation")
_TELLING = 0.01  # a part below this is not worth a sentence among the problems
_DEAR = 0.3  # of the time: with so much for casts, float32 is worth a try
_MOST = 3  # sentences of one kind; the page lists the rest


def verdict(document: Document) -> Verdict:
    """The verdict on the document of one process."""
    costs = _costly(document)
    problems = [
        *_ending(document),
        *_lost_steps(document),
        *beyond_scale(document),
        *rules_without_effect(document),
        *_told(document),
        *_dear_casts(document),
        *(_cost(each) for each in costs[:_MOST]),
    ]
    if len(costs) > _MOST:
        problems.append(f"{plural(len(costs) - _MOST, 'more finding')} with a cost: see below.")
    first = _advice(document, costs)
    level = _level(document, problems)
    return {
        "level": level,
        "headline": _headline(document, costs),
        "precision": list(_precision(document)),
        "problems": problems,
        "first": first,
        "notes": list(_notes(document)),
    }


def lost(document: Document) -> int:
    """How many steps were skipped."""
    return document["run"].get("skipped", sum(step["skipped"] for step in document["steps"]))


def _of_steps(document: Document) -> str:
    skipped = lost(document)
    steps = plural(document["run"]["steps"], "step")
    return f"{count(skipped)} of {steps} {'was' if skipped == 1 else 'were'}"


def all_findings(document: Document) -> list[Finding]:
    """The document's findings and the trace's, each once, the costliest first."""
    every = [*document["findings"], *(document["trace"]["findings"] if document["trace"] else [])]
    once = [each for i, each in enumerate(every) if each not in every[:i]]
    return sorted(once, key=lambda each: -_weight(each))


def _weight(finding: Finding) -> float:
    if _is_numeric(finding):
        return 1e9  # wrong numbers first
    return finding["cost"]["seconds"] or finding["cost"]["share"] or 0.0


def _is_numeric(finding: Finding) -> bool:
    return finding["kind"].startswith(_NUMERIC)


def _failed(document: Document) -> bool:
    run = document["run"]
    return run["ended"] == "exception" or (run["ended"] == "exit" and run["code"] not in (0, None))


def _level(document: Document, problems: list[str]) -> Literal["good", "warning", "bad"]:
    steps = document["run"]["steps"]
    if _failed(document) or (steps and lost(document) > 0.1 * steps):
        return "bad"
    return "warning" if problems else "good"


# --- what precision does ---


def _headline(document: Document, costs: list[Finding]) -> str:
    run = document["run"]
    if _failed(document):
        return "The run ended with an error" + (
            f": {shortened(run['message'])}" if run["message"] else "."
        )
    first, skipped = offender(document), lost(document)
    if skipped:
        by = f": {in_words(first)} was the first that was not finite" if first else ""
        return f"{_of_steps(document)} lost{by}."
    if first:
        said = in_words(first)
        return f"{said[0].upper()}{said[1:]} was not finite at step {first['step']}, and no step was skipped."
    if any(each["kind"] == "underflow" for each in all_findings(document)):
        return "Small gradients are lost: they are too small for the format they are in."
    dear = _dear_part(document)
    if dear:
        return f"Mixed precision may not pay for this run: casts took {share(dear)} of its time."
    part = sum(each["cost"]["share"] or 0 for each in costs)
    if part >= _TELLING:
        return (
            f"Mixed precision works for this run; {share(min(part, 1))} of its time could be saved."
        )
    if not document["counts"] and _elsewhere(document):
        return "This run computed in threads that were not watched: what precision did there is not known."
    if not document["counts"]:
        return "No operation with a rule ran in a region: this run has no mixed precision."
    return "Mixed precision works for this run; nothing wrong was found."


def _precision(document: Document) -> Iterator[str]:
    trace = document["trace"]
    if trace and trace["rows"]:
        dtypes, totals = seconds_by_dtype(trace["rows"]), trace["totals"]
        total = sum(dtypes.values()) or 1.0
        parts = [
            f"{share(s / total)} {'on integers' if d == 'other' else f'in {d}'}"
            for d, s in dtypes.items()
            if s / total >= 0.005
        ]
        yield (
            f"In {plural(totals['steps'], 'step')} that {'was' if totals['steps'] == 1 else 'were'} "
            f"traced, operations spent their time like this: {joined(parts)}."
            if parts
            else "No operation that was traced took any time."
        )
        if totals["casts"] or totals["cached"]:
            yield _casts(totals)
        if trace["saved"]:
            saved = sorted(trace["saved"].items(), key=lambda item: -item[1])
            parts = [f"{size(number)} in {dtype}" for dtype, number in saved]
            yield f"Kept for backward: {joined(parts)}."
        return
    calls = sum(each["calls"] for each in document["counts"])
    if calls:
        lower = sum(each["calls"] for each in document["counts"] if each["rule"] == "lower")
        casts = sum(each["casts"] for each in document["counts"])
        yield (
            f"Of {plural(calls, 'call')} of operations with a rule, {share(lower / calls)} ran in "
            f"16 bits; {plural(casts, 'cast')} were made for them."
        )


def _casts(totals: Totals) -> str:
    return (
        f"Casts took {share(_part_of_casts(totals))} of the time ({duration(totals['cast_seconds'])}): "
        f"{count(totals['casts'])} casts wrote {size(totals['cast_bytes'])}, and "
        f"{count(totals['cached'])} were saved by the cache."
    )


# --- what is wrong ---


def _ending(document: Document) -> Iterator[str]:
    run = document["run"]
    after = f"after {plural(run['steps'], 'step')} and {duration(run['seconds'])}"
    if run["ended"] == "exception":
        yield f"The run ended {after} with this: {_sentence(run['message'] or 'an exception')}"
    elif run["ended"] == "interrupted":
        yield f"The run was interrupted {after}: what follows is about a part of it."
    elif _failed(document):
        yield f"The run ended with exit code {run['code']}, {after}."


def _lost_steps(document: Document) -> Iterator[str]:
    skipped, first = lost(document), offender(document)
    steps = [step["step"] for step in document["steps"] if step["skipped"]]
    if skipped:
        yield (
            f"{_of_steps(document)} skipped "
            f"({share(skipped / max(document['run']['steps'], 1))}), as gradients were not finite"
            + (f"; the first at step {steps[0]}." if steps else ".")
        )
    if first:
        yield _sentence(first["message"])


_NO_LOWER_SCALE = {
    "weights": "the parameters themselves held infinity or NaN",
    "loss": "the loss itself was infinite or NaN before it was scaled, in many skipped steps in a row",
    "floor": "many steps in a row were skipped at a scale of {scale:.3g}, which falls no further",
    "skips": "as many steps in a row were skipped as the scaler's max_consecutive_skips allows",
}


def beyond_scale(document: Document) -> Iterator[str]:
    """The first step at which it was clear that no lower scale helps, and why."""
    for found in document.get("verdicts", [])[:1]:
        because = _NO_LOWER_SCALE[found["reason"]].format(scale=found["scale"])
        yield f"At step {found['step']} no lower scale would have helped: {because}."


def rules_without_effect(document: Document) -> Iterator[str]:
    """The rules for modules that did nothing."""
    rules = document["run"].get("module_rules")
    for problem in rules["problems"][:_MOST] if rules else []:
        yield _sentence(problem[0].upper() + problem[1:])


def _told(document: Document) -> Iterator[str]:
    """Findings about numbers that no other sentence here tells."""
    first = offender(document)
    untold = [
        each
        for each in all_findings(document)
        if (_is_numeric(each) and not (first and each["where"]["module"] == module_of(first)))
        or _weight(each) == 0
    ]
    yield from (_sentence(each["title"]) for each in untold[:_MOST])


def _dear_casts(document: Document) -> Iterator[str]:
    if _dear_part(document):
        yield "Operations may be too small for 16 bits to pay: casts took much of the traced time."


def _dear_part(document: Document) -> float:
    """The part of the time that casts took, where it is so much that float32 may be faster; else 0."""
    part = _part_of_casts(document["trace"]["totals"]) if document["trace"] else 0.0
    return part if part >= _DEAR else 0.0


def _part_of_casts(totals: Totals) -> float:
    return totals["cast_seconds"] / totals["seconds"] if totals["seconds"] else 0.0


def _costly(document: Document) -> list[Finding]:
    """Findings that cost a part of the time worth a sentence."""
    return [
        each
        for each in all_findings(document)
        if not _is_numeric(each) and _weight(each) > 0
        if each["cost"]["share"] is None or each["cost"]["share"] >= _TELLING
    ]


def _cost(finding: Finding) -> str:
    return f"{_sentence(finding['title'])[:-1]} ({cost_words(finding)})."


def cost_words(finding: Finding) -> str:
    """What a finding costs: "3.4% of the time, 20 ms, 1.0 MiB"; empty where nothing is known."""
    cost, parts = finding["cost"], []
    if cost["share"] is not None:
        parts.append(f"{share(cost['share'])} of the time")
    if cost["seconds"] is not None:
        parts.append(duration(cost["seconds"]))
    if cost["bytes"]:
        parts.append(size(cost["bytes"]))
    return ", ".join(parts)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


# --- what to do ---


def _advice(document: Document, costs: list[Finding]) -> Advice | None:
    numeric = [each for each in all_findings(document) if _is_numeric(each)]
    first, skipped = offender(document), lost(document)
    if numeric:
        gain = _steps_back(document) or cost_words(numeric[0])
        return _from_finding(numeric[0], gain or "numbers that are not lost")
    if first:
        gain = _steps_back(document) or "numbers that stay finite"
        return _from_finding(overflow(document, first), gain)
    if skipped and document["health"] is None:
        return {
            "text": "Run it once more with `--health`: the report then names what overflows first.",
            "gain": _steps_back(document),
            "policy": None,
        }
    if costs:
        return _from_finding(costs[0], cost_words(costs[0]))
    dear = _dear_part(document)
    if dear:
        return {
            "text": "Compare its time with float32's, and with that of weights which are held between regions: "
            "`precast.attach(model, optimizer=optimizer)`.",
            "gain": f"at most {share(dear)} of the time",
            "policy": None,
        }
    is_float32 = not (document["counts"] or _elsewhere(document) or _in_16_bits(document))
    if document["run"]["steps"] and is_float32:
        return _open_a_region(document["run"]["devices"])
    return None


def _open_a_region(devices: list[str]) -> Advice:
    kind = next((each.split(":")[0] for each in devices if not each.startswith("cpu")), "cpu")
    return {
        "text": f'Compute the forward pass and the loss `with precast.autocast("{kind}")`, and backward outside.',
        "gain": "memory, and time where this machine computes faster in 16 bits; precast doctor measures that",
        "policy": None,
    }


def _in_16_bits(document: Document) -> bool:
    rows = document["trace"]["rows"] if document["trace"] else []
    return not {"float16", "bfloat16"}.isdisjoint(seconds_by_dtype(rows))


def _from_finding(finding: Finding, gain: str) -> Advice:
    return {"text": _sentence(finding["suggestion"]), "gain": gain, "policy": finding["policy"]}


def _steps_back(document: Document) -> str:
    skipped, steps = lost(document), document["run"]["steps"]
    return f"{plural(skipped, 'step')} of {count(steps)} that would not be lost" if skipped else ""


# --- what was not seen ---


def _elsewhere(document: Document) -> int:
    """How many steps ended in threads that were not watched."""
    return document["run"].get("elsewhere", 0)


def _notes(document: Document) -> Iterator[str]:
    trace, steps = document["trace"], document["steps"]
    rules = document["run"].get("module_rules")
    if rules and rules["models"]:
        acted = [
            f"{plural(number, 'module')} of `{kind}`" for kind, number in rules["models"].items()
        ]
        yield f"The policy's rules for modules acted on {joined(acted)}."
    if _elsewhere(document):
        yield (
            f"{count(_elsewhere(document))} of {plural(document['run']['steps'], 'step')} ended in other threads than "
            "the one that loaded PyTorch: of those no operation was counted or traced."
        )
    if trace is None or not trace["rows"]:
        yield "No operation was traced: `--steps 2:5` shows which ran in which dtype, and what casts cost."
    else:
        if trace["dropped"]:
            yield f"{plural(trace['dropped'], 'call')} have no row of their own; the totals have them."
        yield from (_sentence(note) for note in trace.get("notes", []))
    if document["health"] is None:
        yield "Numbers were not watched: `--health` shows ranges, underflow and overflow."
    if steps and len(steps) < document["run"]["steps"]:
        yield (
            f"{count(len(steps))} of {plural(document['run']['steps'], 'step')} are shown, spread evenly."
        )
