"""Calls a function in a process of its own, and gives what it printed.

Invariants:
    - Processes are forked from one that has loaded PyTorch and computed nothing, which halves what the programs cost.
    - A process knows nothing of the others, runs in the project's folder, and prints in 80 columns without colours.
    - What it writes to stderr is dropped, unless it fails: then its end is said.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.site.directives import PageError

__all__ = ["printed_apart"]

_LIMIT = 300  # seconds that a function may run
_LINES = 20  # of what a failed one wrote
_PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONUTF8": "1", "PYTHONWARNINGS": "ignore"}
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    ["torch", "precast.autocast_mode.region", "precast.grad_scaler.scaler", "tools.site.apart"]
)


def printed_apart(
    name: str, root: Path, function: Callable[..., object], *arguments: object
) -> str:
    """Return the output of a function.

    Args:
        name: what to call it where it fails.
        root: the folder in which it runs.
        function: a function of a module.
        arguments: its arguments.

    Raises:
        PageError: it failed, or did not end.
    """
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKED.Process(target=_call, args=(out, err, root, function, *arguments))
        process.start()
        process.join(_LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise PageError(f"`{name}` did not end within {_LIMIT} seconds")
        if process.exitcode:
            end = "\n".join(err.read_text("utf-8").splitlines()[-_LINES:])
            raise PageError(f"`{name}` failed with exit code {process.exitcode}:\n{end}")
        return out.read_text("utf-8")


def _call(
    out: Path, err: Path, root: Path, function: Callable[..., object], *arguments: object
) -> None:
    """Run the function in the process. File descriptors are replaced, so that its child processes write there, too."""
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    os.environ |= _PLAIN
    os.chdir(root)
    warnings.simplefilter("ignore")
    function(*arguments)
