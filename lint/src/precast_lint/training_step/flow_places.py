"""The functions that run when one runs, each with its code, its variables and the events of its calls.

Invariants: a function that is called twice with the same names is one place; an event of a place is created once for
all rules; nothing here depends on a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_code import Ask, Follow, Line, Put, code_of, is_loss, reach_of
from precast_lint.training_step.flow_events import CallContext, Event, call_event, key, scaler_of
from precast_lint.training_step.flow_facts import TestResults
from precast_lint.training_step.frames import Frame, frame_of

__all__ = ["FlowPlace", "Scaled", "root"]

_DEEP = 3  # calls in functions that are called

Scaled = frozenset[tuple[str, str]]
"""The names that hold scaled losses, each with its scaler."""


@dataclass(eq=False)
class _RunShared:
    """State shared by all places of a run."""

    source: Source
    facts: TestResults = field(default_factory=TestResults)
    places: dict[tuple[object, ...], FlowPlace] = field(default_factory=dict)


class FlowPlace:
    """A function with the arguments of a call and the calls that lead to it.

    Attributes:
        code: its parts.
        facts: the texts of tests.
    """

    def __init__(
        self,
        shared: _RunShared,
        function: Node,
        context: CallContext,
        stack: tuple[Node, ...],
        *,
        deciding: frozenset[str],
        frame: Frame | None = None,
        of_object: str | None = None,
        settled: frozenset[tuple[str, bool]] = frozenset(),
    ) -> None:
        self.code = code_of(shared.source, function)
        self.facts = shared.facts
        self._shared = shared
        self._function = function
        self._context = context
        self._stack = stack
        self._deciding = deciding
        self._frame = frame
        self._object = of_object  # the caller's key of self
        self._settled = 0  # facts on parameters from the call: `limit=None`, or a default of None
        for name, holds in settled:
            self._settled |= (1 if holds else 2) << shared.facts.position(name)
        self._events: dict[object, Event] = {}
        self._called: dict[Follow, FlowPlace | None] = {}
        self._scaled: dict[object, Scaled] = {}
        self._asked = (-1, 0)
        self._forgotten: dict[Line, tuple[int, int]] = {}
        self._object_moves: tuple[int, tuple[_Ways, _Ways]] = (-1, ((), ()))
        self._in, self._out = _ways(shared.facts, frame)

    @property
    def deciding(self) -> int:
        """The bits of the tests for a scaler, by the names of this function."""
        return self.facts.bits_of(self._deciding)

    def called(self, follow: Follow) -> FlowPlace | None:
        """Return the place of a called function; None if it runs already, or is nested too deeply."""
        if follow not in self._called:
            self._called[follow] = self._find(follow)
        return self._called[follow]

    def _find(self, follow: Follow) -> FlowPlace | None:
        function = follow.function
        if function in self._stack or len(self._stack) == _DEEP:
            return None
        shared = self._shared
        frame = frame_of(shared.source, function, follow.arguments, self._context.named)
        stack = (*self._stack, function)
        value = _settled(function, follow.arguments)
        same = (stack, frozenset(frame.names.items()), value)
        if same not in shared.places:
            entry = replace(self._context, named=frame.named)
            deciding = {name for name, value in frame.names.items() if value in self._deciding}
            shared.places[same] = FlowPlace(
                shared,
                function,
                entry,
                stack,
                deciding=self._deciding | deciding,
                frame=frame,
                of_object=self._owner(follow),
                settled=value,
            )
        return shared.places[same]

    # --- events ---

    def event(self, ask: Ask, scaled: Scaled) -> Event:
        """Return the event of a call, if the names in `scaled` hold scaled losses."""
        result = self._events.get(ask) or self._events.get((ask, scaled))
        if result is None:
            result = call_event(self._context, ask.call, dict(scaled))
            is_same = result.kind not in ("backward", "autograd_grad")
            self._events[ask if is_same else (ask, scaled)] = result
        return result

    def put(self, put: Put) -> Event:
        """Return the event of an assignment, with the caller's key of the target."""
        if self._frame is None:
            return put.event
        result = self._events.get(put)
        if result is None:
            named = self._context.named(put.event.node)
            result = self._events[put] = replace(put.event, assigned=named)
        return result

    def forgotten(self, line: Line) -> int:
        """Return the bits of the tests of names that a line assigns."""
        if not line.assigned:
            return 0
        entry, result = self._forgotten.get(line, (-1, 0))
        if entry != len(self.facts):
            for name in line.assigned:
                result |= self.facts.bits_with_name(name)
            self._forgotten[line] = len(self.facts), result
        return result

    def stored(self, put: Put, scaled: Scaled) -> Scaled:
        """Return the names that hold scaled losses after an assignment."""
        if put.is_update or (put.loss is None and not scaled):
            return scaled
        results = self._scaled.get((put, scaled))
        if results is None:
            scaler = scaler_of(self._context, put.loss, dict(scaled))
            results = frozenset(pair for pair in scaled if pair[0] != put.name)
            results |= {(put.name, scaler)} if scaler else frozenset()
            self._scaled[put, scaled] = results
        return results

    # --- calls: from the place that calls, and back ---

    def handed(self, follow: Follow, scaled: Scaled) -> Scaled:
        """Return the names that hold scaled losses in a called function: attributes of self, and parameters."""
        results = self._scaled.get((follow, scaled))
        if results is None:
            values = [(name, value) for name, value in follow.arguments.items() if is_loss(value)]
            scalers = [(n, scaler_of(self._context, value, dict(scaled))) for n, value in values]
            results = frozenset((name, scaler) for name, scaler in scalers if scaler is not None)
            owner = self._owner(follow)
            if owner is None:
                results |= _of_self(scaled)
            else:
                results |= {
                    (f"self.{n[len(owner) + 1 :]}", s)
                    for n, s in scaled
                    if n.startswith(f"{owner}.")
                }
            self._scaled[follow, scaled] = results
        return results

    def returned(self, follow: Follow, before: Scaled, after: Scaled) -> Scaled:
        """Return the names that hold scaled losses after a called function returns."""
        owner = self._owner(follow)
        if owner is None:
            return (before - _of_self(before)) | _of_self(after)
        selection = frozenset(pair for pair in before if not pair[0].startswith(f"{owner}."))
        return selection | {(owner + name[4:], scaler) for name, scaler in _of_self(after)}

    def _owner(self, follow: Follow) -> str | None:
        """Return the key of the object whose method a call runs, if it is not self."""
        return (
            key(self._shared.source, follow.arguments["self"])
            if "self" in follow.arguments
            else None
        )

    def entered(self, facts: int) -> int:
        """Return the caller's facts on self and on the arguments, in the names of this function."""
        if self._is_of_object:
            return _moved(facts, self._moves_of_object[0]) | self._settled
        return facts & self.facts.bits_of_self | _moved(facts, self._in) | self._settled

    def left(self, before: int, after: int) -> int:
        """Return the caller's facts after the call, with those on self and on arguments from this function."""
        if self._is_of_object:
            into, out = self._moves_of_object
            mine = 0
            for place, _ in into:
                mine |= 3 << place
            return before & ~mine | _moved(after, out)
        own = self.facts.bits_of_self
        return before & ~own | after & own | _moved(after, self._out)

    @property
    def _is_of_object(self) -> bool:
        return self._object is not None

    @property
    def _moves_of_object(self) -> tuple[_Ways, _Ways]:
        """The positions of the object's tests, `amp.on` in the caller and `self.on` here, and of parameters."""
        if self._object_moves[0] != len(self.facts):
            owner = self._object or ""
            entries = self.facts.texts()
            pairs = {(f"{owner}.{text[5:]}", text) for text in entries if text.startswith("self.")}
            pairs |= {
                (t, f"self.{t[len(owner) + 1 :]}") for t in entries if t.startswith(f"{owner}.")
            }
            ways = [
                (self.facts.position(outer), self.facts.position(here))
                for outer, here in sorted(pairs)
            ]
            into = (*ways, *(way for way in self._in if way not in ways))
            out = (*((here, outer) for outer, here in ways), *self._out)
            self._object_moves = len(self.facts), (into, out)
        return self._object_moves[1]

    def asked(self) -> int:
        """Return the bits of all names that this function, or one that it calls, may test, pass or assign."""
        if self._asked[0] < len(self.facts):
            reach = reach_of(self._shared.source, self._function)
            result = self.facts.bits_of(reach.tests)
            for name in reach.assigned:
                result |= self.facts.bits_with_name(name)
            result |= self.facts.bits_with_prefix(reach.handed)
            if self._frame is not None:
                result |= self.facts.bits_with_prefix(self._frame.names.values())
                result |= self.facts.bits_of(self._frame.names)
            self._asked = len(self.facts), result
        return self._asked[1]


