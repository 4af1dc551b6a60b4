"""The summary of a process, in sentences: its precision, its problems, and the first thing to do.

Invariants: every number in a sentence is from the document; parts that were not watched are named, and never count as
healthy; wrong values come before slow operations; a gain is at most a measured cost, and no sentence claims a gain over
float32, which a run does not measure. Names are between backticks. For each sentence, `tests/report/test_true.py` has a
run in which it would be false.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast._internal import cures
from precast._internal.display import plural
from precast.report.evidence import (
    expensive_casts,
    is_mixed,
    lost,
    of_steps,
    on_casts,
    ran_lower,
    rows_of,
    rules_ran,
    slow_dtypes,
    steps_counted,
)
from precast.report.numbers import in_words, module_of, offender, overflow
from precast.report.remedies import (
    Remedy,
    all_findings,
    cost_words,
    is_numeric,
    remedies,
    sum_costs,
    time_words,
)
from precast.report.schema import (
    Advice,
    Finding,
    RunDocument,
    RunSummary,
    SummaryLevel,
    TraceData,
    TraceTotals,
)
from precast.report.tree import seconds_by_dtype
from precast.report.words import be, count, duration, joined, sentence, share, shortened, size

__all__ = ["beyond_scale", "code_mistakes", "lint_warnings", "rules_without_effect"]
__all__ += ["summary_of", "untraced"]

_MOST = 3  # sentences of one kind; the page lists the rest
_BAD = 0.1  # of the steps: where more are skipped or have a loss that is not finite, the run is bad


def summary_of(document: RunDocument) -> RunSummary:
    """Return the summary of the document of one process."""
    costs = _costly(document)
    problems = [
        *_ending(document),
        *_lost_steps(document),
        *beyond_scale(document),
        *rules_without_effect(document),
        *_losses(document),
        *code_mistakes(document),
        *_nonfinite_state(document),
        *_nonfinite_outputs(document),
        *_slow_dtypes(document),
        *_other_findings(document),
        *_expensive_casts(document),
        *(_cost(each) for each in costs[:_MOST]),
    ]
    if len(costs) > _MOST:
        problems.append(f"{plural(len(costs) - _MOST, 'more finding')} with a cost: see below.")
    return RunSummary(
        level=_level(document, problems),
        headline=_headline(document, problems, costs),
        precision=list(_precision(document)),
        problems=problems,
        first=_advice(document, costs),
        notes=list(_notes(document)),
    )


def _failed(document: RunDocument) -> bool:
    run = document.run
    return run.ended == "exception" or (run.ended == "exit" and run.code not in (0, None))


def _level(document: RunDocument, problems: list[str]) -> SummaryLevel:
    run = document.run
    bad = lost(document) + run.nonfinite_losses
    outputs = run.evaluations and run.nonfinite_outputs > _BAD * run.evaluations
    if _failed(document) or bad > _BAD * run.steps or run.nonfinite or outputs:
        return "bad"
    if problems:
        return "warning"
    is_good = is_mixed(document) and (rows_of(document) or steps_counted(document))
    return "good" if is_good else "neutral"


# --- precision ---


def _headline(document: RunDocument, problems: list[str], costs: list[Remedy]) -> str:
    run = document.run
    if _failed(document):
        return f"The run ended with an error{f': {shortened(run.message)}' if run.message else '.'}"
    wrong = _wrong_numbers(document) or next(code_mistakes(document), None)
    if wrong:
        return wrong
    text = _works(document, problems, costs) if is_mixed(document) else _not_mixed(document)
    if run.ended == "interrupted":
        return f"The run was interrupted. Until then: {text[0].lower()}{text[1:]}"
    return text


def _wrong_numbers(document: RunDocument) -> str | None:
    first, skipped = offender(document), lost(document)
    if document.run.nonfinite and not document.run.nonfinite_losses:  # else the losses come first
        return next(_nonfinite_state(document))
    if skipped:
        by = f": {in_words(first)} was the first that was not finite" if first else ""
        return f"{of_steps(document, skipped)} {be(skipped)} lost{by}."
    if document.run.nonfinite_losses:
        return f"{_nonfinite(document)}."
    if first:
        text = in_words(first)
        return f"{text[0].upper()}{text[1:]} was not finite at step {first.step}, and no step was skipped."
    if document.run.nonfinite_outputs:
        return next(_nonfinite_outputs(document))
    kinds = {each.kind for each in all_findings(document)}
    return next((text for kind, text in _LOST_VALUES.items() if kind in kinds), None)


_LOST_VALUES = {
    "underflow": "Small gradients are lost: they are too small for their format.",
    "rounded away": "Most updates are lost: they are too small for the 16 bits that the parameters are stored in.",
    "state rounded away": "The optimizer's states cannot follow the gradients: they are stored in 16 bits.",
    "average rounded away": "A moving average of the weights does not follow them: it is stored in 16 bits.",
    "rounded by a rule": "A rule rounds numbers that the program has just cast to float32.",
    "rounded limit": "A limit of clamp is 0, 1 or -1 in 16 bits, and values reach it.",
}
"""Maps a kind of finding to its headline, the most harmful first."""


def _works(document: RunDocument, problems: list[str], costs: list[Remedy]) -> str:
    slow = next(_slow_dtypes(document), None)
    if slow:
        return slow
    casts = expensive_casts(document)
    if casts:
        return f"Mixed precision may not pay for this run: casts took {share(casts)} of the traced time."
    saved = time_words(sum_costs(each.cost for each in costs))
    if saved:
        return f"Mixed precision ran in this run; fixing the findings could save {saved}."
    if problems and document.run.ended != "interrupted":
        return "Mixed precision ran in this run, with problems: see below."
    return f"Mixed precision ran in this run; {_examined(document)}."


def _examined(document: RunDocument) -> str:
    """Return a phrase on the amount that was examined without a problem."""
    numbers, trace = steps_counted(document), document.trace
    traced = trace.totals.steps if trace and trace.rows else 0
    parts = []
    if numbers:
        parts.append(f"the numbers of {of_steps(document, numbers)}")
    if traced:
        parts.append(f"the operations of {count(traced) if parts else of_steps(document, traced)}")
    elif trace and trace.rows:
        parts.append("the operations that were traced")
    if not parts:
        return "neither its numbers nor its operations were examined"
    not_watched = "" if numbers else "; its numbers were not watched"
    return f"nothing wrong was found in {joined(parts)}{not_watched}"


def _not_mixed(document: RunDocument) -> str:
    lower = ran_lower(document)
    if lower == "yes":
        return "This run computes in 16 bits by its own casts: no watched operation ran by an autocast rule."
    if rules_ran(document):
        if lower == "unknown":
            return "Operations ran by autocast rules, without a cast: their dtypes were not traced."
        if rules_ran(document, "lower"):
            return "Nothing that was traced ran in 16 bits, though autocast had rules for it: see the dtypes below."
        return "Nothing ran in 16 bits: of the operations that ran in autocast regions, none had the rule `lower`."
    if lower == "no":
        return "No mixed precision was seen: no watched operation ran by an autocast rule."
    if document.run.elsewhere:
        return (
            "This run computed in threads that were not watched: the precision there is not known."
        )
    return (
        "This run is compiled by `torch.compile`: the precision in compiled functions is not known."
    )


def _precision(document: RunDocument) -> Iterator[str]:
    trace = document.trace
    if trace and trace.rows:
        yield _times(document, trace)
        if trace.totals.casts:
            yield _casts(document, trace.totals)
        if trace.saved:
            saved = sorted(trace.saved.items(), key=lambda item: -item[1])
            parts = [f"{size(number)} in {dtype}" for dtype, number in saved]
            yield f"Peak memory saved for backward: {joined(parts)}."
        yield from _how_to_compare(document)
        return
    calls, lower = rules_ran(document), rules_ran(document, "lower")
    if calls:
        casts = sum(each.casts for each in document.counts)
        yield (
            f"Of {plural(calls, 'call')} of operations with a rule, {share(lower / calls)} had the rule `lower`, "
            f"16 bits; {plural(casts, 'cast')} {be(casts)} made for all of them."
        )
    yield from _how_to_compare(document)


def _how_to_compare(document: RunDocument) -> Iterator[str]:
    """Yield a sentence on how to measure the gain of mixed precision, which one run cannot show."""
    if is_mixed(document):
        yield (
            "Time and memory in float32 were not measured, so this page shows no gain over it. To find out, run the "
            "program once more with `enabled=False` in its regions, and compare the duration and the peak memory."
        )


def _times(document: RunDocument, trace: TraceData) -> str:
    dtypes = seconds_by_dtype(trace.rows)
    total = sum(dtypes.values()) or 1.0
    parts = [
        f"{share(s / total)} {'on integers' if d == 'other' else f'in {d}'}"
        for d, s in dtypes.items()
        if s / total >= 0.005
    ]
    if not parts:
        return "No traced operation took any time."
    where, steps = "what was traced, less than one step", trace.totals.steps
    if steps:
        goes_on = document.run.traced is not None and document.run.traced[1] > document.run.steps
        where = f"{plural(steps, 'traced step')}{' and after them' if goes_on else ''}"
    return f"Time of operations without casts, in {where}: {joined(parts)}."


def _casts(document: RunDocument, totals: TraceTotals) -> str:
    cached = totals.cached
    saved = f", and the weight cache saved {plural(cached, 'cast')}" if cached else ""
    return (
        f"Casts took {share(on_casts(document))} of the traced time ({duration(totals.cast_seconds)}): "
        f"{plural(totals.casts, 'cast')} wrote {size(totals.cast_bytes)}{saved}."
    )


# --- problems ---


def _ending(document: RunDocument) -> Iterator[str]:
    run = document.run
    after = f"after {plural(run.steps, 'step')} and {duration(run.seconds)}"
    if run.ended == "exception":
        yield f"The run failed {after}: {sentence(run.message or 'an exception')}"
    elif run.ended == "interrupted":
        yield f"The run was interrupted {after}; this report covers that part."
    elif _failed(document):
        yield f"The run ended with exit code {run.code}, {after}."


def _lost_steps(document: RunDocument) -> Iterator[str]:
    skipped, first = lost(document), offender(document)
    steps = [step.step for step in document.steps if step.skipped]
    if skipped:
        part = share(skipped / max(document.run.steps, 1))
        yield (
            f"{of_steps(document, skipped)} {be(skipped)} skipped ({part}), as gradients were not finite"
            + (f"; the first at step {steps[0]}." if steps else ".")
        )
    if first:
        yield sentence(first.message)


_NO_LOWER_SCALE = {
    "weights": "parameters or buffers of the model held infinity or NaN",
    "loss": "the loss itself was infinite or NaN before it was scaled, in many skipped steps in a row",
    "floor": "many steps in a row were skipped at a scale of {scale:.3g}, which falls no further",
    "skips": "as many steps in a row were skipped as the scaler's max_consecutive_skips allows",
}


def beyond_scale(document: RunDocument) -> Iterator[str]:
    """Yield a sentence on the first step at which no lower scale would have helped."""
    for diagnosis in document.diagnoses[:1]:
        because = _NO_LOWER_SCALE[diagnosis.reason].format(scale=diagnosis.scale)
        yield f"At step {diagnosis.step} no lower scale would have helped: {because}."


def rules_without_effect(document: RunDocument) -> Iterator[str]:
    """Yield sentences on rules for modules without effect."""
    rules = document.run.module_rules
    for problem in rules.problems[:_MOST] if rules else []:
        yield sentence(problem[0].upper() + problem[1:])


def _losses(document: RunDocument) -> Iterator[str]:
    if document.run.nonfinite_losses:
        yield f"{_nonfinite(document)}; these steps were not skipped, and may have written it into the parameters."


def _nonfinite(document: RunDocument) -> str:
    first = document.run.first_nonfinite_loss
    text = f"The loss was infinite or NaN in {of_steps(document, document.run.nonfinite_losses)}"
    return text if first is None else f"{text}, first in step {first}"


def code_mistakes(document: RunDocument) -> Iterator[str]:
    """Yield sentences on mistakes in the program's code: those that the run saw, and errors of precast-lint."""
    mistakes = [
        each
        for each in all_findings(document)
        if each.severity == "error" or (each.severity and not _is_of_lint(each))
    ]
    for each in mistakes[:_MOST]:
        by = f"`precast-lint` finds an error ({each.kind}): " if _is_of_lint(each) else ""
        yield sentence(f"{by}{each.title}")
    if len(mistakes) > _MOST:
        yield f"{plural(len(mistakes) - _MOST, 'more mistake')} in the code: see the findings."


