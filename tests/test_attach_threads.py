"""attach, where threads work side by side: whose error it is, and that what one does breaks nothing of another's."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import held, unseen
from precast.frames import regions

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to be held in training, where a bias is not."""


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    yield
    assert held.holdings == {}
    assert held.guarded == []
    assert held.before_next_region == {}


def region() -> precast.autocast:
    return precast.autocast("cpu", dtype=BF16, policy="torch")


@contextmanager
def used_by_this_thread() -> Iterator[tuple[nn.Linear, Tensor, precast.Attachment]]:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)
    with precast.attach(model) as attachment, torch.no_grad():
        with region():
            model(x)
        yield model, x, attachment


def enter(times: int) -> None:
    for _ in range(times):
        with region():
            pass


def test_what_another_thread_writes_now_is_no_unseen_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unseen, "LONGEST_WRITE", math.inf)  # however late that thread has its turn
    with used_by_this_thread() as (model, _, _), ThreadPoolExecutor(1) as others:
        model.weight.data.mul_(
            2
        )  # as it looks in the middle of an operation, which counts when it ends

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
    monkeypatch.setattr(unseen, "LONGEST_WRITE", 0.02)
    with used_by_this_thread() as (model, x, attachment), ThreadPoolExecutor(1) as others:
        model.weight.data.mul_(2)
        others.submit(enter, 3).result()
        time.sleep(0.03)
        others.submit(enter, 3).result()
        with pytest.raises(precast.StaleWeightError, match="'weight'"), region():
            model(x)
        attachment.refresh()
        with region():
            assert torch.equal(model(x), x.to(BF16) @ model.weight.to(BF16).t())


def test_what_only_ended_threads_used_is_found_by_its_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unseen, "LONGEST_WRITE", 0.02)
    model, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)

    def use() -> None:
        with torch.no_grad(), region():
            model(x)

    def in_a_thread_of_its_own() -> None:
        with ThreadPoolExecutor(1) as ends:
            ends.submit(use).result()

    with precast.attach(model):
        in_a_thread_of_its_own()
        model.weight.data.mul_(2)
        enter(2)
        time.sleep(0.03)
        enter(2)
        with pytest.raises(precast.StaleWeightError, match="'weight'"):
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
    original = held.Copy.used_by

    def late(copy: held.Copy, entry: Any) -> None:
        attachment.detach()
        original(copy, entry)

    monkeypatch.setattr(held.Copy, "used_by", late)
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
        entries = regions.cache.in_inference_mode.lasting[BF16]
        entries[id(getattr(model, name))].cast = None
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
        copies = held.holdings[id(model.weight)].copies.values()
        for copy in copies:
            with torch.no_grad(), precast.autocast("cpu", dtype=torch.float16):
                model(x)
            assert copy.tensor.dtype is BF16
        assert attachment.memory() == 2 * 2 * WIDTH * (WIDTH + 1)


def test_entries_of_regions_may_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    original = unseen.unheard

    def meanwhile() -> Any:
        unseen._Guard.turn += 5
        return original()

    with precast.attach(model):
        for _ in range(2):
            answer(model, x)
            monkeypatch.setattr(unseen, "unheard", meanwhile)


def test_a_write_in_a_block_for_it_is_no_unseen_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with used_by_this_thread() as (model, _, attachment):
        original, block, entered = unseen._agrees, attachment.writing(), []

        def meanwhile(*args: Any) -> Tensor:
            if not entered:
                entered.append(block.__enter__())
                model.weight.data.mul_(2)
            return original(*args)

        monkeypatch.setattr(unseen, "_agrees", meanwhile)
        enter(3)
        assert entered
        block.__exit__(None, None, None)
        enter(3)


def test_the_search_works_if_it_is_loaded_where_tensors_are_made_on_another_device() -> None:
    spec = importlib.util.spec_from_file_location("precast_unseen_again", unseen.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with torch.device("meta"):
        spec.loader.exec_module(again)
    with precast.attach(model):
        answer(model, x)
        for _ in range(3):
            again.enter_region()
