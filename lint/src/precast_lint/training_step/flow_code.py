"""The statements of a function as a few kinds of parts, read from the tree once.

Invariants: code without an event or a test is left out; parts never change and do not depend on the caller, so all
rules and all callers run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from precast_lint.meaning.functions import followed_call
from precast_lint.parsing.source import Source, once
from precast_lint.parsing.syntax import Node, children, cst
from precast_lint.training_step.flow_events import Event, key

__all__ = [
    "Ask",
    "Branch",
    "Code",
    "Follow",
    "FunctionCode",
    "Leave",
    "Line",
    "Loop",
    "Maybe",
    "Put",
    "Reach",
    "Tell",
    "Try",
    "code_of",
    "reach_of",
]

_DOES, _RUNS_LATER = (cst.Call, cst.NamedExpr), (cst.Lambda, cst.FunctionDef, cst.ClassDef)


@dataclass(frozen=True, eq=False)
class Tell:
    """An event that does not depend on the caller of the function."""

    event: Event


@dataclass(frozen=True, eq=False)
class Put:
    """A name, attribute or item gets a value.

    Attributes:
        name: its key.
        loss: the value, if it can be a scaled loss.
        is_update: whether it is `+=` or the like, after which a scaled loss is still scaled.
        event: the event.
    """

    name: str
    loss: Node | None
    is_update: bool
    event: Event


@dataclass(frozen=True, eq=False)
class Ask:
    """A call that is not followed. Its event depends on the caller of the function."""

    call: cst.Call


@dataclass(frozen=True, eq=False)
class Line:
    """A sequence of steps without a branch; `assigned` are the keys that get values."""

    steps: tuple[Tell | Put | Ask, ...]
    assigned: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Follow:
    """A call of a function of this file.

    Attributes:
        call: the call.
        function: what it runs.
        arguments: the arguments by parameter.
        unfollowed: the call as a line, for a function that runs already or is nested too deeply.
    """

    call: cst.Call
    function: cst.FunctionDef
    arguments: dict[str, Node]
    unfollowed: Line


@dataclass(frozen=True, eq=False)
class Branch:
    """A test with its two sides; `text` is the test, and `yes` runs if its result is `holds`."""

    text: str
    holds: bool
    yes: Code
    no: Code


@dataclass(frozen=True, eq=False)
class Maybe:
    """Code that may run or not, without a test: the right side of `and` and `or`."""

    code: Code


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop. `begin` runs at the start of each iteration. Only `break` leaves a loop that `is_endless`."""

    begin: Code
    body: Code
    orelse: Code
    is_endless: bool


@dataclass(frozen=True, eq=False)
class Try:
    """A `try`: its statements one by one, its `else`, its handlers and its `finally`."""

    tried: tuple[Code, ...]
    orelse: Code
    handlers: tuple[Code, ...]
    final: Code


@dataclass(frozen=True, eq=False)
class Leave:
    """`return`, `raise`, `break` or `continue`."""

    how: str


Part = Line | Follow | Branch | Maybe | Loop | Try | Leave
Code = tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class FunctionCode:
    """The parts of a function, with its tests and assignments.

    Attributes:
        parts: the parts.
        tests: the texts of the tests.
        assigned: the keys that get values.
        follows: the calls of functions of this file.
    """

    parts: Code
    tests: frozenset[str]
    assigned: frozenset[str]
    follows: tuple[Follow, ...]


@dataclass(frozen=True)
class Reach:
    """The tests, arguments and assignments of a function and of all functions that it calls, by their own names."""

    tests: frozenset[str]
    handed: frozenset[str]
    assigned: frozenset[str]


@once
def code_of(source: Source, function: Node) -> FunctionCode:
    """The parts of a function, or of the top level."""
    assert isinstance(function, (cst.FunctionDef, cst.Module))
    body = function.body if isinstance(function, cst.Module) else function.body.body
    notes = _CodeSummary(set(), set(), [])
    parts = _CodeReader(source, notes).read(lambda reader: reader.block(body))
    return FunctionCode(
        parts, frozenset(notes.tests), frozenset(notes.assigned), tuple(notes.follows)
    )


