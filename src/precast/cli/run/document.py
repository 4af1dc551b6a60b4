"""The document of a run: what was seen, as plain values that need no PyTorch to be read.

Invariants: it can always be made, also of a run that ended before it loaded PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from precast._internal.version import __version__
from precast.cli.run.exit_status import ExitStatus
from precast.cli.run.output_files import Rank
from precast.cli.run.target import Target
from precast.diagnostics.report.numbers import numeric_findings

if TYPE_CHECKING:
    from precast.cli.run.run_observer import RunObserver
    from precast.diagnostics.report.schema import Document

__all__ = ["document_of"]


def document_of(
    target: Target,
    rank: Rank,
    policy: str,
    *,
    ending: ExitStatus,
    seconds: float,
    watch: RunObserver | None,
) -> Document:
    """One JSON object, as `docs/report.md` describes it.

    Args:
        target: what was run.
        rank: of this process.
        policy: what was asked for, where nothing was watched.
        ending: how it ended.
        seconds: how long it ran.
        watch: what was seen; None where the program never loaded PyTorch.
    """
    run = {
        "command": target.command,
        "ended": ending.how,
        "code": ending.code,
        "message": ending.message,
        "seconds": seconds,
        "rank": rank.number,
        "world_size": rank.of,
        "torch": _version_of_torch(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "devices": [],
        "policy": {"name": policy},
        "steps": 0,
        "skipped": 0,
        "traced": None,
    }
    document: dict[str, Any] = {
        "schema": 1,
        "precast": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "run": run,
        "steps": [],
        "counts": [],
        "trace": None,
        "health": None,
    }
    seen = cast("Document", document if watch is None else _with(document, watch))
    return {**seen, "findings": numeric_findings(seen)}


def _version_of_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _with(document: dict[str, Any], watch: RunObserver) -> dict[str, Any]:
    history = watch.steps.history
    seen = {
        "devices": watch.devices(),
        "policy": watch.named_policy(),
        "steps": history.count,
        "skipped": history.skipped,
        "nonfinite_losses": history.nonfinite,
        "first_nonfinite_loss": history.first_nonfinite,
        "elsewhere": watch.window.elsewhere,
        "compiled": watch.compiles(),
        "traced": watch.window.traced,
        **watch.rules(),
    }
    return {
        **document,
        "run": {**document["run"], **seen},
        "steps": [step.as_dict() for step in history.kept()],
        "verdicts": watch.verdicts(),
        "counts": watch.window.counts(),
        "trace": watch.window.as_dict(),
        "health": watch.health(),
    }
