"""Findings on the values of a run: overflow, underflow of gradients, and updates that round to nothing.

Invariant: every number in a finding is from the document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from precast._internal import cures
from precast._internal.display import plural
from precast._internal.events import BrokenState, NonfiniteOrigin
from precast.report.evidence import rows_of
from precast.report.schema import (
    Finding,
    FindingCost,
    FindingLocation,
    HealthModule,
    OperationRow,
    RunDocument,
)
from precast.report.words import joined, share

__all__ = ["in_words", "module_of", "numeric_findings", "offender", "overflow"]

_MIN_LOST_SHARE = 0.01  # a smaller share of gradients is not reported
_NORMAL_SKIP_SHARE = (
    0.1  # a smaller share of skipped steps is normal while the scale finds its limit
)
_MIN_STUCK_SHARE = 0.5  # a smaller share of values that an update did not change is not reported
_Shares = list[float | None] | None
"""A share of a tensor's values in each counted step."""


def numeric_findings(document: RunDocument) -> list[Finding]:
    """Return findings on the first tensor that was not finite, on underflow, and on updates that round to nothing."""
    first = offender(document)
    of_first = [] if first is None else [overflow(document, first)]
    return [*of_first, *_underflow(document), *_rounded_away(document)]


def offender(document: RunDocument) -> NonfiniteOrigin | None:
    """Return the first tensor of the run that was not finite."""
    origins = [step.first for step in document.steps if step.first]
    if document.health and document.health.first:
        origins.append(document.health.first)
    return min(origins, key=lambda first: first.step, default=None)


def in_words(first: NonfiniteOrigin) -> str:
    """Return the tensor that was not finite in words: "the output of `decoder.3`"."""
    name = f"`{first.name}`" if first.name else "the whole model"
    return {
        "output": f"the output of {name}",
        "input": f"an input of {name}",
        "gradient": f"the gradient of the output of {name}",
        "parameter": f"the gradient of the parameter {name}",
    }[first.kind]


def module_of(what: NonfiniteOrigin | HealthModule) -> str:
    """Return the module of a tensor: "decoder.3" for its output, and for the parameter decoder.3.weight."""
    return what.name.rpartition(".")[0] if what.kind == "parameter" else what.name


def overflow(document: RunDocument, first: NonfiniteOrigin) -> Finding:
    """Return the finding on the first tensor that was not finite."""
    module, format = module_of(first), _format(document, first) or "float16"
    code = _code_before(document, first, format)
    if code:
        suggestion, modules = _advice_on_code(document, first, code, format)
    else:
        suggestion, modules = _advice_on(document, first, module, format)
    return Finding(
        kind="overflow" if first.what == "inf" else "nan",
        title=first.message,
        cost=FindingCost(),
        suggestion=suggestion,
        policy=_file_with(document, modules) if modules else None,
        where=FindingLocation(module, source=code[0].source if code else None),
    )


def _advice_on(
    document: RunDocument, first: NonfiniteOrigin, module: str, format: str
) -> tuple[str, list[str]]:
    """Return advice, and the modules that a policy has to run in float32, if that is the advice."""
    name = f"`{module}`" if module else "the model"
    if first.kind == "input":
        return _advice_without_trace(document, first), []
    if first.state is not None:
        return _advice_on_state(first.state, module), []
    is_gradient = first.kind in {"gradient", "parameter"}
    if is_gradient and document.run.nonfinite_losses + document.run.skipped_losses:
        return cures.BAD_LOSS(), []
    if is_gradient and _is_scaled(document):
        return _advice_on_scale(document, name), []
    if format != "float16":
        return cures.BEYOND_FLOAT32(module=name[:1].upper() + name[1:]), []
    if _is_stored_low(document, module):
        return cures.STORE_IN_BFLOAT16(module=name), []
    if not module or is_gradient:
        return cures.IN_BFLOAT16(), []
    more = cures.NAN_IN_FLOAT32() if first.what == "nan" else ""
    return cures.MODULE_IN_FLOAT32(modules=name, more=more), [module]


def _advice_on_state(state: BrokenState, module: str) -> str:
    if state.kind == "buffer":
        return cures.BAD_BUFFER(tensor=state.name)
    if state.eps is not None and state.dtype == "float16":
        return cures.SMALL_EPS(eps=state.eps, optimizer=state.optimizer)
    return cures.BAD_STEP(module=module or "the model")


def _advice_on_scale(document: RunDocument, module: str) -> str:
    skipped = [step for step in document.steps if step.skipped]
    count = len(skipped) if document.run.skipped is None else document.run.skipped
    was_last = not document.steps or document.steps[-1].skipped
    if count <= _NORMAL_SKIP_SHARE * document.run.steps and not was_last and not document.diagnoses:
        return cures.LEAVE_IT()
    scale = next((step.scale for step in reversed(skipped) if step.scale is not None), None)
    if scale is not None and scale <= 1:
        return cures.LOW_SCALE(module=module, scale=scale)
    return cures.FIND_SCALE(module=module)


