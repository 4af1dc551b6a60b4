"""Rules for operations that nobody has defined yet: when they begin to hold, and what they cost until then."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

import precast
from precast import _torch
from precast.engine import registration
from precast.errors import PrecastWarning
from precast.policy.policy import Policy

_numbers = itertools.count()


@pytest.fixture
def library() -> Iterator[tuple[str, torch.library.Library]]:
    """A namespace that nobody has used, to define operations in."""
    namespace = f"pending{next(_numbers)}"
    made = torch.library.Library(namespace, "FRAGMENT")
    yield namespace, made
    registration.unregister()
    made._destroy()


def waiting_for(namespace: str, count: int) -> Policy:
    rows = {f"{namespace}::op{n}": "fp32" for n in range(count)}
    policy = Policy.load("torch").replace(name=namespace, ops=rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        with precast.autocast("cpu", policy=policy):
            pass
    return policy


def define(library: torch.library.Library, name: str) -> None:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, torch.Tensor.clone, "CompositeExplicitAutograd")


def runs_in(policy: Policy, namespace: str, name: str) -> torch.dtype:
    with precast.autocast("cpu", policy=policy):
        ran = getattr(getattr(torch.ops, namespace), name)(torch.ones(2, dtype=torch.bfloat16))
    return ran.dtype  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 40, 500])
def test_a_rule_holds_in_the_next_region_after_its_operation_is_defined(
    library: tuple[str, torch.library.Library], count: int
) -> None:
    namespace, made = library
    policy = waiting_for(namespace, count)
    for name in {f"op{count - 1}", "op0"}:
        define(made, name)
        assert runs_in(policy, namespace, name) is torch.float32


def test_each_way_to_define_operations_leaves_a_sign(
    library: tuple[str, torch.library.Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    signs = [_torch.definition_counts()]
    define(library[1], "op")
    signs.append(_torch.definition_counts())
    monkeypatch.setitem(sys.modules, "an_extension", types.ModuleType("an_extension"))
    signs.append(_torch.definition_counts())
    monkeypatch.setattr(torch.ops, "loaded_libraries", {*torch.ops.loaded_libraries, "a.so"})
    signs.append(_torch.definition_counts())
    assert len(set(signs)) == 4


def test_what_waits_is_told_once_and_in_one_warning() -> None:
    policy = Policy.load("torch").replace(
        name="many", ops={f"nobodys::op{n}": "fp32" for n in range(100)}
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with precast.autocast("cpu", policy=policy):
                pass
    assert [str(w.message).count("rules for nobodys::op0, ") for w in told] == [1]
    assert "and 97 others" in str(told[0].message)
