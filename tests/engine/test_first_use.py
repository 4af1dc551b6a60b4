"""The first region of a process may be opened anywhere: in a transform, a trace, a mode, a worker or a thread.

A process that imports PyTorch alone runs as a program here, so this file imports precast nowhere at its top. It starts
one process for each place, in which precast is imported and its library loaded there, and one that has used precast
before. `torch.compile` with Inductor is left out: its C++ compiler takes ten seconds, and Dynamo runs before it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
Function = Any  # a model that is called with one tensor
X = torch.linspace(-1, 1, 24).reshape(3, 8)


class InARegion(nn.Module):
    """A model that imports precast when it is called, and runs in two regions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        import precast

        with precast.autocast("cpu", dtype=torch.bfloat16, policy="torch"):
            x = self.layers(x)
        with precast.autocast("cpu", dtype=torch.bfloat16, policy="torch"):
            return self.layers(x).float()


class Seeing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Hearing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(getattr(func, "__name__", func)))
        return func(*args, **(kwargs or {}))


class Items(torch.utils.data.Dataset[Tensor]):
    def __init__(self, function: Function) -> None:
        self.function = function

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.function(X)


def make_fx(function: Function, **how: Any) -> Any:
    from torch.fx.experimental import proxy_tensor

    graph = proxy_tensor.make_fx(function, _allow_non_fake_inputs=True, **how)(X)
    return graph(X), graph.code


def exported(function: Function, strict: bool) -> Any:
    program = torch.export.export(function, (X,), strict=strict)
    return program.module()(X), program.graph_module.code


def in_a_fork(function: Function) -> Any:
    return torch.jit.wait(torch.jit.fork(function.forward, X))


def in_fake_mode(function: Function) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = function(mode.from_tensor(X))
        return str(result.dtype), list(result.shape), type(result).__name__


def with_mode(mode: Any, function: Function) -> Any:
    with mode:
        result = function(X)
    return result, mode.seen


def within(context: Any, function: Function) -> Tensor:
    with context:
        return function(X).clone()


def with_hooks(function: Function) -> Any:
    x, shapes = X.clone().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
    ):
        result = function(x)
    result.sum().backward()
    return result, shapes, x.grad


def in_a_thread(function: Function) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(X)))
    thread.start()
    thread.join()
    return results


def with_default_dtype(function: Function) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return function(X)
    finally:
        torch.set_default_dtype(torch.float32)


PLACES: dict[str, Callable[[Function], Any]] = {
    "plain": lambda f: f(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, X * 2])),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
    "make_fx": make_fx,
    "make_fx, symbolic": lambda f: make_fx(f, tracing_mode="symbolic"),
    "make_fx, pre-dispatch": lambda f: make_fx(f, tracing_mode="fake", pre_dispatch=True),
    "export": lambda f: exported(f, strict=False),
    "export, strict": lambda f: exported(f, strict=True),
    "compile, eager": lambda f: torch.compile(f, backend="eager")(X),
    "compile, aot_eager": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)(X),
    "jit.trace": lambda f: torch.jit.trace(f, (X,))(X),
    "jit.fork": in_a_fork,
    "FakeTensorMode": in_fake_mode,
    "meta": lambda f: within(torch.device("meta"), f),
    "inference_mode": lambda f: within(torch.inference_mode(), f),
    "no_grad": lambda f: within(torch.no_grad(), f),
    "default dtype": with_default_dtype,
    "dispatch mode": lambda f: with_mode(Seeing(), f),
    "function mode": lambda f: with_mode(Hearing(), f),
    "saved tensors' hooks": with_hooks,
    "DataLoader": lambda f: list(torch.utils.data.DataLoader(Items(f), num_workers=1)),  # type: ignore[arg-type]
    "thread": in_a_thread,
}


RAISES_IN_PYTORCH = {"export, strict": "dtype mismatch"}
"""Programs recorded so of regions raise when they are called, those of torch.autocast too (2.13)."""


def plain(value: Any) -> Any:
    """Make a value that JSON can contain, with all bits of its tensors."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.requires_grad, value.detach().clone().tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def outcome(place: str) -> Any:
    """Return the result of a region there, and of what came to be in the process by its first use."""
    function = InARegion()
    try:
        result = plain(PLACES[place](function))
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    from precast import _torch
    from precast.engine import registration
    from precast.optim import rounding

    whole = torch.empty(4)
    return {
        "result": result,
        "result afterwards": plain(function(X)),
        "engine": registration.engine(),
        "shared": [_torch.is_shared(torch.empty(4)), _torch.is_shared(whole[1:])],
        "tensors": [type(rounding._BLOCK).__name__, rounding._BLOCK.is_inference()],
        "flags": [torch.is_autocast_enabled("cpu"), _torch.autocast_nesting()],
    }


def in_a_child(run: Callable[[], Any]) -> Any:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = json.dumps(run())
        except BaseException as error:  # for the parent to say
            text = json.dumps(f"{type(error).__name__}: {error}")
        with os.fdopen(writes, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def warmed() -> dict[str, Any]:
    InARegion()(X)
    outcomes = {}
    for place in PLACES:
        torch._dynamo.reset()
        outcomes[place] = outcome(place)
    return outcomes


def main() -> None:
    """Print what each place gives in a process of its own, and in one that has used precast before."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for module in ("_dynamo", "_functorch.aot_autograd", "export", "fx.experimental.proxy_tensor"):
        importlib.import_module(f"torch.{module}")  # once, for all processes
    assert "precast" not in sys.modules
    fresh = {place: in_a_child(lambda place=place: outcome(place)) for place in PLACES}
    print(json.dumps({"fresh": fresh, "warmed": in_a_child(warmed)}))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.test_first_use"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("place", PLACES)
def test_a_first_use_gives_what_a_later_one_gives(place: str, outcomes: dict[str, Any]) -> None:
    fresh, later = outcomes["fresh"][place], outcomes["warmed"][place]
    assert fresh == later
    assert fresh["shared"] == [False, True]
    if place in RAISES_IN_PYTORCH:
        assert RAISES_IN_PYTORCH[place] in fresh["result"]
    else:
        assert not isinstance(fresh["result"], str), fresh["result"]


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_any_module_runs_no_operation_that_a_mode_sees() -> None:
    """A lazy import may happen within a transform: what it computes is there for as long as the process lives."""
    code = """
import importlib, pkgutil, precast, torch
from precast.errors import MissingExtraError
from tests.engine.test_first_use import Seeing
names = [m.name for m in pkgutil.walk_packages(precast.__path__, "precast.") if "__main__" not in m.name]
with Seeing() as mode:
    for name in names:
        try:
            importlib.import_module(name)
        except MissingExtraError:
            pass
print(len(names) > 100, mode.seen)
"""
    assert _run(code).split() == ["True", "[]"]


def test_a_captured_region_may_be_the_first() -> None:
    """The library cannot be loaded while a region is open, so that a captured one loads it too."""
    code = """
import torch, precast
with torch.autocast("cpu"), precast.current_precision(), precast.autocast("cpu"):
    print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
"""
    assert _run(code).strip() == "torch.bfloat16"


if __name__ == "__main__":
    main()
