"""Copies of views of weights, found by geometry: each forward makes a new view object of the same numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["Forgetful", "Views"]

Held = TypeVar("Held")


class Forgetful(dict[Any, Held]):
    """A dictionary that forgets a key when what the key is of ends.

    It is in no cycle with what it holds: copies go when a region ends, not when the collector happens to run.
    """

    __slots__ = ("__weakref__",)

    def forgetting(self, key: Any) -> Callable[[Any], None]:
        """The callback for a weak reference."""
        here = weakref.ref(self)

        def forget(_: Any) -> None:
            held = here()
            if held is not None:
                held.pop(key, None)

        return forget


class Views:
    """Copies of views of one weight by geometry: each forward makes a new view object of the same numbers."""

    __slots__ = ("copies", "elements", "owner")

    def __init__(self, base: Tensor, forget: Callable[[Any], Any]) -> None:
        self.copies = Forgetful[Any]()
        self.elements = 0
        self.owner = weakref.ref(base, forget)

    def make_room(self, elements: int, limit: int) -> None:
        """Starts anew where copies grow beyond `limit` elements, as those of a window that slides over a table do."""
        if self.elements + elements > limit:
            self.copies.clear()
            self.elements = 0
        self.elements += elements
