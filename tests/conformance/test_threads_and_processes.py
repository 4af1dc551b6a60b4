"""Threads, workers of data loaders, generators; models that are copied, pickled and loaded inside a region."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import precast
from tests.conformance.compare import assert_same, in_both_dtypes
from tests.conformance.systems import MakeRegion, System, on_all_systems


def _flags() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale  # type: ignore[no-any-return]


def _new_threads(region: MakeRegion, dtype: torch.dtype) -> Any:
    """A thread starts outside of all regions; what it opens is its own."""
    model, x, result = nn.Linear(4, 4), torch.randn(3, 4), []

    def work() -> None:
        result.append((_flags(), model(x)))
        with region("cpu", dtype=dtype):
            result.append((_flags(), model(x)))
        result.append(_flags())

    with region("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        result.append((_flags(), model(x)))
    return result


def _a_pool(region: MakeRegion, dtype: torch.dtype) -> Any:
    """Tasks that come back to one thread find what the last one left: nothing."""
    model, xs = nn.Linear(4, 4), torch.randn(5, 3, 4)

    def task(x: Tensor) -> Any:
        before = _flags()
        with region("cpu", dtype=dtype):
            y = model(x)
            gradients = torch.autograd.grad(y.float().square().sum(), list(model.parameters()))
        return before, y, gradients

    with ThreadPoolExecutor(1) as pool, region("cpu"):
        return list(pool.map(task, xs))


def _regions_that_cross(region: MakeRegion, dtype: torch.dtype) -> Any:
    """Two threads, each in its region at the same time, of other dtypes, without a weight in common."""
    result: dict[str, Any] = {}
    both = threading.Barrier(2)
    models, x = [nn.Linear(4, 4) for _ in range(2)], torch.randn(3, 4)

    def work(i: int) -> None:
        with region("cpu", dtype=(dtype, torch.bfloat16)[i]):
            both.wait()
            result[f"in {i}"] = models[i](x), _flags()
            both.wait()
        result[f"after {i}"] = models[i](x), _flags()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(result.items()))


def _generators(region: MakeRegion, dtype: torch.dtype) -> Any:
    """One that opens a region between two yields; and one that is used inside of a region."""
    model, xs = nn.Linear(4, 4), torch.randn(3, 2, 4)

    def computing() -> Iterator[Any]:
        for x in xs:
            with region("cpu", dtype=dtype):
                y = model(x)
            yield y, _flags()

    def using() -> Iterator[Any]:
        for x in xs:
            yield model(x), _flags()

    outside = using()
    first = next(outside)
    with region("cpu", dtype=dtype):
        return first, list(computing()), list(outside), _flags()


def _copied(region: MakeRegion, dtype: torch.dtype) -> Any:
    model, x = Model(), torch.randn(3, 4)
    with region("cpu", dtype=dtype):
        first = model(x)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with torch.no_grad():
            for i, twin in enumerate(twins, 2):
                for parameter in twin.parameters():
                    parameter.mul_(i)
        results = [m(x) for m in (*twins, model)]
    sum(r.float().square().sum() for r in results).backward()  # type: ignore[union-attr]
    return first, results, [p.grad for m in (*twins, model) for p in m.parameters()]


def _loaded(region: MakeRegion, dtype: torch.dtype) -> Any:
    """Before the first use of its weights; the file was written in a region, too."""
    model, x, file = Model(), torch.randn(3, 4), io.BytesIO()
    with region("cpu", dtype=dtype):
        torch.save({name: tensor * 2 for name, tensor in model.state_dict().items()}, file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
        first = model(x)
        model.load_state_dict(Model().state_dict(), assign=True)
        return first, model(x), list(model.state_dict().values())


def _moved(region: MakeRegion, dtype: torch.dtype) -> Any:
    """To another dtype and back, to be trained and to be frozen."""
    model, x = Model(), torch.randn(3, 4)
    with region("cpu", dtype=dtype):
        results = [model(x)]
        results.append(model.requires_grad_(False)(x))
        results.append(copy.deepcopy(model).double()(x.double()))
        results.append(copy.deepcopy(model).to(dtype)(x.to(dtype)))
        results.append(model.eval().requires_grad_(True)(x))
    results[-1].float().square().sum().backward()
    return results, [p.grad for p in model.parameters()]


class Computed(Dataset[Any]):
    """Items that take a product to make, with the flags of the process that made them."""

    def __init__(self) -> None:
        self.weight = torch.randn(4, 4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        flags = torch.tensor([torch.is_autocast_enabled("cpu")])
        return torch.mm(torch.full((4, 4), float(i + 1)), self.weight), flags


class Streamed(IterableDataset[Any]):
    def __init__(self, region: MakeRegion) -> None:
        self.items, self.region = Computed(), region

    def __iter__(self) -> Iterator[Any]:
        for i in range(4):
            with self.region("cpu"):
                item = self.items[i]
            yield item


def _loaders(region: MakeRegion, dtype: torch.dtype) -> Any:
    """Without workers: items are made in the region that asks for them."""
    with region("cpu", dtype=dtype):
        inside = list(DataLoader(Computed(), batch_size=2))
    return inside, list(DataLoader(Streamed(region), batch_size=2)), list(DataLoader(Computed()))


PROGRAMS: dict[str, Callable[[MakeRegion, torch.dtype], Any]] = {
    "new threads": _new_threads,
    "a pool": _a_pool,
    "regions that cross": _regions_that_cross,
    "generators": _generators,
    "copies": _copied,
    "loading": _loaded,
    "moving": _moved,
    "loaders": _loaders,
}


@in_both_dtypes
@pytest.mark.parametrize("name", PROGRAMS)
@on_all_systems
def test_programs(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, PROGRAMS[name], dtype)


# Python 3.12 and later say so of every fork in a process with threads, as PyTorch's own always are.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@on_all_systems
def test_workers_that_start_inside_a_region(system: System) -> None:
    """They are forked with the region of the thread that starts them, and take it along, as PyTorch's do."""
    assert_same(system, _workers, 2)


def _workers(region: MakeRegion, count: int) -> Any:
    options = {"num_workers": count, "multiprocessing_context": "fork"}
    model = nn.Linear(4, 4)
    with region("cpu"):
        first = model(torch.randn(2, 4))
        inside = list(DataLoader(Computed(), **options))
        streamed = list(DataLoader(Streamed(region), **options))
        loader = iter(DataLoader(Computed(), **options))
        started = next(loader)
    return first, inside, streamed, started, list(loader), list(DataLoader(Computed(), **options))


def test_threads_share_no_copies() -> None:
    """In PyTorch the end of a region in one thread drops the copies of all, and gradients depend on who is when."""

    def gradient(region: Any, around: Callable[[], Any]) -> Tensor:
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(64, 16)
        with region:
            first = F.linear(x, weight)
            around()
            second = F.linear(x * 0.7, weight)
        (first.float().tanh().sum() + second.float().tanh().sum()).backward()
        assert weight.grad is not None
        return weight.grad

    def elsewhere(region: Any) -> Callable[[], None]:
        def work() -> None:
            with region:
                pass

        def run() -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        return run

    ours, theirs = precast.autocast("cpu"), torch.autocast("cpu")
    alone = gradient(ours, lambda: None)
    assert torch.equal(alone, gradient(theirs, lambda: None))
    assert torch.equal(alone, gradient(ours, elsewhere(precast.autocast("cpu"))))
    assert not torch.equal(alone, gradient(theirs, elsewhere(torch.autocast("cpu"))))
