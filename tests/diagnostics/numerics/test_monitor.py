"""monitor: what it sees of a training, what it costs and leaves behind."""

from __future__ import annotations

import collections
import copy
import gc
import json
import math
import pickle
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import precast
from benchmarks.cuda_graphs import counted_waits
from precast import _torch
from precast._internal.events import HealthEvent, witnesses
from precast.diagnostics.numerics import history as history_of
from precast.diagnostics.numerics import tally as tally_of
from precast.diagnostics.numerics.monitoring import Monitor
from precast.errors import MonitorError, PrecastWarning
from tests.grad_scaler.test_observers import Calls


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert not witnesses


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def take(model: nn.Module, optimizer: Any, x: Tensor | None = None, scaler: Any = None) -> None:
    """One training step."""
    optimizer.zero_grad()
    x = torch.randn(6, 8) if x is None else x
    loss = model(x).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def sgd(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, **kwargs)


def entries(monitor: Monitor) -> dict[tuple[str, str], dict[str, Any]]:
    return {(e["kind"], e["name"]): e for e in monitor.to_dict()["modules"]}


# --- what is counted ---


def test_outputs_gradients_and_parameters_are_counted_in_every_nth_step() -> None:
    model = network()
    optimizer = sgd(model)
    seen: dict[tuple[str, str], list[Tensor]] = collections.defaultdict(list)
    for name, module in model.named_children():

        def note(module: Any, args: Any, output: Tensor, name: str = name) -> None:
            seen["output", name].append(output.detach().clone())
            output.register_hook(lambda g: seen["gradient", name].append(g.clone()))

        module.register_forward_hook(note)
    with precast.monitor(model, every=3) as monitor:
        for _ in range(7):
            take(model, optimizer)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                seen["parameter", name].append(parameter.grad.clone())
    found = entries(monitor)
    assert set(found) == set(seen)
    for key, tensors in seen.items():
        assert found[key]["steps"] == [0, 3, 6]
        for place, step in enumerate((0, 3, 6)):
            exact = tensors[step].double()
            assert found[key]["elements"][place] == exact.numel()
            assert found[key]["zeros"][place] == int((exact == 0).sum())
            assert found[key]["maximum"][place] == exact.abs().max().item()
            assert math.isclose(
                found[key]["rms"][place], exact.square().mean().sqrt(), rel_tol=1e-6
            )
            numbers = sum(found[key]["histogram"]["counts"][place])
            assert numbers == int((exact != 0).sum())
    assert monitor.steps == 7
    assert monitor.first is None


def test_gradients_are_told_without_the_scale() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(6, 8)
    found = []
    for scaler in (None, precast.GradScaler("cpu", init_scale=2.0**12)):
        mine = copy.deepcopy(model)
        with precast.monitor(mine) as monitor:
            take(mine, sgd(mine), x, scaler)
        found.append(entries(monitor))
    for key in found[0]:
        for column in ("histogram", "maximum", "what_if"):
            assert found[0][key][column] == found[1][key][column], key


def test_fused_gradients_are_told_without_the_scale() -> None:
    model, x = network(), torch.randn(6, 8)
    found = []
    for fused in (False, True):
        mine = copy.deepcopy(model)
        with precast.monitor(mine) as monitor:
            take(mine, sgd(mine, fused=fused), x, precast.GradScaler("cpu", init_scale=1024.0))
        found.append(entries(monitor))
    assert found[0]["parameter", "0.weight"] == found[1]["parameter", "0.weight"]


def test_accumulated_batches_and_shared_modules_add_up() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    optimizer = sgd(model)
    with precast.monitor(model) as monitor:
        for _ in range(3):
            model(torch.randn(6, 8)).sum().backward()
        optimizer.step()
    found = entries(monitor)
    assert found["output", "0"]["elements"] == [3 * 2 * 6 * 8]
    assert found["gradient", "0"]["elements"] == [3 * 2 * 6 * 8]
    assert found["parameter", "0.weight"]["elements"] == [64]
    assert monitor.steps == 1
    assert ("output", "2") not in found, "the same module"


def test_several_optimizers_are_one_step() -> None:
    model = network()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    other = sgd(network())
    with precast.monitor(model, every=1) as monitor:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            for optimizer in (*optimizers, other):
                optimizer.step()
    assert monitor.steps == 3
    assert all(entry["steps"] == [0, 1, 2] for entry in entries(monitor).values())


