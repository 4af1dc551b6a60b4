"""A CUDA device whose memory and kernels are the CPU's: PyTorch's and precast's code for CUDA runs without a GPU.

Invariants:

- `load` runs before PyTorch is imported, because PyTorch finds its accelerator once; as a plugin
  (`python -m pytest -p tests.support.pretended_cuda`) this module does that before any conftest is imported;
- results are the CPU's bits. Dispatch, casts, order of kernels, waits and captures are those of a CUDA program;
- what needs a GPU stays untested: streams that run at the same time, cuDNN, Triton, NCCL, speed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Kernels", "build", "compiler", "is_loaded", "load", "recorded_kernels"]
__all__ += ["run_tests", "waits"]

SOURCE = Path(__file__).parent / "device.cpp"
_libraries: list[ctypes.CDLL] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    load()


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Return the library for the installed PyTorch, compiled now unless it is in the cache."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes() + bytes(torch))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "precast-tests"
    library = cache / f"pretended-cuda-{key.hexdigest()[:16]}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(torch, library)
    return library


def _compile(torch: Path, library: Path) -> None:
    unfinished = library.with_suffix(".part")
    flags = ["-O0", "-std=c++20", "-fPIC", "-shared", "-DNDEBUG", "-isystem", torch / "include"]
    libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [*compiler(), *flags, SOURCE, *libraries, "-o", unfinished]
    subprocess.run(command, check=True)
    unfinished.replace(library)


def run_tests(files: Iterable[str], *, without: Iterable[str] = ()) -> int:
    """Run the tests marked `gpu` of some files in a process with the device; return the number that passed.

    Args:
        files: from the root of the repository.
        without: beginnings of the names of tests that are left out.
    """
    import torch

    if sys.platform != "linux" or torch.version.cuda is not None:
        pytest.skip("the device needs Linux and a CPU build of PyTorch")
    if not shutil.which(compiler()[0]):
        pytest.skip("the device needs a C++ compiler")
    build()
    of_graphed_callables = "ignore:The AccumulateGrad node's stream"  # once
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.support.pretended_cuda", "-m", "gpu"),
            *("-p", "no:cacheprovider", "--tb=short", "-q", "-W", of_graphed_callables, *files),
            *(f"--deselect={name}" for name in without),
        ],
        cwd=Path(__file__).parents[3],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])


def is_loaded() -> bool:
    return bool(_libraries)


def load() -> None:
    """Give this process the device, and functions of `torch.cuda` that use it."""
    assert "torch" not in sys.modules, "PyTorch is imported already, and has found no accelerator"
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    library.pretended_begin_capture.restype = ctypes.c_int64
    library.pretended_recorded.restype = ctypes.c_char_p
    library.pretended_begin()
    _libraries.append(library)
    _patch(library)


def _number(name: str) -> ctypes.c_int64:
    return ctypes.c_int64.in_dll(_libraries[0], f"pretended_{name}")


def _patch(library: ctypes.CDLL) -> None:
    import torch

    allocated, peak, capturing = _number("bytes"), _number("peak"), _number("capturing")

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
            return super().__new__(cls, device="cuda", priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: bool) -> Event:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    class Graph:
        def capture_begin(self, *_: Any, **__: Any) -> None:
            self.number = library.pretended_begin_capture()

        def capture_end(self) -> None:
            capturing.value = -1

        def replay(self) -> None:
            library.pretended_replay(ctypes.c_int64(self.number))

        def pool(self) -> tuple[int, int]:
            return 0, 1

        def reset(self) -> None: ...

    def set_sync_debug_mode(mode: int | str) -> None:
        number = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)
        _number("sync_debug_mode").value = int(number)

    def reset_peak_memory_stats(_device: Any = None) -> None:
        peak.value = allocated.value

    def is_current_stream_capturing() -> bool:
        return bool(capturing.value == torch.accelerator.current_stream().stream_id)

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    graphs: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph_pool_handle": always((0, 1)),
        "is_current_stream_capturing": is_current_stream_capturing,
    }
    vars(torch.cuda.graphs).update(graphs)
    vars(torch.cuda).update(
        **graphs,
        # A function has one name: torch.compile refuses others. Seeds are those of the CPU's generator.
        **{name: always(None) for name in ("_lazy_init", "init", "set_device", "empty_cache")},
        **{name: always(None) for name in ("_sleep", "manual_seed", "manual_seed_all")},
        **{name: always(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        _initialized=True,
        device_count=always(1),
        current_device=always(0),
        get_device_name=always("pretended"),
        get_device_capability=always((9, 0)),
        get_rng_state=lambda _=None: torch.get_rng_state(),
        set_rng_state=lambda state, _=None: torch.set_rng_state(state),
        memory_allocated=lambda _=None: allocated.value,
        max_memory_allocated=lambda _=None: peak.value,
        reset_peak_memory_stats=reset_peak_memory_stats,
        synchronize=lambda _=None: torch.accelerator.synchronize(),
        Stream=Stream,
        Event=Event,
        current_stream=lambda _=None: torch.accelerator.current_stream(),
        default_stream=lambda _=None: torch.Stream(stream_id=0, device_index=0, device_type=1),
        stream=lambda stream: nullcontext() if stream is None else stream,
        set_sync_debug_mode=set_sync_debug_mode,
    )
    vars(torch._C).setdefault("_host_emptyCache", always(None))


Kernels = list[str]
"""Kernels in the order in which they ran: "aten::mm. BFloat16 BFloat16 -> BFloat16"."""


@contextmanager
def recorded_kernels() -> Iterator[Kernels]:
    """Fill a list with the kernels that run inside, when the block ends."""
    kernels: Kernels = []
    (library,) = _libraries
    library.pretended_record(True)
    try:
        yield kernels
    finally:
        library.pretended_record(False)
        kernels += library.pretended_recorded().decode().splitlines()


def waits() -> int:
    """Return how often the host has waited for the device."""
    return _number("waits").value
