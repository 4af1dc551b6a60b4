"""Loads the package and answers; precast is not imported, and need not be installed.

python serve.py classifier.aoti.pt2 points.pt answer.pt
"""

from __future__ import annotations

import sys

import torch


def main() -> None:
    """Reads the input from a file, and writes what the package computes to another."""
    package, given, answer = sys.argv[1:]
    run = torch._inductor.aoti_load_package(package)
    found = run(torch.load(given))
    torch.save(found, answer)
    print(f"{tuple(found.shape)} in {found.dtype}, precast imported: {'precast' in sys.modules}")


if __name__ == "__main__":
    main()
