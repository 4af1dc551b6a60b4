"""Keeps precast's kernels on the dispatcher while a file of tests runs: to put them there takes longer than a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import precast


@pytest.fixture(autouse=True)
def _kernels_stay_where_systems_change(request: pytest.FixtureRequest) -> None:
    if "system" in request.fixturenames:
        request.getfixturevalue("_kernels_stay_registered")


@pytest.fixture(scope="module")
def _kernels_stay_registered() -> Iterator[None]:
    """A region is open in another thread, so that the end of an installation takes no kernel off the dispatcher."""
    done, entered = threading.Event(), threading.Event()

    def hold() -> None:
        with precast.autocast("cpu"):
            entered.set()
            done.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    entered.wait()
    yield
    done.set()
    thread.join()
