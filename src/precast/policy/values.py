"""What an error about a policy shows of a value, and what text a policy may have.

Invariants:
    - Showing a value never fails and is never long, whatever the value is: it may be of any type, nested as deep as
      Python goes, or raise an error when it is asked for its `repr`.
    - Text that UTF-8 cannot write is refused: it could not be read back from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from precast.errors import PolicyError

__all__ = ["check_mapping", "check_text", "clipped", "shown"]

_LONGEST: Final = 200


def shown(value: object) -> str:
    """The value as an error shows it: its `repr`, cut short; its type where it has none."""
    try:
        return clipped(repr(value))
    except (
        Exception
    ):  # any: it is code of the value's own, or too deep, or a number with too many digits
        return f"<a {type(value).__name__} that cannot be shown>"


def clipped(text: object) -> str:
    """A text as part of a message: its beginning, where it is too long; what is no text is shown."""
    if not isinstance(text, str):
        return shown(text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"


def check_text(value: object, where: str) -> str:
    """`value`, if it is text that can be written to a file.

    Raises:
        PolicyError: it is something else, or has lone surrogates.
    """
    if not isinstance(value, str):
        raise PolicyError(f"{where} is {shown(value)}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PolicyError(
            f"{where} is {shown(value)}; it must be text that UTF-8 can write, and {error.reason}"
        ) from None
    return value


def check_mapping(value: object, where: str, example: str) -> Mapping[Any, Any]:
    """`value`, if it is a mapping.

    Raises:
        PolicyError: it is something else; `example` shows what is meant.
    """
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where} is {shown(value)}; it must be a mapping, such as {example}")
    return value
