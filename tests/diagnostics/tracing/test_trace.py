"""A trace counts what an independent dispatch mode counts, changes nothing, and leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from precast import _torch
from precast.diagnostics.tracing import call_sites
from precast.engine import registration
from precast.errors import PrecastError
from precast.report.saved_trace import SavedTrace
from precast.report.schema import OperationRow

ENGINES = registration.ENGINES


class Casts(TorchDispatchMode):
    """An independent count of casts between floating dtypes: how many, their bytes, and what they were from and to."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.bytes = 0
        self.flow: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if name == "aten::_to_copy":
            self._count(args[0], out)
        elif name == "aten::copy_":
            self._count(args[1], args[0])
        elif name == "aten::_foreach_copy_":
            for target, source in zip(*args[:2], strict=True):
                self._count(source, target)
        return out

    def _count(self, source: Tensor, target: Tensor) -> None:
        dtypes = source.dtype, target.dtype
        if source.dtype != target.dtype and all(d.is_floating_point for d in dtypes):
            self.number += 1
            self.bytes += target.numel() * target.itemsize
            key = str(dtypes[0]).split(".")[1], str(dtypes[1]).split(".")[1]
            self.flow[key] = self.flow.get(key, 0) + 1


def asked_for(trace: precast.Trace) -> tuple[int, int, dict[tuple[str, str], int]]:
    """Casts, their bytes and dtypes, but for those inside operations, which no mode sees."""
    inside = trace._recorder.tally.inside
    flow = {(f.source, f.target): f.casts for f in trace.flow}
    for key, one in inside.items():
        flow[key] -= one.casts
    casts = trace.totals.casts - sum(one.casts for one in inside.values())
    size = trace.totals.cast_bytes - sum(one.bytes for one in inside.values())
    return casts, size, {key: number for key, number in flow.items() if number}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.narrow(F.gelu(self.wide(x)))
        return out


class Transformer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


Step = Callable[[], Tensor]


def training(
    make: Callable[[], nn.Module] = Transformer, *, seed: int = 0, **region: Any
) -> tuple[nn.Module, Step]:
    """A model, and a training step of it that gives the loss."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(11, (2, 5))

    def step() -> Tensor:
        with precast.autocast("cpu", **region):
            out = model(tokens)
            loss = F.cross_entropy(out.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def rows_of(trace: SavedTrace, op: str, phase: str = "forward") -> list[OperationRow]:
    return [row for row in trace.rows if row.op == op and row.phase == phase]


@pytest.fixture(params=ENGINES)
def each_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with registration.use_engine(request.param):
        yield


# --- what it counts ---


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("policy", ["default", "torch", "lean"])
def test_casts_are_what_an_independent_mode_counts(policy: str) -> None:
    _, plain = training(policy=policy)
    _, traced = training(policy=policy)
    with Casts() as independent:
        for _ in range(3):
            plain()
    with precast.trace() as trace:
        for _ in range(3):
            traced()
    assert independent.number > 0
    assert asked_for(trace) == (independent.number, independent.bytes, independent.flow)


def test_rows_add_up_to_the_totals() -> None:
    _, step = training()
    with precast.trace() as trace:
        step()
    for name in ("casts", "cast_bytes", "cached", "calls"):
        assert sum(getattr(row, name) for row in trace.rows) == getattr(trace.totals, name)
    for name in ("seconds", "cast_seconds"):
        total = pytest.approx(getattr(trace.totals, name))
        assert sum(getattr(row, name) for row in trace.rows) == total
    assert sum(flow.casts for flow in trace.flow) == trace.totals.casts
    assert trace.totals.steps == 1
    assert trace.dropped == 0


def test_the_order_of_rows_is_that_of_their_first_calls() -> None:
    with precast.trace() as seen, torch.no_grad():
        x = torch.ones(3)
        for _ in range(3):
            x = (x + 1).exp().log()
        x.sin()
    ops = [row.op for row in sorted(seen.rows, key=lambda row: row.order)]
    assert ops == ["ones", "add.Tensor", "exp", "log", "sin"]
    assert sorted(row.order for row in seen.rows) == [0, 1, 2, 3, 4]


def test_a_weight_in_the_cache_is_counted_as_cached() -> None:
    layer = nn.Linear(4, 4)
    with precast.trace() as trace, precast.autocast("cpu"):
        for _ in range(3):
            layer(torch.ones(2, 4))
    [row] = rows_of(trace, "linear")
    assert (row.calls, row.casts, row.cached) == (3, 3 + 2, 2 * 2)


def test_held_weights_are_used_and_counted_as_cached() -> None:
    layer = nn.Linear(256, 256)
    x = torch.ones(2, 256)
    with precast.attach(layer), torch.no_grad():
        with precast.autocast("cpu"):
            layer(x)
        with precast.trace() as trace, precast.autocast("cpu"):
            layer(x)
    [row] = rows_of(trace, "linear")
    assert (row.casts, row.cached) == (1, 2)


@pytest.mark.usefixtures("each_engine")
def test_a_trace_casts_what_is_cast_without_it() -> None:
    """Dispatch modes have the weight cache keep apart what is made under them: not a trace's."""
    model, _ = training()
    tokens = torch.randint(11, (2, 5))

    def casts(*modes: Any) -> int:
        with precast.autocast("cpu"):
            model(tokens)  # the cache has all weights from here on
            with ExitStack() as stack:
                trace = stack.enter_context(precast.trace())
                for mode in modes:
                    stack.enter_context(mode)
                model(tokens)
        return trace.totals.casts

    assert casts() < casts(Casts())  # another's mode does change that, with or without a trace


