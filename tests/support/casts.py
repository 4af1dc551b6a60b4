"""Counts the weights that are cast, by either engine."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from torch import Tensor

from precast.engine import registration
from precast.weights import weight_cache
from precast.weights.native.api import native_engine

__all__ = ["Casts"]


class Casts:
    """The casts of weights that are made from here on: those that are kept or, if asked, those of a single use too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, of_single_uses: bool = False) -> None:
        self._made: list[weakref.ref[Tensor]] = []
        name = "cast_without_torch_function" if of_single_uses else "_graph_cast"
        original = getattr(weight_cache, name)

        def noted(*args: Any) -> Tensor:
            cast: Tensor = original(*args)
            self._made.append(weakref.ref(cast))
            return cast

        monkeypatch.setattr(weight_cache, name, noted)
        registration.engine()
        self._calls = native_engine.api
        if self._calls is not None:
            self._calls.record_casts()

    def __len__(self) -> int:
        return len(self._made) + (self._calls.recorded_casts(False) if self._calls else 0)

    def clear(self) -> None:
        """Forgets those that have been made."""
        self._made.clear()
        if self._calls is not None:
            self._calls.record_casts()

    def alive(self) -> int:
        """The number of copies that are not freed."""
        by_python = sum(cast() is not None for cast in self._made)
        return by_python + (self._calls.recorded_casts(True) if self._calls else 0)
