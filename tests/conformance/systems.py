"""The ways to run a program that was written for `torch.autocast`: on PyTorch's engine, and on each of precast's.

Invariants:

- `TORCH` is PyTorch alone; nothing of precast is in force there;
- every other system must give what `TORCH` gives, bit for bit, except for what docs/differences.md lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import precast
from precast.engine import registration
from precast.policy.policy import Policy

__all__ = ["SYSTEMS", "TORCH", "MakeRegion", "System", "on_all_systems", "systems"]

MakeRegion = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class System:
    """The system of a program: its class of regions, and the state around it."""

    name: str
    region: MakeRegion
    """Called as ``region(device_type, dtype=..., enabled=..., cache_enabled=...)``."""
    _around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def __call__(self) -> Iterator[MakeRegion]:
        """Puts the system in force, and gives what makes its regions."""
        with self._around():
            yield self.region

    def __str__(self) -> str:
        return self.name


def systems(policy: Policy | str) -> tuple[System, ...]:
    """The ways to run on precast: its own regions and installed ones, on each engine."""
    return tuple(
        system
        for name in registration.available_engines()
        for system in (
            System(
                f"precast, {name} engine",
                partial(_region, policy=policy),
                partial(registration.use_engine, name),
            ),
            System(f"installed, {name} engine", torch.autocast, partial(_installed, name, policy)),
        )
    )


def _region(*args: Any, policy: Policy | str, **kwargs: Any) -> precast.autocast:
    return precast.autocast(*args, **kwargs, policy=policy)


@contextmanager
def _installed(engine_name: str, policy: Policy | str) -> Iterator[None]:
    with registration.use_engine(engine_name), precast.install(policy):
        yield


TORCH = System("torch", torch.autocast)
SYSTEMS = systems("torch")

on_all_systems = pytest.mark.parametrize("system", SYSTEMS, ids=str)
"""Gives a test the argument `system`, once for each way to run on precast."""