def lint_warnings(document: RunDocument) -> Iterator[str]:
    """Yield a sentence if precast-lint has warnings on the program's files."""
    findings = [each for each in all_findings(document) if _is_of_lint(each)]
    warnings = sum(each.severity == "warning" for each in findings)
    if warnings:
        yield f"`precast-lint` has {plural(warnings, 'warning')} on the program's files: see the findings."


def _is_of_lint(finding: Finding) -> bool:
    return finding.kind.startswith("AMP")


def _nonfinite_state(document: RunDocument) -> Iterator[str]:
    states = document.run.nonfinite
    if not states:
        return
    worst, more = states[0], len(states) - 1
    value = "NaN" if worst.what == "nan" else "infinity"
    others = f", and so did {plural(more, 'other tensor')}" if more else ""
    yield f"At the end the {worst.kind} `{worst.name}` held {value}{others}."


def _nonfinite_outputs(document: RunDocument) -> Iterator[str]:
    run = document.run
    if run.nonfinite_outputs:
        first = f"; the first was the output of `{run.first_nonfinite_output}`" * bool(
            run.first_nonfinite_output
        )
        calls = (
            f"{count(run.nonfinite_outputs)} of {plural(run.evaluations, 'call')} without gradients"
        )
        yield f"An output was infinite or NaN in {calls}, as in validation{first}."


