"""Ships every model in every way, compares it with the model in a region to the last bit, and writes the table.

    .venvs/clients/bin/python -m tools.shipping --write
    .venvs/clients/bin/python -m tools.shipping --write --missing     only cells that the data has not

It needs the libraries of the extra `test-clients`. A new way to ship is one row of `WAYS` in shipping_ways.py; what is
asked for by name (`BERT --ways ONNX`) is measured alone, and the rest of the table stays. All of it takes hours, most
of them in AOTInductor's compiler; each row is written when it is there.

Invariants:
    - What is shipped is called with the arguments with which the model is called in a region, in the same mode.
    - A cell is what happened: "equal", "differs by" so much, or "refused" with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precast._internal.pytree import tensors_in
from precast.errors import MissingExtraError, PrecastError
from precast.shipping.function_calls import is_same
from tools.shipping_cases import CASES, POLICIES, Case
from tools.shipping_ways import WAYS, NotShippedError, Trial, Way

__all__ = ["compared", "main", "run", "table"]

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "shipping.json"
PAGES = [ROOT / "docs" / "ship.md", ROOT / "docs" / "ship.zh.md"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DIFFERS = re.compile(r"differs by ([\d.e+-]+|inf)(.*)")
_PLACE = re.compile(r"(<!-- table of shipped models -->\n).*?(<!-- end of the table -->)", re.S)


def compared(
    case: Case,
    policy: str,
    dtype: torch.dtype,
    ways: Iterable[str] = WAYS,
    made: dict[tuple[str, str], tuple[Any, str]] | None = None,
) -> dict[str, str]:
    """Way -> how what it ships compares with the model in a region.

    Args:
        case: the model.
        policy: one of `POLICIES`.
        dtype: the lower precision.
        ways: those that are tried.
        made: what other policies made of the same model, as `Trial.made`.
    """
    trial = Trial(case, policy, dtype, {} if made is None else made)
    return {way: _cell_of(WAYS[way], trial) for way in ways}


def _cell_of(way: Way, trial: Trial) -> str:
    try:
        expected = trial.expected_of_graph if way.is_graph else trial.expected
    except MissingExtraError:
        raise
    except NotShippedError as error:
        return str(error)
    except PrecastError as error:
        return f"refused in a region too: {_first(error)}"
    except RuntimeError as error:
        return f"refused by PyTorch in a region too: {_first(error)}"
    trial.note = ""
    try:
        return f"{_compare(expected, way.ship(trial))} {trial.note}".strip()
    except (PrecastError, NotShippedError) as error:
        return f"refused: {_first(error)}"


def _first(error: Exception) -> str:
    """The first sentence; for what torch.export says, also the first of its own."""
    first, _, rest = str(error).partition("\n")
    said = first.partition(". ")[0].rstrip(".")
    if first.endswith("on this example."):
        said = f"{said}: {rest.partition(chr(10))[0].partition('. ')[0]}"
    return said.replace("|", "/").replace("<", "`").replace(">", "`")


def _compare(expected: Any, found: Any) -> str:
    ours, theirs = _values(found), _values(expected)
    assert theirs, "a case computes tensors"
    if len(ours) == len(theirs) and all(map(is_same, ours, theirs)):
        return "equal"
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return "differs in shape"
    if [t.dtype for t in ours] != [t.dtype for t in theirs]:
        return "differs in dtype"
    return f"differs by {max(map(_distance, ours, theirs)):.1g}"


def _values(result: Any) -> list[Tensor]:
    return tensors_in(result) or tensors_in(list(vars(result).values()))


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, divided by the largest number."""
    one, other = one.double(), other.double()
    distance = ((one - other).abs().max() / other.abs().max()).item()
    return math.inf if math.isnan(distance) else distance


