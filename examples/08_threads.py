"""Threads: a region belongs to the thread that opened it, and `precast.current_precision()` takes it along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from showing import table
from torch import Tensor, nn

import precast


def dtypes_seen() -> dict[str, torch.dtype]:
    """What a linear layer gives here, in a region, and in another thread meanwhile."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    with precast.autocast("cpu", dtype=torch.bfloat16), ThreadPoolExecutor(1) as pool:
        here = precast.current_precision()

        def taken_along() -> Tensor:
            with here:
                result: Tensor = linear(x)
            return result

        def opened_there() -> Tensor:
            with precast.autocast("cpu", dtype=torch.float16):
                result: Tensor = linear(x)
            return result

        ways: dict[str, Callable[[], Tensor]] = {
            "another, as it is": lambda: linear(x),
            "another, with precast.current_precision()": taken_along,
            "another, with a region of its own": opened_there,
        }
        there = {name: pool.submit(work).result().dtype for name, work in ways.items()}
        return {"the region's": linear(x).dtype, **there}


def replicas(model: nn.Module, parts: list[Tensor]) -> list[Tensor]:
    """A model on each part of a batch, a thread a part, all in the region of the caller."""
    here = precast.current_precision()

    def work(part: Tensor) -> Tensor:
        with here:
            result: Tensor = model(part)
        return result

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts))


def backward_in_a_thread(loss: Tensor) -> None:
    """Backward needs no region: each operation remembers the dtype of its forward."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def main() -> None:
    """Prints dtypes by thread, and that threads change no result."""
    table(("the thread is", "a linear layer gives"), *dtypes_seen().items())
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(64, 8)
    parameter = next(model.parameters())
    rows: list[tuple[object, ...]] = []
    with precast.autocast("cpu"):
        alone = torch.cat([model(part) for part in x.chunk(4)])
        together = torch.cat(replicas(model, list(x.chunk(4))))
    for name, output in (("one after the other", alone), ("in four threads", together)):
        model.zero_grad()
        backward_in_a_thread(output.float().square().mean())
        assert parameter.grad is not None
        rows.append(
            (name, output.dtype, bool(torch.equal(output, alone)), parameter.grad.norm().item())
        )
    table(("four parts of a batch", "output", "equal", "norm of a gradient"), *rows)


if __name__ == "__main__":
    main()
