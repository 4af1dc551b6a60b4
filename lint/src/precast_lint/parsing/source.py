"""One parsed file, with the queries that rules use.

Invariants: the tree is parsed once; the node index, the scopes and the positions are computed at first use. Positions
are computed only for files with findings, because that costs as much as parsing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from precast_lint.model import (
    Applicability,
    Edit,
    Fix,
    LintFinding,
    LintRule,
    Severity,
    Span,
    version,
)
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.depth import guard
from precast_lint.parsing.names import NameTable
from precast_lint.parsing.scopes import Scope, Scopes
from precast_lint.parsing.syntax import Node, children, cst, walk
from precast_lint.parsing.text import Text
from precast_lint.parsing.values import Values

__all__ = ["Source", "once"]

_Kind = TypeVar("_Kind", bound="Node")
_Result = TypeVar("_Result")
_Rest = ParamSpec("_Rest")


class Source:
    """The tree of a file, with its names, values and positions.

    Args:
        text: the file's text.
        filename: the name in reports.
        min_torch: the oldest PyTorch version that the file must run on; None: the current one.
        codes: the selected rules; None: all. For fixes that are shared by several rules.

    Raises:
        libcst.ParserSyntaxError: it is not Python.
        RecursionError: it is nested too deeply.
    """

    def __init__(
        self,
        text: Text,
        filename: str = "example.py",
        min_torch: str | None = None,
        codes: frozenset[str] | None = None,
    ) -> None:
        self.text = text
        self.filename = filename
        self.min_torch = min_torch
        self.codes = codes
        guard(text.string)
        self.module = cst.parse_module(text.string)
        self._functions: dict[Node, cst.FunctionDef | None] = {}
        self._method_calls: dict[tuple[str, ...], list[tuple[cst.Call, Node, Arguments]]] = {}
        self.cache: dict[
            object, Any
        ] = {}  # results that rules share, by the function that `once` decorates

    # --- the tree ---

    @cached_property
    def _index(self) -> tuple[dict[Node, Node], dict[type, list[Node]]]:
        parents: dict[Node, Node] = {}
        kinds: dict[type, list[Node]] = {}
        stack: list[Node] = [self.module]
        while stack:
            node = stack.pop()
            kinds.setdefault(type(node), []).append(node)
            inner = list(children(node))
            for child in inner:
                parents[child] = node
            stack.extend(reversed(inner))
        return parents, kinds

    @property
    def parents(self) -> dict[Node, Node]:
        """Maps each node to its parent."""
        return self._index[0]

    def all(self, *kinds: type[_Kind]) -> Iterator[_Kind]:
        """Yield the nodes of some classes, one class after the other, each in the order of the text."""
        for kind in kinds:
            yield from self._index[1].get(kind, ())  # type: ignore[misc]

    def around(self, node: Node) -> Iterator[Node]:
        """Yield the ancestors of a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: Node) -> cst.FunctionDef | None:
        """Return the innermost function whose body (not decorators or defaults) contains a node."""
        if node not in self._functions:
            self._functions[node] = self._function(node)
        return self._functions[node]

    def _function(self, node: Node) -> cst.FunctionDef | None:
        for outer in self.around(node):
            if isinstance(outer, (cst.FunctionDef, cst.ClassDef)) and node is outer.body:
                return outer if isinstance(outer, cst.FunctionDef) else None
            node = outer
        return None

    def statement(self, node: Node) -> Node:
        """Return the statement that contains a node: a simple line, or a compound statement."""
        if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            return node
        return next(
            outer
            for outer in self.around(node)
            if isinstance(outer, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
        )

    def block(self, statement: Node) -> list[Node]:
        """Return the statements of the block that contains a statement, itself included."""
        body = getattr(self.parents.get(statement), "body", ())
        return list(body) if isinstance(body, (list, tuple)) else []

    # --- text ---

    @cached_property
    def quote(self) -> str:
        """The quotation mark that the file prefers."""
        data = self.text.data
        return "'" if data.count(b"'") > data.count(b'"') else '"'

    def quoted(self, text: str, at: Node) -> str:
        """Return a string literal whose quotation marks do not end an f-string around the node `at`."""
        outer_quotes = {f.end for f in self.around(at) if isinstance(f, cst.FormattedString)}
        marks = (self.quote, '"' if self.quote == "'" else "'")
        mark = next((mark for mark in marks if mark not in outer_quotes), self.quote)
        return f"{mark}{text}{mark}"

    @cached_property
    def _spans(self) -> dict[Node, Span]:
        from precast_lint.parsing.spans import spans_of

        return spans_of(self.module)

    @cached_property
    def words(self) -> str:
        """The names and string literals of the code, one per line; attributes as ".name".

        Comments, docstrings and strings with spaces are left out, because they cannot be names.
        """
        results = [f".{n.attr.value}" for n in self.all(cst.Attribute)]
        results += [n.value for n in self.all(cst.Name)]
        texts = [
            n.value for n in self.all(cst.SimpleString) if not isinstance(self.parents[n], cst.Expr)
        ]
        results += [text for text in texts if not any(ch.isspace() for ch in text)]
        return "\n".join(results)

    def span(self, node: Node) -> Span:
        """Return the span of a node, without parentheses, whitespace and comments."""
        return self._spans[node]

    def code(self, node: Node) -> str:
        """Return the source text of a node."""
        span = self.span(node)
        return self.text.data[span.start : span.end].decode("utf-8")

    # --- names ---

    @cached_property
    def scopes(self) -> Scopes:
        """All bindings."""
        return Scopes(self.module)

    @cached_property
    def names(self) -> NameTable:
        """The resolution of names."""
        return NameTable(self.scopes)

    @cached_property
    def values(self) -> Values:
        """The classes of expressions."""
        return Values(self.names, self.parents)

    def origin(self, node: Node | None) -> str | None:
        """Return the documented dotted name of an expression, or None."""
        return self.names.origin(node)

    def instance(self, node: Node | None) -> str | None:
        """Return the documented dotted name of the class of an expression, or None."""
        return self.values.instance(node)

    def scope(self, node: Node) -> Scope:
        """Return the scope in which the names of an expression are looked up."""
        entry = self.scopes.scope_of
        return next((entry[name] for name in walk(node) if name in entry), self.scopes.module)

    def calls(self, *origins: str) -> Iterator[tuple[cst.Call, Arguments]]:
        """Yield the calls of functions and classes with one of these documented dotted names."""
        expected = frozenset(origins)
        for call in self.all(cst.Call):
            if self.origin(call.func) in expected:
                yield call, Arguments.of(call)

    def methods(self, *names: str) -> Iterator[tuple[cst.Call, Node, Arguments]]:
        """Yield the calls `receiver.name(...)`: the call, its receiver, its arguments."""
        if names not in self._method_calls:
            results = [pair for name in set(names) for pair in self._methods.get(name, ())]
            self._method_calls[names] = [
                (call, call.func.value, Arguments.of(call))
                for _, call in sorted(results, key=lambda pair: pair[0])
                if isinstance(call.func, cst.Attribute)
            ]
        return iter(self._method_calls[names])

    @cached_property
    def _methods(self) -> dict[str, list[tuple[int, cst.Call]]]:
        """The calls of methods by the method's name, each with its place among all calls."""
        results: dict[str, list[tuple[int, cst.Call]]] = {}
        for place, call in enumerate(self.all(cst.Call)):
            if isinstance(call.func, cst.Attribute):
                results.setdefault(call.func.attr.value, []).append((place, call))
        return results

    # --- versions, findings, fixes ---

    def allows(self, since: str) -> bool:
        """Return True if this file may use a name that PyTorch has had since a version."""
        return self.min_torch is None or version(self.min_torch) >= version(since)

    def find(
        self,
        rule: LintRule,
        node: Node | Span,
        message: str | None = None,
        fix: Fix | None = None,
        severity: Severity | None = None,
    ) -> LintFinding:
        """Return a finding of a rule at a node."""
        span = node if isinstance(node, Span) else self.span(node)
        text = message or rule.message
        return LintFinding(rule.code, rule.name, severity or rule.severity, text, span, fix)

    def fix(self, message: str, *edits: Edit | Iterable[Edit], unsafe: bool = False) -> Fix:
        """Return a fix that makes some edits."""
        flat = [e for part in edits for e in ([part] if isinstance(part, Edit) else part)]
        kind = Applicability.UNSAFE if unsafe else Applicability.SAFE
        return Fix(tuple(sorted(set(flat))), message, kind)

    def replace(self, node: Node, text: str) -> Edit:
        """Return an edit that replaces a node by a text; its parentheses stay."""
        span = self.span(node)
        return Edit(span.start, span.end, text)

    def before(self, node: Node, text: str) -> Edit:
        """Return an edit that inserts a text before a node."""
        start = self.span(node).start
        return Edit(start, start, text)

    def after(self, node: Node, text: str) -> Edit:
        """Return an edit that inserts a text after a node."""
        end = self.span(node).end
        return Edit(end, end, text)


def once(
    function: Callable[Concatenate[Source, _Rest], _Result],
) -> Callable[Concatenate[Source, _Rest], _Result]:
    """Cache a function's results in its `source`, by its other arguments, which must be positional."""

    @wraps(function)
    def cached(source: Source, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        assert not kwargs
        results: dict[object, _Result] = source.cache.setdefault(function, {})
        if args not in results:
            results[args] = function(source, *args, **kwargs)
        return results[args]

    return cached