def _is_stored_low(document: RunDocument, module: str) -> bool:
    """Return True if a module, or one inside it, has parameters in 16 bits."""
    low = document.health.low_modules if document.health else None
    return any(not module or f"{name}.".startswith(f"{module}.") for name in low or ())


def _advice_on_code(
    document: RunDocument, first: NonfiniteOrigin, code: list[OperationRow], format: str
) -> tuple[str, list[str]]:
    """Return advice and modules as `_advice_on` does, for code between modules."""
    module = code[0].module or ""
    owner = f"`{module}`" if module else "the model"
    ran = f" {_traced(document)}, code of {owner} itself ran in {format}: {_lines(code)}."
    if format != "float16":
        return f"{cures.LINES_BEYOND_FLOAT32()}{ran}", []
    ran += cures.OWN_CAST() if any(row.op == "_to_copy" for row in code) else ""
    ran += cures.NAN_IN_FLOAT32() if first.what == "nan" else ""
    if module and not _is_stored_low(document, module):
        return cures.MODULE_IN_FLOAT32(modules=owner, more=ran), [module]
    # A rule for the model itself would remove all 16-bit operations.
    return cures.CODE_IN_FLOAT32(more=ran), []


def _traced(document: RunDocument) -> str:
    if document.run.traced is None:
        return "In the steps that were traced"
    first, end = document.run.traced
    last = min(end, document.run.steps) - 1
    steps = f"steps {first} to {last}, which were" if last > first else f"step {first}, which was"
    return f"In {steps} traced"


def _advice_without_trace(document: RunDocument, first: NonfiniteOrigin) -> str:
    if not first.name:
        return cures.LOOK_AT_DATA()
    look = cures.LOOK_BEFORE(place=_place(first))
    if _module_before(first) is None:
        look += ", and at the data that the model is given"
    if document.trace is None and not document.run.compiled:
        # A trace that begins with step 0 starts before the model is called, and has other names of modules.
        step = max(first.step, 1)
        look += f". Its operations and lines are named where a step is traced, as by `--steps {step}:{step + 1}`"
    return f"{look}."


def _place(first: NonfiniteOrigin) -> str:
    before, module = _module_before(first), first.name
    if before is None:
        return f"before `{module}`"
    return f"between {f'two calls of `{module}`' if before == module else f'`{before}` and `{module}`'}"


def _format(document: RunDocument, first: NonfiniteOrigin) -> str | None:
    """Return the dtype of the first tensor that was not finite; if unknown, the narrowest dtype of the run, or None."""
    health = document.health
    if health is None:
        return None
    steps = (step for step in health.ring if step.get("step") == first.step)
    worst = (one for step in steps for one in step.get("worst", []))
    tensor = first.kind, first.name
    return next((w["dtype"] for w in worst if (w["kind"], w["name"]) == tensor), health.format)


def _is_scaled(document: RunDocument) -> bool:
    return any(step.scale is not None for step in document.steps)


def _underflow(document: RunDocument) -> Iterator[Finding]:
    health, is_scaled = document.health, _is_scaled(document)
    for kind, what in (("parameter", "parameters"), ("gradient", "module outputs")):
        modules = [m for m in health.modules if m.kind == kind] if health else []
        lost = _underflow_share(modules)
        if health is None or lost < _MIN_LOST_SHARE:
            continue
        worst = max(modules, key=lambda module: _underflow_share([module]))
        yield Finding(
            kind="underflow",
            title=f"{share(lost)} of the gradients of {what} became zero, because they are too small for "
            f"{health.format}; most in `{worst.name}` ({share(_underflow_share([worst]))}).",
            cost=FindingCost(),
            suggestion=cures.RAISE_THE_SCALE() if is_scaled else cures.SCALE_THE_LOSS(),
            policy=None,
            where=FindingLocation(module_of(worst)),
        )


_STUCK_TITLES: Final = {
    "rounded away": (
        "{share} of the updates of `{name}` round to nothing{when}, because it is stored in 16 bits{others}."
    ),
    "state rounded away": (
        "The optimizer's state `{state}` of `{name}` cannot follow the gradients: it is stored in 16 bits, and {share} "
        "of the values that the step should change stayed the same{when}{others}."
    ),
    "average rounded away": (
        "A moving average of `{name}` does not follow it: the average is stored in 16 bits, and its update did not "
        "change {share} of the values that differ{when}{others}."
    ),
}


