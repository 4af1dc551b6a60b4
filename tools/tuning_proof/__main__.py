"""Shows that `precast.tune` finds what it should, how long it takes, and how good that is.

    python -m tools.tuning_proof planted [--networks 10]     what must not run in 16 bits is found, and nothing else
    python -m tools.tuning_proof exhaustive [--networks 10]  the choice beside every other one
    python -m tools.tuning_proof seeds [--seeds 5]           the same policy from each seed, or one as good
    python -m tools.tuning_proof growth [--sizes 10 30 ...]  the time by the number of modules
    python -m tools.tuning_proof search [--budget 300]       the time for a decoder of four layers
    python -m tools.tuning_proof real [NETWORK ...]          real networks beside presets and torch.autocast
    python -m tools.tuning_proof render                      writes the tables of docs/tune.md anew

Each writes what it measures to docs/data/tuning.json as soon as it is measured, and then the tables. The exit status is
1 where something was not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from tools.tuning_proof import data, page
from tools.tuning_proof.exhaustive import compared
from tools.tuning_proof.growth import SIZES, grown
from tools.tuning_proof.networks import NETWORKS
from tools.tuning_proof.planted import planted
from tools.tuning_proof.real import tuned_beside
from tools.tuning_proof.search import searched
from tools.tuning_proof.seeds import found_by_seeds

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one measurement; returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        is_right = _WORKS[asked.what](asked)
    finally:
        if not asked.dry:
            page.render(data.read())
    return int(not is_right)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.tuning_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=sorted(_WORKS))
    parser.add_argument("network", nargs="*", help=f"of: {', '.join(NETWORKS)}; all by default")
    parser.add_argument("--networks", type=int, default=10, help="random networks of each kind")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="modules")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of `search`")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each network, or seed")
    parser.add_argument("--objective", choices=("time", "memory"), default="time")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--missing", action="store_true", help="only networks not yet measured")
    parser.add_argument("--dry", action="store_true", help="print alone; write no file")
    return parser


def _planted(asked: argparse.Namespace) -> bool:
    rows = []
    for row in planted(asked.networks, asked.seconds):
        rows.append(row)
        _said(asked, row)
        _kept(asked, "planted", {"networks": rows, "budget": asked.seconds})
    return all(row["is_right"] for row in rows)


def _exhaustive(asked: argparse.Namespace) -> bool:
    rows = []
    for row in compared(asked.networks):
        rows.append(row)
        _said(asked, row)
        _kept(asked, "exhaustive", {"networks": rows})
    return all(row["is_right"] or row["within_noise"] for row in rows)


def _growth(asked: argparse.Namespace) -> bool:
    rows = []
    for row in grown(asked.sizes):
        rows.append(row)
        _said(asked, row)
        _kept(asked, "growth", {"sizes": rows})
    return True


def _seeds(asked: argparse.Namespace) -> bool:
    found = found_by_seeds(
        range(asked.seeds), asked.seconds, objective=asked.objective, tolerance=asked.tolerance
    )
    _said(asked, found)
    _kept(asked, "seeds", found, asked.objective)
    return bool(found["are_proven"] and (found["is_same"] or found["within_noise"]))


def _search(asked: argparse.Namespace) -> bool:
    found = searched(asked.budget, tolerance=asked.tolerance)
    _said(asked, {name: value for name, value in found.items() if name != "comparisons"})
    _kept(asked, "search", found)
    return bool(found["is_proven"])


def _real(asked: argparse.Namespace) -> bool:
    if unknown := set(asked.network) - set(NETWORKS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; write some of: {', '.join(NETWORKS)}")
    known = data.read().get(f"real {asked.objective}", {})
    are_right = True
    for name in asked.network or NETWORKS:
        if asked.missing and "failure" not in known.get(name, {"failure": "not measured yet"}):
            continue
        try:
            row = tuned_beside(
                name, asked.seconds, objective=asked.objective, tolerance=asked.tolerance
            )
        except Exception as error:  # a library that is missing; the other networks are measured
            row = {"network": name, "failure": f"{type(error).__name__}: {error}"}
        _said(asked, {key: row.get(key) for key in ("network", *_SHOWN) if row.get(key)})
        _kept(asked, f"real {asked.objective}", row, name)
        are_right &= "failure" not in row and row["beside"]["within"] != "no"
    return are_right


_SHOWN: Final = ("failure", "answer", "because", "search_seconds", "seconds", "seeds", "beside")


def _render(_asked: argparse.Namespace) -> bool:
    return True


_WORKS: Final[dict[str, Callable[[argparse.Namespace], bool]]] = {
    "planted": _planted,
    "exhaustive": _exhaustive,
    "seeds": _seeds,
    "growth": _growth,
    "search": _search,
    "real": _real,
    "render": _render,
}


def _said(_asked: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps(row, default=str), flush=True)


def _kept(asked: argparse.Namespace, part: str, measured: dict[str, Any], key: str = "") -> None:
    if not asked.dry:
        data.put(part, {**measured, "where": data.where()}, key)


if __name__ == "__main__":
    sys.exit(main())
