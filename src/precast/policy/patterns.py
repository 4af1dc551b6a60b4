"""Matching of a module's name with many patterns, without trying each pattern.

Invariants:
    - A name has components, separated by dots; the model's own name is "", which has none. `*` matches any text
      within one component, `**` any number of components, including none. A leading `*.` means `**.`: `*.head`
      matches every `head`, at the top of the model too.
    - Matching one pattern takes at most as many steps as the product of the lengths of pattern and name.
    - Matching many patterns takes time only for patterns with the same beginning as the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from precast.errors import PolicyError
from precast.policy.values import shown

__all__ = ["PatternIndex", "check_pattern"]

_ADVICE = (
    'Write names with dots, as in "decoder.0.attn"; * for part of a component, ** for any number of them, and "*.attn" '
    "for every attn."
)


def check_pattern(pattern: object, where: str) -> str:
    """Return `pattern` if it can match the name of a module.

    Raises:
        PolicyError: it cannot match any name, or its meaning would surprise.
    """
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


@dataclass(slots=True, eq=False)
class _PatternNode:
    """A node of the tree of patterns: the components that may follow, and the patterns that end here."""

    exact: dict[str, _PatternNode] = field(default_factory=dict)
    any_number: _PatternNode | None = None
    is_any_number: bool = False
    globs: dict[str, dict[str, _PatternNode]] = field(default_factory=dict)
    """Maps the longest text without stars in a component with stars to the next node of each such component."""
    lengths: set[int] = field(default_factory=set)
    """The lengths of these texts."""
    ends: list[int] = field(default_factory=list)

    def child(self, component: str) -> _PatternNode:
        """Return the next node for one component of a pattern; create it if there is none."""
        if component == "**":
            if self.is_any_number:  # a second ** adds nothing
                return self
            self.any_number = self.any_number or _PatternNode(is_any_number=True)
            return self.any_number
        if "*" not in component:
            return self.exact.setdefault(component, _PatternNode())
        text = max(component.split("*"), key=len)
        self.lengths.add(len(text))
        return self.globs.setdefault(text, {}).setdefault(component, _PatternNode())

    def matches(self, component: str) -> Iterator[_PatternNode]:
        """Yield the next nodes for one component of a name."""
        if self.is_any_number:
            yield self
        if component in self.exact:
            yield self.exact[component]
        for text in self._texts_in(component):
            for glob, node in self.globs[text].items():
                if fnmatchcase(component, glob):  # takes at most the product of their lengths
                    yield node

    def _texts_in(self, component: str) -> set[str]:
        """Return the texts of `globs` that occur in a component; other globs cannot match it."""
        return {
            text
            for length in self.lengths
            for start in range(len(component) - length + 1)
            if (text := component[start : start + length]) in self.globs
        }


class PatternIndex:
    """A tree of patterns by their components; patterns with the same beginning share nodes."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._root = _PatternNode()
        self._patterns = tuple(patterns)
        for number, pattern in enumerate(self._patterns):
            node = self._root
            for component in _components_of_pattern(pattern):
                node = node.child(component)
            node.ends.append(number)

    def matching(self, name: str) -> list[str]:
        """Return the patterns that match a name, in the order of the constructor's argument.

        >>> index = PatternIndex(["*.lm_head", "encoder.**"])
        >>> index.matching("model.lm_head"), index.matching("lm_head")
        (['*.lm_head'], ['*.lm_head'])
        >>> index.matching("encoder"), index.matching("encoder.layer.0")
        (['encoder.**'], ['encoder.**'])
        """
        *_, matching = self.along(name)
        return matching

    def along(self, name: str) -> Iterator[list[str]]:
        """Yield the matching patterns of the model, of each module that contains the named one, and of that one."""
        nodes = _with_none([self._root])
        yield self._ending(nodes)
        for component in _components(name):
            nodes = _with_none(child for node in nodes for child in node.matches(component))
            yield self._ending(nodes)

    def _ending(self, nodes: list[_PatternNode]) -> list[str]:
        return [self._patterns[number] for number in sorted(n for node in nodes for n in node.ends)]


def _with_none(nodes: Iterable[_PatternNode]) -> list[_PatternNode]:
    """Return the nodes once each, and those after a `**` that matches no component."""
    reached = list(nodes)
    both = [*reached, *(node.any_number for node in reached if node.any_number is not None)]
    return list({id(node): node for node in both}.values())
