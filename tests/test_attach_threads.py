"""attach, where threads work side by side: whose error it is, and that nobody reads what is being written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import unseen

BF16 = torch.bfloat16


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


def test_what_another_thread_writes_now_is_no_unseen_write() -> None:
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
