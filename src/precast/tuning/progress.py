"""Progress of a search, as it is reported while the search runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """What a search is doing, as plain data.

    Attributes:
        stage: "record", "errors", "costs", "prove" or "done".
        said: what it does now, in a few words.
        seconds: since the search began.
        budget: in seconds.
        best: the name of the best setup that is proven so far.
    """

    stage: Literal["record", "errors", "costs", "prove", "done"]
    said: str
    seconds: float
    budget: float
    best: str
