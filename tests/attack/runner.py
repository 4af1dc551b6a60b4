"""Runs scenarios, each in a process that is forked for it, with a seed of its own and a limit of time."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from tests.attack.scenarios import Scenario

__all__ = ["FAILED", "HOLDS", "LIMIT", "Outcome", "attack", "load"]

HOLDS, LIMIT, FAILED = "holds", "known limit", "failed"
_LONGEST = 4000


@dataclass(frozen=True)
class Outcome:
    """The result of a scenario with one seed."""

    name: str
    area: str
    seed: int
    result: str
    """`holds`, `known limit` or `failed`."""
    seconds: float
    message: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


@dataclass
class _Running:
    scenario: Scenario
    seed: int
    process: int
    pipe: int
    started: float
    said: bytes = b""


def attack(
    tries: Iterable[tuple[Scenario, int]], *, jobs: int, seconds: float
) -> Iterator[Outcome]:
    """Run each scenario with each seed, and yield the results as they end.

    Args:
        tries: scenarios and seeds.
        jobs: how many run at a time.
        seconds: how long each may take.
    """
    waiting = iter(tries)
    running: list[_Running] = []
    while True:
        while len(running) < jobs and (following := next(waiting, None)) is not None:
            running.append(_start(*following))
        if not running:
            return
        for one in _ended(running, seconds):
            running.remove(one)
            yield _outcome(one, seconds)


def load() -> None:
    """Loads once what nearly all scenarios would load: an optimizer's first step imports half of PyTorch."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([parameter], 0.1).step()
    importlib.import_module("torch._dynamo")
    gc.freeze()  # what is loaded lives for ever: collectors of the forked processes need not look through it


def _start(scenario: Scenario, seed: int) -> _Running:
    out, into = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads, by Python 3.12: none of ours holds a lock
        process = os.fork()
    if process:
        os.close(into)
        return _Running(scenario, seed, process, out, started)
    os.close(out)
    os.setsid()  # so that what it starts can be ended with it
    text = _try(scenario.attack, seed)
    os.write(into, json.dumps(text).encode()[:_LONGEST])
    os.close(into)
    os._exit(0)


def _try(function: Callable[[], None], seed: int) -> str:
    """Return the failure of a scenario, or ""."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        function()
    except BaseException as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return f"{type(error).__name__}: {error}"[: _LONGEST // 4] + f"\n{where}"[: _LONGEST // 4]
    return ""


def _ended(running: list[_Running], seconds: float) -> list[_Running]:
    ready, _, _ = select.select([one.pipe for one in running], [], [], 0.2)
    ended = []
    for one in running:
        if one.pipe in ready:
            chunk = os.read(one.pipe, 1 << 16)
            one.said += chunk
            if not chunk:
                ended.append(one)
        elif time.monotonic() - one.started > seconds:
            os.killpg(one.process, signal.SIGKILL)
            ended.append(one)
    return ended


def _outcome(one: _Running, seconds: float) -> Outcome:
    os.close(one.pipe)
    _, status = os.waitpid(one.process, 0)
    took = time.monotonic() - one.started
    if os.WIFSIGNALED(status):
        late = took > seconds
        message = f"took longer than {seconds:g} s" if late else f"signal {os.WTERMSIG(status)}"
    else:
        message = json.loads(one.said) if one.said else f"exit status {status}"
    result, message = _judged(one.scenario, message)
    return Outcome(one.scenario.name, one.scenario.area, one.seed, result, took, message)


def _judged(scenario: Scenario, message: str) -> tuple[str, str]:
    if scenario.limit is None:
        return (FAILED, message) if message else (HOLDS, "")
    if not message:
        return FAILED, f"this limit is gone, so take it out of the table: {scenario.limit.reason}"
    if re.search(scenario.limit.shows, message) is None:
        return FAILED, f"it fails in another way than {scenario.limit.shows!r}: {message}"
    return LIMIT, message
