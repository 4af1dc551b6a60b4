"""Renders `docs/conformance.md` from `docs/data/conformance.json`, which `python -m tools.conformance` writes.

Invariants:
    - The page depends on the JSON file and the list of intended differences alone.
    - Not part of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.conformance.differences import DIFFERENCES

__all__ = ["render"]

Results = Mapping[str, Any]

_HEAD = """\
# Conformance

Programs that ran on PyTorch's autocast and on precast with the policy `torch`, in one process. Results, gradients and
dtypes were compared bit for bit. Each ran on precast in four ways: in its own regions (`precast.autocast`) and in
PyTorch's while precast is installed (`precast.install()`), each on the {engine} and on the reference engine.

`make conformance` runs all of it and writes this page and its data. This run was on {date}, with PyTorch {torch},
Python {python}, on the CPU ({cpu}).

"""

_TESTS = """\
## Tests

The files of `tests/conformance/`. A case is one comparison with PyTorch, or one behaviour that PyTorch does not have.
`test_fake_devices.py` compares decisions with those of torch.autocast on cuda, xpu, mps and mtia: operations, dtypes
and errors of the forward pass, without values. `test_pretended_device.py` runs the tests marked `gpu` on a CUDA device
whose memory and kernels are the CPU's: that proves which kernels run, their dtypes and order, waits and captures.
Neither proves anything about concurrent streams, cuDNN, Triton, NCCL or speed.

"""

_PROGRAMS = """\
## Random programs

{count} programs, drawn with seed {seed}: {steps} steps, among them operations with and without a rule, modules, nested
regions of several devices, dtypes and cache settings, grad modes, writes in place and through views, hooks, exceptions
and backward passes. A program is *equal* if all results are the same bit for bit. It is *explained* if results differ
only at the points in the list below, and are equal after PyTorch's cache is emptied there. Gradients of a backward pass
that raises an error are not compared, because the order of independent nodes is not fixed.

"""

_DIFFERENCES = """\

## Intended differences

Number of programs that each difference explains, on the {engine} engine; some programs need two.

"""

_CLIENTS = """\

## Programs of other libraries

`make test-clients`: each ran unmodified with PyTorch alone and with precast installed, on both engines, and all results
were compared.

"""

_VERSIONS = """\

## Versions

`make test-versions`: all tests, including those of this page.

"""

_NOT_RUN = "Not run.\n"


def render(results: Results) -> str:
    """The whole page."""
    programs = results["programs"]
    engine = _engine(programs).removesuffix(" engine")
    parts = [
        _HEAD.format(**results, engine=engine),
        _TESTS,
        *_lines(_tests(results["sections"])),
        *_skipped(results["sections"]),
        "\n",
        _PROGRAMS.format(**programs),
        *_lines(_systems(programs)),
        f"\nUnexplained: {_in_words(programs['unexplained'])}.\n",
        _DIFFERENCES.format(**programs, engine=engine),
        *_lines(_differences(programs)),
        _CLIENTS,
        *(_lines(_clients(results["clients"])) if results["clients"] else [_NOT_RUN]),
        _VERSIONS,
        *(_lines(_versions(results["versions"])) if results["versions"] else [_NOT_RUN]),
    ]
    return "".join(parts)


def _tests(sections: Iterable[Results]) -> Iterator[str]:
    yield from _header("file", "contents", "equal, of cases")
    total = dict.fromkeys(("cases", "equal"), 0)
    for section in sections:
        name = section["file"].removeprefix("tests/conformance/")
        contents = section["title"].partition(":")[0]
        yield _row(f"`{name}`", contents, f"{section['equal']}/{section['cases']}")
        total = {key: total[key] + section[key] for key in total}
    yield _row("", "all", f"{total['equal']}/{total['cases']}")


def _skipped(sections: Iterable[Results]) -> Iterator[str]:
    reasons: dict[str, int] = {}
    for section in sections:
        for reason, count in section["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    if reasons:
        listed = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items()))
        yield f"\nSkipped: {listed}.\n"


def _systems(programs: Results) -> Iterator[str]:
    yield from _header("system", "programs", "equal", "explained")
    for system in programs["systems"]:
        explained = sum(each["programs"] for each in system["explained"])
        yield _row(system["name"], programs["count"], system["equal"], explained)


def _engine(programs: Results) -> str:
    """The engine beside the reference that the programs ran on, as the names of systems say it."""
    names = [system["name"].partition(", ")[2] for system in programs["systems"]]
    return next((name for name in names if name != "reference engine"), "reference engine")


def _differences(programs: Results) -> Iterator[str]:
    engine = _engine(programs)
    first = [s for s in programs["systems"] if s["name"].endswith(engine)]
    yield from _header("difference", "description", *(s["name"].partition(",")[0] for s in first))
    for difference in DIFFERENCES:
        link = f"[{difference.name}](differences.md#{difference.anchor})"
        counts = (_explained_by(difference.point, system) for system in first)
        yield _row(link, difference.what, *counts)


def _explained_by(point: str, system: Results) -> int:
    return sum(
        each["programs"] for each in system["explained"] if point in each["divergence_points"]
    )


def _clients(clients: Iterable[Results]) -> Iterator[str]:
    yield from _header("library", "programs", "tensors compared", "identical")
    for client in clients:
        yield _row(*(client[key] for key in ("library", "programs", "tensors", "identical")))


def _versions(runs: Iterable[Results]) -> Iterator[str]:
    yield from _header("PyTorch", "Python", "passed", "skipped", "failed", "date")
    for run in runs:
        keys = ("torch", "python", "passed", "skipped", "failed", "date")
        yield _row(*(run[key] for key in keys))


def _in_words(count: int) -> str:
    return "zero" if count == 0 else str(count)


def _header(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield "|---" * len(cells) + "|"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _lines(lines: Iterable[str]) -> Iterator[str]:
    return (f"{line}\n" for line in lines)