def _settled(function: cst.FunctionDef, values: dict[str, Node]) -> frozenset[tuple[str, bool]]:
    """Return the parameters that are None, False or True in a call, each with the result of a test of it."""
    results: set[tuple[str, bool]] = set()
    for param in (*function.params.params, *function.params.kwonly_params):
        value = values.get(param.name.value, param.default)
        if isinstance(value, cst.Name) and value.value in ("None", "False", "True"):
            results.add((param.name.value, value.value == "True"))
    return frozenset(results)


def root(
    source: Source, function: Node, scalers: frozenset[str], optimizers: frozenset[str]
) -> FlowPlace:
    """Return the place of a function that is followed from its start."""
    entry = CallContext(source, lambda node: key(source, node), scalers, optimizers)
    place = FlowPlace(_RunShared(source), function, entry, (), deciding=scalers)
    place.asked()  # this assigns bits to most texts
    return place


def _of_self(scaled: Scaled) -> Scaled:
    if not scaled:
        return scaled
    return frozenset(pair for pair in scaled if pair[0].startswith("self."))


_Ways = tuple[tuple[int, int], ...]


def _ways(facts: TestResults, frame: Frame | None) -> tuple[_Ways, _Ways]:
    """Return the source and target positions of a test's bits, on entering and on leaving a function."""
    if frame is None:
        return (), ()
    called = {value: name for value, name in frame.called.items() if value}
    into = [(facts.position(value), facts.position(name)) for value, name in called.items()]
    out = [
        (facts.position(name), facts.position(value))
        for name, value in frame.names.items()
        if value
    ]
    return tuple(into), tuple(out)


def _moved(facts: int, ways: _Ways) -> int:
    result = 0
    for old, new in ways:
        result |= (facts >> old & 3) << new
    return result
