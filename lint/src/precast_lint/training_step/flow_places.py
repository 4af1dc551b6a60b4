"""The functions that run when one runs, each with its code, its variables and the events of its calls.

Invariants: a function that is called twice with the same names is one place; an event of a place is made once,
whichever rule asks; nothing here depends on a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.training_step.flow_code import Ask, Follow, Line, Put, code_of, is_loss, reach_of
from precast_lint.training_step.flow_events import Event, Known, call_event, key, scaler_of
from precast_lint.training_step.flow_facts import Facts
from precast_lint.training_step.frames import Frame, frame_of

__all__ = ["Place", "Scaled", "root"]

_DEEP = 3  # calls in functions that are called

Scaled = frozenset[tuple[str, str]]
"""The names that hold scaled losses, each with its scaler."""


@dataclass(eq=False)
class _Shared:
    """State shared by all places of a run."""

    source: Source
    facts: Facts = field(default_factory=Facts)
    places: dict[tuple[object, ...], Place] = field(default_factory=dict)


class Place:
    """A function, called with certain arguments on a certain way.

    Attributes:
        code: its parts.
        facts: the texts of tests.
    """

    def __init__(
        self,
        shared: _Shared,
        function: Node,
        known: Known,
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
        self._known = known
        self._stack = stack
        self._deciding = deciding
        self._frame = frame
        self._object = of_object  # what self is here, as the function that calls says it
        self._settled = 0  # what the call says of parameters: `limit=None`, or a default of None
        for name, holds in settled:
            self._settled |= (1 if holds else 2) << shared.facts.place(name)
        self._events: dict[object, Event] = {}
        self._called: dict[Follow, Place | None] = {}
        self._scaled: dict[object, Scaled] = {}
        self._asked = (-1, 0)
        self._forgotten: dict[Line, tuple[int, int]] = {}
        self._known_moves: tuple[int, tuple[_Ways, _Ways]] = (-1, ((), ()))
        self._in, self._out = _ways(shared.facts, frame)

    @property
    def deciding(self) -> int:
        """The bits of what tests may ask for: whether there is a scaler, by the names of this function."""
        return self.facts.bits(self._deciding)

    def called(self, follow: Follow) -> Place | None:
        """The place of a function that is called; None if it runs already, or lies too deep."""
        if follow not in self._called:
            self._called[follow] = self._find(follow)
        return self._called[follow]

    def _find(self, follow: Follow) -> Place | None:
        function = follow.function
        if function in self._stack or len(self._stack) == _DEEP:
            return None
        shared = self._shared
        frame = frame_of(shared.source, function, follow.given, self._known.named)
        stack = (*self._stack, function)
        given = _settled(function, follow.given)
        same = (stack, frozenset(frame.names.items()), given)
        if same not in shared.places:
            known = replace(self._known, named=frame.named)
            deciding = {name for name, given in frame.names.items() if given in self._deciding}
            shared.places[same] = Place(
                shared,
                function,
                known,
                stack,
                deciding=self._deciding | deciding,
                frame=frame,
                of_object=self._owner(follow),
                settled=given,
            )
        return shared.places[same]

    # --- events ---

    def event(self, ask: Ask, scaled: Scaled) -> Event:
        """Return the event of a call, if the names in `scaled` hold scaled losses."""
        found = self._events.get(ask) or self._events.get((ask, scaled))
        if found is None:
            found = call_event(self._known, ask.call, dict(scaled))
            is_same = found.kind not in ("backward", "autograd_grad")
            self._events[ask if is_same else (ask, scaled)] = found
        return found

    def put(self, put: Put) -> Event:
        """The event of an assignment, with the key by which the function that calls this one knows what is assigned."""
        if self._frame is None:
            return put.event
        found = self._events.get(put)
        if found is None:
            named = self._known.named(put.event.node)
            found = self._events[put] = replace(put.event, assigned=named)
        return found

    def forgotten(self, line: Line) -> int:
        """The bits of what tests said of names that get values."""
        if not line.assigned:
            return 0
        known, found = self._forgotten.get(line, (-1, 0))
        if known != len(self.facts):
            for name in line.assigned:
                found |= self.facts.about(name)
            self._forgotten[line] = len(self.facts), found
        return found

    def stored(self, put: Put, scaled: Scaled) -> Scaled:
        """The names that hold scaled losses after something got a value."""
        if put.is_update or (put.loss is None and not scaled):
            return scaled
        found = self._scaled.get((put, scaled))
        if found is None:
            scaler = scaler_of(self._known, put.loss, dict(scaled))
            found = frozenset(pair for pair in scaled if pair[0] != put.name)
            found |= {(put.name, scaler)} if scaler else frozenset()
            self._scaled[put, scaled] = found
        return found

    # --- calls: from the place that calls, and back ---

    def handed(self, follow: Follow, scaled: Scaled) -> Scaled:
        """The names that hold scaled losses in a function that is called: attributes of self, and its parameters."""
        found = self._scaled.get((follow, scaled))
        if found is None:
            given = [(name, value) for name, value in follow.given.items() if is_loss(value)]
            scalers = [(n, scaler_of(self._known, value, dict(scaled))) for n, value in given]
            found = frozenset((name, scaler) for name, scaler in scalers if scaler is not None)
            owner = self._owner(follow)
            if owner is None:
                found |= _of_self(scaled)
            else:
                found |= {
                    (f"self.{n[len(owner) + 1 :]}", s)
                    for n, s in scaled
                    if n.startswith(f"{owner}.")
                }
            self._scaled[follow, scaled] = found
        return found

    def returned(self, follow: Follow, before: Scaled, after: Scaled) -> Scaled:
        """The names that hold scaled losses when a called function returns: the caller's own, and its object's."""
        owner = self._owner(follow)
        if owner is None:
            return (before - _of_self(before)) | _of_self(after)
        kept = frozenset(pair for pair in before if not pair[0].startswith(f"{owner}."))
        return kept | {(owner + name[4:], scaler) for name, scaler in _of_self(after)}

    def _owner(self, follow: Follow) -> str | None:
        """The key here of the object whose method a call runs, if it is not self."""
        return key(self._shared.source, follow.given["self"]) if "self" in follow.given else None

    def entered(self, known: int) -> int:
        """Return the caller's facts that hold in this function: those on self and on its arguments."""
        if self._is_of_object:
            return _moved(known, self._moves_of_object[0]) | self._settled
        return known & self.facts.of_self | _moved(known, self._in) | self._settled

    def left(self, before: int, after: int) -> int:
        """Return the caller's facts after the call: its own, and those on self and on arguments from here."""
        if self._is_of_object:
            into, out = self._moves_of_object
            mine = 0
            for place, _ in into:
                mine |= 3 << place
            return before & ~mine | _moved(after, out)
        own = self.facts.of_self
        return before & ~own | after & own | _moved(after, self._out)

    @property
    def _is_of_object(self) -> bool:
        """Return True if self is another object here than in the function that calls."""
        return self._object is not None

    @property
    def _moves_of_object(self) -> tuple[_Ways, _Ways]:
        """The ways of tests of the object, `amp.on` outside and `self.on` here, and of the other parameters."""
        if self._known_moves[0] != len(self.facts):
            owner = self._object or ""
            known = self.facts.texts()
            pairs = {(f"{owner}.{text[5:]}", text) for text in known if text.startswith("self.")}
            pairs |= {
                (t, f"self.{t[len(owner) + 1 :]}") for t in known if t.startswith(f"{owner}.")
            }
            ways = [
                (self.facts.place(outer), self.facts.place(here)) for outer, here in sorted(pairs)
            ]
            into = (*ways, *(way for way in self._in if way not in ways))
            out = (*((here, outer) for outer, here in ways), *self._out)
            self._known_moves = len(self.facts), (into, out)
        return self._known_moves[1]

    def asked(self) -> int:
        """The bits of all that this function, or one that it calls, may test, hand on or change."""
        if self._asked[0] < len(self.facts):
            reach = reach_of(self._shared.source, self._function)
            found = self.facts.bits(reach.tests)
            for name in reach.assigned:
                found |= self.facts.about(name)
            found |= self.facts.under(reach.handed)
            if self._frame is not None:
                found |= self.facts.under(self._frame.names.values())
                found |= self.facts.bits(self._frame.names)
            self._asked = len(self.facts), found
        return self._asked[1]


