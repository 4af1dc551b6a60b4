"""The operation that created each node of the graph, by which an operation in backward gets its place.

Invariant: memory is bounded: nodes of two steps at most, or `_MOST_NODES` twice.
"""

from __future__ import annotations

from typing import Any, Final

from precast import _torch
from precast.diagnostics.tracing.tally import CallPlace

__all__ = ["GraphPlaces"]

_MOST_NODES: Final = 200_000
_MOST_NEW_NODES: Final = 64
"""The most nodes of the graph that are attributed to one operation."""


class GraphPlaces:
    """Maps the number of a graph node to the operation that created it, and the place of that operation."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[str, CallPlace]] = {}
        self._before: dict[int, tuple[str, CallPlace]] = {}
        self.start()

    def __len__(self) -> int:
        """Return the number of nodes that are remembered."""
        return len(self._nodes) + len(self._before)

    def start(self) -> None:
        """Begin, or continue, with the next node of this thread."""
        self._sequence = _torch.next_sequence()

    def new_step(self) -> None:
        """Forget the nodes of the step before the last one."""
        self._before, self._nodes = self._nodes, {}

    @property
    def has_new(self) -> bool:
        """True if nodes were created since the last call of `add` or `start`."""
        return _torch.next_sequence() > self._sequence

    def add(self, op: str, place: CallPlace) -> None:
        """Attribute the new nodes to an operation."""
        if len(self._nodes) > _MOST_NODES:
            self.new_step()
        sequence = _torch.next_sequence()
        for number in range(max(self._sequence, sequence - _MOST_NEW_NODES), sequence):
            self._nodes[number] = op, place
        self._sequence = sequence

    def creator(self, node: Any) -> tuple[str, CallPlace] | None:
        """Return the operation that created a node, with its place; None if it was not attributed."""
        number = _torch.sequence_of(node)
        return self._nodes.get(number) or self._before.get(number)
