"""What holds for all tests: one thread for PyTorch (tensors are tiny), no region left open, one seed for programs.

And what PyTorch and Python would do beside it, and no test asks for: see `_leave_out`.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from precast import _torch
from precast.diagnostics.tracing import facts, trials
from precast.engine.compile_guards import NO_GUARD_ID
from precast.engine.thread_state import regions
from precast.weights import held
from precast.weights.native import library
from tests.support.draw import SLOW_FILES, is_drawn

# In the environment, so that what this process starts draws the same programs.
PROGRAMS_SEED = int(os.environ.setdefault("PRECAST_PROGRAMS_SEED", str(random.getrandbits(30))))
SHARE = int(os.environ.get("PRECAST_DRAW", "1"))
torch.set_num_threads(1)
# A deadline would test how busy the machine is.
settings.register_profile("precast", deadline=None)
settings.load_profile("precast")


def _leave_out() -> None:
    """Has tests take a fraction of their time, by what has no part in what they say.

    - A seed for devices that are not there: PyTorch keeps it for the day on which they are, with the caller's whole
      stack as text (2.13): 1 ms for each `torch.manual_seed` in a test, most of what some tests took.
    - Headers that Inductor compiles before it compiles the first kernel of a process, for those that may follow: 10 s;
      and a process that waits for more kernels.
    - The collector's looks at all that tests have loaded: fewer. Who asks for a collection gets a whole one.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            vars(device)["manual_seed_all"] = lambda seed: None
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    gc.set_threshold(10_000, 20, 20)


_leave_out()


_native = library.load()


def pytest_report_header() -> list[str]:
    return [
        f"random programs: PRECAST_PROGRAMS_SEED={PROGRAMS_SEED}",
        f"native engine: {_native.path if isinstance(_native, library.Library) else _native}",
        *(
            [f"slow files: one test of {SHARE}, drawn by the seed; without PRECAST_DRAW all"]
            * (SHARE > 1)
        ),
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn. Without a compiler, skip the tests of the native engine, with the reason."""
    left_out = {
        item
        for item in items
        if item.nodeid.partition("::")[0] in SLOW_FILES
        and not is_drawn(item.nodeid, PROGRAMS_SEED, SHARE)
    }
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if isinstance(_native, library.Unavailable):
        reason = pytest.mark.skip(reason=f"needs the native engine: {_native.reason}")
        for item in items:
            parameters = getattr(item, "callspec", None)
            given = () if parameters is None else parameters.params.values()
            if any("native" in value.split() for value in given if isinstance(value, str)):
                item.add_marker(reason)


@pytest.fixture(autouse=True, scope="session")
def _what_is_printed_is_plain() -> Iterator[None]:
    """In 80 columns, without colours, wherever tests run: a CI may ask all programs for colours."""
    with pytest.MonkeyPatch.context() as environment:
        for name in ("COLUMNS", "FORCE_COLOR", "LINES"):
            environment.delenv(name, raising=False)
        yield


@pytest.fixture
def faster_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial of a trace's advice measures a saving, whatever the machine is busy with."""
    saving = trials.TrialSaving(1e-3, 2e-3, 3e-3)
    monkeypatch.setattr(facts, "measure_saving", lambda *_, **__: saving)


@pytest.fixture(autouse=True)
def _one_seed_repeats_all_draws() -> None:
    """`--randomly-seed` seeds Python's and NumPy's generator for each test: with PyTorch's it repeats what failed."""
    torch.manual_seed(random.getrandbits(32))


@pytest.fixture(autouse=True, scope="module")
def _collections_look_at_what_tests_make() -> None:
    """Many tests ask for a collection, which looks at all that is loaded: half of what tests of weights took.

    What is there when the tests of a file begin is left out from then on; it has just been collected.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_region_is_left_open() -> Iterator[None]:
    yield
    assert not regions.records
    assert regions.guard_id is NO_GUARD_ID
    assert not torch.is_autocast_enabled("ipu")
    assert not torch.is_autocast_enabled("maia")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert _torch.optimizes_torchscript()


@pytest.fixture(autouse=True)
def _no_weight_is_left_held() -> Iterator[None]:
    """A region compares held weights when it is entered, and there are tests that count what runs in one."""
    yield
    if held.held_parameters:  # by an attached model of the test, which is in a cycle
        gc.collect()


@pytest.fixture(autouse=True)
def _skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
