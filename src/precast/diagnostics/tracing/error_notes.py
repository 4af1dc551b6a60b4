"""Notes on errors about dtypes: the operation, the rules that led to its dtypes, and how to avoid the error.

Invariant: advice was tried on copies of the tensors of the failed call; without success there is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from precast._internal import cures
from precast._internal.display import dtype_name
from precast.diagnostics.tracing.lineage import Origin, chain
from precast.diagnostics.tracing.reasons import RuleDecision
from precast.diagnostics.tracing.trials import TrialCall, works, works_after_cast
from precast.engine.operator_kinds import floating_in, tensors_of
from precast.errors import PolicyError
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["FailedCall", "add_note"]

_DTYPE_ERROR = re.compile(
    r"dtype|scalar type|same type|should be the same|expected.*(Float|Half|BFloat16|Double)",
    re.IGNORECASE,
)
_PREFIX = "precast's trace: "


class FailedCall(NamedTuple):
    """The call that failed, and its circumstances."""

    call: TrialCall
    device: str
    policy: Policy
    is_in_region: bool
    """True inside a region, also inside one that a module rule switched off."""

    def works_in_region(self, policy: Policy) -> bool:
        """Return True if the call runs in a region with a policy."""
        low = next((dtype for dtype in self.dtypes() if dtype.itemsize == 2), None)
        return works(self.call, policy, self.device, low)

    def dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes of its tensors, the widest first."""
        tensors = floating_in(tensors_of(self.call.args, self.call.kwargs))
        return sorted({tensor.dtype for tensor in tensors}, key=lambda dtype: -dtype.itemsize)


def add_note(
    error: BaseException,
    decision: RuleDecision,
    failed_call: FailedCall,
    inputs: Iterable[str],
    links: Iterable[Origin | None],
) -> None:
    """Add a note to an error about dtypes that differ, unless it has one. Other errors are not changed."""
    floating = [dtype for dtype in inputs if "float" in dtype]
    if not isinstance(error, RuntimeError) or len(set(floating)) < 2:
        return
    has_note = any(note.startswith(_PREFIX) for note in getattr(error, "__notes__", ()))
    if has_note or not _DTYPE_ERROR.search(str(error)):
        return
    rule = "no rule" if decision.rule is None else f"the rule {decision.rule!r}"
    lines = [
        f"{_PREFIX}{decision.op} has {rule} ({decision.reason}), and got {', '.join(floating)}.",
        *_origins(links),
        *_remedy(decision.op, failed_call),
    ]
    error.add_note("\n".join(lines))


def _origins(links: Iterable[Origin | None]) -> Iterator[str]:
    texts = set()
    for link in links:
        steps = chain(link)
        if steps and (text := str(steps[-1])) not in texts:
            texts.add(text)
            yield f"  {steps[-1].output} came from {text}"


def _remedy(op: str, failed_call: FailedCall) -> Iterator[str]:
    device, policy = failed_call.device, failed_call.policy
    if not failed_call.is_in_region:
        if failed_call.works_in_region(policy):
            yield cures.CALL_IN_REGION(device=device)
            return
    elif (row := _with_row(op, failed_call)) is not None:
        yield cures.PROMOTE_ROW()
        lines = whole_file(row).splitlines()
        yield from (f"    {line}".rstrip() for line in lines)
        return
    dtype = _dtype_that_works(failed_call)
    if dtype is not None:
        yield cures.CAST_BEFORE(dtype=dtype_name(dtype))


def _with_row(op: str, failed_call: FailedCall) -> Policy | None:
    """Return the policy with a row that promotes the operation, if the call runs under it."""
    try:
        changed = failed_call.policy.replace(ops={failed_call.device: {op: "promote"}})
    except PolicyError:
        return None
    return changed if failed_call.works_in_region(changed) else None


def _dtype_that_works(failed_call: FailedCall) -> torch.dtype | None:
    """Return the widest dtype of the call's tensors to which all of them can be cast."""
    return next(
        (each for each in failed_call.dtypes() if works_after_cast(failed_call.call, each)), None
    )
