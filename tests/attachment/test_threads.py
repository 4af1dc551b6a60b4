"""attach, where threads work side by side: whose error it is, and that what one does breaks nothing of another's."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.attachment.attachment import Attachment
from precast.engine import registration
from precast.weights import held, held_copy, unversioned_writes, weight_cache
from tests.support.unsampled import write_unsampled

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to be held in training, where a bias is not."""


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    yield
    assert held.held_parameters == {}
    assert held.comparison_queue == []
    assert held.before_next_region == {}


def region() -> precast.autocast:
    return precast.autocast("cpu", dtype=BF16, policy="torch")


@contextmanager
def used_by_this_thread() -> Iterator[tuple[nn.Linear, Tensor, Attachment]]:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)
    with precast.attach(model) as attachment, torch.no_grad():
        with region():
            model(x)
        yield model, x, attachment


def enter(comparisons: int) -> None:
    """Enters regions until weights have been compared so often."""
    for _ in range(comparisons * unversioned_writes.ENTRIES_BETWEEN_CHECKS):
        with torch.no_grad(), region():
            pass


def test_what_another_thread_writes_now_is_no_unversioned_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        unversioned_writes, "LONGEST_WRITE", math.inf
    )  # however late that thread has its turn
    with used_by_this_thread() as (model, _, _), ThreadPoolExecutor(1) as others:
        write_unsampled(model.weight)  # as in the middle of an operation, which counts when it ends

        def end() -> None:
            time.sleep(0.05)
            with torch.no_grad():
                model.weight.mul_(1)

        written = others.submit(end)
        enter(3)
        written.result()
        enter(3)


def test_another_thread_gets_no_error_for_a_model_that_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unversioned_writes, "LONGEST_WRITE", 0.02)
    with used_by_this_thread() as (model, x, attachment), ThreadPoolExecutor(1) as others:
        write_unsampled(model.weight)
        others.submit(enter, 3).result()
        time.sleep(0.03)
        others.submit(enter, 3).result()
        with pytest.raises(precast.errors.StaleWeightError, match="'weight'"), region():
            model(x)
        attachment.refresh()
        with region():
            assert torch.equal(model(x), x.to(BF16) @ model.weight.to(BF16).t())


def test_what_only_ended_threads_used_is_found_by_its_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unversioned_writes, "LONGEST_WRITE", 0.02)
    # Frozen: one that is trained would be copied again where this thread has made graphs.
    model, x = nn.Linear(64, 64, bias=False).requires_grad_(False), torch.randn(2, 64)

    def use() -> None:
        with torch.no_grad(), region():
            model(x)

    def in_a_thread_of_its_own() -> None:
        with ThreadPoolExecutor(1) as ends:
            ends.submit(use).result()

    with precast.attach(model):
        in_a_thread_of_its_own()
        write_unsampled(model.weight)
        enter(2)
        time.sleep(0.03)
        enter(2)
        with pytest.raises(precast.errors.StaleWeightError, match="'weight'"):
            in_a_thread_of_its_own()