# --- what rows say ---


def test_a_row_says_where_and_why() -> None:
    model, step = training()
    with precast.trace(model) as trace:
        step()
    [row] = [row for row in rows_of(trace, "linear") if row.module == "blocks.1.wide"]
    line = step.__code__.co_firstlineno
    assert row.source is not None
    assert row.source.endswith(" in forward")
    assert row.source.startswith("tests/diagnostics/tracing/test_trace.py:")
    assert row.region == f"tests/diagnostics/tracing/test_trace.py:{line + 1} in step"
    assert (row.inputs, row.output) == (["float32"] * 3, ["bfloat16"])
    assert row.rule == "lower"
    assert "policy 'default'" in row.reason
    assert "torch.toml: [ops.cpu] linear" in row.reason
    assert row.module_rule is None


def test_backward_has_the_module_and_the_line_of_its_forward() -> None:
    model, step = training()
    with precast.trace(model) as trace:
        step()
    forward = {row.module: row.source for row in rows_of(trace, "linear")}
    backward = [r for r in rows_of(trace, "mm", "backward") if r.reason == "backward of linear"]
    assert {row.module for row in backward} >= {"head", "blocks.0.wide", "blocks.1.narrow"}
    assert {row.source for row in backward} <= set(forward.values())
    assert all(row.source == forward[row.module] for row in backward if row.module in forward)


def test_steps_of_optimizers_and_loose_operations_have_phases_of_their_own() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with precast.trace(layer) as trace:
        x = torch.zeros(2, 4) + 1
        layer(x).sum().backward()
        optimizer.step()
    assert [row.op for row in trace.rows if row.phase == "optimizer"]
    assert {row.phase for row in trace.rows if row.op == "add.Tensor" and row.module is None} == {
        "other"
    }
    assert {row.module for row in rows_of(trace, "addmm")} == {""}


def test_an_operation_without_a_rule_says_why() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with precast.trace() as trace:
        torch.relu(x)
        with precast.autocast("cpu"):
            torch.sigmoid(x)
            with precast.disable():
                torch.tanh(x)
    reasons = {row.op: row.reason for row in trace.rows}
    assert reasons["relu"] == "not in a region"
    assert reasons["sigmoid"].startswith("no row for sigmoid on cpu in the policy 'default'")
    assert reasons["tanh"].startswith(
        "autocast is off in the region at tests/diagnostics/tracing/test_trace.py:"
    )


def test_rules_for_modules_are_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    policy = precast.Policy.load("default").replace(modules={"0": "fp32", "1": "float16"})
    with precast.attach(model, policy), precast.trace() as trace, precast.autocast("cpu"):
        model(torch.ones(2, 4))
    by_module = {row.module: row for row in trace.rows if row.op in ("linear", "addmm")}
    assert by_module["0"].reason == "autocast is off here ([modules] 0 = fp32)"
    assert (by_module["1"].module_rule, by_module["1"].output) == ("1 = float16", ["float16"])
    assert by_module["2"].module_rule is None


