"""The points of a run at which PyTorch's weight cache gives what it should not, or another cache than precast's.

A run notes the *divergence points* that it comes by. With *repairs* the cache is emptied there, so that PyTorch
computes what it would without the defect, and everything else stays comparable to the bit. On precast's side the same
repair drops what PyTorch's cache lost with it, and leaves what is under test: whatever precast must see by itself.

| divergence point | the run comes by |
|---|---|
| "written" | a leaf with another version or other memory than before the step, or that a fused optimizer wrote |
| "dtype" | an operation, or a checkpoint in backward, in a region of another dtype than that of the operation before |
| "own cache" | an operation that uses another weight cache than the one before it in the same outermost region |
| "re-entered" | a region object that is entered while it is open |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precast.engine.thread_state import regions
from tests.conformance.programs.steps import GradMode, Region
from tests.conformance.programs.world import World

__all__ = ["NO_REPAIRS", "DivergencePoints", "Repairs", "repair_ours", "repair_pytorch"]

Fingerprint = tuple[int, int, str]
_clear_pytorchs = (
    torch._C.clear_autocast_cache
)  # `torch.clear_autocast_cache` clears precast's, too


class Repairs(NamedTuple):
    """At which divergence points something is done, and what: called with the point, what is there, and all leaves."""

    points: frozenset[str]
    forget: Callable[[str, Any, list[Tensor]], None]


def _nothing(point: str, what: Any, leaves: list[Tensor]) -> None:
    raise AssertionError(point)


NO_REPAIRS = Repairs(frozenset(), _nothing)


def repair_pytorch(point: str, what: Any, leaves: list[Tensor]) -> None:
    """PyTorch's cache can be emptied, no more."""
    if point != "re-entered":
        _clear_pytorchs()


def repair_ours(point: str, what: Any, leaves: list[Tensor]) -> None:
    """Drops what PyTorch's cache lost with its wrong copies; keeps those that precast must know to be wrong."""
    repair_pytorch(point, what, leaves)
    if point == "written":
        regions.cache.invalidate([leaf for leaf in leaves if id(leaf) not in what])
    elif point == "dtype":
        regions.cache.invalidate(leaves, what)
    elif point != "re-entered":
        regions.cache.clear()


class DivergencePoints:
    """The divergence points of one run; a `with` around each step that computes."""

    def __init__(self, world: World, repairs: Repairs) -> None:
        self.met: set[str] = set()
        self._world = world
        self._repairs = repairs
        self._open: list[tuple[Region | GradMode, int]] = []
        self._entries = 0
        self._dtype: torch.dtype | None = None
        self._cache: tuple[int, int] | None = None
        self._leaves = self._fingerprints()

    def meets(self, point: str, what: Any = None) -> bool:
        """Notes a divergence point; returns whether it is repaired."""
        self.met.add(point)
        if point not in self._repairs.points:
            return False
        self._repairs.forget(point, what, list(self._world.watched()))
        return True

    def entered(self, step: Region | GradMode) -> None:
        """A region or mode begins."""
        self._entries += 1
        self._open.append((step, self._entries))

    def left(self) -> None:
        """End the region that was entered last."""
        self._open.pop()

    def fused(self, weight: Tensor) -> None:
        """A weight was written by an optimizer, without a trace on it."""
        self.meets("written", {id(weight)})

    def __enter__(self) -> None:
        self._look_at_cache()
        self.look_at_dtype()

    def __exit__(self, *exc_info: object) -> None:
        before, self._leaves = self._leaves, self._fingerprints()
        both = before.keys() & self._leaves.keys()
        contents = {leaf for leaf in both if before[leaf] != self._leaves[leaf]}
        if contents:
            self.meets("written", contents)

    def look_at_dtype(self) -> None:
        """Called before what computes: also before what a checkpoint computes again, in its own region's dtype."""
        if torch.is_autocast_enabled("cpu"):
            before, self._dtype = self._dtype, torch.get_autocast_dtype("cpu")
            if before not in (None, self._dtype):
                self.meets("dtype", self._dtype)

    def _look_at_cache(self) -> None:
        """Note an operation that uses another weight cache than the operation before it.

        Inside a region of precast's for the CPU that is precast's cache, elsewhere PyTorch's, whatever regions for
        other devices are open. PyTorch's is emptied at the end of the outermost region, precast's at the end of the
        outermost one of precast's, and those may be for another device.
        """
        opened = [(step, number) for step, number in self._open if isinstance(step, Region)]
        if not any(step.device == "cpu" for step, _ in opened):
            return  # no copy is made, and none is freed
        ours = [(step.device, number) for step, number in opened if not step.torchs]
        is_ours = any(device == "cpu" for device, _ in ours)
        before, self._cache = self._cache, (opened[0][1], ours[0][1] if is_ours else 0)
        if before is not None and before[0] == self._cache[0] and before != self._cache:
            self.meets("own cache")

    def _fingerprints(self) -> dict[int, Fingerprint]:
        return {id(leaf): _fingerprint(leaf) for leaf in self._world.watched()}


def _fingerprint(leaf: Tensor) -> Fingerprint:
    """Version, address, and the numbers where no version counts writes: one that is refused has written already."""
    numbers = str(leaf.detach().tolist()) if leaf.is_inference() else ""
    try:
        return leaf._version, leaf.data_ptr(), numbers
    except RuntimeError:  # made in inference mode
        return 0, leaf.data_ptr(), str(leaf.detach().tolist())
