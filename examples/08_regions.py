"""Regions inside regions: another dtype, switched off, left by an exception, entered twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from showing import say, table
from torch import Tensor, nn

import precast

Autocast = Callable[..., Any]
Tree = list["Tree"]


def nested(autocast: Autocast) -> dict[str, object]:
    """The dtype that one linear layer gives at each place; "error" where it raises."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    seen: dict[str, object] = {}

    def look(place: str, on: Tensor) -> None:
        try:
            seen[place] = linear(on).dtype
        except RuntimeError:
            seen[place] = "error"

    with autocast("cpu", dtype=torch.bfloat16):
        look("in a bfloat16 region", x)
        with autocast("cpu", dtype=torch.float16):
            look("  in a float16 region in it", x)
        hidden = linear(x)
        with autocast("cpu", enabled=False):
            look("  switched off, on x", x)
            look("  switched off, on hidden", hidden)
            look("  switched off, on hidden.float()", hidden.float())
        with suppress(KeyError), autocast("cpu", enabled=False):
            raise KeyError
        look("after an exception in a region in it", x)
    look("outside", x)
    return seen


def on_afterwards(autocast: Autocast) -> dict[str, bool]:
    """Whether autocast is still on when all regions have been left; it is switched off again."""
    region = autocast("cpu")

    @autocast("cpu")  # type: ignore[untyped-decorator]
    def depth(tree: Tree) -> int:
        return 1 + max(map(depth, tree), default=0)

    def twice() -> None:
        with region, region:
            pass

    return {
        "one object entered twice": _is_on_after(twice),
        "a recursive function, decorated": _is_on_after(lambda: depth([[], [[]]])),
    }


def _is_on_after(run: Callable[[], object]) -> bool:
    run()
    on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    return on


def main() -> None:
    """Prints the dtype at each place, and what stays on."""
    ours, theirs = nested(precast.autocast), nested(torch.autocast)
    table(
        ("one linear layer", "torch.autocast", "precast"),
        *((place, theirs[place], ours[place]) for place in ours),
    )
    say("`torch.autocast` keeps one copy of a weight, in the dtype that was first.")
    ours_on, theirs_on = on_afterwards(precast.autocast), on_afterwards(torch.autocast)
    table(
        ("autocast is still on after", "torch.autocast", "precast"),
        *((how, theirs_on[how], ours_on[how]) for how in ours_on),
    )


if __name__ == "__main__":
    main()