def test_modules_are_called_as_in_the_model_or_by_the_class_of_the_outermost() -> None:
    model = Transformer()
    tokens = torch.randint(11, (2, 5))
    with precast.trace(model) as named, precast.trace() as unnamed, precast.autocast("cpu"):
        model(tokens)
    assert rows_of(named, "embedding")[0].module == "embed"
    assert rows_of(unnamed, "embedding")[0].module == "Transformer.embed"
    assert ("blocks.0", "Block") in [(m.name, m.type) for m in named.modules]


def test_two_models_of_one_class_are_told_apart() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with precast.trace() as trace:
        first(torch.ones(1, 2))
        second(torch.ones(1, 2))
    assert {row.module for row in rows_of(trace, "addmm")} == {"Linear", "Linear 2"}


def test_regions_of_pytorch_alone_are_traced_as_the_policy_torch() -> None:
    layer = nn.Linear(4, 4)
    with precast.trace() as trace, torch.autocast("cpu"):
        layer(torch.ones(2, 4))
        F.mse_loss(layer(torch.ones(2, 4)), torch.ones(2, 4))
    [linear, *_], [loss] = rows_of(trace, "linear"), rows_of(trace, "mse_loss")
    assert (linear.rule, loss.rule, loss.casts) == ("lower", "fp32", 1)
    assert "policy 'torch'" in linear.reason
    assert sum(row.cached for row in rows_of(trace, "linear")) == 2


def test_a_region_that_is_open_when_the_trace_begins() -> None:
    layer = nn.Linear(4, 4)
    with precast.autocast("cpu"):
        layer(torch.ones(2, 4))
        with precast.trace() as trace:
            layer(torch.ones(2, 4))
            F.mse_loss(torch.ones(2), torch.ones(2))
    [row] = rows_of(trace, "linear")
    assert (row.region, row.casts, row.cached) == ("opened before the trace", 1, 2)
    assert len(rows_of(trace, "mse_loss")) == 1


def test_installed_policies_are_seen() -> None:
    policy = precast.Policy.load("default").replace(name="mine", ops={"relu": "fp32"})
    with precast.install(policy), precast.trace() as trace, torch.autocast("cpu"):
        torch.relu(torch.ones(2).bfloat16())
    [row] = rows_of(trace, "relu")
    assert (row.rule, row.output, row.casts) == ("fp32", ["float32"], 1)
    assert "policy 'mine'" in row.reason


def test_what_is_kept_for_backward_is_counted_by_dtype() -> None:
    x = torch.ones(8, 16)
    layer = nn.Linear(16, 32)
    with precast.trace() as trace:
        with precast.autocast("cpu"):
            y = torch.sigmoid(layer(x))
        y.float().sum().backward()
    output, cast_input = (
        2 * (8 * 32),
        2 * (8 * 16),
    )  # the weight is saved only for an input's gradient
    assert trace.saved["bfloat16"] == output + cast_input


# --- it changes nothing ---


def _state() -> tuple[object, ...]:
    return (
        _torch.dispatch_modes(),
        torch.autocast_increment_nesting,
        torch.autocast_decrement_nesting,
        torch.set_autocast_enabled,
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        has_python_kernel("mse_loss"),
        {key: entry.__code__ for key, entry in registration._registered.items()},
    )


def has_python_kernel(op: str) -> bool:
    return "Python" in torch._C._dispatch_dump(f"aten::{op}") and "engine.py" in (
        torch._C._dispatch_dump_table(f"aten::{op}")
    )


@pytest.mark.parametrize("full", [True, False])
def test_nothing_is_left_behind(full: bool) -> None:
    _, step = training(policy="torch")
    step()
    before = _state()
    with precast.trace(full=full):
        step()
        assert _state() != before
    assert _state() == before
    with (
        pytest.raises(ZeroDivisionError),
        precast.trace(full=full),
        precast.autocast("cpu", policy="torch"),
    ):
        _ = 1 / 0
    assert _state() == before
    assert not call_sites._regions.open


