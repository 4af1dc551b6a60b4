"""The errors for packages that are not installed: what needs them, and how one installs them, also from a clone.

Invariant: how an extra is installed is said here and nowhere else.
"""

from __future__ import annotations

from typing import Final

from precast.errors import MissingExtraError

__all__ = ["missing_extra", "missing_requirement"]

_REQUIRED: Final = ("torch", "click", "rich", "tomli_w")
"""What precast is always installed with, but by `--no-deps`."""


def missing_extra(what: str, package: str, extra: str) -> MissingExtraError:
    """The error where `what`, the subject of a sentence, needs a package of an extra."""
    return MissingExtraError(
        f"{what} needs the package {package}, which is not installed here. Write: pip install 'precast[{extra}]', or "
        f"in a clone of precast: pip install '.[{extra}]'."
    )


def missing_requirement(what: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """The same where precast was installed without its dependencies; None where `error` is about something else."""
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