class Several(nn.Module):
    """Gives and takes containers."""

    def forward(self, x: Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        return {"sum": x + more["y"][0], "pair": (x * 2, 3), "text": "x", "mask": x > 0}


def test_containers_are_looked_into() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.several = nn.Linear(8, 8), Several()

        def forward(self, x: Tensor) -> Tensor:
            found = self.several(self.first(x), more={"y": [x * 3]})
            total: Tensor = found["sum"] + found["pair"][0]
            return total

    model = Outer()
    with precast.monitor(model) as monitor:
        take(model, sgd(model))
    assert entries(monitor)["output", "several"]["elements"] == [2 * 6 * 8]
    assert entries(monitor)["gradient", "several"]["elements"] == [2 * 6 * 8]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_looked_at_does_no_harm() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> list[Any]:
            nested = torch.nested.nested_tensor([x, x[:2]])
            found = [x * 2, nested, (v for v in (x,)), {1, 2}, None, x[:0], x.to("meta"), x > 0]
            found.append(found)  # what is in itself
            return found

    model = nn.Sequential(nn.Linear(8, 8), Odd())
    for every in (1, 1000):
        with precast.monitor(model, every=every) as monitor, torch.no_grad():
            for _ in range(2):
                model(torch.randn(6, 8))
        assert entries(monitor)["output", "1"]["elements"][0] == 48


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_counts_once(reentrant: bool) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(8, 8), network()

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            found: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-untyped-call]
            return found

    model = Checked()
    x = torch.randn(6, 8)
    with precast.monitor(model) as monitor:
        take(model, sgd(model), x)
    found = entries(monitor)
    for place in range(5):
        assert found["output", f"inner.{place}"]["elements"] == [6 * (4 if place == 4 else 16)]
        assert found["gradient", f"inner.{place}"]["elements"] == [6 * (4 if place == 4 else 16)]


def test_inference_counts_calls_and_evaluation_is_no_part_of_training() -> None:
    model = network().eval()
    with precast.monitor(model, every=2) as monitor:
        with torch.no_grad():
            for _ in range(5):
                model(torch.randn(2, 8))
        assert monitor.steps == 5
        assert entries(monitor)["output", "0"]["steps"] == [0, 2, 4]
        model.train()
        optimizer = sgd(model)
        for _ in range(3):
            take(model, optimizer)
            model.eval()
            with torch.inference_mode():
                model(torch.randn(1000, 8))
            model.train()
    assert monitor.steps == 3
    assert entries(monitor)["output", "0"]["elements"] == [96, 96]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inference_mode_in_the_midst_of_training(dtype: torch.dtype) -> None:
    model = network()
    optimizer = sgd(model)
    with precast.monitor(model, every=1) as monitor, precast.autocast("cpu", dtype=dtype):
        take(model, optimizer)
        with torch.inference_mode():
            model(torch.randn(6, 8))  # as a teacher, or for statistics of BatchNorm
        take(model, optimizer)
        with torch.inference_mode():
            model(torch.randn(6, 8))
        monitor.end_step()
    assert entries(monitor)["output", "0"]["elements"] == [96, 192, 96]


def test_sparse_complex_frozen_and_double_backward() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4, sparse=True)
            self.turn = nn.Linear(4, 4, dtype=torch.complex64)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.frozen(self.turn(self.table(x).to(torch.complex64)).abs())
            return found

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precast.monitor(model) as monitor:
        out = model(torch.tensor([1, 1, 3])).sum()
        [g] = torch.autograd.grad(out, [model.turn.weight], create_graph=True)
        (out + g.abs().square().sum()).backward()
        optimizer.step()
    found = entries(monitor)
    assert found["parameter", "table.weight"]["elements"] == [3 * 4]
    assert found["parameter", "turn.weight"]["elements"] == [2 * 16]
    assert ("parameter", "frozen.weight") not in found
    assert found["output", "turn"]["elements"] == [2 * 12]


def test_steps_that_differ_are_all_known() -> None:
    """A module that runs in float16 first in a later step makes that the narrowest type."""
    model = network()
    optimizer = sgd(model)
    with precast.monitor(model) as monitor:
        take(model, optimizer)
        take(model, optimizer)
        assert monitor.to_dict()["format"] == "float32"
        with precast.autocast("cpu", dtype=torch.float16):
            take(model, optimizer)
        take(model, optimizer)
    assert monitor.to_dict()["format"] == "float16"


