"""Quantities in words, for the report's sentences and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["be", "count", "duration", "joined", "sentence", "share", "shortened", "size"]
__all__ += ["with_code"]


def share(part: float) -> str:
    """Format a share as per cent.

    >>> share(0.4), share(0.034), share(0.0002), share(0), share(0.9999), share(0.997)
    ('40%', '3.4%', 'under 0.1%', '0%', 'over 99.9%', '99.7%')
    """
    if 0 < part < 0.001:
        return "under 0.1%"
    if 0.999 < part < 1:
        return "over 99.9%"
    digits = 1 if (part < 0.1 and part * 100 % 1) or 0.99 < part < 1 else 0
    return f"{100 * part:.{digits}f}%"


def duration(seconds: float) -> str:
    """Format a time in a suitable unit.

    >>> duration(0.00002), duration(0.0123), duration(4.25), duration(90), duration(7300)
    ('20 µs', '12.3 ms', '4.2 s', '1 min 30 s', '2 h 1 min')
    """
    if seconds >= 60:
        minutes, rest = divmod(int(seconds), 60)
        hours, minutes_of_hour = divmod(minutes, 60)
        return f"{hours} h {minutes_of_hour} min" if hours else f"{minutes} min {rest} s"
    units = ((1, "s"), (1e3, "ms"), (1e6, "µs"))
    factor, unit = next((each for each in units if seconds * each[0] >= 1), units[-1])
    value = seconds * factor
    return f"{value:.{0 if value >= 99.95 or value == int(value) else 1}f} {unit}"


def size(number: float) -> str:
    """Format bytes in a suitable unit.

    >>> size(512), size(2048), size(5.5 * 2**20), size(300 * 2**30)
    ('512 B', '2.0 KiB', '5.5 MiB', '300 GiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.{0 if number >= 99.95 or units[0] == 'B' else 1}f} {units[0]}"


def count(number: float) -> str:
    """Format an integer with thousands separators.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,.0f}"


def be(number: int) -> str:
    """Return "was" or "were" for a number.

    >>> be(1), be(2)
    ('was', 'were')
    """
    return "was" if number == 1 else "were"


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends with a mark.

    >>> sentence("It ends"), sentence("Does it?")
    ('It ends.', 'Does it?')
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shortened(text: str, most: int = 140) -> str:
    """Return the first sentence of a message, truncated to `most` characters but never inside a name.

    >>> shortened("ValueError: no. Do this."), shortened("abcdef", 4), shortened("see `a.b` and `c.d.e`", 18)
    ('ValueError: no.', 'abc…', 'see `a.b` and …')
    """
    parts = text.partition("\n")[0].partition(". ")
    first = parts[0] + parts[1].strip()
    if len(first) > most:
        first = first[: most - 1]
        if first.count("`") % 2:
            first = first[: first.rindex("`")]
        first += "…"
    return first.replace("`", "") if first.count("`") % 2 else first


def joined(parts: Iterable[str]) -> str:
    """Join parts of a sentence by commas and "and".

    >>> joined("a"), joined("abc")
    ('a', 'a, b and c')
    """
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def with_code(escaped: str) -> str:
    """Return escaped text as HTML, with the text between backticks as code.

    >>> with_code("in `a.b`")
    'in <code>a.b</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escaped)
