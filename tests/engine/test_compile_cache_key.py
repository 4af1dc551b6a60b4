"""The tag that keeps policies apart in the compiler's cache on disk."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import torch

import precast
from precast.engine import registration


def test_the_tag_says_the_policies_in_force_and_is_taken_off_again() -> None:
    other = precast.Policy.load("torch").replace(name="other", ops={"mm": "fp32"})
    assert registration.unregister()
    assert type(torch.compiler.config.cache_key_tag) is str
    with precast.autocast("cpu", policy=other):
        tag = torch.compiler.config.cache_key_tag
        assert other.fingerprint in str(tag)
        assert other.fingerprint in f"{tag}"
        assert type(pickle.loads(pickle.dumps(tag))) is str
        assert str(in_a_thread(lambda: torch.compiler.config.cache_key_tag)) == str(tag)
        plain = str(tag)
        with torch.compiler.config.patch(cache_key_tag="mine"):  # type: ignore[attr-defined]
            assert str(torch.compiler.config.cache_key_tag) == "mine" + plain
    assert str(tag) == ""
    with precast.install(other):
        assert other.fingerprint in str(tag)
    assert type(torch.compiler.config.cache_key_tag) is str


def in_a_thread(read: Callable[[], object]) -> str:
    """What a thread of its own reads, in a region like the one here."""
    here = precast.current_precision()
    found: list[str] = []

    def work() -> None:
        with here:
            found.append(str(read()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    return found[0]
