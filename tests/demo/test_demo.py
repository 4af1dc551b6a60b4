"""The demo trains two runs fairly, measures what it says it measures, and shows it."""

from __future__ import annotations

import functools
import gc
import io
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.autograd.profiler_util import FunctionEventAvg

from precast.demo import findings, page, picture, settings, table
from precast.demo.checkerboard import Checkerboard, checkerboard, coordinates
from precast.demo.compare import Comparison, compare, seeded_model, trainers
from precast.demo.digits import IMAGES, Digits
from precast.demo.profile import KINDS, profile_steps
from precast.demo.threads import fastest_threads
from precast.diagnostics.hardware.machine import measure
from precast.errors import MissingExtraError
from tests.support.comparisons import comparison, report, run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing by threads, and threads that wait for each other are slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do does not change between two tests."""
    monkeypatch.setattr("precast.demo.compare.measure", _measure)


_measure = functools.cache(measure)


def tiny(task: str = "checkerboard", **asked: Any) -> settings.Settings:
    return settings.settings(task, device="cpu", **{"size": 16, "steps": 10, **asked})


# --- the tasks ---


def test_the_target_is_eight_by_eight_fields_of_equal_size_in_turn() -> None:
    image = checkerboard(32)[0, 0]
    assert image.shape == (32, 32)
    fields = image.reshape(8, 4, 8, 4).transpose(1, 2).reshape(8, 8, 16)
    assert torch.equal(fields.amin(2), fields.amax(2))
    assert torch.equal(fields[..., 0], torch.tensor([[0.0, 1] * 4, [1.0, 0] * 4] * 4))


def test_the_input_is_the_coordinates_of_each_pixel() -> None:
    grid = coordinates(5)
    assert grid.shape == (1, 2, 5, 5)
    assert grid[0, :, 0, 4].tolist() == [-1, 1]
    assert grid[0, :, 2, 1].tolist() == [0, -0.5]


def test_the_checkerboard_network_is_a_script_module_and_says_nothing_of_it() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model = Checkerboard(16, CPU).model()
    assert isinstance(model, torch.jit.ScriptModule)
    assert not heard
    kernels = [tuple(p.shape) for p in model.parameters() if p.ndim == 4]
    assert kernels == [(256, 2, 1, 1), (256, 256, 1, 1), (256, 256, 1, 1), (1, 256, 1, 1)]
    kinds = [child.original_name for child in model.children()]
    assert kinds == [*("Conv2d", "BatchNorm2d", "ReLU") * 3, "Conv2d"]


def test_held_out_digits_are_never_trained_on_and_each_other_one_once_an_epoch() -> None:
    from sklearn.datasets import load_digits

    half = (IMAGES - IMAGES // 5) // 2
    task = Digits(half, CPU, seed=3)
    epoch = [task.batch(0)[0], task.batch(1)[0]]
    seen = torch.cat([task.examples, *epoch]).flatten(1).mul(16).int().tolist()
    assert sorted(seen) == sorted(load_digits().data.astype(int).tolist())


def test_a_digits_batch_is_the_same_whenever_it_is_asked_for() -> None:
    first, again = Digits(32, CPU, seed=5), Digits(32, CPU, seed=5)
    late, _ = again.batch(60)
    assert torch.equal(again.batch(2)[0], first.batch(2)[0])
    assert torch.equal(late, first.batch(60)[0])
    assert not torch.equal(first.batch(2)[0], Digits(32, CPU, seed=6).batch(2)[0])


def test_digits_that_a_run_gets_wrong_are_shown_first_and_marked() -> None:
    task = Digits(32, CPU, seed=0)
    right = nn.functional.one_hot(task.labels, 10).float()
    wrong = right.clone()
    wrong[200] = right[200].roll(1)
    target, good, bad = task.panels({"float32": right, "float16": wrong})
    assert task.accuracy(right) == 1
    assert task.accuracy(wrong) == pytest.approx(1 - 1 / len(task.labels))
    assert all(mark.right for mark in (*target.marks, *good.marks))
    assert [mark.right for mark in bad.marks] == [False] + [True] * 35
    assert target.marks[0].text == str(task.labels[200].item()) != bad.marks[0].text


# --- two runs, one seed ---


@pytest.mark.parametrize("task", settings.TASKS)
def test_both_runs_start_from_identical_weights(task: str) -> None:
    chosen = tiny(task, seed=7)
    float32, mixed = trainers(chosen.make_task(), chosen)
    ours, theirs = float32.model.state_dict(), mixed.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=0)
        assert theirs[name].data_ptr() != value.data_ptr()


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone() -> None:
    one, two = tiny(seed=1), tiny(seed=2)
    task = one.make_task()
    before = torch.get_rng_state()
    weights = [next(iter(seeded_model(task, s).parameters())) for s in (one, one, two)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("task", settings.TASKS)
def test_the_same_seed_gives_the_same_float32_losses(task: str) -> None:
    first, again, other = (compare(tiny(task, seed=seed)) for seed in (11, 11, 12))
    assert first.float32.losses == again.float32.losses
    assert first.float32.losses != other.float32.losses


def test_every_step_is_counted_once_and_the_mixed_run_is_mixed() -> None:
    advanced: list[None] = []
    result = compare(tiny(steps=12), lambda: advanced.append(None))
    assert len(advanced) == 12
    assert len(result.float32.losses) == len(result.mixed.losses) == 12
    assert 0 < len(result.mixed.step_seconds) == len(result.float32.step_seconds) < 12
    assert result.mixed.losses[0] == pytest.approx(result.float32.losses[0], rel=0.02)
    assert result.mixed.losses != result.float32.losses
    assert result.mixed.profile.peak_bytes < result.float32.profile.peak_bytes


def test_bfloat16_runs_without_a_scaler_and_float16_with_one() -> None:
    brain = compare(tiny("digits", size=2))
    assert brain.mixed.scales == ()
    assert brain.mixed.skipped == 0
    half = compare(tiny("digits", size=2, dtype="float16"))
    assert len(half.mixed.scales) == 10
    assert half.mixed.initial_scale == 2.0**16
    assert half.mixed.scales[-1] == 2.0 ** (16 - half.mixed.skipped)
    assert all(map(math.isfinite, half.mixed.losses))


def test_the_checkerboard_is_learnt_in_both_precisions() -> None:
    result = compare(tiny(steps=300))  # of the pixels 0.89 or more are right; after 180 steps, 0.71
    variance = 0.25  # what answering 1/2 everywhere leaves
    for each in (result.float32, result.mixed):
        assert sum(each.losses[-10:]) / 10 < 0.7 * variance
    target, *learnt = (panel.image for panel in result.panels)
    for image in learnt:
        assert ((image > 0.5) == (target > 0.5)).float().mean() > 0.7


def test_digits_are_read_correctly_in_both_precisions() -> None:
    result = compare(tiny("digits", size=64, steps=60))
    for each in (result.float32, result.mixed):
        assert each.accuracy is not None
        assert each.accuracy > 0.9


def test_training_takes_one_thread_where_threads_are_in_each_others_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock of its own: what a call really takes would test how busy the machine is.
    seconds = 0.0
    clock = SimpleNamespace(perf_counter=lambda: seconds)
    monkeypatch.setattr("precast.demo.threads.time", clock)

    def step(slow: int) -> None:
        nonlocal seconds
        seconds += 0.02 if torch.get_num_threads() == slow else 0.001

    torch.set_num_threads(3)
    for slow, chosen in ((1, 3), (3, 1)):
        with fastest_threads(functools.partial(step, slow)) as threads:
            assert threads == torch.get_num_threads() == chosen
        assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    with fastest_threads(lambda: pytest.fail("one thread needs no trial")) as threads:
        assert threads == 1


def test_a_skipped_step_is_a_step_after_which_the_scale_fell() -> None:
    scaled = run("float16", 1.0, (0, 0, 0), initial_scale=8.0, scales=(8.0, 4.0, 4.0, 8.0, 4.0))
    assert scaled.skipped == 2
    assert run("float16", 1.0, (0, 0, 0), initial_scale=8.0, scales=(4.0,)).skipped == 1
    assert run("bfloat16", 1.0, (0, 0, 0)).skipped == 0


# --- what is measured ---


def test_peak_memory_is_what_is_held_plus_the_most_handed_out_during_a_step() -> None:
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = (torch.zeros(7, 100), torch.zeros(7, 10))
    held = 4 * (1000 + 700 + 70)

    def step(_: Any) -> None:
        one = torch.empty(50_000)
        two = torch.empty(30_000)
        del one
        three = torch.empty(10_000)
        del two, three

    profile = profile_steps(step, [batch, batch], model, optimizer)
    assert profile.peak_bytes == held + 4 * 80_000


def test_what_an_earlier_profile_left_is_no_part_of_the_peak_whenever_it_is_collected() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = (torch.zeros(1), torch.zeros(1))

    def leaves_a_cycle(_: Any) -> None:
        cycle: list[Any] = [torch.empty(50_000)]
        cycle.append(cycle)

    def step(_: Any) -> None:
        gc.collect()
        torch.empty(50_000)

    expected = profile_steps(step, [batch], model, optimizer).peak_bytes
    profile_steps(leaves_a_cycle, [batch], model, optimizer)
    assert profile_steps(step, [batch], model, optimizer).peak_bytes == expected


def test_time_is_counted_by_kind_of_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a call really takes would test how busy the machine is: here the work takes a second, and what is around
    # it nothing.
    work = ("aten::mm", "aten::copy_", "aten::exp")
    seconds = property(lambda event: 1e6 * event.count * (event.key in work), lambda *_: None)
    monkeypatch.setattr(FunctionEventAvg, "self_cpu_time_total", seconds, raising=False)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    big = torch.ones(3, 3)
    works = {
        KINDS[0]: lambda: [big @ big for _ in range(20)],
        KINDS[1]: lambda: [big.to(torch.bfloat16) for _ in range(100)],
        KINDS[2]: lambda: [big.exp() for _ in range(50)],
    }
    for kind, run_it in works.items():
        profile = profile_steps(lambda _, run_it=run_it: run_it(), [(big, big)], model, optimizer)
        assert [each for each, spent in profile.seconds.items() if spent] == [kind]


def test_the_time_of_a_step_is_the_median() -> None:
    assert run("float32", 0.020, (0, 0, 0)).seconds == 0.020
    assert comparison(mixed_seconds=0.010).speedup == 2.0


# --- what is said ---

GOLDEN = """\
a picture; 1200 steps on cpu (2 threads), seed 0
                           float32   bfloat16 mixed   mixed beside float32
 ─────────────────────────────────────────────────────────────────────────
 time per step, median     20.0 ms          10.0 ms   2.00x: faster
 peak memory of a step     1.0 MiB          1.0 MiB   1.00x the memory
 final loss                 0.1250           0.1250
 steps skipped by scaler         -                0   no scaler needed
 computed                   native           native   by measured speed