def test_losses_with_scales_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Overflows(False), nn.Linear(8, 4))
    optimizer = sgd(model)
    scalers = precast.LossScalers("cpu", ["a", "b"], init_scale=8.0, on_diagnosis="ignore")
    with precast.monitor(model) as monitor:
        for step in range(4):
            model[1].factor = math.inf if step == 2 else 1.0
            optimizer.zero_grad()
            out = model(torch.randn(3, 8))
            scalers.backward("a", out.square().mean(), optimizer, retain_graph=True)
            scalers.backward("b", out.abs().mean(), optimizer)
            scalers.step(optimizer)
            scalers.update()
    assert monitor.steps == 4
    assert monitor.first is not None
    assert (monitor.first.step, monitor.first.name) == (2, "1")
    assert [entry["skipped"] for entry in monitor.ring] == [False, False, True, False]


def test_in_distributed_data_parallel(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/together", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(network())
        optimizer = sgd(model)
        with precast.monitor(model, every=1) as monitor:
            take(model, optimizer)
            take(model, optimizer)
    finally:
        torch.distributed.destroy_process_group()
    found = entries(monitor)
    assert {"0", "1", "2", "3", "4"} == {name for kind, name in found if kind == "output"}
    assert found["parameter", "0.weight"]["steps"] == [0, 1]


@pytest.mark.parametrize(
    "wrapper", [nn.DataParallel, torch.optim.swa_utils.AveragedModel, torch.compile]
)
def test_names_are_those_of_the_model_inside_wrappers(wrapper: Any) -> None:
    model = wrapper(network())
    with precast.monitor(model) as monitor:
        model.train()
        torch.compiler.set_stance("force_eager")
        try:
            take(model, sgd(model))
        finally:
            torch.compiler.set_stance("default")
    assert ("parameter", "0.weight") in entries(monitor)
    assert ("output", "0") in entries(monitor)


# --- the first to overflow ---


class Backward(torch.autograd.Function):
    """Multiplies the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Overflows(nn.Module):
    """Multiplies by `factor`, which a test sets at some step."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.factor = 1.0
        self._backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if self._backward:
            found: Tensor = Backward.apply(x, self.factor)
            return found
        return x * self.factor


@pytest.mark.parametrize("place", [1, 3, 5])
@pytest.mark.parametrize("kind", ["output", "gradient"])
@pytest.mark.parametrize("scaled", ["precast", "fused", "torch", "none"])
def test_the_first_that_overflows_is_named_with_its_step(
    scaled: str, kind: str, place: int
) -> None:
    """Steps that are not counted, too; and not a later module, though all of those overflow as well."""
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(8)]
    planted = Overflows(kind == "gradient")
    layers[place] = planted
    model = nn.Sequential(*layers)
    scaler: Any = {
        "precast": lambda: precast.GradScaler("cpu", init_scale=8.0, on_diagnosis="ignore"),
        "fused": lambda: precast.GradScaler("cpu", init_scale=8.0, on_diagnosis="ignore"),
        "torch": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
        "none": lambda: None,
    }[scaled]()
    optimizer = sgd(model, fused=scaled == "fused")
    with precast.monitor(model, every=100, scaler=scaler) as monitor:
        for step in range(9):
            planted.factor = 1e30 if step == 5 else 1.0
            with precast.autocast("cpu", dtype=torch.float16):
                take(model, optimizer, scaler=scaler)
            if scaled == "none" and step == 5:
                break
        first = monitor.first
    assert first is not None
    expected = str(place) if kind == "output" else str(place - 1)
    assert (first.step, first.kind, first.name) == (5, kind, expected)
    assert first.inputs
    assert all(math.isfinite(one.maximum) for one in first.inputs)
    assert expected in first.message
    assert "step 5" in first.message
    bad = [entry for entry in monitor.ring if entry["first"]]
    assert [entry["step"] for entry in bad] == [5]
    if scaled not in {"none"}:
        assert [entry["skipped"] for entry in monitor.ring] == [False] * 5 + [True] + [False] * 3