@once
def reach_of(source: Source, function: Node) -> Reach:
    """Return the reach of a function."""
    tests: set[str] = set()
    handed: set[str] = set()
    assigned: set[str] = set()
    waiting, visited = [function], {function}
    while waiting:
        code = code_of(source, waiting.pop())
        tests |= code.tests
        assigned |= code.assigned
        for follow in code.follows:
            plain = [
                v for v in follow.arguments.values() if isinstance(v, (cst.Name, cst.Attribute))
            ]
            handed |= {key(source, value) or "" for value in plain}
            if follow.function not in visited:
                visited.add(follow.function)
                waiting.append(follow.function)
    return Reach(frozenset(tests), frozenset(handed), frozenset(assigned))


@dataclass
class _CodeSummary:
    tests: set[str]
    assigned: set[str]
    follows: list[Follow]


class _CodeReader:
    """Converter of statements to parts."""

    def __init__(self, source: Source, notes: _CodeSummary) -> None:
        self.source = source
        self.noted = notes
        self.parts: list[Part] = []
        self.steps: list[Tell | Put | Ask] = []

    def read(self, write: Callable[[_CodeReader], None]) -> Code:
        """Return the parts that a new reader reads."""
        inner = _CodeReader(self.source, self.noted)
        write(inner)
        inner._end_line()
        return tuple(inner.parts)

    def block(self, statements: Sequence[Node]) -> None:
        """Read statements one after the other."""
        for statement in statements:
            getattr(self, f"_{type(statement).__name__}", self._other)(statement)

    def _end_line(self) -> None:
        if self.steps:
            assigned = tuple(step.name for step in self.steps if isinstance(step, Put))
            self.parts.append(Line(tuple(self.steps), assigned))
            self.steps = []

    def _ended(self) -> tuple[Part, ...]:
        self._end_line()
        return ()

    def _add(self, part: Part) -> None:
        self._end_line()
        self.parts.append(part)

    def _suite(self, body: Node | None) -> Code:
        if body is None:
            return ()
        assert isinstance(body, (cst.IndentedBlock, cst.SimpleStatementSuite))
        return self.read(lambda reader: reader.block(body.body))

    def _else(self, orelse: cst.Else | None) -> Code:
        return self._suite(orelse.body if orelse is not None else None)

    # --- statements ---

    def _other(self, statement: Node) -> None:
        for child in children(statement):
            self.expression(child)

    def _SimpleStatementLine(self, line: cst.SimpleStatementLine) -> None:
        self.block(line.body)

    def _FunctionDef(self, _: Node) -> None:
        pass

    _ClassDef = _FunctionDef

    def _Return(self, statement: cst.Return) -> None:
        self._other(statement)
        self._add(Leave("return"))

    def _Raise(self, statement: cst.Raise) -> None:
        self._other(statement)
        self._add(Leave("raise"))

    def _Break(self, _: Node) -> None:
        self._add(Leave("break"))

    def _Continue(self, _: Node) -> None:
        self._add(Leave("continue"))

    def _Assign(self, statement: cst.Assign) -> None:
        self.expression(statement.value)
        for target in statement.targets:
            self._put(target.target, statement.value)

    def _AnnAssign(self, statement: cst.AnnAssign) -> None:
        if statement.value is not None:
            self.expression(statement.value)
            self._put(statement.target, statement.value)

    def _AugAssign(self, statement: cst.AugAssign) -> None:
        self.expression(statement.value)
        self._put_one(statement.target, statement.value, is_update=True)

    def _put(self, target: Node, value: Node | None) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._put(element.value, None)
        else:
            self._put_one(target, value)

    def _put_one(self, target: Node, value: Node | None, *, is_update: bool = False) -> None:
        name = key(self.source, target) or ""
        loss = value if not is_update and is_loss(value) else None
        self.noted.assigned.add(name)
        self.steps.append(
            Put(name, loss, is_update, Event("assign", target, name, value=value, assigned=name))
        )

    def _If(self, statement: cst.If) -> None:
        self.expression(statement.test)
        orelse = statement.orelse
        if isinstance(orelse, cst.If):
            other = orelse
            no = self.read(lambda reader: reader._If(other))
        else:
            no = self._else(orelse)
        self._branch(statement.test, self._suite(statement.body), no)

    def _branch(self, test: Node, yes: Code, no: Code) -> None:
        if isinstance(test, cst.Name) and test.value == "True":
            self.parts += [*self._ended(), *yes]
        elif yes or no:
            text, holds = _condition(self.source, test)
            self.noted.tests.add(text)
            self._add(Branch(text, holds, yes, no))

    def _With(self, statement: cst.With) -> None:
        for item in statement.items:
            self.expression(item.item)
            if item.asname is not None:
                self._put(item.asname.name, None)
        self.block(statement.body.body)

    def _Try(self, statement: cst.Try | cst.TryStar) -> None:
        def one(line: Node) -> Code:
            return self.read(lambda reader: reader.block([line]))

        final = statement.finalbody
        self._add(
            Try(
                tuple(map(one, statement.body.body)),
                self._else(statement.orelse),
                tuple(self._suite(handler.body) for handler in statement.handlers),
                self._suite(final.body if final is not None else None),
            )
        )

    _TryStar = _Try

    def _For(self, statement: cst.For) -> None:
        self.expression(statement.iter)
        self._loop(statement, lambda reader: reader._put(statement.target, None))

    def _While(self, statement: cst.While) -> None:
        test = statement.test
        endless = isinstance(test, cst.Name) and test.value == "True"
        endless |= isinstance(test, cst.Integer) and test.value == "1"
        self._loop(statement, lambda reader: reader.expression(test), is_endless=endless)

    def _loop(
        self,
        statement: cst.For | cst.While,
        begin: Callable[[_CodeReader], None],
        *,
        is_endless: bool = False,
    ) -> None:
        def first(reader: _CodeReader) -> None:
            begin(reader)
            reader.steps.append(Tell(Event("loop", statement)))

        body, orelse = self._suite(statement.body), self._else(statement.orelse)
        self._add(Loop(self.read(first), body, orelse, is_endless))

    # --- expressions ---

    def expression(self, node: Node) -> None:
        """Read the events of an expression, inner ones first."""
        parts = _parts(self.source, node)
        if not (parts or _is_event(node)):
            return
        if isinstance(node, cst.IfExp):
            body, orelse = node.body, node.orelse
            self.expression(node.test)
            yes = self.read(lambda reader: reader.expression(body))
            self._branch(node.test, yes, self.read(lambda reader: reader.expression(orelse)))
        elif isinstance(node, cst.BooleanOperation):
            right = node.right
            self.expression(node.left)
            if code := self.read(lambda reader: reader.expression(right)):
                self._add(Maybe(code))
        elif isinstance(node, cst.NamedExpr):
            self.expression(node.value)
            self._put(node.target, node.value)
        else:
            for child in parts:
                self.expression(child)
            if isinstance(node, cst.Call):
                self._call(node)
            elif isinstance(node, cst.Attribute) and node.attr.value == "grad":
                self.steps.append(Tell(Event("grad_read", node, key(self.source, node.value))))

    def _call(self, call: cst.Call) -> None:
        result = followed_call(self.source, call)
        if result is None:
            self.steps.append(Ask(call))
            return
        follow = Follow(call, *result, unfollowed=Line((Ask(call),)))
        self.noted.follows.append(follow)
        self._add(follow)


