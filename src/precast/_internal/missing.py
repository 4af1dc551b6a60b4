"""Errors for packages that are not installed, with the command that installs them."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

from precast.errors import MissingExtraError

__all__ = ["missing_extra", "missing_requirement"]

_REQUIRED: Final = ("torch", "click", "rich", "tomli_w")
"""The packages that pip installs with precast, unless `--no-deps` is passed."""
_REQUIREMENT: Final = re.compile(r"([\w.-]+)[^;]*; extra == ['\"]([\w-]+)['\"]")


def missing_extra(subject: str, package: str, extra: str) -> MissingExtraError:
    """Return the error for a package of an optional extra. `subject` names the feature that needs it.

    The command in the message installs `package` and all other packages of the extra that are not installed.
    """
    others = [name for name in _packages_of(extra) if name != package and not _is_installed(name)]
    return MissingExtraError(
        f"{subject} needs the package {package}, which is not installed. Install it: "
        f"pip install {' '.join([package, *others])}."
    )


def missing_requirement(subject: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """Return the error for a package that precast always needs; None if `error` is about another module."""
    package = (error.name or "").partition(".")[0]
    if package not in _REQUIRED:
        return None
    if package == "torch":
        return MissingExtraError(
            f"{subject} needs PyTorch, which is not installed. Install it: pip install torch. `precast run --merge` "
            "works without it."
        )
    return MissingExtraError(
        f"{subject} needs the package {package}, which is not installed. Install it: pip install "
        f"{package.replace('_', '-')}."
    )


def _packages_of(extra: str) -> list[str]:
    try:
        requirements = metadata.requires("precast") or []
    except metadata.PackageNotFoundError:  # imported from a folder, without an installation
        return []
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    return [match[1] for match in matches if match[2] == extra and match[1] != "precast"]


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
