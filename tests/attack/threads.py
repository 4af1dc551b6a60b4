"""Threads and processes: who steps, attaches, forks and reads at once computes as alone."""

from __future__ import annotations

import os
import random
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn

import precast
from tests.attack.scenarios import scenario
from tests.attack.tools import equal, program, together
from tests.attack.weights import void


def _forwards(model: nn.Module, count: int, *, gradients: bool) -> None:
    x = torch.randn(4, 16)
    for _ in range(count):
        with torch.set_grad_enabled(gradients), precast.autocast("cpu"):
            out = model(x)
        assert out.dtype is torch.bfloat16, out.dtype
        if gradients:
            out.float().sum()


@scenario(
    "threads",
    "a thread that steps an optimizer disturbs no forward with gradients of others",
    "by hand",
)
def a_step_beside_forwards() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    precast.attach(model)

    def step() -> None:
        for _ in range(150):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()

    together(step, *[lambda: _forwards(model, 150, gradients=True)] * 3)


@scenario(
    "threads",
    "a thread that calls refresh() disturbs no forward with gradients of others",
    "by hand",
)
def refresh_beside_forwards() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    attachment = precast.attach(model)

    def refresh() -> None:
        for _ in range(150):
            attachment.refresh()

    together(refresh, *[lambda: _forwards(model, 150, gradients=True)] * 3)


@scenario(
    "threads",
    "a thread that attaches and detaches changes no number of four others",
    "plain PyTorch",
)
def attach_beside_forwards() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    with torch.no_grad(), torch.autocast("cpu"):
        expected = model(x)
    ended = threading.Event()

    def attach() -> None:
        for _ in range(100):
            with precast.attach(model):
                time.sleep(random.random() * 1e-3)
        ended.set()

    def run() -> None:
        while not ended.is_set():
            with torch.no_grad(), precast.autocast("cpu"):
                equal(model(x), expected)

    together(attach, *[run] * 4)


@scenario("threads", "counted writes beside readers are never called stale", "by hand")
def counted_writes_beside_readers() -> None:
    model = nn.Linear(16, 16)
    precast.attach(model)

    def write() -> None:
        for _ in range(150):
            with torch.no_grad():
                model.weight.mul_(1.001)

    together(write, *[lambda: _forwards(model, 150, gradients=False)] * 5)


@scenario("threads", "Hogwild: threads that train one attached model meet no error", "by hand")
def hogwild() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    precast.attach(model)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for _ in range(60):
            x = torch.randn(4, 8)
            with precast.autocast("cpu"):
                loss = model(x).float().square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.add_(g, alpha=-1e-3)
            optimizer.zero_grad()

    together(*[train] * 3)


@scenario("threads", "a fork while a thread is in refresh() gives a child that works", "by hand")
def fork_while_refreshing() -> None:
    model = nn.Linear(64, 64)
    attachment = precast.attach(model)
    with torch.no_grad(), precast.autocast("cpu"):
        model(torch.ones(1, 64))
    ended = threading.Event()

    def refresh() -> None:
        while not ended.is_set():
            attachment.refresh()

    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                with torch.no_grad(), precast.autocast("cpu"):
                    model(torch.ones(1, 64))
                attachment.refresh()
                os._exit(0)
            until = time.monotonic() + 30
            while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
                assert time.monotonic() < until, "the child hangs"
                time.sleep(0.01)
            assert done[1] == 0, done
    finally:
        ended.set()
        thread.join()


@scenario("threads", "each thread has the policy of its own region", "by hand")
def policies_of_threads() -> None:
    a = torch.ones(2, 2)

    def run(rule: str, expected: torch.dtype) -> None:
        policy = precast.Policy.load("default").replace(ops={"matmul": rule})
        for _ in range(200):
            with precast.autocast("cpu", policy=policy):
                assert (a @ a).dtype is expected

    together(
        lambda: run("fp32", torch.float32),
        lambda: run("lower", torch.bfloat16),
        lambda: run("keep", torch.float32),
        *[lambda: void(precast.Policy.load("torch").text)] * 2,
    )