def _slow_dtypes(document: RunDocument) -> Iterator[str]:
    for dtype in slow_dtypes(document):
        ratio = document.run.speeds[dtype]
        yield (
            f"Mixed precision makes this run slower: the CPU emulates {dtype}, and multiplies matrices at {ratio:.2g} "
            "times its speed in float32 (measured at the end of the run)."
        )


def _other_findings(document: RunDocument) -> Iterator[str]:
    """Yield the findings on values, and of unknown cost, that no other sentence has."""
    first = offender(document)
    others = [
        each
        for each in all_findings(document)
        if (is_numeric(each) and not (first and each.where.module == module_of(first)))
        or (
            _is_advice(each)
            and each.severity is None
            and each.cost.share is each.cost.seconds is None
        )
    ]
    yield from (sentence(each.title) for each in others[:_MOST])


def _expensive_casts(document: RunDocument) -> Iterator[str]:
    part = expensive_casts(document)
    if part:
        yield f"Operations may be too small for 16 bits to pay: casts took {share(part)} of the traced time."


def _costly(document: RunDocument) -> list[Remedy]:
    """Return the remedies whose cost is large enough for a sentence."""
    with_cost = (each for each in remedies(document) if each.cost.seconds or each.cost.share)
    return [each for each in with_cost if each.is_telling and _is_advice(each.worst)]


