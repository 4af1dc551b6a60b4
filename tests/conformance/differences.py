"""The intended differences between precast with the policy "torch" and torch.amp that random programs can meet.

Each is a line of docs/differences.md with a test of its own. A program that differs is compared once more after
PyTorch's cache was repaired at the difference's divergence point, and must be equal then: see
`programs.divergence_points`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DIFFERENCES", "Difference"]


class Difference(NamedTuple):
    """One line of the list."""

    point: str
    """The divergence point of a run."""
    when_installed: bool
    """True if PyTorch's own regions differ too, while precast is installed."""
    name: str
    what: str
    test: str
    """The test that pins it: file::function."""
    anchor: str
    """The heading of docs/differences.md under which its line is, as links name it."""


DIFFERENCES = (
    Difference(
        point="written",
        when_installed=True,
        name="a weight changed inside a region",
        what="PyTorch uses the old copy until the outermost region ends; precast sees the change.",
        test="tests/weights/test_weights.py::test_a_written_weight_is_never_stale",
        anchor="weight-cache",
    ),
    Difference(
        point="dtype",
        when_installed=True,
        name="a float16 region in a bfloat16 one, same weight",
        what="PyTorch's cache gives the copy in the other dtype; precast keeps copies by dtype.",
        test="tests/weights/test_weights.py::test_regions_of_two_dtypes_share_a_weight",
        anchor="weight-cache",
    ),
    Difference(
        point="own cache",
        when_installed=False,
        name="regions of precast's and PyTorch's in one outermost region, same weight",
        what="Each has a copy of its own, so their gradients are added in float32, not in 16 bits.",
        test="tests/conformance/test_differences.py::test_each_difference_is_met_by_its_program",
        anchor="weight-cache",
    ),
    Difference(
        point="re-entered",
        when_installed=False,
        name="one object entered twice",
        what="PyTorch's stays on after the last exit; precast's restores what was there.",
        test="tests/autocast_mode/test_region.py::test_one_object_entered_twice_restores_what_was_there",
        anchor="regions",
    ),
)
