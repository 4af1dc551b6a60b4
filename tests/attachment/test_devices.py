"""attach on devices that have streams and graphs: made-up ones on the CPU, and those of a GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import _torch
from precast.attachment import attachment as attachments
from precast.weights import held, unversioned_writes, weight_cache
from tests.support.unsampled import write_unsampled

BF16 = torch.bfloat16


class Mark:
    """A point in a stream's work. A test decides when it is reached."""

    done = False

    def is_reached(self) -> bool:
        return self.done

    def hold_back(self, stream: Stream) -> None:
        stream.waits_for.append(self)


class Stream:
    """Records its marks, the marks that it waits for, and the memory that it uses."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.waits_for: list[Mark] = []
        self.uses: list[Tensor] = []

    def new_mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


class Streams:
    """Those of a made-up device, and the one that this thread gives its work to."""

    def __init__(self) -> None:
        self.one, self.other = Stream(), Stream()
        self.current = self.one


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made_up = Streams()
    for module in (held, unversioned_writes):
        monkeypatch.setattr(module, "stream_of", lambda _device: made_up.current)
    monkeypatch.setattr(held, "StreamMark", lambda _device: made_up.current.new_mark())
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, stream: stream.uses.append(self), raising=False
    )
    return made_up


@contextmanager
def captured() -> Iterator[None]:
    """What runs inside is as if it were written into a CUDA graph."""
    with pytest.MonkeyPatch.context() as capture:
        for module in (held, weight_cache, attachments):
            capture.setattr(module, "is_captured", lambda _tensor: True)
        capture.setattr(unversioned_writes, "is_capturing", lambda: True)
        yield


def region() -> precast.autocast:
    return precast.autocast("cpu", dtype=BF16, policy="torch")


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), region():
        result: Tensor = model(x)
    return result


def linear() -> tuple[nn.Linear, Tensor]:
    return nn.Linear(64, 64, bias=False), torch.randn(2, 64)


class TestStreams:
    def test_one_stream_waits_for_nothing(self, streams: Streams) -> None:
        model, x = linear()
        with precast.attach(model):
            for _ in range(3):
                run(model, x)
                with torch.no_grad():
                    model.weight.mul_(2)
        assert len(streams.one.marks) == 3
        assert streams.one.waits_for == []

    def test_another_waits_for_the_write_in_every_region_until_it_is_done(
        self, streams: Streams
    ) -> None:
        model, x = linear()
        with precast.attach(model):
            expected = run(model, x)
            (written,) = streams.one.marks
            streams.current = streams.other
            for times in (1, 2):
                assert torch.equal(run(model, x), expected)
                assert streams.other.waits_for == [written] * times
            written.done = True
            for _ in range(3):
                assert torch.equal(run(model, x), expected)
            assert streams.other.waits_for == [written] * 2
            assert {used.dtype for used in streams.other.uses} == {BF16}
        assert streams.one.waits_for == []

    def test_one_that_renews_a_copy_waits_for_the_last_write(self, streams: Streams) -> None:
        model, x = linear()
        with precast.attach(model):
            run(model, x)
            with torch.no_grad():
                model.weight.mul_(2)
            streams.current = streams.other
            assert torch.equal(run(model, x), x.to(BF16) @ model.weight.to(BF16).t())
            assert streams.other.waits_for == streams.one.marks
            streams.current = streams.one
            run(model, x)
            assert streams.one.waits_for == streams.other.marks

    def test_what_another_still_writes_is_not_compared(
        self, streams: Streams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unversioned_writes, "LONGEST_WRITE", 0.0)
        monkeypatch.setattr(unversioned_writes, "ENTRIES_BETWEEN_CHECKS", 1)
        model, x = linear()
        with precast.attach(model):
            run(model, x)
            write_unsampled(model.weight)
            streams.current = streams.other
            for _ in range(3):
                with torch.no_grad(), region():
                    pass
            streams.one.marks[0].done = True
            with pytest.raises(precast.errors.StaleWeightError), torch.no_grad(), region():
                pytest.fail("entered")


class TestGraphs:
    def test_a_graph_casts_weights_that_may_change(self) -> None:
        model, x = linear()
        with precast.attach(model) as attachment:
            expected = x.to(BF16) @ model.weight.to(BF16).t()
            with captured():
                assert torch.equal(run(model, x), expected)
            assert attachment.memory() == 0
            assert torch.equal(run(model, x), expected)
            assert attachment.memory() == 2 * model.weight.numel()

    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_graph_reads_a_copy_that_is_there_where_the_weight_is_frozen(
        self, frozen: bool
    ) -> None:
        model, x = nn.Linear(160, 160, bias=False), torch.randn(2, 160)
        model.requires_grad_(not frozen)
        with precast.attach(model) as attachment:
            with region():
                expected = model(x)
            (one,) = (c for c in attachment._copies())
            one.tensor.zero_()
            with captured():
                found = run(model, x)
            assert torch.equal(found, torch.zeros_like(expected) if frozen else expected)

    def test_no_answer_is_read_while_a_graph_is_captured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Elsewhere:
            refuses = True

            def __init__(self, _number: object) -> None:
                assert not Elsewhere.refuses

            def has_arrived(self) -> bool:
                assert not Elsewhere.refuses
                return True

            def read(self) -> float:
                return 1.0

        monkeypatch.setattr(unversioned_writes, "ENTRIES_BETWEEN_CHECKS", 1)
        monkeypatch.setattr(unversioned_writes, "HostCopy", Elsewhere)
        monkeypatch.setattr(unversioned_writes, "_matches", lambda *_: torch.tensor(True))
        model, x = linear()
        with precast.attach(model):
            for _ in range(2):
                Elsewhere.refuses = False
                run(model, x)
                Elsewhere.refuses = True
                with captured():
                    run(model, x)
            Elsewhere.refuses = False
            run(model, x)

    def test_what_a_captured_step_writes_is_held_no_longer(
        self,
    ) -> None:
        model, x = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with precast.attach(model) as attachment:
            run(model, x)
            model.weight.grad = torch.ones_like(model.weight)
            with captured():
                optimizer.step()
            assert attachment.left_alone == {
                "weight": "a CUDA graph writes it without moving its version counter"
            }
            assert attachment.memory() == 0
            model.weight.data.mul_(2)  # the graph, played again
            assert torch.equal(run(model, x), x.to(BF16) @ model.weight.to(BF16).t())
        with precast.attach(model) as attachment:
            assert list(attachment.left_alone) == ["weight"]


@pytest.mark.gpu
class TestOnGpu:
    @staticmethod
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad(), precast.autocast("cuda", dtype=BF16):
            result: Tensor = model(x)
        return result

    def test_a_stream_never_reads_a_copy_that_another_is_writing(self) -> None:
        model, x = nn.Linear(512, 512, device="cuda"), torch.randn(4, 512, device="cuda")
        expected = self.run(model, x)
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with precast.attach(model):
            with torch.cuda.stream(one):
                torch.cuda._sleep(200_000_000)  # what is written now is written some 0.1 s later
                self.run(model, x)
            with torch.cuda.stream(other):
                found = self.run(model, x)
            torch.cuda.synchronize()
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_graph_follows_its_weights(self, frozen: bool) -> None:
        model, x = nn.Linear(512, 512, device="cuda"), torch.randn(4, 512, device="cuda")
        model.requires_grad_(not frozen)
        with precast.attach(model) as attachment:
            self.run(model, x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self.run(model, x)
            with torch.no_grad():
                model.weight.mul_(2)
            if frozen:
                attachment.refresh()
            graph.replay()
            assert torch.equal(result, self.run(model, x))

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64],
    )
    def test_a_number_arrives_in_the_cpus_memory(self, dtype: torch.dtype) -> None:
        numbers = [
            torch.tensor(value, device="cuda").to(dtype)
            for value in (0.0, 1.0, 5.0, math.nan, math.inf)
            if dtype.is_floating_point or math.isfinite(value)
        ]
        for shape in ((), (1,)):
            copies = [_torch.HostCopy(number.reshape(shape)) for number in numbers]
            torch.cuda.synchronize()
            assert all(copy.has_arrived() for copy in copies)
            expected = [float(number) for number in numbers]
            assert list(map(str, (copy.read() for copy in copies))) == list(map(str, expected))
