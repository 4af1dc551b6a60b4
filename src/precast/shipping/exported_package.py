"""Packages of AOTInductor: an exported program compiled for the machine, which PyTorch loads in Python and in C++.

Invariants:

- each result that the program rounds to 16 bits is rounded in the package, also if the compiler fuses operations;
- a package is written completely or not at all.
"""

from __future__ import annotations

from pathlib import Path

import torch

from precast import _torch
from precast.errors import ExportError, PrecastError
from precast.shipping import exported_file

__all__ = ["write_package"]


def write_package(program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile a program, and write the package that `torch._inductor.aoti_load_package` loads.

    Raises:
        ExportError: there is no compiler, or the program cannot be compiled.
        OutputError: it could not be written.
    """

    def save(name: str) -> None:
        try:
            with torch.no_grad(), exported_file.without_deprecations():
                _torch.compile_package(program, name)
        except (PrecastError, OSError):
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"AOTInductor cannot compile the program: {type(error).__name__}: {first}"
            ) from error

    exported_file.replace_by(path, save, ".pt2")
