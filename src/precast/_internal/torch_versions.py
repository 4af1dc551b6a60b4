"""The versions of PyTorch that precast runs on, and the check of the one that is installed.

Invariants:
    - PyTorch is not imported here: what is checked is the text of its version.
    - `pyproject.toml` declares the same range (a test compares), and `make test-versions` runs it.
"""

from __future__ import annotations

import re
import warnings
from typing import Final

from precast.errors import PrecastWarning, TorchVersionError

__all__ = ["NEWEST", "OLDEST", "Version", "check", "parse", "spell", "supported"]

Version = tuple[int, int]
"""Major and minor number; what a pre-release or a build adds to them changes nothing for precast."""

OLDEST: Final[Version] = (2, 11)
NEWEST: Final[Version] = (2, 15)
assert OLDEST[0] == NEWEST[0], "`supported` counts minor numbers alone"

_TEXT = re.compile(r"(\d+)\.(\d+)(?!\d)")


def parse(text: str) -> Version:
    """`2.11.0a0+cu130` -> (2, 11).

    Raises:
        ValueError: the text does not begin with two numbers.
    """
    match = _TEXT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a version")
    return int(match[1]), int(match[2])


def spell(version: Version) -> str:
    """(2, 11) -> `2.11`."""
    return f"{version[0]}.{version[1]}"


def supported() -> tuple[Version, ...]:
    """All versions that precast runs on, the oldest first."""
    return tuple((OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1))


def check(found: str) -> Version:
    """The version, checked; a newer one than precast has run on is a warning, an older one an error.

    In an older one something that precast stands on is missing. A newer one probably works, so it is not refused:
    an operation that it has added to PyTorch's tables has no row, and follows PyTorch's own rule.

    Raises:
        TorchVersionError: PyTorch is older than `OLDEST`.
    """
    version = parse(found)
    supported = f"{spell(OLDEST)} to {spell(NEWEST)}"
    if version < OLDEST:
        raise TorchVersionError(
            f"PyTorch {found} is installed; precast runs on PyTorch {supported}. "
            f'Install a newer one: pip install "torch>={spell(OLDEST)}".'
        )
    if version > NEWEST:
        warnings.warn(
            f"PyTorch {found} is newer than precast was tested on ({supported}): what it has added to autocast "
            "follows PyTorch's own rules, whatever the policy. Look for a newer precast.",
            PrecastWarning,
            stacklevel=2,
        )
    return version