def test_an_operation_that_fails_leaves_nothing_behind() -> None:
    with precast.trace() as trace, precast.autocast("cpu"):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(torch.ones(2, 3), torch.ones(4, 5))
        F.linear(torch.ones(2, 3), torch.ones(4, 3))
    rows = {tuple(row.output): (row.calls, row.casts) for row in rows_of(trace, "linear")}
    assert rows == {(): (1, 2), ("bfloat16",): (1, 2)}
    assert not trace._recorder._applications


def test_traces_nest_and_a_trace_is_entered_again() -> None:
    layer = nn.Linear(4, 4)
    outer, inner = precast.trace(), precast.trace()
    with outer, precast.autocast("cpu"):
        layer(torch.ones(2, 4))
        with inner, inner:
            layer(torch.ones(2, 4))
        layer(torch.ones(2, 4))
        with inner:
            layer(torch.ones(2, 4))
    assert sum(row.calls for row in rows_of(outer, "linear")) == 4
    assert sum(row.calls for row in rows_of(inner, "linear")) == 2


def test_traces_that_end_out_of_order() -> None:
    first, second = precast.trace(), precast.trace()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.relu(torch.ones(2))
    second.__exit__(None, None, None)
    assert _torch.dispatch_modes() == 0
    assert not rows_of(first, "relu", "other")
    assert len(rows_of(second, "relu", "other")) == 1


def test_a_trace_sees_its_own_thread() -> None:
    layer = nn.Linear(4, 4)

    def work() -> None:
        with precast.autocast("cpu"):
            layer(torch.ones(2, 4))
        with pytest.raises(PrecastError, match="open in another thread"):
            trace.__enter__()

    with precast.trace() as trace:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert trace.totals.calls == 0


def test_a_policy_that_comes_to_need_an_operation_keeps_it() -> None:
    policy = precast.Policy.load("torch").replace(ops={"mse_loss": "keep", "relu": "fp32"})
    low = torch.ones(2).bfloat16()
    for _ in range(2):
        with precast.trace(), precast.autocast("cpu", policy=policy):
            assert F.mse_loss(low, low).dtype is torch.bfloat16
        with precast.autocast("cpu", policy=policy):
            assert F.mse_loss(low, low).dtype is torch.bfloat16
            assert torch.relu(low).dtype is torch.float32
        with Casts() as casts, precast.autocast("cpu", policy=policy):
            assert F.mse_loss(low, low).dtype is torch.bfloat16
        assert casts.number == 0


def test_memory_does_not_grow_with_steps() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def sizes() -> tuple[int, ...]:
        recorder = trace._recorder
        gc.collect()
        return (
            len(recorder.tally.rows), len(recorder.lineage), len(recorder._nodes),
            len(trace._counts),
        )  # fmt: skip

    def steps(count: int) -> None:
        for _ in range(count):
            with precast.autocast("cpu"):
                y = layer(torch.ones(2, 4))
            y.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with precast.trace() as trace:
        steps(3)
        before = sizes()
        steps(200)
        assert sizes() == before


def test_too_many_kinds_of_rows_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precast.diagnostics.tracing.tally.MOST_ROWS", 2)
    x = torch.ones(2)
    with precast.trace() as trace:
        for op in (torch.relu, torch.sigmoid, torch.tanh, torch.exp):
            op(x)
    assert (len(trace.rows), trace.dropped, trace.totals.calls) == (2, 2, 4)