def test_the_range_of_its_input_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Overflows(False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    model[1].factor = 2.0
    with precast.monitor(model) as monitor, precast.autocast("cpu", dtype=torch.float16):
        take(model, sgd(model), torch.tensor([[60000.0, 1.0, -7.0, 0.0]]))
    first = monitor.first
    assert first is not None
    assert (first.name, first.what) == ("1", "inf")
    [given] = first.inputs
    assert (given.dtype, given.minimum, given.maximum) == ("float16", -7.0, 60000.0)
    assert "60000" in first.message or "6e+04" in first.message
    assert "65504" in first.message


def test_the_scaler_says_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Overflows(False), nn.Linear(8, 8))
    optimizer = sgd(model)
    scaler = precast.GradScaler("cpu", init_scale=8.0, max_nonfinite_losses=0)
    seen: list[Any] = []
    with precast.monitor(model), precast.observe(seen.append):
        model[1].factor = 1e30
        with (
            pytest.raises(
                precast.errors.BrokenModelError, match="the output of `1` was the first"
            ) as error,
            precast.autocast("cpu", dtype=torch.float16),
        ):
            take(model, optimizer, scaler=scaler)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.first is not None
    assert event.first.name == "1"
    diagnosis: Any = error.value.diagnosis
    assert diagnosis.first == event.first


def test_a_parameters_gradient_that_overflows_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)  # outputs of 600 and 1200, and 300 000 in the gradients
    optimizer = sgd(model)
    scaler = precast.GradScaler("cpu", init_scale=1.0, on_diagnosis="ignore", min_scale=0.5)
    with precast.monitor(model), precast.autocast("cpu", dtype=torch.float16):
        out = model(torch.full((600, 4), 300.0))
        scaler.scale((out.float() * 0.9).sum()).backward()
        scaler.step(optimizer)
    event = scaler.last_step(optimizer)
    assert event is not None
    assert event.skipped
    assert event.first is not None
    assert event.first.kind == "parameter"
    assert event.first.name.endswith(".weight")
    assert event.first.inputs


def test_a_mask_that_is_infinite_in_good_steps_is_no_offender() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.score, self.after = Mask(), nn.Linear(8, 8), Overflows(False)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.after((self.score(x) + self.mask(x)).softmax(-1))
            return found

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x).masked_fill(torch.arange(8) > 4, -math.inf)

    model = Masked()
    optimizer = sgd(model)
    scaler = precast.GradScaler("cpu", on_diagnosis="ignore", init_scale=1.0)
    with precast.monitor(model) as monitor:
        take(model, optimizer, scaler=scaler)
        assert monitor.first is None
        model.after.factor = math.inf
        take(model, optimizer, scaler=scaler)
    assert monitor.first is not None
    assert (monitor.first.step, monitor.first.name) == (1, "after")


def test_weights_that_are_not_finite_are_named() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0] = math.inf
    with precast.monitor(model) as monitor:
        take(model, sgd(model))
    assert monitor.first is not None
    assert monitor.first.name == "2"
    assert "weight was not finite before the first step" in monitor.first.message


# --- what it costs and leaves ---


def test_results_have_their_bits() -> None:
    def run(watched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        optimizer = torch.optim.Adam(model.parameters())
        scaler = precast.GradScaler("cpu")
        monitor = precast.monitor(model, every=2) if watched else None
        attachment = precast.attach(model)
        for _ in range(5):
            with precast.autocast("cpu", dtype=torch.float16):
                take(model, optimizer, scaler=scaler)
        attachment.detach()
        if monitor is not None:
            monitor.detach()
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}
WAITS |= {"aten::item", "aten::masked_select", "aten::unique", "aten::isfinite.all"}


