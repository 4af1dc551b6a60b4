"""Finds which of many patterns match the name of a module, without trying each of them.

Invariants:
    - A name has components, between dots; the model's own name is "", which has none. `*` stands for any text
      within one component, `**` for any number of components, none included. A leading `*.` means `**.`: `*.head`
      matches every `head`, at the top of the model too.
    - Whether a pattern matches a name takes at most as many steps as the pattern has letters times those of the name.
    - Finding which of many patterns match a name takes time only for patterns that begin as the name does.
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
    """Returns `pattern`, if it can match the name of a module.

    Raises:
        PolicyError: it cannot match any name, or does not mean what it seems to mean.
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
        return "has one of ? [ ], which names of modules do not have and patterns do not know"
    if not component.isascii() and any("\ud800" <= letter <= "\udfff" for letter in component):
        return "has a lone surrogate, which no file can have"
    return None


def _components(name: str) -> list[str]:
    return name.split(".") if name else []


def _components_of_pattern(pattern: str) -> list[str]:
    first, *others = _components(pattern) or [""]
    return ["**", *others] if first == "*" and others else _components(pattern)


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the tree of patterns: the components that may follow, and the patterns that end here."""

    exact: dict[str, _Node] = field(default_factory=dict)
    any_number: _Node | None = None
    is_any_number: bool = False
    globs: dict[str, dict[str, _Node]] = field(default_factory=dict)
    """The longest text without stars in a component with stars -> that component -> the next node."""
    lengths: set[int] = field(default_factory=set)
    """The lengths of these texts."""
    ends: list[int] = field(default_factory=list)

    def on(self, component: str) -> _Node:
        """The next node for one component of a pattern; it is made if there is none."""
        if component == "**":
            if self.is_any_number:  # a second ** adds nothing
                return self
            self.any_number = self.any_number or _Node(is_any_number=True)
            return self.any_number
        if "*" not in component:
            return self.exact.setdefault(component, _Node())
        text = max(component.split("*"), key=len)
        self.lengths.add(len(text))
        return self.globs.setdefault(text, {}).setdefault(component, _Node())

    def after(self, component: str) -> Iterator[_Node]:
        """The next nodes for one component of a name."""
        if self.is_any_number:
            yield self
        if component in self.exact:
            yield self.exact[component]
        for text in self._texts_in(component):
            for glob, node in self.globs[text].items():
                if fnmatchcase(
                    component, glob
                ):  # in at most as many steps as their letters, multiplied
                    yield node

    def _texts_in(self, component: str) -> set[str]:
        """The texts of `globs` that occur in a component; other globs cannot match it."""
        return {
            text
            for length in self.lengths
            for start in range(len(component) - length + 1)
            if (text := component[start : start + length]) in self.globs
        }


class PatternIndex:
    """A tree of patterns by their components, in which patterns that begin alike share nodes."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._root = _Node()
        self._patterns = tuple(patterns)
        for number, pattern in enumerate(self._patterns):
            node = self._root
            for component in _components_of_pattern(pattern):
                node = node.on(component)
            node.ends.append(number)

    def matching(self, name: str) -> list[str]:
        """The patterns that match a name, in the order in which they were given.

        >>> index = PatternIndex(["*.lm_head", "encoder.**"])
        >>> index.matching("model.lm_head"), index.matching("lm_head")
        (['*.lm_head'], ['*.lm_head'])
        >>> index.matching("encoder"), index.matching("encoder.layer.0")
        (['encoder.**'], ['encoder.**'])
        """
        *_, matching = self.along(name)
        return matching

    def along(self, name: str) -> Iterator[list[str]]:
        """The same for each module that contains the named one, the model first, and for that one itself."""
        nodes = _with_none([self._root])
        yield self._ending(nodes)
        for component in _components(name):
            nodes = _with_none(after for node in nodes for after in node.after(component))
            yield self._ending(nodes)

    def _ending(self, nodes: list[_Node]) -> list[str]:
        return [self._patterns[number] for number in sorted(n for node in nodes for n in node.ends)]


def _with_none(nodes: Iterable[_Node]) -> list[_Node]:
    """The nodes, each once, with those that follow a `**` which stands for no component."""
    given = list(nodes)
    both = [*given, *(node.any_number for node in given if node.any_number is not None)]
    return list({id(node): node for node in both}.values())
