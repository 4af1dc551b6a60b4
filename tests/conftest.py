"""What holds for all tests: one thread for PyTorch (tensors are tiny), no region left open, one seed for programs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from precast import _torch
from precast.frames import regions
from precast.marks import NO_MARK

# In the environment, so that what this process starts draws the same programs.
PROGRAMS_SEED = int(os.environ.setdefault("PRECAST_PROGRAMS_SEED", str(random.getrandbits(30))))
torch.set_num_threads(1)
# A deadline would test how busy the machine is.
settings.register_profile("precast", deadline=None)
settings.load_profile("precast")


def pytest_report_header() -> str:
    return f"random programs: PRECAST_PROGRAMS_SEED={PROGRAMS_SEED}"


@pytest.fixture(autouse=True)
def _no_region_is_left_open() -> Iterator[None]:
    yield
    assert not regions.records
    assert regions.mark is NO_MARK
    assert not torch.is_autocast_enabled("ipu")
    assert not torch.is_autocast_enabled("maia")
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert _torch.optimizes_torchscript()


@pytest.fixture(autouse=True)
def _skip_without_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