def _settled(function: cst.FunctionDef, given: dict[str, Node]) -> frozenset[tuple[str, bool]]:
    """The parameters that a call leaves at, or sets to, None, False or True, and whether a test of them holds."""
    found: set[tuple[str, bool]] = set()
    for param in (*function.params.params, *function.params.kwonly_params):
        value = given.get(param.name.value, param.default)
        if isinstance(value, cst.Name) and value.value in ("None", "False", "True"):
            found.add((param.name.value, value.value == "True"))
    return frozenset(found)


def root(
    source: Source, function: Node, scalers: frozenset[str], optimizers: frozenset[str]
) -> Place:
    """The place of a function that nobody calls here."""
    known = Known(source, lambda node: key(source, node), scalers, optimizers)
    place = Place(_Shared(source), function, known, (), deciding=scalers)
    place.asked()  # most texts get their bits now
    return place


def _of_self(scaled: Scaled) -> Scaled:
    if not scaled:
        return scaled
    return frozenset(pair for pair in scaled if pair[0].startswith("self."))


_Ways = tuple[tuple[int, int], ...]


def _ways(facts: Facts, frame: Frame | None) -> tuple[_Ways, _Ways]:
    """Return the source and target positions of a test's bits, on entering and on leaving a function."""
    if frame is None:
        return (), ()
    called = {given: name for given, name in frame.called.items() if given}
    into = [(facts.place(given), facts.place(name)) for given, name in called.items()]
    out = [(facts.place(name), facts.place(given)) for name, given in frame.names.items() if given]
    return tuple(into), tuple(out)


def _moved(known: int, ways: _Ways) -> int:
    found = 0
    for old, new in ways:
        found |= (known >> old & 3) << new
    return found
