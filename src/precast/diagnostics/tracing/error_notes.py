"""What a trace adds to an error about dtypes: the operation, the rules that led there, and how to avoid the error."""

from __future__ import annotations

import re
from collections.abc import Iterable

from precast.diagnostics.tracing.lineage import Link, chain
from precast.diagnostics.tracing.reasons import Decided
from precast.errors import PolicyError
from precast.policy import preset_files
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["note_on"]

_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|same type|should be the same|expected.*(Float|Half|BFloat16|Double)",
    re.IGNORECASE,
)
_OURS = "precast's trace: "


def note_on(  # noqa: PLR0917
    error: BaseException,
    decided: Decided,
    device: str,
    policy: Policy,
    inputs: Iterable[str],
    links: Iterable[Link | None],
    *,
    enabled: bool,
) -> None:
    """Adds a note to an error about dtypes that differ, unless it has one; leaves all other errors alone."""
    floating = [dtype for dtype in inputs if "float" in dtype]
    if not isinstance(error, RuntimeError) or len(set(floating)) < 2:
        return
    noted = any(note.startswith(_OURS) for note in getattr(error, "__notes__", ()))
    if noted or not _ABOUT_DTYPES.search(str(error)):
        return
    rule = "no rule" if decided.rule is None else f"the rule {decided.rule!r}"
    remedy = f'  Autocast is off here. To mend it, run it in a region: with precast.autocast("{device}"): ...'
    lines = [
        f"{_OURS}{decided.op} has {rule} ({decided.reason}), and got {', '.join(floating)}.",
        *_ways(links),
        _remedy(decided.op, device, policy) if enabled else remedy,
    ]
    error.add_note("\n".join(lines))


def _ways(links: Iterable[Link | None]) -> Iterable[str]:
    """Which operation decided each dtype."""
    said = set()
    for link in links:
        steps = chain(link)
        if steps and (text := str(steps[-1])) not in said:
            said.add(text)
            yield f"  {steps[-1].output} came from {text}"


def _remedy(op: str, device: str, policy: Policy) -> str:
    try:
        lines = whole_file(policy, ops={device: {op: "promote"}}).splitlines()
    except PolicyError:
        return "  To mend it, cast one of them before the call."
    file = "\n".join(f"    {line}".rstrip() for line in lines)
    said = f"  To mend it, save this as a policy file, and name it as the policy:\n{file}"
    if preset_files.is_preset(policy.name):
        said += f"\n  or: policy=precast.Policy.load({policy.name!r}).replace(ops={{{op!r}: 'promote'}})"
    return said