def run(
    only: tuple[str, ...] = (),
    ways: tuple[str, ...] = (),
    known: Collection[tuple[str, str, str, str]] = (),
) -> Iterator[dict[str, str]]:
    """One row for each model, policy and dtype, without the cells that are known: (model, policy, dtype, way)."""
    for case in CASES.values():
        if only and not any(word in case.name for word in only):
            continue
        made: dict[tuple[str, str], tuple[Any, str]] = {}
        for policy in POLICIES:
            for name, dtype in DTYPES.items():
                asked = [w for w in ways or WAYS if (case.name, policy, name, w) not in known]
                if not asked:
                    continue
                try:
                    found = compared(case, policy, dtype, asked, made)
                except MissingExtraError as error:
                    print(f"{case.name} is left out: {error}")
                    continue
                row = {"model": case.name, "library": case.library, "policy": policy, "dtype": name}
                yield row | found


def table(rows: list[dict[str, str]]) -> str:
    """One line for each model: what every policy and dtype gave, together where they agree."""
    ways = [way for way in WAYS if any(way in row for row in rows)]
    lines = [f"| model | library | {' | '.join(ways)} |", f"|---|---|{'---|' * len(ways)}"]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_it = [row for row in rows if row["model"] == model]
        cells = [_cell([(row, row[way]) for row in of_it if way in row]) for way in ways]
        lines.append(f"| {model} | {of_it[0]['library']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: list[tuple[dict[str, str], str]]) -> str:
    """What was found, with policy and dtype where it is not the same for all; of differences the largest."""
    parts: dict[str, list[str]] = {}
    largest: dict[str, float] = {}
    for row, what in found:
        difference = _DIFFERS.fullmatch(what)
        equal = "equal" if what.startswith("equal") else what
        said = f"differs by up to {{}}{difference[2]}" if difference else equal
        parts.setdefault(said, []).append(f"{row['policy']} {row['dtype']}")
        if difference:
            largest[said] = max(largest.get(said, 0.0), float(difference[1]))
    if len(parts) == 1:
        [said] = parts
        return said.format(largest[said]) if said in largest else said
    return "; ".join(
        said if said.startswith("equal") else _with_place(said, where, largest, "equal" in parts)
        for said, where in parts.items()
    )


def _with_place(said: str, where: list[str], largest: dict[str, float], are_equal: bool) -> str:
    """What was found and where; of differences, where only if others have none."""
    if said not in largest:
        return f"{said} ({', '.join(where)})"
    differs = said.format(largest[said])
    return f"{differs} ({', '.join(where)})" if are_equal else differs


def main() -> None:
    """Prints the table, and writes it where it is asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", help="words: a model whose name has one of them")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=[], help="[default: all]")
    parser.add_argument("--write", action="store_true", help="write the data and the pages")
    parser.add_argument("--missing", action="store_true", help="leave out cells that the data has")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, str]] = []
    known = _known() if asked.missing else set()
    for row in run(tuple(asked.only), tuple(asked.ways), known):
        rows.append(row)
        if asked.write:
            _write(rows)
    print(table(rows))


def _known() -> set[tuple[str, str, str, str]]:
    """The cells that the data has."""
    return {
        (row["model"], row["policy"], row["dtype"], way)
        for row in _with_what_was([])
        for way in WAYS
        if way in row
    }


def _write(rows: list[dict[str, str]]) -> None:
    rows = _with_what_was(rows)
    text = table(rows)
    found = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__, "rows": rows}
    DATA.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = _PLACE.sub(lambda place: f"{place[1]}\n{text}\n{place[2]}", before)
        page.write_text(after, encoding="utf-8")


def _with_what_was(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows in the order of the cases; what was not run is as it was written last."""
    before = json.loads(DATA.read_text(encoding="utf-8"))["rows"] if DATA.exists() else []
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in (*before, *rows):
        found.setdefault((row["model"], row["policy"], row["dtype"]), {}).update(row)
    order = [(c, p, d) for c in CASES for p in POLICIES for d in DTYPES]
    return [found[key] for key in order if key in found]


if __name__ == "__main__":
    main()
