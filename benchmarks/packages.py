"""Exported programs and packages of AOTInductor beside the same model in 16 bits by hand, shipped the same way.

By hand is `model.to(dtype)`, exported, and compiled with AOTInductor's own settings. Those leave out roundings between
operations that the compiler joins; a policy's package is compiled so that it rounds where the program does. What the
policy keeps in float32 is written by hand too (`benchmarks/islands.py`), so that it does not count as precast's cost.

Invariants:
    - A row compares two things that were shipped alike, in one process, in turns.
    - Where a policy's program is that of another policy, it is compiled once, and its rows say so.
    - Where nothing can be compiled, the rows of the packages say why, and those of the programs are measured.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import precast
from benchmarks import islands, networks
from benchmarks.interleave import Variant, compare
from benchmarks.networks import Network
from benchmarks.shipping import called, fresh, repeats, seconds_of
from benchmarks.variants import BY_HAND
from precast.errors import ExportError
from precast.shipping.exported_package import write_package

__all__ = ["CASES", "EXPORTED", "PACKAGE", "POLICIES", "ROUNDS", "run"]

ROUNDS = 21
EXPORTED, PACKAGE = "exported", "AOTInductor"
"""A program that PyTorch runs eagerly, and one that AOTInductor has compiled."""
POLICIES: Mapping[str, str] = {"": "default", " + lean": "lean"}
"""What the name of a kind ends with -> the policy."""
_BY_HAND = {kind: f"{kind}, {BY_HAND}" for kind in (EXPORTED, PACKAGE)}
_DTYPE = torch.bfloat16

CASES: Mapping[str, Callable[[], Network]] = {
    "decoder 512, 1x1": partial(networks.decoder, 512, 1, 1),
    "decoder 512, 1x128": partial(networks.decoder, 512, 1, 128),
    "convolutional": networks.convolutional,
    "MLP": networks.mlp,
}


@dataclass(frozen=True)
class _Package:
    """A package that is loaded.

    Attributes:
        run: calls it.
        bytes: of its file.
    """

    run: Callable[..., object]
    bytes: int


def run(*, rounds: int = ROUNDS, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Rows for each network: the program and the package under each policy."""
    torch.set_num_threads(1)
    for case, make in CASES.items():
        if not only or any(word in case for word in only):
            with tempfile.TemporaryDirectory() as folder:
                yield from _measure(case, make(), rounds, Path(folder))


def _measure(case: str, network: Network, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    model, inputs = fresh(network)
    programs = {
        end: precast.export(model, (inputs,), policy=policy, dtype=_DTYPE)
        for end, policy in POLICIES.items()
    }
    first = {end: _first_alike(programs, end) for end in programs}
    lowered = inputs.to(_DTYPE) if inputs.is_floating_point() else inputs
    by_hand = {"": _exported_by_hand(model.to(_DTYPE).requires_grad_(False), lowered)}
    for end in dict.fromkeys(first.values()):
        low = [name for name, weight in programs[end].state_dict.items() if weight.dtype is _DTYPE]
        alike = islands.in_16_bits(network, low, _DTYPE)
        by_hand[_alike(end)] = _exported_by_hand(alike, inputs)
    packages, why_not = _packaged({end: programs[end] for end in first.values()}, by_hand, folder)

    works = {}
    for end, program in by_hand.items():
        given = inputs if end else lowered
        works[_BY_HAND[EXPORTED] + end] = called(program.module(), given)
        if packages:
            works[_BY_HAND[PACKAGE] + end] = called(packages[_BY_HAND[PACKAGE] + end].run, given)
    for end, program in programs.items():
        works[EXPORTED + end] = called(program.module(), inputs)
        if packages:
            works[PACKAGE + end] = called(packages[PACKAGE + first[end]].run, inputs)
    calls = repeats(seconds_of(works[_BY_HAND[EXPORTED]]))
    result = compare(
        {kind: Variant(work) for kind, work in works.items()}, rounds=rounds, calls=calls
    )
    for end in programs:
        for shipped in (EXPORTED, PACKAGE):
            kind, other = shipped + end, _BY_HAND[shipped]
            row = {"benchmark": "packages", "case": case, "kind": kind, "rounds": rounds}
            row |= {"calls": calls, "against": other, "same_as": POLICIES[first[end]]}
            if kind not in works:
                yield row | {"skipped": why_not}
                continue
            ratio, spread = result.ratio(kind, other)
            row |= {"median_ms": result.median(kind) * 1e3, "by_hand": ratio, "by_hand_iqr": spread}
            same = other + _alike(first[end])
            row["same_islands"], row["same_islands_iqr"] = result.ratio(kind, same)
            if shipped == PACKAGE:
                size = packages[shipped + first[end]].bytes
                row["file"] = size / packages[other].bytes
                row["file_same_islands"] = size / packages[same].bytes
            yield row


def _alike(end: str) -> str:
    return f", with the float32 of {POLICIES[end]}"


def _packaged(
    programs: Mapping[str, torch.export.ExportedProgram],
    by_hand: Mapping[str, torch.export.ExportedProgram],
    folder: Path,
) -> tuple[dict[str, _Package], str]:
    """The package of each program and of the models by hand; none, and the reason, where nothing can be compiled."""
    packages: dict[str, _Package] = {}
    for end, program in programs.items():
        path = folder / f"{len(packages)}.pt2"
        try:
            write_package(program, path)
        except ExportError as error:
            return {}, str(error)
        packages[PACKAGE + end] = _loaded(path)
    for end, program in by_hand.items():
        path = folder / f"{len(packages)}.pt2"
        with torch.no_grad(), _without_deprecations():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        packages[_BY_HAND[PACKAGE] + end] = _loaded(path)
    return packages, ""


def _exported_by_hand(model: nn.Module, inputs: Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad(), _without_deprecations():
        return torch.export.export(model, (inputs,))


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """PyTorch's exporter and compiler use what PyTorch has deprecated (2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _loaded(path: Path) -> _Package:
    return _Package(torch._inductor.aoti_load_package(str(path)), path.stat().st_size)


def _first_alike(programs: Mapping[str, torch.export.ExportedProgram], end: str) -> str:
    """The first of the programs that has the same graph and weights of the same dtypes."""
    mine = _written(programs[end])
    return next(other for other, program in programs.items() if _written(program) == mine)


def _written(program: torch.export.ExportedProgram) -> str:
    dtypes = {name: str(weight.dtype) for name, weight in program.state_dict.items()}
    return f"{program.graph}\n{dtypes}"