def _rounded_away(document: RunDocument) -> Iterator[Finding]:
    modules = document.health.modules if document.health else []
    stuck: dict[tuple[str, str], list[tuple[float, int, HealthModule]]] = {}
    for module in modules:
        states = module.states_rounded_away or []
        series = {("rounded away", ""): module.updates_rounded_away}
        for name in dict.fromkeys(name for step in states for name in step):
            series["state rounded away", name] = [step.get(name) for step in states]
        series["average rounded away", ""] = module.average_rounded_away
        for key, shares in series.items():
            part, step = _latest(module, shares)
            if part >= _MIN_STUCK_SHARE:
                stuck.setdefault(key, []).append((part, step, module))
    for kind, state in sorted(stuck, key=lambda key: [*_STUCK_TITLES].index(key[0])):
        part, step, worst = max(stuck[kind, state], key=lambda each: each[0])
        more = len(stuck[kind, state]) - 1
        title = _STUCK_TITLES[kind].format(
            state=state,
            name=worst.name,
            share=share(part),
            when=f" in step {step}, the latest counted step",
            others=f"; the same holds for {plural(more, 'more parameter')}" if more else "",
        )
        where = FindingLocation(module_of(worst))
        advice = _advice_on_stuck(kind, part, worst)
        yield Finding(kind, title, FindingCost(), advice, None, where)


def _advice_on_stuck(kind: str, part: float, worst: HealthModule) -> str:
    if kind == "state rounded away":
        return cures.KEEP_STATES()
    if kind == "average rounded away":
        return cures.KEEP_AVERAGE()
    with_kahan, _ = _latest(worst, worst.updates_rounded_away_with_kahan)
    helps = with_kahan < part / 2
    return cures.KEEP_MASTERS() + (cures.LEARN_IN_16_BITS(share=share(with_kahan)) if helps else "")


def _latest(module: HealthModule, shares: _Shares) -> tuple[float, int]:
    """Return the latest known share and its step; 0 without one."""
    pairs = zip(shares or [], module.steps, strict=False)
    return next(((part, step) for part, step in reversed([*pairs]) if part is not None), (0.0, 0))


def _underflow_share(modules: list[HealthModule]) -> float:
    """Return the share of values that underflow made zero, as far as it is known."""
    lost = sum(number or 0 for module in modules for number in module.underflow_zeros)
    return lost / max(sum(sum(module.elements) for module in modules), 1)


def _file_with(document: RunDocument, modules: list[str]) -> str:
    """Return the run's policy as a file, with rules that run modules in float32."""
    policy = document.run.policy
    base = policy.name if policy.name in {"default", "lean", "torch"} else "torch"
    text = policy.file or f'base = "{base}"\n'
    before, _, rules = text.partition("[modules]\n")  # the last table of a file that precast writes
    # In the file, a name that TOML allows as a key may have no quotes.
    same = tuple(f"{key} =" for name in modules for key in (_quoted(name), name))
    others = [line for line in rules.splitlines() if not line.startswith(same)]
    added = [f'{_quoted(name)} = "fp32"' for name in modules]
    return "\n".join([before.rstrip(), "", "[modules]", *others, *added]).strip() + "\n"


def _quoted(name: str) -> str:
    """Return a name as a key of TOML."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- the code before an input, if steps were traced ---


_MOST_LINES = 4
_OUTPUT = "the output of `"  # the prefix of a monitor's text for the output of a named module


def _code_before(document: RunDocument, first: NonfiniteOrigin, dtype: str) -> list[OperationRow]:
    """Return the operations of the module around an input that ran before it with results of a dtype.

    The module is the innermost one around the input and the output before it that has such operations. Empty if there
    are none, or if `first` is no input of a module.
    """
    if first.kind != "input" or not first.name:
        return []
    forward = sorted(
        (row for row in rows_of(document) if row.phase == "forward" and row.order is not None),
        key=lambda row: row.order or 0,
    )
    inside = f"{first.name}."
    rows = itertools.takewhile(lambda row: not f"{row.module}.".startswith(inside), forward)
    low, before = [row for row in rows if dtype in row.output], _module_before(first)
    around = _around(first.name)
    if before is not None:
        around = [name for name in around if f"{before}.".startswith(f"{name}." if name else "")]
    own = ([row for row in low if row.module == name] for name in reversed(around))
    return next(filter(None, own), [])


def _lines(code: list[OperationRow]) -> str:
    """Return operations with their lines: "`mul.Tensor` and `matmul` at train.py:10 in forward"."""
    operations: dict[str | None, dict[str, None]] = {}
    for row in code:
        operations.setdefault(row.source, {})[f"`{row.op}`"] = None
    texts = [joined(names) + (f" at {line}" if line else "") for line, names in operations.items()]
    more = len(texts) - _MOST_LINES
    return "; ".join(texts[:_MOST_LINES]) + (f"; and {plural(more, 'more line')}" * (more > 0))


def _module_before(first: NonfiniteOrigin) -> str | None:
    """Return the module of the last finite output before; None if it has no name."""
    of = (first.inputs[-1].of or "") if first.inputs else ""
    return of.removeprefix(_OUTPUT).rstrip("`") if of.startswith(_OUTPUT) else None


def _around(module: str) -> list[str]:
    """Return the modules around a module, including the model itself."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]
