"""Findings on the values of a run: overflow, underflow of gradients, and updates that round to nothing.

Invariants: every number in a finding is from the document. Of the code between two modules, only operations outside of
modules are considered, because the outputs of modules were watched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

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

__all__ = [
    "between",
    "in_words",
    "module_before",
    "module_of",
    "numeric_findings",
    "offender",
    "overflow",
]

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
    module, format = module_of(first), _format(document, first)
    code = None
    if first.kind == "input" and first.name:
        code = between(document, first, format or "float16")
    if code is None:
        suggestion, modules = _advice_on(document, first, module, format or "float16")
    else:
        suggestion, modules = _advice_on_code(document, first, code, format or "float16")
    return Finding(
        kind="overflow" if first.what == "inf" else "nan",
        title=first.message,
        cost=FindingCost(),
        suggestion=suggestion,
        policy=_file_with(document, modules) if modules else None,
        where=FindingLocation(module, code and code.only("op"), code and code.only("source")),
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
    """Return advice on a parameter or buffer that was not finite before the step."""
    if state.kind == "buffer":
        return cures.BAD_BUFFER(tensor=state.name)
    if state.eps is not None and state.dtype == "float16":
        return cures.SMALL_EPS(eps=state.eps, optimizer=state.optimizer)
    return cures.BAD_STEP(module=module or "the model")


def _advice_on_scale(document: RunDocument, module: str) -> str:
    """Return advice on gradients that were not finite under a scaler while the losses were finite."""
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
    document: RunDocument, first: NonfiniteOrigin, code: CodeBetween, format: str
) -> tuple[str, list[str]]:
    """Return advice and modules as `_advice_on` does, for code between modules."""
    ran = f" {_traced(document)}, the code {_place(first)} ran in {format}: {code.lines}."
    if format != "float16":
        return f"{cures.LINES_BEYOND_FLOAT32()}{ran}", []
    ran += cures.OWN_CAST() if code.casts else ""
    ran += cures.NAN_IN_FLOAT32() if first.what == "nan" else ""
    modules = [name for name in code.owners if name]
    are_stored_low = any(_is_stored_low(document, name) for name in modules)
    if len(modules) == len(code.owners) and not are_stored_low:
        names = joined(f"`{name}`" for name in modules)
        return cures.MODULE_IN_FLOAT32(modules=names, more=ran), modules
    # A rule for the model itself would remove all 16-bit operations, and no rule applies to the code around the model.
    return cures.CODE_IN_FLOAT32(more=ran), []


def _traced(document: RunDocument) -> str:
    """Return the traced steps as the beginning of a sentence."""
    if document.run.traced is None:
        return "In the steps that were traced"
    first, end = document.run.traced
    last = min(end, document.run.steps) - 1
    steps = f"steps {first} to {last}, which were" if last > first else f"step {first}, which was"
    return f"In {steps} traced"


def _advice_without_trace(document: RunDocument, first: NonfiniteOrigin) -> str:
    """Return advice for a module whose preceding operations were not traced."""
    if not first.name:
        return cures.LOOK_AT_DATA()
    look = cures.LOOK_BEFORE(place=_place(first))
    if module_before(first) is None:
        look += ", and at the data that the model is given"
    if document.trace is None and not document.run.compiled:
        # A trace that begins with step 0 starts before the model is called, and has other names of modules.
        step = max(first.step, 1)
        look += f". Its operations and lines are named where a step is traced, as by `--steps {step}:{step + 1}`"
    return f"{look}."


def _place(first: NonfiniteOrigin) -> str:
    before, module = module_before(first), first.name
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
    """Yield findings on gradients that underflow made zero."""
    health = document.health
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
            suggestion=_advice_on_underflow(document),
            policy=None,
            where=FindingLocation(module_of(worst)),
        )


class _Stuck(NamedTuple):
    """Values of one 16-bit tensor that an update did not change, in the latest counted step."""

    module: HealthModule
    """The parameter that the tensor belongs to."""
    part: float
    """Their share of the values that should change."""
    since: int
    """The first step of the latest sequence of counted steps with such values."""
    step: int
    """The latest counted step."""


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
    """Yield findings on 16-bit parameters, optimizer states and averages whose updates round to nothing."""
    health = document.health
    modules = [m for m in (health.modules if health else []) if m.kind == "parameter"]
    states = dict.fromkeys(
        name for m in modules for step in m.states_rounded_away or [] for name in step
    )
    series: list[tuple[str, str, list[_Shares]]] = [
        ("rounded away", "", [m.updates_rounded_away for m in modules]),
        *(("state rounded away", state, _shares_of(state, modules)) for state in states),
        ("average rounded away", "", [m.average_rounded_away for m in modules]),
    ]
    for kind, state, shares in series:
        stuck = _stuck(zip(modules, shares, strict=True))
        if not stuck:
            continue
        worst, more = stuck[0], len(stuck) - 1
        title = _STUCK_TITLES[kind].format(
            state=state,
            name=worst.module.name,
            share=share(worst.part),
            when=_when(worst),
            others=f"; the same holds for {plural(more, 'more parameter')}" if more else "",
        )
        where = FindingLocation(module_of(worst.module))
        yield Finding(kind, title, FindingCost(), _advice_on_stuck(kind, worst), None, where)


def _shares_of(state: str, modules: list[HealthModule]) -> list[_Shares]:
    return [[step.get(state) for step in m.states_rounded_away or []] for m in modules]


def _stuck(shares: Iterable[tuple[HealthModule, _Shares]]) -> list[_Stuck]:
    """Return the tensors of which most values did not change in the latest counted step, the worst first."""
    stuck = []
    for module, values in shares:
        steps = zip(module.steps, values or [], strict=False)
        pairs = [(step, value) for step, value in steps if value is not None]
        later = list(itertools.takewhile(lambda each: each[1] >= _MIN_STUCK_SHARE, reversed(pairs)))
        if later:
            stuck.append(_Stuck(module, later[0][1], later[-1][0], later[0][0]))
    return sorted(stuck, key=lambda each: -each.part)


def _when(stuck: _Stuck) -> str:
    if stuck.since == stuck.step:
        return f" in step {stuck.step}, the latest counted step"
    return f" in step {stuck.step}, and more than {share(_MIN_STUCK_SHARE)} in all counted steps from {stuck.since} on"


def _advice_on_stuck(kind: str, worst: _Stuck) -> str:
    if kind == "state rounded away":
        return cures.KEEP_STATES()
    if kind == "average rounded away":
        return cures.KEEP_AVERAGE()
    with_kahan = _latest(worst.module.updates_rounded_away_with_kahan)
    helps = with_kahan < worst.part / 2
    return cures.KEEP_MASTERS() + (cures.LEARN_IN_16_BITS(share=share(with_kahan)) if helps else "")


def _latest(shares: _Shares) -> float:
    """Return the latest share that is not None."""
    return next((each for each in reversed(shares or []) if each is not None), 0.0)


def _advice_on_underflow(document: RunDocument) -> str:
    return cures.RAISE_THE_SCALE() if _is_scaled(document) else cures.SCALE_THE_LOSS()


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


# --- the code between two modules, if steps were traced ---


_MOST_LINES = 4
_OUTPUT = "the output of `"  # the prefix of a monitor's text for the output of a named module
_KEEPS_FINITE = frozenset(
    {"abs", "amax", "amin", "cat", "chunk", "clone", "copy_", "cos", "detach", "flip", "gather"}
    | {"index", "index_select", "max", "min", "neg", "permute", "relu", "relu_", "repeat"}
    | {"_softmax", "gelu", "softmax", "silu"}
    | {"reshape", "roll", "sigmoid", "sign", "sin", "split", "stack", "tanh", "transpose", "view"}
)
"""Operations that return finite values for finite inputs, in every format."""


class CodeBetween(NamedTuple):
    """The operations between two modules."""

    rows: list[OperationRow]
    """In the order in which they were first called, never empty."""

    @property
    def owners(self) -> list[str | None]:
        """The modules with this code: "" is the model itself, None the program around it."""
        return list(dict.fromkeys(row.module for row in self.rows))

    @property
    def lines(self) -> str:
        """The operations with their lines: "`mul.Tensor` and `matmul` at train.py:10 in forward"."""
        operations: dict[str | None, dict[str, None]] = {}
        for row in self.rows:
            operations.setdefault(row.source, {})[f"`{row.op}`"] = None
        texts = [
            joined(names) + (f" at {line}" if line else "") for line, names in operations.items()
        ]
        more = len(texts) - _MOST_LINES
        return "; ".join(texts[:_MOST_LINES]) + (f"; and {plural(more, 'more line')}" * (more > 0))

    @property
    def casts(self) -> bool:
        """True if the code has explicit casts."""
        return any(row.op == "_to_copy" for row in self.rows)

    def only(self, what: Literal["op", "source"]) -> str | None:
        """Return the operation, or the line, if there is exactly one."""
        values = {getattr(row, what) for row in self.rows}
        return values.pop() if len(values) == 1 else None


def between(document: RunDocument, first: NonfiniteOrigin, dtype: str) -> CodeBetween | None:
    """Return the operations with results of a dtype right before a module; None if they were not traced.

    `first` is an input of that module that no module returned.
    """
    module, before = first.name, module_before(first)
    forward = [row for row in rows_of(document) if row.phase == "forward"]
    forward.sort(key=lambda row: row.order or 0)
    rows = [row for row in forward if dtype in row.output]
    ends = _ends(forward, first, before)
    if ends is None:
        candidates = _nearest(rows, module, before)
    else:
        inside = {*_around(module), *(_around(before) if before else ()), None}
        after, until = ends
        candidates = [r for r in rows if r.module in inside and after < (r.order or 0) < until]
    telling = [row for row in candidates if row.op.partition(".")[0] not in _KEEPS_FINITE]
    return CodeBetween(telling or candidates) if candidates else None


def module_before(first: NonfiniteOrigin) -> str | None:
    """Return the module of the last finite output before; None if it has no name."""
    of = (first.inputs[-1].of or "") if first.inputs else ""
    return of.removeprefix(_OUTPUT).rstrip("`") if of.startswith(_OUTPUT) else None


def _ends(
    forward: list[OperationRow], first: NonfiniteOrigin, before: str | None
) -> tuple[int, int] | None:
    """Return the range of the order in which the code ran.

    None if a module was not traced, or for a later call of a module, because rows have the order of the first call.
    """
    ordered = [(row.order, row.module) for row in forward if row.order is not None]
    own = [order for order, module in ordered if _is_in(module, first.name)]
    if not own or " in its call " in first.message:
        return None
    if before is None:
        return -1, own[0]
    earlier = [order for order, module in ordered if _is_in(module, before) and order < own[0]]
    return (earlier[-1], own[0]) if earlier else None


def _nearest(rows: list[OperationRow], module: str, before: str | None) -> list[OperationRow]:
    """Return the operations of the innermost module around both, or of the next one further out with some."""
    both = _around(module)
    if before is not None:
        both = [name for name in both if name in {before, *_around(before)}]
    own = ([row for row in rows if row.module == name] for name in reversed(both))
    return next(filter(None, own), [])


def _around(module: str) -> list[str]:
    """Return the modules around a module, including the model itself."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _is_in(name: str | None, module: str) -> bool:
    return name is not None and f"{name}.".startswith(f"{module}.")
