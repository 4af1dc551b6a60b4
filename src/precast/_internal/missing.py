"""Makes the errors for packages that are not installed: they say what needs the package and how to install it.

Invariant: the command that installs an extra is written here and nowhere else.
"""

from __future__ import annotations

from typing import Final

from precast.errors import MissingExtraError

__all__ = ["missing_extra", "missing_requirement"]

_REQUIRED: Final = ("torch", "click", "rich", "tomli_w")
"""The packages that pip installs with precast, unless it is told `--no-deps`."""


def missing_extra(what: str, package: str, extra: str) -> MissingExtraError:
    """Returns the error to raise where `what`, the subject of its sentence, needs a package of an optional extra."""
    return MissingExtraError(
        f"{what} needs the package {package}, which is not installed here. Write: pip install 'precast[{extra}]', or "
        f"in a clone of precast: pip install '.[{extra}]'."
    )


def missing_requirement(what: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """Returns that error for a required package that is missing; None where `error` is about another module."""
    package = (error.name or "").partition(".")[0]
    if package not in _REQUIRED:
        return None
    if package == "torch":
        return MissingExtraError(
            f"{what} needs PyTorch, which is not installed here. Write: pip install torch. `precast report` "
            "does without."
        )
    return MissingExtraError(
        f"{what} needs the package {package}, which precast was installed without. Write: pip install "
        f"{package.replace('_', '-')}."
    )
