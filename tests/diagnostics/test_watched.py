"""A watched program runs as an unwatched one, whatever layouts its tensors have and whatever fails in a watcher."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from precast.diagnostics.numerics.step_record import StepRecord
from precast.diagnostics.tracing.counting import RuleCounter
from precast.diagnostics.tracing.recorder import TraceRecorder
from precast.engine import registration
from tests.conftest import PROGRAMS_SEED
from tests.diagnostics.watched import LAYOUTS, SETTINGS, Call, Logged, Wrapped, compare
from tests.support.op_samples import named, samples

_OPERATORS = 3
_UNREPEATABLE = {"aten::linalg_lstsq"}  # LAPACK's rounding depends on where its memory lies


@pytest.fixture(params=registration.ENGINES, autouse=True)
def each_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes and of old layouts
        yield


def jagged() -> Tensor:
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def adjacency() -> Tensor:
    places = torch.tensor([[0, 1], [1, 0]])
    matrix = torch.sparse_coo_tensor(places, torch.ones(2), (2, 2), check_invariants=True)
    return torch.sparse.mm(matrix, torch.ones(2, 3)).sum()


def sparse_embedding() -> Tensor:
    embedding = nn.Embedding(5, 3, sparse=True)
    nn.init.ones_(embedding.weight)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    for _ in range(2):
        embedding(torch.tensor([1, 1, 3])).sum().backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight


def sparse_gather() -> Tensor:
    x = torch.arange(4.0, requires_grad=True)
    torch.gather(x, 0, torch.tensor([1, 1]), sparse_grad=True).sum().backward()
    assert x.grad is not None
    return x.grad.to_dense()


def jagged_layer() -> Tensor:
    x = jagged()
    y = F.linear(x, torch.ones(3, 3, requires_grad=True))
    y.values().sum().backward()
    assert x.grad is not None
    return x.grad.values()


def masked_sum() -> Tensor:
    x = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]), True)
    (x + x).sum().get_data().backward()
    assert x.grad is not None
    data: Tensor = x.grad.get_data()
    return data


PROGRAMS = [adjacency, sparse_embedding, sparse_gather, jagged_layer, masked_sum]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("region", [True, False])
def test_tensors_of_other_layouts_are_traced(
    program: Callable[[], Tensor], full: bool, region: bool
) -> None:
    with precast.autocast("cpu", enabled=region):
        expected = program()
    with precast.trace(full=full) as trace, precast.autocast("cpu", enabled=region):
        result = program()
    assert torch.equal(result, expected)
    assert not any("failed" in note for note in trace.notes)
    assert all(type(row.cast_bytes) is int for row in trace.rows)
    trace.to_dict()


@pytest.mark.parametrize("name", ["eigvals", "eigvalsh", "svdvals"])
def test_values_without_vectors_have_the_same_bits_when_watched(name: str) -> None:
    torch.manual_seed(0)
    matrices = [
        torch.randn(3, 3),
        torch.randn(2, 4, 4),
        torch.ones(3, 3),
        torch.randn(1, 3).expand(3, 3),
    ]
    for matrix in matrices:
        with torch.inference_mode():
            expected = getattr(torch.linalg, name)(matrix)
            with precast.trace():
                result = getattr(torch.linalg, name)(matrix)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rules", [{}, {"bilinear": "fallthrough"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_inside_one_that_leaves_autocast_on_have_the_same_rules_when_watched(
    rules: dict[str, str], dtype: torch.dtype
) -> None:
    """The products in `bilinear` are cast, unless it refuses its dtypes and is promoted as a whole."""
    torch.manual_seed(0)
    operands = torch.randn(5, 4), torch.randn(5, 3, dtype=dtype), torch.randn(1, 4, 3)
    policy = precast.Policy.load("default").replace(ops=rules)

    def run() -> Tensor | str:
        with precast.autocast("cpu", policy=policy):
            try:
                return F.bilinear(*operands)
            except RuntimeError as error:
                return str(error)

    expected = run()
    with precast.trace():
        result = run()
    if isinstance(expected, str):
        assert result == expected
    else:
        assert isinstance(result, Tensor)
        assert torch.equal(result, expected)


def test_calls_of_operators_on_all_layouts_are_the_same_when_watched() -> None:
    draw = random.Random(PROGRAMS_SEED)
    for name in draw.sample(sorted(named() - _UNREPEATABLE), _OPERATORS):
        operation, _, overload = name.removeprefix("aten::").partition(".")
        function = getattr(getattr(torch.ops.aten, operation), overload or "default")
        given = tuple(draw.choice(samples(name)))
        calls = [
            Call(function, given, layout, draw.choice(list(SETTINGS)), draw.random() < 0.5)
            for layout in LAYOUTS
        ]
        totals, texts = compare(calls, registration.engine())
        assert not texts, f"{name}:\n" + "\n".join(texts)
        assert totals["agree"] > len(calls)


@pytest.mark.parametrize("function", [lambda x: x.chunk(2)[1], lambda x: x.narrow(0, 1, 2)])
def test_views_of_ordinary_tensors_are_traced_in_inference_mode(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.arange(4.0)
    with precast.trace(), torch.inference_mode():
        view = function(x)
    assert view._base is x


def _fail(*_args: object) -> None:
    raise ValueError("the watcher failed")


@pytest.mark.parametrize("method", ["begin", "end", "saw", "stepped"])
def test_a_trace_that_fails_counts_the_operation_and_says_so(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceRecorder, method, _fail)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    with precast.trace() as trace, precast.autocast("cpu"):
        result = layer(torch.ones(1, 2))
        optimizer.step()
    assert result.dtype is torch.bfloat16
    [note] = [note for note in trace.notes if "failed" in note]
    assert "ValueError: the watcher failed" in note
    assert "counted" in note


@pytest.mark.parametrize("method", ["fail", "failed"])
def test_an_error_of_the_program_stays_its_own_where_a_trace_fails(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceRecorder, method, _fail)
    with precast.trace() as trace, precast.autocast("cpu"):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(2).add(torch.ones(3))
    assert any("failed" in note for note in trace.notes)


def test_a_count_that_fails_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RuleCounter, "begin", _fail)
    with precast.trace(full=False) as trace, precast.autocast("cpu"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert any("1 operation" in note for note in trace.notes), trace.notes


def test_a_subclass_is_not_asked_by_a_trace_in_backward() -> None:
    def backward() -> dict[str, int]:
        weight = torch.ones(3).as_subclass(Logged).requires_grad_()
        loss = (weight * torch.ones(3, requires_grad=True)).sum().as_subclass(Tensor)
        Logged.calls.clear()
        loss.backward()
        return dict(Logged.calls)

    assert backward() == {}
    with precast.trace():
        assert backward() == {}


def test_a_function_mode_is_not_asked_by_a_trace() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def calls() -> list[str]:
        x = torch.ones(2, requires_grad=True)
        loss = (x * x).sum()
        with Mode() as mode:
            loss.backward()
            torch.add(x, 1)
        return mode.calls

    expected = calls()
    with precast.trace():
        assert calls() == expected


# --- monitors ---

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr(),
    "BSC": lambda x: x.to_sparse_bsc((1, 1)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "jagged": lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:1]]),
    "masked": lambda x: torch.masked.as_masked_tensor(x, x > 0),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "logged": lambda x: x.as_subclass(Logged),
    "wrapped": lambda x: Wrapped(x.detach()),
    "meta": lambda x: x.to("meta"),
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "expanded": lambda x: x[:, :1].expand(3, 3),
    "no numbers": lambda x: x[:0],
}


class Returns(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layer, self.begin, self.end = nn.Linear(3, 3), nn.Identity(), nn.Identity()
        self.layout = layout

    def forward(self, x: Tensor) -> Any:
        return self.end(self.begin(OUTPUTS[self.layout](self.layer(x))))


@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize("traced", [False, True])
def test_modules_that_return_any_layout_are_monitored(layout: str, traced: bool) -> None:
    def run(watched: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Returns(layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        errors: list[str] = []
        Logged.calls.clear()
        with contextlib.ExitStack() as stack:
            if watched:
                monitor = stack.enter_context(precast.monitor(model, every=1))
                if traced:
                    stack.enter_context(precast.trace(model))
            for _ in range(2):
                out = model(torch.ones(3, 3))
                try:
                    out.sum().backward()
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
                optimizer.step()
            if watched:
                assert not monitor.to_dict()["notes"]
        return errors, dict(Logged.calls), [p.detach().tolist() for p in model.parameters()]

    assert run(True) == run(False)


def test_a_monitor_that_fails_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepRecord, "note", _fail)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with precast.monitor(model, every=1) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.end_step()
    [note] = monitor.to_dict()["notes"]
    assert "ValueError: the watcher failed" in note