def answer(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(), region():
        result: Tensor = model(x)
    return result


class Meanwhile:
    """A lock that somebody else has for as long as it takes to do something."""

    def __init__(self, lock: Any, act: Callable[[], object]) -> None:
        self._lock = lock
        self._acts = [act]

    def __enter__(self) -> None:
        self._lock.acquire()
        while self._acts:
            self._acts.pop()()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def test_an_attachment_that_ends_while_a_copy_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    expected = answer(model, x)
    attachment = precast.attach(model)
    monkeypatch.setattr(held, "lock", Meanwhile(held.lock, attachment.detach))
    assert torch.equal(answer(model, x), expected)


def test_a_copy_that_ends_before_it_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(2, WIDTH)
    other = precast.attach(nn.Linear(2, 2))  # so that held copies are looked for
    attachment = precast.attach(model)
    original = held.Copy.keep_for_kernels

    def late(copy: held.Copy, *args: Any, **kwargs: Any) -> None:
        attachment.detach()
        original(copy, *args, **kwargs)

    monkeypatch.setattr(held.Copy, "keep_for_kernels", late)
    answer(model, x)
    monkeypatch.undo()
    model.weight.data.zero_()
    assert answer(model, x).abs().sum() == 0
    other.detach()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_copy_that_is_withdrawn_while_it_is_looked_up(name: str) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with precast.attach(model):
        expected = answer(model, x)
        held.held_parameters[id(getattr(model, name))].copies[BF16].evict()
        assert torch.equal(answer(model, x), expected)


def test_a_refresh_is_not_seen_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with precast.attach(model) as attachment:
        answer(model, torch.randn(2, WIDTH))
        memory, seen = attachment.memory(), []
        original = held.reason_not_held

        def looked(parameter: Tensor) -> str | None:
            seen.append((attachment.memory(), repr(attachment)))
            return original(parameter)

        monkeypatch.setattr(held, "reason_not_held", looked)
        attachment.refresh()
        assert seen == [(memory, "<Attachment of Sequential: 4 parameters held>")] * 4


def test_copies_may_be_made_while_others_are_gone_through() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with precast.attach(model) as attachment:
        answer(model, x)
        copies = held.held_parameters[id(model.weight)].copies.values()
        for copy in copies:
            with torch.no_grad(), precast.autocast("cpu", dtype=torch.float16):
                model(x)
            assert copy.tensor.dtype is BF16
        assert attachment.memory() == 2 * 2 * WIDTH * (WIDTH + 1)


def test_entries_of_regions_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    original = unversioned_writes.without_torch_function

    def meanwhile() -> Any:
        unversioned_writes._SearchState.turn += 5
        return original()

    with precast.attach(model):
        for _ in range(2):
            for _ in range(unversioned_writes.ENTRIES_BETWEEN_CHECKS):
                answer(model, x)
            monkeypatch.setattr(unversioned_writes, "without_torch_function", meanwhile)


def test_a_write_in_a_block_for_it_is_no_unversioned_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with used_by_this_thread() as (model, _, attachment):
        original, block, entered = unversioned_writes._matches, attachment.writing(), []

        def meanwhile(*args: Any) -> Tensor:
            if not entered:
                entered.append(block.__enter__())
                model.weight.data.mul_(2)
            return original(*args)

        monkeypatch.setattr(unversioned_writes, "_matches", meanwhile)
        enter(3)
        assert entered
        block.__exit__(None, None, None)
        enter(3)


def test_the_search_works_if_it_is_loaded_where_tensors_are_made_on_another_device() -> None:
    spec = importlib.util.spec_from_file_location(
        "precast_unseen_again", unversioned_writes.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with torch.device("meta"):
        spec.loader.exec_module(again)
    with precast.attach(model):
        answer(model, x)
        for _ in range(3 * again.ENTRIES_BETWEEN_CHECKS):
            again.check_at_entry()


@pytest.mark.parametrize("act", ["refresh", "detach", "step"])
def test_a_copy_that_one_thread_is_about_to_use_is_not_written_by_another(
    monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    expected = trained(model, x)
    attachment, others = precast.attach(model), ThreadPoolExecutor(1)

    def change() -> None:
        if act == "step":
            with torch.no_grad():
                model.weight.mul_(2)
            with region():
                model(x)
        else:
            getattr(attachment, act)()

    original = held_copy.Copy.with_gradient

    def meanwhile(copy: held_copy.Copy, parameter: Tensor, tensor: Tensor) -> Tensor:
        cast = original(copy, parameter, tensor)
        if parameter is model.weight:
            monkeypatch.setattr(held_copy.Copy, "with_gradient", original)
            others.submit(change).result()
        return cast

    monkeypatch.setattr(held_copy.Copy, "with_gradient", meanwhile)
    found = trained(model, x)
    attachment.detach()
    others.shutdown()
    assert len(found) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a forward pass gives, and the gradients of a backward pass."""
    with region():
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("attached", "mode"),
    [
        (False, torch.enable_grad),
        (False, torch.no_grad),
        (True, torch.enable_grad),
        (True, torch.no_grad),
        (True, torch.inference_mode),
    ],
)
def test_what_is_written_while_it_is_cast_is_cast_again(
    monkeypatch: pytest.MonkeyPatch, attached: bool, mode: Any
) -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(2, WIDTH)
    name = "handle_of" if attached else "cast_without_torch_function"
    original = getattr(held if attached else weight_cache, name)
    written: list[float] = []

    def meanwhile(tensor: Tensor, dtype: torch.dtype) -> Any:
        made = original(tensor, dtype)
        if made is not None and not written:
            with ThreadPoolExecutor(1) as others:
                others.submit(zero, tensor).result()
        return made

    def zero(tensor: Tensor) -> None:
        with torch.no_grad():
            written.append(float(tensor.zero_().sum()))

    model.weight.requires_grad_(not attached or mode is torch.enable_grad)
    attachment = precast.attach(model, hold=attached)
    # What compiled kernels cast themselves cannot be stopped half-way.
    engine: Any = nullcontext() if attached else registration.use_engine("reference")
    with engine, mode(), region():
        model(x)
        monkeypatch.setattr(held if attached else weight_cache, name, meanwhile)
        with torch.no_grad():
            model.weight.add_(1)
        assert model(x).abs().sum() > 0
        assert written
        assert model(x).abs().sum() == 0
        assert model(x).abs().sum() == 0
    attachment.detach()


def test_a_counted_write_during_the_search_is_no_unversioned_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unversioned_writes, "LONGEST_WRITE", 0.0)
    with used_by_this_thread() as (model, x, _), ThreadPoolExecutor(1) as others:
        original = unversioned_writes._matches
        asked: list[Tensor] = []

        def end() -> None:
            with torch.no_grad(), region():
                model.weight.mul_(1)
                model(x)

        def meanwhile(*args: Any) -> Tensor:
            if asked:
                return original(*args)
            model.weight.data.mul_(2)  # as it looks in the middle of an operation
            asked.append(original(*args))
            others.submit(end).result()
            return asked[0]

        monkeypatch.setattr(unversioned_writes, "_matches", meanwhile)
        enter(3)
        assert not asked[0]


@pytest.mark.parametrize(
    "module",
    [
        "precast.engine.registration",
        "precast.integrations.torch_amp.installation",
        "precast.engine.compile_guards",
        "precast._torch.patches",
        "precast.diagnostics.tracing.listening",
    ],
)
def test_a_process_that_is_forked_while_a_thread_has_a_lock_finds_it_free(module: str) -> None:
    program = f"""
import os, sys, threading, time, warnings
import torch
import precast
import {module} as module

warnings.simplefilter("ignore")
inside = threading.Event()
def hold():
    with module._lock:
        inside.set()
        time.sleep(0.2)
thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    os._exit(7 if module._lock.acquire(timeout=60) else 1)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 7


def test_a_process_that_is_forked_during_a_refresh_goes_on() -> None:
    program = """
import os, sys, threading, time, warnings
import torch
import precast
from precast.weights import held

warnings.simplefilter("ignore")
torch.set_num_threads(1)
model, x = torch.nn.Linear(8, 8), torch.ones(1, 8)
attachment = precast.attach(model)
def run():
    with torch.no_grad(), precast.autocast("cpu", dtype=torch.bfloat16):
        return model(x)
run()
inside, original = threading.Event(), held.reason_not_held
def slow(parameter):
    inside.set()
    time.sleep(0.2)
    return original(parameter)
held.reason_not_held = slow
thread = threading.Thread(target=attachment.refresh)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    held.reason_not_held = original
    attachment.refresh()
    run()
    os._exit(7)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
thread.join()
run()
sys.exit(os.waitstatus_to_exitcode(status) if pid else 1)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 7


def test_processes_that_are_forked_while_threads_train_attached_models_go_on() -> None:
    """The threads hold locks of the library for a part of their time: 1 of 60 children waited for one for ever."""
    program = """
import os, sys, threading, time, warnings
import torch
from torch import nn
from torch.nn import functional as F
import precast

warnings.simplefilter("ignore")
torch.set_num_threads(1)
class Sum(nn.Module):
    def __init__(self, width, weights):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, 130)) for _ in range(weights)])
    def forward(self):
        return sum(F.linear(torch.ones(1, 130), w).float().sum() for w in self.weights)
def train(model):
    with precast.autocast("cpu"):
        loss = model()
    loss.backward()
models = [Sum(130 + number, 40) for number in range(4)]
own = Sum(128, 2)
attachments = [precast.attach(model) for model in [*models, own]]
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in [*models, own]]
for model, optimizer in zip([*models, own], optimizers):
    train(model)
    optimizer.step()
ended = threading.Event()
def work(model, optimizer):
    while not ended.is_set():
        train(model)
        optimizer.step()
threads = [threading.Thread(target=work, args=pair) for pair in zip(models, optimizers)]
for thread in threads: thread.start()
waiting = 0
for _ in range(200):
    child = os.fork()
    if child == 0:
        train(own)
        os._exit(0)
    until = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            waiting += 1
            break
        time.sleep(0.001)
    if waiting: break
ended.set()
for thread in threads: thread.join()
sys.exit(7 if waiting == 0 else 1)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 7
