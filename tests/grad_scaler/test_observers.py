"""The scaler's observers and reductions, what waits for the device, and a CUDA device."""

from __future__ import annotations

import collections
import math
import pickle
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from benchmarks.cuda_graphs import counted_waits, graph_of
from precast._internal.events import StepEvent, observe
from precast.grad_scaler.scaler import GradScaler
from precast.running.step_tracker import StepTracker
from tests.support.scaling import KINDS, bits, make_parameter, sgd

Tensor = torch.Tensor


# --- observers, reductions, what waits for the device ---


def test_observers_hear_of_every_step() -> None:
    events: list[StepEvent] = []
    parameters = [make_parameter(), make_parameter()]
    optimizers = [sgd(parameters[0]), torch.optim.Adam([parameters[1]], fused=True)]
    scaler = GradScaler("cpu", init_scale=8.0)
    with observe(events.append):
        for factor in (1.0, math.inf):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale((parameter * factor).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
    assert [(e.optimizer, e.step, float(e.scale), bool(e.skipped)) for e in events] == [
        (0, 0, 8.0, False),
        (1, 0, 8.0, False),
        (0, 1, 8.0, True),
        (1, 1, 8.0, True),
    ]
    assert all(e.seconds > 0 for e in events)


class Calls(TorchDispatchMode):
    """Counts the operations that run; reading a value waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return self.counts["aten::_local_scalar_dense"]


def iterate(scaler: Any, fused: bool) -> Calls:
    parameter = make_parameter()
    optimizer = torch.optim.Adam([parameter], fused=fused, foreach=False)
    with Calls() as calls:
        for _ in range(3):
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return calls


@pytest.mark.parametrize("fused", [True, False])
def test_no_more_waits_and_no_more_operations_than_torch(fused: bool) -> None:
    ours, theirs = iterate(GradScaler("cpu"), fused), iterate(torch.amp.GradScaler("cpu"), fused)
    assert theirs.waits > 0 or fused
    assert ours.waits <= theirs.waits
    assert ours.counts.total() <= theirs.counts.total()


@pytest.mark.parametrize("fused", [True, False])
def test_observing_waits_for_nothing(fused: bool) -> None:
    alone = iterate(GradScaler("cpu"), fused)
    with observe(lambda event: None):
        observed = iterate(GradScaler("cpu"), fused)
    assert observed.waits == alone.waits
    assert observed.counts == alone.counts  # events are made anyway


def mark_bad(verdicts: list[Tensor]) -> None:
    for verdict in verdicts:
        verdict.fill_(1.0)


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_a_reduction_of_the_verdicts_decides(kind: str) -> None:
    """Another process found a bad gradient: this one skips too, even if it has no gradients."""
    parameter = make_parameter()
    before = parameter.detach().clone()
    scaler = GradScaler("cpu", init_scale=8.0, reduce_found_inf=mark_bad)
    scaler.scale(parameter.sum()).backward()
    scaler.step(KINDS[kind]([parameter]))
    scaler.step(KINDS[kind]([make_parameter()]))
    scaler.update()
    assert torch.equal(parameter, before)
    assert scaler.get_scale() == 4.0
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_losses_and_gradients_on_two_devices(self) -> None:
        parameters = [make_parameter(), make_parameter(device="cuda")]
        before = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = GradScaler("cuda", init_scale=8.0)
        for factor, scale in ((1.0, 8.0), (math.inf, 4.0)):
            optimizer.zero_grad()
            losses = scaler.scale([parameters[0].sum(), (parameters[1] * factor).sum()])
            assert [t.device.type for t in losses] == ["cpu", "cuda"]
            torch.autograd.backward(losses)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
        assert all(torch.equal(p, b - 1) for p, b in zip(parameters, before, strict=True))

    def test_a_fused_step_never_waits(self) -> None:
        parameter = make_parameter(device="cuda")
        optimizer = torch.optim.Adam([parameter], fused=True)
        scaler = GradScaler("cuda")
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        with counted_waits() as waits, observe(lambda event: None):
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert waits == [0]

    def test_a_verdict_that_the_device_decides_reaches_the_counters(self) -> None:
        parameter = make_parameter(device="cuda")
        optimizer = torch.optim.Adam([parameter], fused=True)
        scaler = GradScaler("cuda", on_diagnosis="ignore")
        before = bits(parameter.cpu())
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((parameter * math.inf).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        counters = scaler.counters
        assert (counters.skipped, counters.consecutive_skips, counters.backoffs) == (3, 3, 3)
        assert bits(parameter.cpu()) == before

    def test_an_iteration_in_a_cuda_graph(self) -> None:
        """Scale, backward, a capturable and fused step, and update, captured once and played again."""
        parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.Adam([parameter], fused=True, capturable=True)
        scaler = GradScaler("cuda", init_scale=8.0, growth_interval=1)
        factor = torch.ones((), device="cuda")

        def iteration() -> None:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        graph = graph_of(iteration)
        scale = scaler.get_scale()
        graph.replay()
        assert scaler.get_scale() == 2 * scale
        before = bits(parameter.cpu())
        factor.fill_(math.inf)
        graph.replay()
        assert bits(parameter.cpu()) == before
        assert scaler.get_scale() == scale

    def test_nothing_in_another_thread_ends_a_capture(self) -> None:
        """No event of a stream is queried, and nothing waits, by what a training step does."""
        model = torch.nn.Linear(64, 64, device="cuda")
        x = torch.ones(4, 64, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        scaler = GradScaler("cuda", init_scale=8.0)
        stream, failures = torch.cuda.Stream(), list[BaseException]()

        def train(steps: int) -> None:
            try:
                with torch.cuda.stream(stream):
                    for _ in range(steps):
                        optimizer.zero_grad()
                        with precast.autocast("cuda", dtype=torch.float16):
                            loss = model(x).float().sum()
                        scaler.scale(loss).backward()
                        scaler.step(optimizer)
                        scaler.update()
                        with torch.no_grad(), precast.autocast("cuda", dtype=torch.float16):
                            model(x)
            except RuntimeError as error:
                failures.append(error)

        def train_in_a_thread(steps: int) -> None:
            thread = threading.Thread(target=train, args=(steps,))
            thread.start()
            thread.join()

        tracker = StepTracker(lambda _number: None, lambda _model: None)
        with precast.attach(model):
            tracker.start()
            train_in_a_thread(20)  # PyTorch allocates memory, which is not allowed later
            graph, y = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
            with torch.cuda.graph(graph):
                train_in_a_thread(5)
                y += 1
            tracker.stop()
        y.zero_()
        graph.replay()
        assert not failures
        assert not tracker.failures.total
        assert y.tolist() == [1.0] * 3
        assert scaler.counters.steps == 25

    @pytest.mark.parametrize("arguments", [{"capturable": True}, {"foreach": True}])
    def test_other_optimizers_on_the_device(self, arguments: dict[str, bool]) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.Adam([parameter], lr=0.5, **arguments)  # type: ignore[arg-type]
        scaler = GradScaler("cuda", init_scale="auto")
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.counters.skipped == 1
        assert parameter.isfinite().all()


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Profiler record function")
def test_a_training_step_with_a_scaler_is_compiled_once() -> None:
    """What the scaler remembers changes in each iteration: traced, it would be compiled each time."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            step(torch.ones(2, 3))
    assert scaler.counters.steps == 5
    off = GradScaler("cpu", enabled=False)
    scaled = torch.compile(lambda x: off.scale(x) * 2, backend="eager", fullgraph=True)
    assert scaled(torch.ones(1)).item() == 2.0
