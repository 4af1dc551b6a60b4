"""The demo trains two runs fairly, measures what its table claims, and shows it."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from precast.cli.demo import display, example
from precast.cli.demo.example import DemoResult, DemoRun, demo_task, train_both
from precast.errors import MissingExtraError
from tests.support.dtype_reports import report


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "measure", lambda _, dtype: report(dtype, 3.0))


def result(mixed: dict[str, Any] | None = None) -> DemoResult:
    """Return a result with chosen figures: 20 ms a step in float32, 10 ms in mixed precision."""
    chosen, _, _ = demo_task("cpu", size=16)
    with torch.no_grad():
        output = chosen.seeded_model().eval()(chosen.coordinates)
    runs = [
        DemoRun(name, [0.5, 0.25, 0.125], [t, t * 5, t / 5], [], 2**20, output)
        for name, t in (("float32", 0.020), ("bfloat16", 0.010))
    ]
    mixed_run = replace(runs[1], **(mixed or {}))
    return DemoResult(chosen, 0, 12, runs[0], mixed_run, report("bfloat16", 3.0))


def text(value: DemoResult, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(display.render(value))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- the task ---


def test_the_target_is_eight_by_eight_alternating_fields_of_equal_size() -> None:
    task, _, _ = demo_task("cpu", size=32)
    assert task.image.shape == (1, 1, 32, 32)
    fields = task.image[0, 0].reshape(8, 4, 8, 4).transpose(1, 2).reshape(8, 8, 16)
    assert torch.equal(fields.amin(2), fields.amax(2))
    assert torch.equal(fields[..., 0], torch.tensor([[0.0, 1] * 4, [1.0, 0] * 4] * 4))
    assert task.coordinates[0, :, 0, -1].tolist() == [-1, 1]


def test_weights_depend_on_the_seed_alone() -> None:
    chosen, _, _ = demo_task("cpu", size=16)
    state = torch.get_rng_state()
    first, second, other = (list(chosen.seeded_model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], other[0])


# --- training ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_both_runs_train_the_same_steps_and_the_mixed_run_is_mixed(dtype: str) -> None:
    task, mixed_dtype, _ = demo_task("cpu", dtype, size=16)
    dtypes: list[torch.dtype] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        dtypes.append(output.dtype)
        return F.mse_loss(output, target)

    calls = []
    trained = train_both(replace(task, loss=loss), mixed_dtype, 12, 0, lambda: calls.append(1))
    assert len(calls) == 12
    assert dtypes.count(torch.float32) == dtypes.count(mixed_dtype) == 12
    for run in (trained.float32, trained.mixed):
        assert len(run.losses) == 12
        assert (
            len(run.step_seconds) == 8
        )  # without three to warm up and the one in which memory is counted
    assert trained.mixed.losses[0] == pytest.approx(trained.float32.losses[0], rel=0.02)
    assert len(trained.mixed.scales) == (13 if dtype == "float16" else 0)
    assert trained.float32.scales == []


def test_the_same_seed_gives_the_same_losses() -> None:
    task, dtype, _ = demo_task("cpu", size=16)
    first, second = (train_both(task, dtype, 10).float32.losses for _ in range(2))
    assert first == second


def test_both_precisions_learn() -> None:
    chosen, dtype, _ = demo_task("cpu", size=32)
    trained = train_both(chosen, dtype, 60)
    for run in (trained.float32, trained.mixed):
        assert run.losses[-1] < run.losses[0] / 1.5


def test_a_skipped_step_is_a_step_after_which_the_scale_fell() -> None:
    assert DemoRun("float16", scales=[8, 4, 4, 8, 4]).skipped == 2
    assert DemoRun("bfloat16").skipped == 0


def test_peak_memory_is_the_resident_memory_and_the_peak_of_allocations() -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = (torch.zeros(100, 256), torch.zeros(100, 256))

    def step() -> None:
        first = torch.zeros(2**18)  # 1 MiB
        del first
        second, third = torch.zeros(2**18), torch.zeros(2**19)
        del second, third

    held = sum(t.nbytes for t in (model.weight, *batch))
    assert example.peak_bytes(step, model, optimizer, batch) == held + 3 * 2**20


def test_peak_memory_is_that_of_the_device_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def reading(value: int | None) -> Any:
        return lambda device: devices.append(device) or value

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reading(None))
    monkeypatch.setattr(torch.cuda, "memory_allocated", reading(10))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", reading(25))
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda:1"))
    peak = example.peak_bytes(lambda: None, model, optimizer, (elsewhere, elsewhere))
    assert peak == model.weight.nbytes + 15
    assert devices == [torch.device("cuda:1")] * 3


# --- the table and the picture ---


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_shows_all_figures_at_each_width(width: int) -> None:
    lines = text(result(), width)
    assert max(map(len, lines.splitlines())) <= width
    words = " ".join(lines.split())
    for part in ("20.0 ms", "10.0 ms", "2.00x", "1.0 MiB", "0.1250"):
        assert part in words


def test_the_scale_is_in_the_table_where_there_is_one() -> None:
    lines = text(result({"dtype": "float16", "scales": [8.0, 4.0, 4.0]}))
    assert re.search(r"steps skipped by scaler +- +1 +scale 4 at the end", lines)
    assert "no scaler needed" in text(result(), 120)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0199, "the same"), (0.010, "faster"), (0.040, "slower")]
)
def test_the_comparison_of_times_follows_from_the_medians(seconds: float, words: str) -> None:
    assert words in text(result({"step_seconds": [seconds] * 3}))


def test_a_loss_that_is_not_finite_is_a_failure() -> None:
    broken = result({"losses": [0.5, math.nan]})
    assert "the bfloat16 mixed run ended with loss nan" in str(display.failure(broken))
    assert display.failure(result()) is None


def test_no_part_of_the_picture_is_blank() -> None:
    from matplotlib.image import imread

    picture = display.picture_png(result())
    assert picture.startswith(b"\x89PNG")
    pixels = imread(io.BytesIO(picture))
    height, width = pixels.shape[:2]
    for row in range(2):
        for column in range(3):
            part = pixels[
                row * height // 2 : (row + 1) * height // 2,
                column * width // 3 : (column + 1) * width // 3,
            ]
            assert part[..., :3].std() > 0.01


# --- what is refused ---


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        display.require_matplotlib()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "abacus"}, "expected a device of this machine (cpu"),
        ({"size": 3}, "expected a size (pixels along a side) from 16 to 4096, got 3"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_the_allowed_ones(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        demo_task(**arguments)
