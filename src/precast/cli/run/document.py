"""The document of a run: what was seen, as plain values that need no PyTorch to be read.

Invariants: it can always be made, also of a run that ended before it loaded PyTorch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from precast._internal.version import __version__
from precast.cli.run.exit_status import ExitStatus
from precast.cli.run.output_files import Rank
from precast.cli.run.target import Target
from precast.diagnostics.report.numbers import numeric_findings
from precast.diagnostics.schema import VERSION, Document, PolicyName, Run

if TYPE_CHECKING:
    from precast.cli.run.run_observer import RunObserver

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
    """What is left of a run, as `docs/report.md` describes it.

    Args:
        target: what was run.
        rank: of this process.
        policy: what was asked for, where nothing was watched.
        ending: how it ended.
        seconds: how long it ran.
        watch: what was seen; None where the program never loaded PyTorch.
    """
    run = Run(
        command=target.command,
        ended=ending.how,
        code=ending.code,
        message=ending.message,
        seconds=seconds,
        rank=rank.number,
        world_size=rank.of,
        torch=_version_of_torch(),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        devices=[],
        policy=PolicyName(policy),
        steps=0,
        skipped=0,
        traced=None,
    )
    made = Document(
        schema=VERSION,
        precast=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        run=run,
        steps=[],
        counts=[],
        trace=None,
        health=None,
        findings=[],
    )
    document = made if watch is None else _with(made, watch)
    return replace(document, findings=numeric_findings(document))


def _version_of_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _with(document: Document, watch: RunObserver) -> Document:
    history = watch.steps.history
    run = replace(
        document.run,
        devices=watch.devices(),
        policy=watch.named_policy(),
        steps=history.count,
        skipped=history.skipped,
        nonfinite_losses=history.nonfinite,
        first_nonfinite_loss=history.first_nonfinite,
        elsewhere=watch.window.elsewhere,
        compiled=watch.compiles(),
        traced=watch.window.traced,
        module_rules=watch.rules(),
    )
    return replace(
        document,
        run=run,
        steps=history.kept(),
        verdicts=watch.verdicts(),
        counts=watch.window.counts(),
        trace=watch.window.data(),
        health=watch.health(),
    )
