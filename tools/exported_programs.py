"""Exports random programs of the conformance tests, and compares each with itself in a region, bit by bit.

    python -m tools.exported_programs                    500 programs
    python -m tools.exported_programs --programs 50 --seed 7

Invariants:
    - The same seed draws the same programs, however many processes run them.
    - Not part of the package; nothing is written.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context

import torch

from tests.shipping.programs import outcomes, refusal

__all__ = ["main"]

AT_ONCE = 10
"""How many programs are drawn from one seed."""


def main(arguments: Sequence[str]) -> int:
    """Says how many programs were equal, and why others were not; 0 if each is equal or refused for a known reason."""
    chosen = _parser().parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's advice on deprecated calls
    seed = random.randrange(2**30) if chosen.seed is None else chosen.seed
    starts = range(0, chosen.programs, AT_ONCE)
    parts = [(min(AT_ONCE, chosen.programs - start), seed + start) for start in starts]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with get_context("spawn").Pool(chosen.processes, _prepare) as pool:
        for counted, failed in pool.imap_unordered(_run, parts):
            counts += counted
            wrong += failed
            equal = f"{counts['equal']} equal, {len(wrong)} unexplained"
            print(f"{counts.total()} of {chosen.programs}: {equal}", file=sys.stderr, flush=True)
            print(*failed, sep="\n", end="\n" * bool(failed), flush=True)
    print(f"{counts.total()} programs, seed {seed}")
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")
    return 1 if wrong else 0


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch.export's own words on what it refuses


def _run(part: tuple[int, int]) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for number, (case, found) in enumerate(outcomes(*part)):
        why = refusal(found) if found.kind == "refused" else None
        own = ", and by PyTorch without a policy" if found.by_torch else ""
        counts[f"refused{own}: {why}" if why else found.kind] += 1
        if found.kind != "equal" and why is None:
            wrong.append(f"{part}[{number}] {found}\n    {case!r}")
    return counts, wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.exported_programs")
    parser.add_argument("--programs", type=int, default=500, help="how many; 500 if not given")
    parser.add_argument("--seed", type=int, help="draws the programs; printed where none is given")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