def _is_advice(finding: Finding) -> bool:
    """Return True if a finding is about time, and says how to save it."""
    return bool(finding.suggestion) and not is_numeric(finding)


def _cost(remedy: Remedy) -> str:
    more = len(remedy.findings) - 1
    also = f", and {plural(more, 'more place')} with the same remedy" if more else ""
    cost = cost_words(remedy.cost)
    return f"{sentence(remedy.worst.title)[:-1]}{also}{f' ({cost})' if cost else ''}."


# --- limits of the observation ---


def _notes(document: RunDocument) -> Iterator[str]:
    trace, run = document.trace, document.run
    if run.module_rules and run.module_rules.models:
        models = run.module_rules.models
        acted = [f"{plural(number, 'module')} of `{kind}`" for kind, number in models.items()]
        yield f"The policy's rules for modules acted on {joined(acted)}."
    if run.elsewhere:
        yield (
            f"{of_steps(document, run.elsewhere)} ended in other threads than the one that loaded PyTorch: of "
            "those no operation was counted or traced."
        )
    if trace and trace.rows:
        yield from map(sentence, trace.notes)
    else:
        if run.compiled:
            yield "In functions of `torch.compile` no operation is counted."
        yield untraced(document)
    yield from lint_warnings(document)
    if document.health is None:
        yield "Numbers were not watched: `--health` shows ranges, underflow and overflow."
    else:
        yield from document.health.notes or ()
    if document.steps and len(document.steps) < run.steps:
        yield f"The page shows {of_steps(document, len(document.steps))}."