@scenario(
    "threads",
    "policies that come and go in threads leave the live regions of others right",
    "by hand",
)
def policies_that_come_and_go() -> None:
    import gc

    a = torch.ones(2, 2)
    kept = precast.Policy.load("default").replace(ops={"matmul": "fp32"})

    def come_and_go() -> None:
        for number in range(6):
            policy = precast.Policy.load("default").replace(name=f"p{number}", ops={"exp": "fp32"})
            with precast.autocast("cpu", policy=policy):
                assert (a @ a).dtype is torch.bfloat16
            del policy
            gc.collect()

    def stay() -> None:
        for _ in range(200):
            with precast.autocast("cpu", policy=kept):
                assert (a @ a).dtype is torch.float32

    together(come_and_go, come_and_go, stay, stay)


@scenario(
    "threads", "backward in a thread of PyTorch's own runs the policy of its region", "by hand"
)
def deep_backward_in_pool_threads() -> None:
    policy = precast.Policy.load("default").replace(ops={"mm": "fp32"})
    dtypes = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            dtypes.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
            return g

    x = torch.ones(1, requires_grad=True)
    with precast.autocast("cpu", policy=policy):
        Notes.apply(x).sum().backward()
    assert dtypes == [torch.float32]


@scenario(
    "threads",
    "data loaders that fork compute under the region that they open",
    "by hand",
    quick=False,
)
def data_loaders_that_fork() -> None:
    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            with precast.autocast("cpu"):
                return F.linear(torch.ones(1, 2), torch.full((2, 2), float(index))).float()

    with precast.autocast("cpu"):
        F.linear(torch.ones(1, 2), torch.ones(2, 2))
    loader = torch.utils.data.DataLoader(Data(), num_workers=2)
    assert [float(batch[0, 0, 0]) for batch in loader] == [2.0 * i for i in range(8)]


ENDS = {
    "after threads used a region": """
import threading, torch, precast
def run():
    with precast.autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)
threads = [threading.Thread(target=run) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print("done")
""",
    "while daemon threads use regions": """
import threading, torch, precast, time
def run():
    while True:
        with precast.autocast("cpu"):
            torch.ones(2, 2) @ torch.ones(2, 2)
for _ in range(4): threading.Thread(target=run, daemon=True).start()
time.sleep(0.1)
print("done")
""",
    "with a region in __del__": """
import torch, precast
class A:
    def __del__(self):
        with precast.autocast("cpu"):
            torch.ones(2, 2) @ torch.ones(2, 2)
a = A()
with precast.autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
print("done")
""",
    "with an attached model at module level": """
import torch, precast
model = torch.nn.Linear(8, 8)
attachment = precast.attach(model)
with precast.autocast("cpu"):
    model(torch.ones(1, 8)).float().sum().backward()
print("done")
""",
    "with a region open": """
import torch, precast
region = precast.autocast("cpu")
region.__enter__()
torch.ones(2, 2) @ torch.ones(2, 2)
print("done")
""",
    "installed": """
import torch, precast
precast.install("default")
with torch.autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
print("done")
""",
    "with a monitor and a scaler": """
import torch, precast
model = torch.nn.Linear(8, 8)
monitor = precast.monitor(model)
scaler = precast.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with precast.autocast("cpu"):
    loss = model(torch.ones(1, 8)).float().sum()
scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
print("done")
""",
}


def _ends_quietly(text: str, times: int) -> None:
    for _ in range(times):
        done = program(text)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr[-800:]}"
        assert done.stdout == "done\n", done.stdout
        assert done.stderr == "", done.stderr[-800:]


for _when, _text in ENDS.items():
    scenario(
        "exit",
        f"a process that ends {_when} ends with 0 and prints nothing of its own",
        "plain PyTorch",
        name=f"the end of a process {_when}",
        quick="attached" in _when,
    )(lambda text=_text, times=1 if "attached" in _when else 2: _ends_quietly(text, times))
