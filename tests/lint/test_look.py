"""The cheap look finds a text interesting exactly where all words of some entry are in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precast_lint.selecting import look
from precast_lint.selecting.look import interesting, looks_at
from precast_lint.selecting.registry import Short, index

ENTRIES = {code: [entry.split() for entry in rule.words] for code, rule in index().items()}
WORDS = sorted({word for entries in ENTRIES.values() for entry in entries for word in entry})
PIECES = [*WORDS, "x", ".", "(", "torch.", "torch.rint(", "mytorch.rint(", "noqa: AMP", "e-", "\n"]


def _plainly(text: str, codes: frozenset[str]) -> list[str]:
    return [c for c in ENTRIES if c in codes and _fits(text, ENTRIES[c])]


def _fits(text: str, entries: list[list[str]]) -> bool:
    return any(all(word in text for word in entry) for entry in entries)


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.sets(st.sampled_from(sorted(ENTRIES))))
def test_a_look_finds_what_its_words_say(pieces: list[str], codes: set[str]) -> None:
    for text in ("".join(pieces), " ".join(pieces)):
        requests = frozenset(codes) or frozenset(ENTRIES)
        result = _plainly(text, requests)
        assert interesting(text.encode(), requests) == bool(result)
        assert list(looks_at(text.encode(), requests)) == result


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a b", "b a"), "a b"),
        (("a b", "ab c"), "ab"),
        (("ab", "a b"), "ba"),
        (("torch.x(", "torch y"), "torch.x(1)"),
        (("torch.x(", "torch.y( z"), "torch.y( z"),
    ],
)
def test_of_entries_that_say_the_same_one_stays(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str
) -> None:
    rule = Short("AMP999", "amp999", "none", "error", words)
    monkeypatch.setattr(look, "index", lambda: {"AMP999": rule})
    codes = frozenset({"AMP999"})
    look._words.cache_clear()
    try:
        assert interesting(text.encode(), codes) == _fits(text, [e.split() for e in words])
    finally:
        look._words.cache_clear()
