"""Values in messages about policies, and checks of texts, choices, dtypes and mappings that users pass.

Invariants:
    - Showing a value never fails and gives a short text, also for a value that is nested as deeply as Python allows or
      has a `repr` that raises an error.
    - Text that UTF-8 cannot encode is refused, because it could not be written to a policy file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from precast.errors import PolicyError

__all__ = [
    "DTYPES",
    "canonical_dtype",
    "check_choice",
    "check_mapping",
    "check_text",
    "clipped",
    "nearest",
    "shown",
]

DTYPES: Final = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""Maps each spelling of a dtype to PyTorch's name."""

_MAX_LENGTH: Final = 200
"""The maximum length of a text in a message, and of a text for which similar names are searched: the time of a
comparison is proportional to the product of both lengths."""


def shown(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long; the name of its type if `repr` fails."""
    try:
        return clipped(repr(value))
    except Exception:  # `repr` is the value's own code, which may raise anything
        return f"<a {type(value).__name__} that cannot be shown>"


def clipped(text: object) -> str:
    """Return a text for a message, shortened if it is long; the `repr` of a value that is not text."""
    if not isinstance(text, str):
        return shown(text)
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[:_MAX_LENGTH]}... ({len(text)} characters)"


def canonical_dtype(value: object) -> str | None:
    """Return PyTorch's name of a dtype, which is a spelling in `DTYPES` or a `torch.dtype`.

    Returns:
        "float32", "float16" or "bfloat16"; None for all other values.

    Examples:
        >>> canonical_dtype("bf16"), canonical_dtype("torch.half"), canonical_dtype("lower")
        ('bfloat16', 'float16', None)
    """
    kind = type(value)
    if isinstance(value, str) or (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return DTYPES.get(str(value).removeprefix("torch."))
    return None


def nearest(word: str, words: Iterable[str] | Mapping[str, str]) -> str:
    """Return the end of a sentence: `; did you mean ...?` with up to three similar words, or a full stop.

    Args:
        word: the unknown word.
        words: the allowed words. For a mapping, keys are compared, and the message has their values.
    """
    if len(word) > _MAX_LENGTH:
        return "."
    close = difflib.get_close_matches(word, list(words), n=3, cutoff=0.6)
    if isinstance(words, Mapping):
        close = list(dict.fromkeys(words[each] for each in close))
    return f"; did you mean {' or '.join(close)}?" if close else "."


def check_choice(
    value: object,
    choices: Iterable[str],
    before: str,
    after: str = "",
    *,
    dtypes: Mapping[str, str] | None = None,
    hints: Mapping[str, str] | None = None,
) -> str:
    """Return `value` if it is one of `choices`, or the choice for the dtype that it names.

    Args:
        value: the value to check.
        choices: the allowed words.
        before: the message's text before the value.
        after: its text after the value.
        dtypes: maps PyTorch's name of a dtype to a choice.
        hints: maps PyTorch's name of a dtype that is not allowed to the choice that the message suggests.
    """
    meanings, choices = dtypes or {}, tuple(choices)
    # Only text is compared: for other values, such as arrays, even a comparison with text may raise an error.
    if isinstance(value, str) and value in choices:
        return value
    name = canonical_dtype(value)
    if name is not None and name in meanings:
        return meanings[name]
    near = {**meanings, **(hints or {})}
    words = {choice: str(choice) for choice in choices}
    words |= {spelling: near[dtype] for spelling, dtype in DTYPES.items() if dtype in near}
    hint = nearest(value, words) if isinstance(value, str) else "."
    raise PolicyError(f"{before}{shown(value)}{after}{hint} Allowed: {', '.join(choices)}")


def check_text(value: object, where: str) -> str:
    """Return `value` if it is text that can be written to a file."""
    if not isinstance(value, str):
        raise PolicyError(f"{where} is {shown(value)}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PolicyError(
            f"{where} is {shown(value)}; it must be text that UTF-8 can encode: {error.reason}"
        ) from None
    return value


def check_mapping(value: object, where: str, example: str) -> Mapping[Any, Any]:
    """Return `value` if it is a mapping."""
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where} is {shown(value)}; it must be a mapping, such as {example}")
    return value
