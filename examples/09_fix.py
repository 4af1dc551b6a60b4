"""An old program and `precast-lint check --fix`: the same losses before and after, and no more warnings.

`09_before.py` is the program; a copy of it is changed to `torch.amp`.
"""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

from showing import table

OLD_PROGRAM = Path(__file__).with_name("09_before.py")


@dataclass(frozen=True)
class Run:
    """The losses of a program, and how many kinds of FutureWarning it gave."""

    losses: list[float]
    warnings: int


def fixed(program: Path) -> str:
    """Return a program after `precast-lint check --fix`, which changes a copy of it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, program.name)
        copy.write_bytes(program.read_bytes())
        command = [sys.executable, "-m", "precast_lint", "check", "--fix", str(copy)]
        subprocess.run(command, check=True, capture_output=True)
        return copy.read_text(encoding="utf-8")


def run(text: str) -> Run:
    """Runs a program, and its function `train`."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        path = Path(folder, "program.py")
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None
        assert spec.loader is not None
        warnings.simplefilter("always")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        losses: list[float] = module.train()
    return Run(losses, len({str(w.message) for w in caught if w.category is FutureWarning}))


def changed(before: str, after: str) -> list[str]:
    """The lines that a fix wrote anew."""
    return [
        line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] == "+"
    ]


def main() -> None:
    """Prints what is changed, and what the programs compute."""
    before = OLD_PROGRAM.read_text(encoding="utf-8")
    programs = {
        "as it was": before,
        "precast-lint check --fix": fixed(OLD_PROGRAM),
    }
    table(
        ("09_before.py", "lines changed", "FutureWarnings", "last loss"),
        *(
            (name, len(changed(before, text)), found.warnings, f"{found.losses[-1]:.8f}")
            for name, text in programs.items()
            for found in [run(text)]
        ),
    )
    print("precast-lint check --fix:")
    for line in changed(before, programs["precast-lint check --fix"]):
        print(*textwrap.wrap(line, 80, subsequent_indent=" " * 10), sep="\n")


if __name__ == "__main__":
    main()
