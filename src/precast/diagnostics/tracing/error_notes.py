"""Notes on errors about dtypes: the operation, the rules that led to its dtypes, and how to avoid the error.

Invariant: advice was tried on copies of the tensors of the failed call; without success there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from precast._internal import cures
from precast._internal.display import dtype_name
from precast.diagnostics.tracing.lineage import Origin, chain
from precast.diagnostics.tracing.tally import TracedCall
from precast.diagnostics.tracing.trials import works, works_after_cast
from precast.engine.operator_kinds import floating_in, tensors_of
from precast.errors import PolicyError
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["add_note"]

_DTYPE_ERROR = re.compile(
    r"dtype|scalar type|same type|should be the same|expected.*(Float|Half|BFloat16|Double)",
    re.IGNORECASE,
)
_PREFIX = "precast's trace: "


def add_note(error: BaseException, failed: TracedCall, *, is_in_region: bool) -> None:
    """Add a note to an error about dtypes that differ, unless it has one. Other errors are not changed.

    `is_in_region` is True inside a region, also inside one that a module rule switched off.
    """
    floating = [dtype for dtype in failed.inputs if "float" in dtype]
    if not isinstance(error, RuntimeError) or len(set(floating)) < 2:
        return
    has_note = any(note.startswith(_PREFIX) for note in getattr(error, "__notes__", ()))
    if has_note or not _DTYPE_ERROR.search(str(error)):
        return
    op, rule, reason = failed.decision
    has = "no rule" if rule is None else f"the rule {rule!r}"
    lines = [
        f"{_PREFIX}{op} has {has} ({reason}), and got {', '.join(floating)}.",
        *_origins(failed.origins),
        *_remedy(failed, is_in_region=is_in_region),
    ]
    error.add_note("\n".join(lines))


def _origins(links: Iterable[Origin | None]) -> Iterator[str]:
    texts = set()
    for link in links:
        steps = chain(link)
        if steps and (text := str(steps[-1])) not in texts:
            texts.add(text)
            yield f"  {steps[-1].output} came from {text}"


def _remedy(failed: TracedCall, *, is_in_region: bool) -> Iterator[str]:
    op, device, tensors = failed.decision.op, failed.device, tensors_of(*failed.call[1:])
    dtypes = sorted({t.dtype for t in floating_in(tensors)}, key=lambda dtype: -dtype.itemsize)
    low = next((dtype for dtype in dtypes if dtype.itemsize == 2), None)
    if not is_in_region:
        if works(failed.call, failed.policy, device, low):
            yield cures.CALL_IN_REGION(device=device)
            return
    else:
        policy = _with_row(op, failed)
        if policy is not None and works(failed.call, policy, device, low):
            yield cures.PROMOTE_ROW()
            yield from (f"    {line}".rstrip() for line in whole_file(policy).splitlines())
            return
    dtype = next((each for each in dtypes if works_after_cast(failed.call, each)), None)
    if dtype is not None:
        yield cures.CAST_BEFORE(dtype=dtype_name(dtype))


def _with_row(op: str, failed: TracedCall) -> Policy | None:
    """Return the policy with a row that promotes the operation, if it can have one."""
    try:
        return failed.policy.replace(ops={failed.device: {op: "promote"}})
    except PolicyError:
        return None