def test_only_counted_steps_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host are `_to_copy` on a CPU, too, where they cost nothing: `read` alone makes them."""
    monkeypatch.setattr(
        _torch, "without_dispatch", torch.autograd.grad_mode.inference_mode.__mro__[-1]
    )
    monkeypatch.setattr(_torch, "dispatch_modes", lambda: 0)
    monkeypatch.setattr(tally_of, "_may_have_limits", lambda *_: True)  # as off the CPU
    reads = []
    monkeypatch.setattr(
        history_of, "read", lambda steps, read=history_of.read: reads.append(1) or read(steps)
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    waits = []
    monitor = precast.monitor(model, every=4)
    for _ in range(9):
        with Calls() as calls:
            take(model, optimizer)
        assert calls.counts["aten::aminmax"] > 9, "what a monitor does is seen here"
        waits.append((sum(calls.counts[name] for name in WAITS), len(reads)))
        reads.clear()
    monitor.detach()
    quiet = [waits[k] for k in (2, 3, 4, 6, 7, 8)]  # a step is over when the next begins
    assert quiet == [(0, 0)] * 6
    assert waits[1][0] > 0
    assert waits[1][1] == waits[5][1] == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:PyTorch's fused SGD on the CPU")  # its gradients are counted
@pytest.mark.parametrize("factor", [1.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_counted_step_on_a_gpu_waits_once(dtype: torch.dtype, factor: float) -> None:
    """The counts equal those of the same step on the CPU."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, x = network().to(dtype).to(device), torch.randn(6, 8).to(device, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        scaler = precast.GradScaler(device, init_scale=4.0)
        monitor = precast.monitor(model, every=1)
        for number in range(3):
            with counted_waits() if device == "cuda" else nullcontext([1]) as waits:
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                scaler.scale(loss * (factor if number == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                monitor.end_step()
        assert waits == [1]
        monitor.detach()
        results.append(entries(monitor))
        del model, optimizer, scaler  # else they would be taken for averages of the other weights
    assert results[0].keys() == results[1].keys()
    for key, entry in results[0].items():
        other = results[1][key]
        for name in ("zeros", "steps", "elements"):
            assert entry[name] == other[name], (key, name)
        # Where a kernel leaves out zeros, zero times infinity is not NaN.
        nonfinite = [
            [a + b for a, b in zip(each["overflow"], each["nan"], strict=True)]
            for each in (entry, other)
        ]
        assert nonfinite[0] == nonfinite[1], key


def test_modes_do_not_see_what_it_does() -> None:
    model = network()
    optimizer = sgd(model)
    plain, watched = [], []
    for seen in (plain, watched):
        with precast.monitor(model, every=1) if seen is watched else Calls():
            with Calls() as calls:
                take(model, optimizer)
            seen.append(calls.counts)
    assert plain == watched


def test_without_an_interval_early_steps_are_counted_too() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with precast.monitor(model) as monitor:
        for _ in range(402):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    early = [0, 1, 2, 4, 8, 16, 32, 64, 128]
    for entry in monitor.to_dict()["modules"]:
        assert entry["steps"] == [*early, 200, 400]


def test_a_scaler_names_parameters_as_the_monitored_model_does() -> None:
    model = network()
    optimizer, scaler = sgd(model), precast.GradScaler("cpu")
    for watched in (False, True):
        with precast.monitor(model) if watched else nullcontext():
            scaler.scale(model(torch.randn(4, 8)).sum()).backward()
            model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
        names = scaler.last_step(optimizer).names
        assert names == (("0.weight",) if watched else ("group 0, parameter 0",))
        scaler.update()
        optimizer.zero_grad()


def test_nothing_is_left_on_the_model() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    before = [dict(vars(m)) for m in model.modules()], dict(vars(scaler))
    monitor = precast.monitor(model, scaler=scaler)
    take(model, sgd(model))
    monitor.detach()
    monitor.detach()
    for module, attributes in zip(model.modules(), before[0], strict=True):
        assert {k: v for k, v in vars(module).items() if "hooks" in k} == {
            k: v for k, v in attributes.items() if "hooks" in k
        }
    assert vars(scaler).keys() == before[1].keys()
    assert monitor.steps == 1
    take(model, sgd(model))
    assert monitor.steps == 1


def test_a_model_that_goes_takes_its_monitor_along() -> None:
    model = network()
    monitor = precast.monitor(model)
    take(model, sgd(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not witnesses
    assert monitor.to_dict()["modules"]


def test_copies_are_not_watched() -> None:
    model = network()
    with precast.monitor(model, every=1) as monitor:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            take(other, sgd(other))
            assert monitor.steps == 0
        take(model, sgd(model))
    assert monitor.steps == 1


def test_many_steps_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = sgd(model)
    x = torch.ones(1, 2)
    alive = []
    with precast.monitor(model, every=10, keep=4) as monitor:
        for _ in range(3):
            for _ in range(600):
                take(model, optimizer, x)
            gc.collect()
            alive.append(sum(type(o) is Tensor for o in gc.get_objects()))
            assert len(monitor.ring) <= 66
            assert all(len(entry["steps"]) <= 4 for entry in entries(monitor).values())
            assert len(pickle.dumps(monitor.to_dict())) < 100_000
    assert alive[0] == alive[1] == alive[2]


def test_of_compiled_models_parameters_and_the_whole_are_seen() -> None:
    torch.manual_seed(0)
    plain = network()
    inside, outside = copy.deepcopy(plain), copy.deepcopy(plain)
    x = torch.randn(6, 8)
    compiled = {m: torch.compile(m, backend="aot_eager", fullgraph=True) for m in (inside, outside)}
    with (
        precast.monitor(plain, every=2) as expected,
        precast.monitor(inside, every=2) as first,
        precast.monitor(compiled[outside], every=2) as second,
    ):
        for _ in range(4):
            take(plain, OPTIMIZERS.setdefault(plain, sgd(plain)), x)
            for model in (inside, outside):
                take(compiled[model], OPTIMIZERS.setdefault(model, sgd(model)), x)
    OPTIMIZERS.clear()
    torch.compiler.reset()
    parameters = {k: e for k, e in entries(expected).items() if k[0] == "parameter"}
    assert entries(first) == parameters
    whole = entries(second)
    assert whole["output", ""] == {**entries(expected)["output", "4"], "name": ""}
    assert {k: e for k, e in whole.items() if k[0] == "parameter"} == parameters
    assert expected.steps == first.steps == second.steps == 4


OPTIMIZERS: dict[nn.Module, torch.optim.Optimizer] = {}


def test_transforms_and_traces_are_left_alone() -> None:
    model = network()
    with precast.monitor(model) as monitor:
        torch.func.vmap(model)(torch.randn(3, 2, 8))
        torch.func.grad(lambda x: model(x).sum())(torch.randn(8))
        torch.jit.trace(model, torch.randn(2, 8), check_trace=False)
    assert monitor.steps == 0


# --- what is written ---


def test_what_is_told_is_strict_json(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Overflows(False), nn.Linear(8, 8))
    model[1].factor = 1e30
    path, ring = tmp_path / "health.json", tmp_path / "deep" / "ring.json"
    with precast.monitor(model, every=2, ring=ring) as monitor:
        take(model, sgd(model))
        take(model, sgd(model))
        assert json.loads(ring.read_text())["ring"][0]["step"] == 0
        monitor.save(path)
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (found["first"]["kind"], found["first"]["name"]) == ("gradient", "0")
    assert found["ring"][0]["worst"][0]["maximum"] is None
    assert found["modules"][0]["what_if"].keys() == set(
        precast.diagnostics.numerics.formats.WHAT_IF
    )


def test_a_ring_that_cannot_be_written_ends_no_training(tmp_path: Any) -> None:
    model, folder = network(), tmp_path / "folder"
    optimizer = sgd(model)
    folder.touch()
    with precast.monitor(model, every=1, ring=folder / "ring.json") as monitor:
        take(model, optimizer)
        with pytest.warns(PrecastWarning, match=r"cannot write .*ring\.json"):
            take(model, optimizer)
        folder.unlink()  # someone makes room
        take(model, optimizer)
    assert monitor.steps == 3
    assert len(json.loads((folder / "ring.json").read_text())["ring"]) == 3


def test_the_ring_survives_an_exception_in_the_model() -> None:
    model = network()
    optimizer = sgd(model)
    monitor = precast.monitor(model)
    for _ in range(100):
        take(model, optimizer)
    with pytest.raises(RuntimeError, match="shapes"):
        take(model, optimizer, torch.randn(6, 9))
    assert [entry["step"] for entry in monitor.ring][-3:] == [97, 98, 99]
    monitor.detach()


def test_counted_steps_are_told_to_observers() -> None:
    model = network()
    optimizer = sgd(model)
    seen: list[Any] = []
    with precast.monitor(model, every=2) as monitor, precast.observe(seen.append):
        for _ in range(3):
            take(model, optimizer)
        monitor.end_step()
    assert [event.step for event in seen] == [0, 2]
    assert all(isinstance(event, HealthEvent) for event in seen)
    assert {row["kind"] for row in seen[0].tensors} == {"output", "gradient", "parameter"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "got int"),
        ((nn.ReLU(), 0), "every=.* got 0"),
        ((nn.ReLU(), True), "every=.* got True"),
        ((nn.ReLU(), 2.5), "every=.* got 2.5"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(MonitorError, match=message):
        precast.monitor(*arguments)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(MonitorError, match=r"keep=.* got 1"):
        precast.monitor(nn.ReLU(), keep=1)
    with pytest.raises(MonitorError, match="scaler="):
        precast.monitor(nn.ReLU(), scaler=F)
