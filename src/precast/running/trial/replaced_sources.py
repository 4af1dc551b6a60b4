"""Other text in place of files of the program: an edit of it, and a mark at the function that is a step.

Invariants: the files are not changed, and no bytecode of them is used; nothing here imports torch.
"""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from precast.running.trial.plan import TrialPlan

__all__ = ["replace_sources"]


def replace_sources(plan: TrialPlan) -> None:
    """Run the plan's texts, and decorate its step function by ``__precast_step__`` of `builtins`."""
    if not plan.sources and plan.step_function is None:
        return
    module, _, name = (plan.step_function or ":").partition(":")
    definition = re.compile(rf"^([ \t]*)(async )?def {re.escape(name.rpartition('.')[2])}\(", re.M)
    read, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def has_step(loader: Any) -> bool:
        is_main = loader.name == "__main__" and module in {"__main__", Path(plan.program).stem}
        return bool(module) and (is_main or loader.name == module)

    def get_data(loader: Any, path: Any) -> bytes:
        if path in plan.sources:
            return plan.sources[path].encode()
        data = read(loader, path)
        if not (has_step(loader) and str(path).endswith(".py")):
            return data
        mark = r"\1@__precast_step__\n\g<0>"
        return definition.sub(mark, data.decode(), count=1).encode()

    def path_stats(loader: Any, path: Any) -> Any:
        if path in plan.sources or has_step(loader):
            raise OSError("this text has no file")
        return stats(loader, path)

    SourceFileLoader.get_data = get_data  # type: ignore[assignment, method-assign]
    SourceFileLoader.path_stats = path_stats  # type: ignore[assignment, method-assign]