# --- counting mode ---


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize("opened_by", [precast.autocast, torch.autocast])
@pytest.mark.parametrize("held", [True, False])
def test_counting_counts_what_the_full_trace_counts(opened_by: Any, held: bool) -> None:
    def count(full: bool) -> dict[tuple[str, str, str], tuple[int, int]]:
        torch.manual_seed(0)
        model = Transformer()
        tokens = torch.randint(11, (2, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ExitStack() as stack:
            if held:
                stack.enter_context(precast.attach(model))
            trace = stack.enter_context(precast.trace(full=full))
            for _ in range(2):
                with opened_by("cpu"):
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                    model(tokens)
                loss.backward()
                optimizer.step()
            with torch.no_grad(), opened_by("cpu"):
                model(tokens)
        return {(c.op, c.device_type, c.rule): (c.calls, c.casts) for c in trace.counts}

    assert count(full=False) == count(full=True)


def test_a_trace_is_paused_and_resumed() -> None:
    layer = nn.Linear(4, 4)
    with precast.trace(full=False) as trace:
        for step in range(5):
            if step == 2:
                trace.resume()
            elif step == 4:
                trace.pause()
            with precast.autocast("cpu"):
                layer(torch.ones(2, 4))
    [row] = rows_of(trace, "linear")
    [count] = trace.counts
    assert (row.calls, count.calls, count.casts) == (2, 5, 15)
    assert not trace.full


# --- explain, save, diff ---


def test_explain_names_the_rule_that_gave_a_tensor_its_dtype() -> None:
    layer = nn.Linear(4, 4)
    with precast.trace() as trace, precast.autocast("cpu"):
        y = torch.relu(layer(torch.ones(2, 4))).reshape(-1)
        z = y.float() * 2
    explained = trace.explain(y)
    assert explained.dtype == "bfloat16"
    assert [step.op for step in explained.steps] == ["relu", "linear"]
    assert explained.steps[-1].rule == "lower"
    assert "linear (float32, float32, float32 -> bfloat16) in Linear" in str(explained)
    assert [step.op for step in trace.explain(z).steps] == ["mul.Tensor", "_to_copy"]
    assert "not created while" in str(trace.explain(torch.ones(2)))


def test_explain_follows_gradients() -> None:
    layer = nn.Linear(4, 4)
    for op in ("_to_copy", "add_.Tensor"):  # the first is the gradient, the next is added to it
        with precast.trace(layer) as trace, precast.autocast("cpu"):
            layer(torch.randn(2, 4)).sum().backward()
        assert layer.weight.grad is not None
        explained = trace.explain(layer.weight.grad)
        assert explained.steps[0].op == op
        assert "_to_copy (bfloat16 -> float32)" in str(explained)
        assert "backward of linear" in str(explained)


def test_explain_says_what_it_does_not_follow() -> None:
    with precast.trace() as trace:
        place = torch.randn(4).argmax()
    assert str(trace.explain(place)) == "int64: only floating-point tensors are followed"
    with pytest.raises(PrecastError, match=r"explain\(tensor\): .* got int"):
        trace.explain(3)  # type: ignore[arg-type]


def test_code_that_was_traced_ends_with_its_function() -> None:
    namespace: dict[str, Any] = {"torch": torch}
    program = "def made():\n    return torch.ones(2) @ torch.ones(2)"
    exec(compile(program, "made.py", "exec"), namespace)  # as `torch.compile` makes code
    code = weakref.ref(namespace["made"].__code__)
    with precast.trace() as traced:
        namespace["made"]()
    assert any(" in made" in str(row.source) for row in traced.rows)
    del namespace["made"]
    gc.collect()
    assert code() is None


def test_explain_stays_short_and_keeps_nothing_alive() -> None:
    with precast.trace() as trace:
        x = torch.ones(2)
        for _ in range(500):
            x = x + 1
        assert 0 < len(trace.explain(x).steps) <= 128
        assert len(trace._recorder.lineage) <= 2


def test_a_trace_is_saved_and_loaded(tmp_path: Path) -> None:
    _, step = training()
    with precast.trace() as trace:
        step()
    trace.save(tmp_path / "trace.json")
    loaded = precast.Trace.load(tmp_path / "trace.json")
    assert loaded.to_dict() == trace.to_dict()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PrecastError, match="no trace of schema 1"):
        precast.Trace.load(tmp_path / "other.json")
    with pytest.raises(PrecastError, match="cannot read a trace"):
        precast.Trace.load(tmp_path / "missing.json")


def test_diff_says_what_another_policy_changes() -> None:
    low = torch.ones(2, 2).bfloat16()
    traces = []
    for rule in ("keep", "fp32"):
        policy = precast.Policy.load("default").replace(ops={"relu": rule})
        with precast.trace() as trace, precast.autocast("cpu", policy=policy):
            torch.relu(low)
            torch.mm(low, low)
        traces.append(trace)
    difference = traces[0].diff(traces[1])
    [changed] = difference.rows
    assert (changed.op, changed.before.rule, changed.after.rule) == ("relu", "keep", "fp32")
    assert difference.totals.casts == 1
    assert not traces[0].diff(traces[0]).rows


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(PrecastError, match=r"trace\(model\): .* got str"):
        precast.trace("model")  # type: ignore[arg-type]
