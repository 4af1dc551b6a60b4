"""Notes of a trace on errors about dtypes: the operation, the rules that led there, and how to avoid the error.

Invariant: the advice was tried, on copies of the tensors of the call that failed; where nothing helped, none is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from precast._internal import cures
from precast._internal.display import dtype_name
from precast.diagnostics.tracing.lineage import Link, chain
from precast.diagnostics.tracing.reasons import Decided
from precast.diagnostics.tracing.trials import Call, works, works_after_cast
from precast.engine.operator_kinds import floating_in, tensors_of
from precast.errors import PolicyError
from precast.policy import preset_files
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["Attempt", "note_on"]

_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|same type|should be the same|expected.*(Float|Half|BFloat16|Double)",
    re.IGNORECASE,
)
_OURS = "precast's trace: "


class Attempt(NamedTuple):
    """The call that failed."""

    call: Call
    device: str
    policy: Policy
    is_in_region: bool
    """Whether a region is around it, also one that a rule for modules switched off."""

    def works_in_region(self, policy: Policy) -> bool:
        """Return True if the call runs in a region with a policy."""
        low = next((dtype for dtype in self.dtypes() if dtype.itemsize == 2), None)
        return works(self.call, policy, self.device, low)

    def dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes of its tensors, the widest first."""
        tensors = floating_in(tensors_of(self.call.args, self.call.kwargs))
        return sorted({tensor.dtype for tensor in tensors}, key=lambda dtype: -dtype.itemsize)


def note_on(
    error: BaseException,
    decided: Decided,
    attempt: Attempt,
    inputs: Iterable[str],
    links: Iterable[Link | None],
) -> None:
    """Adds a note to an error about dtypes that differ, unless it has one; leaves all other errors alone."""
    floating = [dtype for dtype in inputs if "float" in dtype]
    if not isinstance(error, RuntimeError) or len(set(floating)) < 2:
        return
    noted = any(note.startswith(_OURS) for note in getattr(error, "__notes__", ()))
    if noted or not _ABOUT_DTYPES.search(str(error)):
        return
    rule = "no rule" if decided.rule is None else f"the rule {decided.rule!r}"
    lines = [
        f"{_OURS}{decided.op} has {rule} ({decided.reason}), and got {', '.join(floating)}.",
        *_origins(links),
        *_remedy(decided.op, attempt),
    ]
    error.add_note("\n".join(lines))


def _origins(links: Iterable[Link | None]) -> Iterator[str]:
    """Yield the operation that decided each dtype."""
    texts = set()
    for link in links:
        steps = chain(link)
        if steps and (text := str(steps[-1])) not in texts:
            texts.add(text)
            yield f"  {steps[-1].output} came from {text}"


def _remedy(op: str, attempt: Attempt) -> Iterator[str]:
    """Yield the lines of the first advice under which the call runs."""
    device, policy = attempt.device, attempt.policy
    if not attempt.is_in_region:
        if attempt.works_in_region(policy):
            yield cures.CALL_IN_REGION(device=device)
            return
    elif (row := _with_row(op, attempt)) is not None:
        yield cures.PROMOTE_ROW()
        lines = whole_file(row).splitlines()
        yield from (f"    {line}".rstrip() for line in lines)
        if preset_files.is_preset(policy.name):
            yield f"  or: policy=precast.Policy.load({policy.name!r}).replace(ops={{{op!r}: 'promote'}})"
        return
    dtype = _dtype_that_works(attempt)
    if dtype is not None:
        yield cures.CAST_BEFORE(dtype=dtype_name(dtype))


def _with_row(op: str, attempt: Attempt) -> Policy | None:
    """Return the policy with a row that promotes the operation, if the call runs under it."""
    try:
        changed = attempt.policy.replace(ops={attempt.device: {op: "promote"}})
    except PolicyError:
        return None
    return changed if attempt.works_in_region(changed) else None


def _dtype_that_works(attempt: Attempt) -> torch.dtype | None:
    """Return the widest dtype of the call's tensors to which all of them can be cast."""
    return next((each for each in attempt.dtypes() if works_after_cast(attempt.call, each)), None)
