"""The supported versions of PyTorch, and the check of the installed one.

Invariants:
    - PyTorch is not imported here: the check reads the text of its version.
    - `pyproject.toml` declares the same range (a test compares), and `make test-versions` runs it.
"""

from __future__ import annotations

import re
import warnings
from typing import Final

from precast.errors import PrecastWarning, TorchVersionError

__all__ = ["NEWEST", "OLDEST", "Version", "check", "parse", "spell", "supported"]

Version = tuple[int, int]
"""Major and minor number; suffixes of pre-releases and builds do not matter."""

OLDEST: Final[Version] = (2, 11)
NEWEST: Final[Version] = (2, 15)
assert OLDEST[0] == NEWEST[0], "`supported` counts minor numbers alone"

_TEXT = re.compile(r"(\d+)\.(\d+)(?!\d)")


def parse(text: str) -> Version:
    """`2.11.0a0+cu130` -> (2, 11)."""
    match = _TEXT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a version")
    return int(match[1]), int(match[2])


def spell(version: Version) -> str:
    """(2, 11) -> `2.11`."""
    return f"{version[0]}.{version[1]}"


def supported() -> tuple[Version, ...]:
    """Return all supported versions, oldest first."""
    return tuple((OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1))


def check(installed: str) -> Version:
    """Return the version; warn if it is newer than the supported ones, raise an error if it is older.

    An older version lacks something that precast uses. A newer one probably works, so it is not refused: operations
    that it added to PyTorch's tables have no row, and follow PyTorch's rule.

    Raises:
        TorchVersionError: PyTorch is older than `OLDEST`.
    """
    version = parse(installed)
    supported = f"{spell(OLDEST)} to {spell(NEWEST)}"
    if version < OLDEST:
        raise TorchVersionError(
            f"PyTorch {installed} is installed; precast runs on PyTorch {supported}. "
            f'Install a newer one: pip install "torch>={spell(OLDEST)}".'
        )
    if version > NEWEST:
        warnings.warn(
            f"PyTorch {installed} is newer than precast was tested on ({supported}): operations that it added to "
            "autocast follow PyTorch's own rules under every policy. Look for a newer precast.",
            PrecastWarning,
            stacklevel=2,
        )
    return version
