"""Ships every model in every way, compares it with the model in a region to the last bit, and writes the table.

    .venvs/clients/bin/python -m tools.shipping --write

It needs the libraries of the extra `test-clients`. A new way to ship is one row of `WAYS`.

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
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import precast
from precast._internal.pytree import tensors_in
from precast.errors import MissingExtraError, PrecastError
from precast.policy.policy import Policy
from precast.shipping.function_calls import is_same
from tools.shipping_cases import CASES, POLICIES, Case, Shipped

__all__ = ["WAYS", "compared", "main", "table"]

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "shipping.json"
PAGES = [ROOT / "docs" / "ship.md", ROOT / "docs" / "ship.zh.md"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PLACE = re.compile(r"(<!-- table of shipped models -->\n).*?(<!-- end of the table -->)", re.S)

Way = Callable[[Shipped, Policy, torch.dtype], Any]
"""Ships a model and returns what it computes then."""


def _converted(shipped: Shipped, policy: Policy, dtype: torch.dtype) -> Any:
    model = precast.convert(shipped.model, policy, dtype, example=shipped.example)
    with torch.inference_mode():
        return shipped.call(model)


WAYS: dict[str, Way] = {"converted": _converted}
"""The columns of the table."""


def in_region(shipped: Shipped, policy: Policy, dtype: torch.dtype) -> Any:
    """What the model computes in a region."""
    with (
        precast.attach(shipped.model, policy, hold=False),
        torch.inference_mode(),
        precast.autocast("cpu", dtype, policy=policy),
    ):
        return shipped.call(shipped.model)


def compared(
    case: Case, policy: str, dtype: torch.dtype, ways: Iterable[str] = WAYS
) -> dict[str, str]:
    """Way -> how what it ships compares with the model in a region."""
    found = {}
    for way in ways:
        shipped = case.make()
        made = POLICIES[policy](shipped.model, dtype)
        try:
            expected = in_region(shipped, made, dtype)
        except PrecastError as error:
            found[way] = f"refused in a region too: {_first(error)}"
        except RuntimeError as error:
            found[way] = f"refused by PyTorch in a region too: {_first(error)}"
        else:
            found[way] = _shipped(way, case, made, dtype, expected)
    return found


def _shipped(way: str, case: Case, policy: Policy, dtype: torch.dtype, expected: Any) -> str:
    try:
        return _compare(expected, WAYS[way](case.make(), policy, dtype))
    except PrecastError as error:
        return f"refused: {_first(error)}"


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def _compare(expected: Any, found: Any) -> str:
    ours, theirs = _values(found), _values(expected)
    assert theirs, "a case computes tensors"
    if len(ours) == len(theirs) and all(map(is_same, ours, theirs)):
        return "equal"
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return "differs in shape"
    return f"differs by {max(map(_distance, ours, theirs)):.1g}"


def _values(result: Any) -> list[Tensor]:
    return tensors_in(result) or tensors_in(list(vars(result).values()))


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, divided by the largest number."""
    one, other = one.double(), other.double()
    distance = ((one - other).abs().max() / other.abs().max()).item()
    return math.inf if math.isnan(distance) else distance


def run(only: tuple[str, ...] = ()) -> Iterator[dict[str, str]]:
    """One row for each model, policy and dtype."""
    for case in CASES.values():
        if only and not any(word in case.name for word in only):
            continue
        for policy in POLICIES:
            for name, dtype in DTYPES.items():
                try:
                    found = compared(case, policy, dtype)
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
    said = dict.fromkeys(what for _, what in found)
    if len(said) == 1:
        return next(iter(said))
    parts = []
    for what in said:
        where = [f"{row['policy']} {row['dtype']}" for row, it in found if it == what]
        parts.append(what if what == "equal" else f"{what} ({', '.join(where)})")
    return "; ".join(parts)


def main() -> None:
    """Prints the table, and writes it where it is asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="*", help="words: a model whose name has one of them")
    parser.add_argument("--write", action="store_true", help="write the data and the pages")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = list(run(tuple(asked.only)))
    print(table(rows))
    if asked.write:
        rows = _with_what_was(rows)
        text = table(rows)
        found = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": torch.__version__, "rows": rows}
        DATA.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        for page in PAGES:
            before = page.read_text(encoding="utf-8")
            after = _PLACE.sub(lambda place: f"{place[1]}\n{text}\n{place[2]}", before)
            page.write_text(after, encoding="utf-8")


def _with_what_was(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows in the order of the cases; those of models that were not run are as they were written last."""
    before = json.loads(DATA.read_text(encoding="utf-8"))["rows"] if DATA.exists() else []
    found = {(r["model"], r["policy"], r["dtype"]): r for r in (*before, *rows)}
    order = [(c, p, d) for c in CASES for p in POLICIES for d in DTYPES]
    return [found[key] for key in order if key in found]


if __name__ == "__main__":
    main()