- A profiled bfloat16 step, beside float32's: -8.0 ms in convolutions and
products, +0.00 ms in casts and copies, -2.0 ms in everything else.
- bfloat16 is native on cpu: matmul 4.0x, convolution 3.0x, convolution backward
2.0x float32's speed; units: amx_bf16.
- Memory is that of tensors, not of the process: every allocation of PyTorch's,
recorded in the last steps.
"""


def printed(result: Comparison) -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(table.render(result))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in lines)
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def test_the_table_says_all_of_it_in_80_columns() -> None:
    assert printed(comparison()) == GOLDEN


def test_accuracy_and_scale_are_in_the_table_where_there_are_some() -> None:
    text = printed(
        comparison(
            dtype="float16",
            float32={"accuracy": 0.991},
            mixed={"accuracy": 0.975, "initial_scale": 4.0, "scales": (4.0, 2.0, 2.0)},
        )
    )
    assert re.search(r"held-out accuracy +99.1% +97.5%", text)
    assert re.search(r"steps skipped by scaler +- +1 +scale 2 at the end", text)


@pytest.mark.parametrize(
    ("kinds", "ratios", "because"),
    [
        ((0.030, 0.001, 0.003), (1.0, 0.5, 0.01), "this machine computes bfloat16 slower than"),
        ((0.017, 0.001, 0.003), (4.0, 3.0, 2.0), "this network's products are too small to gain"),
        ((0.008, 0.020, 0.003), (4.0, 3.0, 2.0), "too small to win back what the casts cost"),
        ((0.016, 0.001, 0.013), (4.0, 3.0, 2.0), "neither product nor cast"),
        ((0.008, 0.001, 0.001), (4.0, 3.0, 2.0), "what is left is the time between them"),
    ],
)
def test_where_mixed_is_slower_the_reason_follows_from_what_was_measured(
    kinds: tuple[float, float, float], ratios: tuple[float, float, float], because: str
) -> None:
    slow = comparison(mixed_seconds=0.040, kinds=kinds, machine=report("bfloat16", *ratios))
    first = findings.reasons(slow)[0]
    assert first.startswith("Slower")
    assert because in first
    assert "0.5x: slower" in printed(slow)


def test_a_slow_operation_is_named_with_its_ratio() -> None:
    machine = report("bfloat16", 1.5, 0.5, 0.01)
    slow = comparison(mixed_seconds=0.040, kinds=(0.03, 0.001, 0.003), machine=machine)
    reason = findings.reasons(slow)[0]
    assert "(convolution 0.5x, convolution backward 0.01x)" in reason
    assert "14.0 ms more" in reason


def test_where_mixed_is_as_fast_or_faster_nothing_is_called_slower() -> None:
    for seconds, said in ((0.0201, "0.99x"), (0.020, "1.00x: the same"), (0.005, "4.00x: faster")):
        text = printed(comparison(mixed_seconds=seconds))
        assert said in text or "1x: the same" in text
        assert "lower" not in text


def test_a_loss_that_is_not_finite_is_a_failure_and_null_in_json() -> None:
    assert findings.failure(comparison()) is None
    broken = comparison(mixed={"losses": (0.5, math.nan)})
    failure = findings.failure(broken)
    assert failure is not None
    assert "bfloat16 run ended with loss nan" in failure
    assert json.loads(json.dumps(findings.as_dict(broken), allow_nan=False))["runs"]["mixed"][
        "losses"
    ] == [0.5, None]


# --- what is drawn ---


@pytest.fixture(params=["bfloat16", "float16"])
def drawn(request: pytest.FixtureRequest) -> Comparison:
    scales = {"initial_scale": 4.0, "scales": (4.0, 2.0, 2.0)}
    return comparison(
        dtype=request.param, mixed=scales if request.param == "float16" else {"accuracy": 0.5}
    )


def test_the_picture_is_a_png(drawn: Comparison) -> None:
    from matplotlib.image import imread

    png = picture.picture_png(drawn)
    image = imread(io.BytesIO(png))
    height, width, _ = image.shape
    assert width > height > 500
    assert image.std() > 0.05  # something is on it


def test_no_part_of_the_picture_is_blank(drawn: Comparison) -> None:
    """Also without a scaler, whose chart would be empty."""
    from matplotlib.image import imread

    image = imread(io.BytesIO(picture.picture_png(drawn)))[..., :3]
    height, width, _ = image.shape
    for column, least in enumerate((0.01, 0.01, 0.05)):  # of the two lower fifths: curves, and bars
        part = image[height * 3 // 5 :, column * width // 3 : (column + 1) * width // 3]
        inked = (part.min(axis=2) < 0.8).mean()
        assert inked > least, column


def test_the_picture_says_what_it_was_measured_on() -> None:
    found = findings.machine(comparison())
    assert torch.__version__ in found
    assert len(found.split(", PyTorch ")[0]) > 2


def test_what_a_step_took_is_what_the_table_says(drawn: Comparison) -> None:
    for cost, row in zip(findings.costs(drawn), findings.rows(drawn), strict=False):
        assert cost.name in row.name.replace("peak ", "")
        assert cost.said(cost.float32) == row.float32
        assert cost.said(cost.mixed) == row.mixed


def test_the_page_needs_nothing_else_and_shows_the_table(drawn: Comparison) -> None:
    html = page.page_html(drawn)
    links = re.findall(r"(?:src|srcset|href)=\"([^\"]*)\"", html)
    charts = 2 if drawn.mixed.scales else 1  # no empty chart of a scale that there is not
    assert len(links) == 3 + 2 * charts
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert "http" not in re.sub(r"base64,[^\"]*", "", html)
    assert "<script" not in html
    text = re.sub(r"<[^>]*>", "\n", html).replace("&#39;", "'")
    for row in findings.rows(drawn):
        assert row.name in text
        assert row.mixed in text
    for reason in findings.reasons(drawn):
        assert reason in text


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_to_draw_with_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture.require()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install {package}\."):
        picture.require()


def test_missing_digits_name_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install scikit-learn\."):
        Digits(16, CPU, 0)


# --- what can be asked for ---


def test_without_wishes_each_device_and_dtype_has_a_size_and_steps() -> None:
    for task in settings.TASKS:
        for dtype in settings.DTYPES:
            chosen = settings.settings(task, device="cpu", dtype=dtype)
            assert chosen.size > 0
            assert chosen.steps >= 10
    assert settings.settings(device="cpu").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"task": "chess"}, "task 'chess' is unknown; write one of: checkerboard, digits"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown; write one of: bfloat16, float16"),
        ({"device": "abacus"}, "device 'abacus' is not here; write one of: cpu"),
        ({"device": "meta"}, "device 'meta' is not here"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"size": 15}, "size 15 (pixels along a side) must be from 16 to 4096"),
        ({"task": "digits", "size": 1}, "size 1 (images in a batch) must be from 2 to 1438"),
        ({"steps": 9}, "steps 9 must be at least 10"),
        ({"seed": -1}, "seed -1 must be from 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_can(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        settings.settings(**asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_that_is_not_there_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="sees no CUDA device here; write --device cpu"):
        settings.settings(device="cuda")


@given(
    st.sampled_from(settings.TASKS),
    st.integers(),
    st.integers(),
    st.integers(),
)
def test_numbers_are_kept_or_refused_by_name(task: str, size: int, steps: int, seed: int) -> None:
    asked = {"size": size, "steps": steps, "seed": seed}
    try:
        chosen = settings.settings(task, device="cpu", **asked)
    except ValueError as error:
        assert any(f"{name} {value}" in str(error) for name, value in asked.items())  # noqa: PT017
    else:
        assert (chosen.size, chosen.steps, chosen.seed) == (size, steps, seed)
