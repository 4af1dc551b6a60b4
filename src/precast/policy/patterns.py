"""Matching of a module's name with patterns.

Invariants:
    - A name has components, separated by dots; the model's own name is "", which has none. `*` matches any text
      within one component, `**` any number of components, including none. A leading `*.` means `**.`: `*.head`
      matches every `head`, at the top of the model too.
    - Matching one pattern takes at most as many steps as the product of the lengths of pattern and name.
    - An exact name takes no time among others.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from precast.errors import PolicyError
from precast.policy.values import shown

__all__ = ["PatternIndex", "check_pattern"]

_ADVICE = (
    'Write names with dots, as in "decoder.0.attn"; * for part of a component, ** for any number of them, and "*.attn" '
    "for every attn."
)


def check_pattern(pattern: object, where: str) -> str:
    """Return `pattern` if it can match the name of a module."""
    if not isinstance(pattern, str):
        raise PolicyError(f"{where}: {shown(pattern)} is not the name of a module. {_ADVICE}")
    problem = next(filter(None, map(_problem, pattern.split(".") if pattern else ())), None)
    if problem is not None:
        raise PolicyError(f"{where}: the pattern {shown(pattern)} {problem}. {_ADVICE}")
    return pattern


def _problem(component: str) -> str | None:
    if component == "":
        return "has an empty component"
    if "**" in component and component != "**":
        return f"has ** beside other text in the component {shown(component)}"
    if set(component) & set("?[]"):
        return "has one of ? [ ], which names of modules do not contain and patterns do not support"
    if not component.isascii() and any("\ud800" <= letter <= "\udfff" for letter in component):
        return "has a lone surrogate, which a file cannot contain"
    return None


def _components(name: str) -> list[str]:
    return name.split(".") if name else []


def _components_of_pattern(pattern: str) -> list[str]:
    first, *others = _components(pattern) or [""]
    return ["**", *others] if first == "*" and others else _components(pattern)


class PatternIndex:
    """Patterns, with exact names in a table and the components of the others."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._exact = {p: number for number, p in enumerate(self._patterns) if "*" not in p}
        self._globs = [
            (number, _components_of_pattern(pattern))
            for number, pattern in enumerate(self._patterns)
            if "*" in pattern
        ]

    def matching(self, name: str) -> list[str]:
        """Return the patterns that match a name, in the order of the constructor's argument.

        >>> index = PatternIndex(["*.lm_head", "encoder.**"])
        >>> index.matching("model.lm_head"), index.matching("lm_head")
        (['*.lm_head'], ['*.lm_head'])
        >>> index.matching("encoder"), index.matching("encoder.layer.0")
        (['encoder.**'], ['encoder.**'])
        """
        components = _components(name)
        matching = [number for number, glob in self._globs if _matches(glob, components)]
        if name in self._exact:
            matching.append(self._exact[name])
        return [self._patterns[number] for number in sorted(matching)]


def _matches(pattern: list[str], name: list[str]) -> bool:
    """Return True if a pattern matches a name, both in components, in at most their product of steps."""
    ends = {0}
    """The numbers of components that the beginning of the pattern can match."""
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends), len(name) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(name) and fnmatchcase(name[end], part)}
        if not ends:
            return False
    return len(name) in ends