@once
def _parts(source: Source, node: Node) -> tuple[Node, ...]:
    """Return the direct parts of an expression that have events."""
    inside = () if isinstance(node, _RUNS_LATER) else children(node)
    return tuple(n for n in inside if _is_event(n) or _parts(source, n))


def _is_event(node: Node) -> bool:
    return isinstance(node, _DOES) or (
        isinstance(node, cst.Attribute) and node.attr.value == "grad"
    )


def _condition(source: Source, test: Node) -> tuple[str, bool]:
    """Return a test as text, and False if it is negated: `x is not None` is `x`."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        text, holds = _condition(source, test.expression)
        return text, not holds
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        comparison = test.comparisons[0]
        right = comparison.comparator
        if isinstance(right, cst.Name) and right.value in ("None", "True", "False"):
            same = isinstance(comparison.operator, (cst.Is, cst.Equal))
            text = key(source, test.left) or ""
            return text, same is (right.value == "True")
    return key(source, test) or "", True


def is_loss(value: Node | None) -> bool:
    """Return True if a value can be a scaled loss: a call of scale, or arithmetic with one."""
    if isinstance(value, cst.BinaryOperation):
        return is_loss(value.left) or is_loss(value.right)
    if isinstance(value, cst.Call):
        return isinstance(value.func, cst.Attribute) and value.func.attr.value == "scale"
    return isinstance(value, (cst.Name, cst.Attribute))