def untraced(document: RunDocument) -> str:
    """Return a sentence on why no operation was traced, and on the steps to trace instead."""
    run = document.run
    steps = run.steps - run.elsewhere
    if steps <= 0:
        thread = " in the thread that loaded PyTorch" if run.elsewhere else ""
        return f"No training step finished{thread}, so no operation was traced."
    reason = ""
    if run.to_trace is not None and run.to_trace[0] >= steps:
        begin, end = run.to_trace
        reason = f"`--steps {begin}:{end}` begins after the last of {plural(steps, 'step')}; "
    suggestion = f"0:{steps}" if steps <= 2 else "2:5"
    shows = "shows which ran in which dtype, and what casts cost"
    return f"No operation was traced: {reason}`--steps {suggestion}` {shows}."


# --- the first thing to do ---


def _advice(document: RunDocument, costs: list[Remedy]) -> Advice | None:
    """Return the most important advice; None without any. The remedies of `costs` begin with the most expensive."""
    numeric = [each for each in all_findings(document) if is_numeric(each)]
    first, skipped = offender(document), lost(document)
    steps_back = f"up to {of_steps(document, skipped)}, lost now" if skipped else ""
    if numeric:
        gain = "" if numeric[0].kind in ("underflow", "rounded away") else steps_back
        return _from_finding(numeric[0], gain or "numbers that are not lost")
    if first:
        return _from_finding(overflow(document, first), steps_back or "numbers that stay finite")
    if (skipped or document.run.nonfinite_losses) and document.health is None:
        event = "overflows" if skipped else "is infinite or NaN"
        return Advice(cures.WATCH_NUMBERS(happens=event), steps_back, None)
    if document.run.nonfinite:
        is_parameter = document.run.nonfinite[0].kind == "parameter"
        text = cures.BROKEN_AT_THE_END() if is_parameter else cures.RESTORE_BUFFERS()
        return Advice(text, "numbers that stay finite", None)
    mistake = next((each for each in all_findings(document) if each.severity == "error"), None)
    if mistake:
        return _from_finding(mistake, "")
    slow = slow_dtypes(document)
    if slow:
        return Advice(_mend_slow(document, slow[0]), "", None)
    if costs:
        return _from_finding(costs[0].worst, cost_words(costs[0].cost))
    on_casts = expensive_casts(document)
    if on_casts:
        return Advice(cures.COMPARE_TIMES(), f"at most {share(on_casts)} of the traced time", None)
    text = _to_16_bits(document)
    return Advice(text, "", None) if text else None


def _mend_slow(document: RunDocument, dtype: str) -> str:
    speeds = document.run.speeds
    faster = [name for name, ratio in speeds.items() if ratio > 1.25]
    instead = f"{faster[0]} (`dtype=torch.{faster[0]}`)" if faster else "float32"
    return cures.FASTER_DTYPE(instead=instead, dtype=dtype)


def _to_16_bits(document: RunDocument) -> str:
    """Return advice on 16 bits for a run in float32; empty for other runs, or if the precision is unknown."""
    rows, run = rows_of(document), document.run
    is_float32 = not rows or "float32" in seconds_by_dtype(rows)
    if not run.steps or ran_lower(document) != "no" or not is_float32:
        return ""
    if rules_ran(document):
        return cures.START_FROM_A_BASE()
    if run.elsewhere:
        return ""
    device = next((each.split(":")[0] for each in run.devices if not each.startswith("cpu")), "cpu")
    return cures.OPEN_A_REGION(device=device)


def _from_finding(finding: Finding, gain: str) -> Advice:
    return Advice(sentence(finding.suggestion), gain, finding.policy)
