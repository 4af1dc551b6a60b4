"""Module rules: which module follows which, what then runs in what precision, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.checkpoint import checkpoint

import precast
from precast import Policy, _torch
from precast.attachment.module_hooks import AppliedPlan, apply
from precast.errors import PolicyError, RegionError
from precast.policy.module_plan import plan
from precast.weights import held

TORCH = Policy.load("torch")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32

Rules = Mapping[str, object]
Region = Callable[[], AbstractContextManager[Any]]


class Layer(nn.Module):
    """A linear layer that notes what came in, what it computed in, and in which region."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result = F.linear(x, self.weight)
        self.seen.append((x.dtype, result.dtype))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(), Layer())
        self.head = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def seen(model: nn.Module) -> list[tuple[torch.dtype, torch.dtype]]:
    """What each layer saw last, in order; forgotten when asked."""
    found = [pair for layer in layers(model) for pair in layer.seen[-1:]]
    for layer in layers(model):
        layer.seen.clear()
    return found


def ruled(model: nn.Module, rules: Rules, policy: Policy = TORCH) -> AppliedPlan:
    return apply(model, plan(model, policy.replace(modules=rules)))


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))

REGIONS: dict[str, Region] = {
    "precast": lambda: precast.autocast("cpu"),
    "policy torch": lambda: precast.autocast("cpu", policy="torch"),
    "torch": lambda: torch.autocast("cpu"),
}


@pytest.fixture(params=REGIONS)
def region(request: pytest.FixtureRequest) -> Region:
    return REGIONS[request.param]


def test_no_rule_no_hook(region: Region) -> None:
    model = net()
    ruled(model, {"*.nothing": "fp32", "head": "keep"})
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


# rules -> for each layer the dtype of its input and of its result
PRECISIONS: dict[str, tuple[Rules, list[tuple[torch.dtype, torch.dtype]]]] = {
    "float32 for the last": ({"head": "fp32"}, [(FULL, BRAIN), (BRAIN, BRAIN), (FULL, FULL)]),
    "a dtype of its own": (
        {"encoder": "float16"},
        [(HALF, HALF), (HALF, HALF), (HALF, BRAIN)],
    ),
    "everything in it": (
        {"encoder.**": "fp32"},
        [(FULL, FULL), (FULL, FULL), (FULL, BRAIN)],
    ),
    "the region's dtype": ({"encoder": "lower"}, [(BRAIN, BRAIN)] * 3),
    "the model itself": ({"": "fp32"}, [(FULL, FULL)] * 3),
    "on again inside": (
        {"": "fp32", "encoder.0": "lower"},
        [(BRAIN, BRAIN), (FULL, FULL), (FULL, FULL)],
    ),
    "from outer to inner": (
        {"": "float16", "encoder": "fp32", "encoder.1": "lower"},
        [(FULL, FULL), (HALF, HALF), (FULL, HALF)],
    ),
    "an exception that is exact": (
        {"**": "fp32", "encoder.1": "keep"},
        [(FULL, FULL)] * 3,
    ),
    "an exception among siblings": (
        {"encoder.*": "fp32", "encoder.0": "keep"},
        [(FULL, BRAIN), (FULL, FULL), (FULL, BRAIN)],
    ),
    "rows for operations": (
        {"encoder": {"ops": {"linear": "fp32"}}},
        [(FULL, FULL), (FULL, FULL), (FULL, BRAIN)],
    ),
    "rows and a dtype": (
        {"encoder": {"dtype": "float16", "ops": {"linear": "fp32"}}, "encoder.1": "bfloat16"},
        [(HALF, FULL), (BRAIN, FULL), (FULL, BRAIN)],
    ),
    "rows laid over rows": (
        {"encoder": {"ops": {"linear": "fp32"}}, "encoder.1": {"ops": {"linear": "lower"}}},
        [(FULL, FULL), (FULL, BRAIN), (BRAIN, BRAIN)],
    ),
    "rows that wait where autocast is off": (
        {"": {"ops": {"linear": "fp32"}}, "encoder": "fp32", "encoder.1": "lower"},
        [(FULL, FULL), (BRAIN, FULL), (FULL, FULL)],
    ),
}


@pytest.mark.parametrize(("rules", "expected"), PRECISIONS.values(), ids=PRECISIONS.keys())
def test_inputs_and_operations_follow_the_rule(
    rules: Rules, expected: list[tuple[torch.dtype, torch.dtype]], region: Region
) -> None:
    model = net()
    applied = ruled(model, rules)
    with region():
        result = model(X)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BRAIN
    assert seen(model) == expected
    assert (result.float() - model(X)).abs().max() < 0.1  # NaN is not
    assert seen(model) == [(FULL, FULL)] * 3, "outside a region nothing changes"
    applied.remove()
    with region():
        model(X)
    assert seen(model) == [(FULL, BRAIN), (BRAIN, BRAIN), (BRAIN, BRAIN)]


COMPILED = (
    "float32 for the last",
    "from outer to inner",
    "on again inside",
    "rows and a dtype",
    "rows that wait where autocast is off",
)


# PyTorch silences this warning of its own, which here is an error before it is.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("around", ["precast", "torch"])
def test_a_compiled_model_gives_the_same_bits(
    name: str, around: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(call: Any, model: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        with REGIONS[around]():
            result = call(x)
        if backend != "eager":  # PyTorch traces backward with the casts of the region around
            return [result]
        gradients = torch.autograd.grad(result.float().square().sum(), [x, *model.parameters()])
        return [result, *gradients]

    model = net()
    ruled(model, PRECISIONS[name][0])
    plain = run(model, model)
    monkeypatch.setattr(Layer, "forward", lambda self, x: F.linear(x, self.weight))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert all(map(torch.equal, run(compiled, model), plain))
    assert torch.equal(compiled(X), model(X)), "outside a region"
    assert not any(t.isnan().any() for t in plain)


def test_a_compiled_model_has_the_gradients_of_regions_written_by_hand(region: Region) -> None:
    class ByHand(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            with torch.autocast("cpu", enabled=False):
                return self[1](x.float())

    def gradients(model: nn.Module) -> list[Tensor]:
        with region():
            loss = torch.compile(model, backend="aot_eager")(X).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    torch.manual_seed(3)
    by_hand = ByHand(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(*copy.deepcopy(by_hand))
    ruled(model, {"1": "fp32"})
    assert all(map(torch.equal, gradients(model), gradients(by_hand)))


def by_hand(
    module: nn.Module, x: Tensor, rules: Rules, name: str = "", off: bool = False
) -> Tensor:
    """What exact rules mean, written as regions around calls; `off` says that a rule switched autocast off around."""

    def inside(x: Tensor, off: bool) -> Tensor:
        if isinstance(module, Layer):
            return F.gelu(F.linear(x, module.weight))
        for child, part in module.named_children():
            x = by_hand(part, x, rules, f"{name}.{child}" if name else child, off)
        return x

    rule = rules.get(name, "keep")
    if rule == "keep":
        return inside(x, off)
    if rule == "fp32":
        with torch.autocast("cpu", enabled=False):
            return inside(x.float(), True)
    named = {"float16": HALF, "bfloat16": BRAIN}
    dtype = named.get(str(rule), torch.get_autocast_dtype("cpu"))
    with torch.autocast("cpu", dtype):
        result = inside(x.to(dtype), False)
    return result.float() if off else result


class Gelu(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight))


trees = st.recursive(
    st.builds(Gelu), lambda parts: st.lists(parts, max_size=3).map(lambda p: nn.Sequential(*p))
)


@settings(max_examples=60)
@given(st.data(), trees, st.sampled_from(sorted(REGIONS)))
def test_rules_are_regions_written_by_hand(
    data: st.DataObject, tree: nn.Module, around: str
) -> None:
    model = nn.Sequential(tree, Gelu())
    names = [name for name, _ in model.named_modules()]
    values = st.sampled_from(["fp32", "float16", "bfloat16", "lower", "keep"])
    rules = data.draw(st.dictionaries(st.sampled_from(names), values))
    ruled(model, rules)
    results = []
    for call in (model, lambda x: by_hand(model, x, rules)):
        x = X.clone().requires_grad_()
        with REGIONS[around]():
            result = call(x)
            assert _state()[:2] == (True, BRAIN)
        gradients = torch.autograd.grad(result.float().sum(), [x, *model.parameters()])
        results.append([result, *gradients])
    assert all(map(torch.equal, *results))
    assert all(a.dtype is b.dtype for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", PRECISIONS)
def test_held_weights_do_not_change_what_rules_compute(name: str) -> None:
    def steps(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(2):
            with precast.autocast("cpu"):
                found.append(model(X))
            gradients = torch.autograd.grad(found[-1].float().sum(), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient)
        return found

    held, plain = net(), net()
    attachment = precast.attach(held)
    for model in (held, plain):
        ruled(model, PRECISIONS[name][0])
    assert all(map(torch.equal, steps(held), steps(plain)))
    attachment.detach()


def test_where_the_program_switches_autocast_off_it_stays_off(region: Region) -> None:
    model = net()
    ruled(model, {"": "fp32", "encoder.**": "lower"})

    class Island(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    model.encoder.__class__ = Island
    with region():
        model(X)
        assert seen(model) == [(FULL, FULL)] * 3
        with precast.disable():
            model(X)
        assert seen(model) == [(FULL, FULL)] * 3


def test_a_region_that_the_program_opens_inside_is_followed(region: Region) -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", HALF):
                return super().forward(x).float()

    model = net()
    model.encoder.__class__ = Own
    ruled(model, {"": "fp32", "encoder.1": "bfloat16"})
    with region():
        model(X)
    assert seen(model) == [(FULL, HALF), (BRAIN, BRAIN), (FULL, FULL)]


def test_inputs_are_cast_in_containers_and_by_keyword(region: Region) -> None:
    got: dict[str, Any] = {}

    class Takes(nn.Module):
        def forward(self, pair: Any, *, extra: Any, count: int, exact: Tensor) -> Tensor:
            got.update(pair=pair, extra=extra, count=count, exact=exact)
            return pair[0]

    model = nn.Sequential(Takes())
    ruled(model, {"0": "float16"})
    exact, whole = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    given = ([X], {"a": (X, whole)})
    with region():
        result = model[0](given[0], extra=given[1], count=3, exact=exact)
    assert (got["pair"][0].dtype, got["extra"]["a"][0].dtype) == (HALF, HALF)
    assert got["extra"]["a"][1] is whole
    assert got["exact"] is exact
    assert given[0][0] is X, "the caller's container is not written to"
    assert result.dtype is HALF, "results stay as they are"


def test_gradients_reach_what_came_before_in_its_own_dtype(region: Region) -> None:
    model = net()
    ruled(model, {"head": "fp32"})
    x = X.clone().requires_grad_()
    with region():
        loss = model(x).square().sum()
    loss.backward()
    assert x.grad is not None
    with region():
        hidden = model.encoder(X)
    by_hand = F.linear(hidden.float(), model.head.weight).square().sum()
    assert torch.equal(loss, by_hand)
    assert all(p.grad is not None and p.grad.dtype is FULL for p in model.parameters())


# --- calls ---


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return self.layer(x)


def test_a_module_may_call_itself(region: Region) -> None:
    model = Recursive()
    ruled(model, {"": "float16"})
    with region():
        model(X, 3)
        assert model.layer.seen == [(HALF, HALF)] * 4
        assert torch.get_autocast_dtype("cpu") is BRAIN


@pytest.mark.parametrize("rule", ["fp32", "float16", {"ops": {"linear": "fp32"}}], ids=str)
def test_an_exception_restores_what_was_there(rule: object, region: Region) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(Layer(), nn.Sequential(Fails()))
    ruled(model, {"1": rule, "1.0": "lower"})
    with region():
        before = _state()
        with pytest.raises(ZeroDivisionError):
            model(X)
        assert _state() == before


@pytest.mark.parametrize("rule", ["fp32", "float16", {"ops": {"linear": "fp32"}}], ids=str)
def test_an_interrupted_call_changes_no_later_one(rule: object, region: Region) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # PyTorch then calls no hook

    model = net()
    ruled(model, {"": rule, "head": "lower"})
    hook = model.encoder.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), region():
        model(X)
    hook.remove()
    assert _state()[:2] == (False, BRAIN)
    assert not precast.engine.thread_state.regions.records
    with torch.autocast("cpu", enabled=False):
        model(X)
        assert seen(model) == [(FULL, FULL)] * 3
    with region():
        before = _state()
        model(X)
        assert _state() == before
    assert _torch.optimizes_torchscript()


@pytest.mark.parametrize("then", ["nothing", "detached", "detached in the region"])
def test_an_interrupted_call_leaves_its_policy_in_no_later_region(then: str) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    attachment = precast.attach(model, Policy.load("torch").replace(ops={"mm": "fp32"}))
    handle = model.register_forward_pre_hook(stop)
    with torch.autocast("cpu"):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        if then == "detached in the region":
            attachment.detach()
            assert torch.mm(x, x.t()).dtype is torch.bfloat16
    handle.remove()
    if then == "detached":
        attachment.detach()
    with torch.autocast("cpu"):
        assert torch.mm(x, x.t()).dtype is torch.bfloat16
    attachment.detach()


def test_a_hook_that_fails_before_ours_changes_nothing(region: Region) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model = net()
    ruled(model, {"": "fp32", "head": "float16"})
    model.head.register_forward_pre_hook(fail, prepend=True)
    with region():
        before = _state()
        with pytest.raises(ZeroDivisionError):
            model(X)
        assert _state() == before


def _state() -> tuple[object, ...]:
    frame = precast.engine.thread_state.thread_state("cpu").state.bound_policy
    records = len(precast.engine.thread_state.regions.records)
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), frame, records


def test_other_hooks_run_inside_the_rule(region: Region) -> None:
    states = []
    model = net()
    model.head.register_forward_pre_hook(lambda *_: states.append(_state()[0]))
    model.head.register_forward_hook(lambda *_: states.append(_state()[0]))
    ruled(model, {"head": "fp32"})
    with region():
        model(X)
    assert states == [False, False]


def test_threads_do_not_see_each_others_calls(region: Region) -> None:
    model = net()
    inside, done = threading.Barrier(2), []

    def wait(*_: object) -> None:
        inside.wait(60)

    ruled(model, {"": "fp32", "head": "float16"})
    model.encoder.register_forward_hook(wait)
    model.head.register_forward_hook(wait)

    def run() -> None:
        with region():
            done.append(model(X).dtype)
            done.append(torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, done)) == ["True", "True", "torch.float32", "torch.float32"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("what", ["model", "layers"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_what_a_checkpoint_runs_again_follows_the_same_rules(
    name: str, what: str, reentrant: bool, region: Region
) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def gradients(model: nn.Module, call: Any) -> list[Tensor]:
        ruled(model, PRECISIONS[name][0])
        x = X.clone().requires_grad_()
        with region():
            loss = call(x).float().square().sum()
        loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    model, plain = net(), net()
    if what == "layers":
        model.encoder.__class__ = Checkpointed
        call: Any = model
    else:
        call = lambda x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    assert all(map(torch.equal, gradients(model, call), gradients(plain, plain)))
    assert all(layer.runs == 2 for layer in layers(model.encoder)), "it has run again"
    assert seen(model) == seen(plain)


# --- models ---


@pytest.mark.parametrize("policy", [{"modules": {"1": "fp32"}}, {"ops": {"linear": "fp32"}}])
def test_a_plan_that_ends_while_another_thread_is_in_the_model(policy: dict[str, Any]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    inside, go = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert go.wait(30)

    def work() -> None:
        with torch.autocast("cpu"):
            model(x)
            found.append(model[1](x).dtype)
        with torch.autocast("cpu"):
            found.append(model[1](x).dtype)

    found: list[torch.dtype] = []
    handle = model[1].register_forward_hook(wait)
    attachment = precast.attach(model, Policy.load("torch").replace(**policy))
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    attachment.detach()
    handle.remove()
    go.set()
    thread.join()
    assert found == [torch.bfloat16] * 2
    precast.attach(model, "torch").detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "register", [register_module_forward_pre_hook, register_module_forward_hook]
)
def test_a_plan_that_ends_while_hooks_are_called(register: Any) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    attachment = precast.attach(model, Policy.load("torch").replace(modules={"": "fp32"}))
    handle = register(lambda *_: attachment.detach())  # before those of the module
    try:
        with torch.autocast("cpu"):
            model(x)
            assert model(x).dtype is torch.bfloat16
    finally:
        handle.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_copies_follow_the_same_rules_until_they_get_others(region: Region) -> None:
    model = net()
    applied = ruled(model, {"head": "fp32"})
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    applied.remove()
    for each in copies:
        with region():
            each(X)
        assert seen(each)[2] == (FULL, FULL)
        again = ruled(each, {"encoder": "fp32"})
        with region():
            each(X)
        assert seen(each) == [(FULL, FULL), (FULL, FULL), (FULL, BRAIN)]
        again.remove()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in each.modules())


def test_a_module_follows_one_plan_at_a_time() -> None:
    model = net()
    first = ruled(model, {"head": "fp32"})
    with pytest.raises(PolicyError, match="'head' already follows a rule of another attachment"):
        ruled(model, {"encoder": "fp32", "*": "fp32"})
    assert not model.encoder._forward_pre_hooks
    first.remove()
    first.remove()
    ruled(model, {"*": "fp32"}).remove()


def test_a_plan_that_ends_leaves_no_trace() -> None:
    model = net()
    kept = model.head.register_forward_hook(lambda *_: None)
    before = [copy.deepcopy({**vars(m), "_modules": None}) for m in model.modules()]
    ruled(model, {"**": "float16"}).remove()
    for was, module in zip(before, model.modules(), strict=True):
        assert was.keys() == vars(module).keys()
        hooks = [name for name in was if "hook" in name]
        assert [was[name] for name in hooks] == [vars(module)[name] for name in hooks]
    kept.remove()


def test_names_see_through_wrappers() -> None:
    model = nn.Sequential(torch.compile(net(), backend="eager"))
    found = plan(model, TORCH.replace(modules={"0.head": "fp32", "*._orig_mod": "fp32"}))
    assert [m.name for m in found.modules if m.applied_rule] == ["0.head"]
    assert found.unmatched == ("*._orig_mod",)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rules_come_to_a_model_that_was_compiled_before(region: Region, backend: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(model, backend=backend)
    with region():
        assert compiled(X).dtype is BRAIN
        applied = ruled(compiled, {"1": "fp32"})
        assert compiled(X).dtype is FULL
        applied.remove()
        assert compiled(X).dtype is BRAIN


def test_a_graph_that_breaks_inside_a_module(region: Region) -> None:
    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Breaks(4, 4), nn.Linear(4, 4))
    ruled(model, {"1": "fp32"})
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), region():
        before = _state()
        assert torch.equal(compiled(X), model(X))
        assert _state() == before


def test_a_model_may_go_while_another_function_is_compiled() -> None:
    """The collector may come at any time, and PyTorch drops no compiled code in the middle of a compilation."""
    models = [nn.Sequential(nn.Linear(4, 4))]
    attachment = precast.attach(models[0], TORCH.replace(modules={"0": "fp32"}))

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        models.clear()
        gc.collect()
        return graph.forward

    compiled = torch.compile(lambda x: torch.sin(x) * 2, backend=backend)
    assert torch.equal(compiled(X), torch.sin(X) * 2)
    assert not models
    assert attachment not in held.attached


def test_a_model_may_go_while_the_compiler_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of an optimizer loads it, and a module that is being loaded has no attributes yet."""
    model = nn.Sequential(nn.Linear(4, 4))
    attachment = precast.attach(model, TORCH.replace(modules={"0": "fp32"}))
    half = types.ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", half)
    monkeypatch.setattr(torch, "_dynamo", half, raising=False)
    attachment.detach()
    assert attachment not in held.attached


@pytest.mark.parametrize("first", ["rule", "program"])
def test_a_compiled_part_knows_who_switched_autocast_off(first: str, region: Region) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))

        def forward(self, x: Tensor) -> Tensor:
            return compiled(x)

    model = Outer()
    compiled = torch.compile(model.part, backend="eager")
    ruled(model, {"": "fp32", "part.0": "lower"})
    exact = model.part(X)

    def by_rule() -> None:
        with torch.no_grad(), region():
            assert not torch.equal(model(X), exact), "rounded: on again by the inner rule"

    def by_program() -> None:
        with torch.no_grad(), region(), torch.autocast("cpu", enabled=False):
            assert torch.equal(compiled(X), exact)

    for run in [by_rule, by_program][:: 1 if first == "rule" else -1] * 2:
        run()


def test_an_exported_program_follows_the_rules(region: Region) -> None:
    class InRegion(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with region():
                return super().forward(x)

    model = InRegion(nn.Linear(4, 4), nn.Linear(4, 4))
    ruled(model, {"1": "fp32"})
    if region is REGIONS["precast"]:  # whose policy no exported program can say
        with pytest.raises(RegionError, match="cannot record a region"):
            torch.export.export(model, (X,))
        return
    program = torch.export.export(model, (X,)).module()
    assert torch.equal(program(X), model(X))
    assert program(X).dtype is FULL


def test_rows_that_an_exported_program_cannot_say_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    ruled(model, {"0": {"ops": {"linear": "fp32"}}})
    with torch.autocast("cpu"), pytest.raises(RegionError, match="cannot record a region"):
        torch.export.export(model, (X,))


def scripted() -> torch.jit.ScriptModule:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_a_scripted_module_follows_a_rule_as_a_whole(region: Region) -> None:
    model = nn.Sequential(scripted(), nn.Linear(4, 4))

    def unscripted(x: Tensor) -> Tensor:
        with precast.disable():
            for layer in model[0].children():
                x = F.linear(x, layer.weight, layer.bias)
        return x

    for _ in range(3):
        with region():
            assert model(X).dtype is BRAIN
    applied = ruled(model, {"0": "fp32"})
    for _ in range(3):
        with region():
            assert torch.equal(model[0](X.to(BRAIN)), unscripted(X.to(BRAIN).float()))
    applied.remove()
    with region():
        assert model[0](X).dtype is BRAIN


def test_rows_reach_the_operations_of_a_scripted_module(region: Region) -> None:
    # Not a kind of module that ran under PyTorch's policy before: TorchScript keeps its casts, a known limit.
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4, bias=False))))
    ruled(model, {"0": {"ops": {"linear": "fp32"}}})
    [layer] = model[0].children()
    exact = F.linear(X, layer.weight)
    for _ in range(3):
        with region():
            assert torch.equal(model(X), exact)


def test_a_rule_for_a_part_of_a_scripted_module_is_refused() -> None:
    model = nn.Sequential(scripted())
    with pytest.raises(PolicyError, match=r"'0\.1' is scripted as a part of '0'"):
        plan(model, TORCH.replace(modules={"0.1": "fp32"}))
    found = plan(model, TORCH.replace(modules={"0.**": "fp32"}))
    assert [m.name for m in found.modules if m.applied_rule] == ["0"]


# --- plans ---


def test_two_globs_that_disagree_are_an_error_that_names_both() -> None:
    rules = {"encoder.*": "fp32", "**.1": "float16", "*": "lower"}
    with pytest.raises(
        PolicyError, match=r"'encoder\.\*' says fp32, '\*\*\.1' says float16.*'encoder\.1'"
    ):
        plan(net(), TORCH.replace(modules=rules))
    plan(net(), TORCH.replace(modules=rules | {"encoder.1": "keep"}))
    plan(net(), TORCH.replace(modules=rules | {"**.1": {"dtype": "fp32", "reason": "so"}}))


def test_a_module_with_two_names_follows_one_rule() -> None:
    model = net()
    model.alias = model.head
    for rules in ({"head": "fp32"}, {"alias": "fp32"}, {"alias": "fp32", "head": "fp32"}):
        found = plan(model, TORCH.replace(modules=rules))
        assert [m.name for m in found.modules if m.applied_rule] == ["head", "alias"]
        applied = ruled(model, rules)
        assert len(model.head._forward_pre_hooks) == 1
        applied.remove()
    with pytest.raises(PolicyError, match=r"'head' and 'alias' are one module.*fp32.*float16"):
        plan(model, TORCH.replace(modules={"head": "fp32", "alias": "float16"}))


class Listed(nn.Module):
    """Layers in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"layers": "fp32"}, [(FULL, FULL)] * 3),
        (
            {"layers": "fp32", "layers.1": "lower", "layers.2": "keep"},
            [(FULL, FULL), (BRAIN, BRAIN), (FULL, FULL)],
        ),
        (
            {"layers": "float16", "layers.0": "lower", "layers.1": "bfloat16", "layers.2": "fp32"},
            [(HALF, HALF), (BRAIN, BRAIN), (FULL, FULL)],
        ),
        (
            {"layers": {"ops": {"linear": "fp32"}}, "layers.0": "float16", "layers.2": "bfloat16"},
            [(HALF, FULL), (FULL, FULL), (BRAIN, FULL)],
        ),
    ],
)
def test_a_list_hands_its_rule_to_what_is_in_it(
    rules: Rules, expected: list[tuple[torch.dtype, torch.dtype]], region: Region
) -> None:
    torch.manual_seed(3)
    model = Listed()
    applied = ruled(model, rules)
    with region():
        model(X)
    assert seen(model) == expected
    precisions = {FULL: "fp32", BRAIN: "bfloat16", HALF: "float16"}
    for index, (_, computed) in enumerate(expected):
        inside = applied.plan.inside(f"layers.{index}")
        if not inside.ops:
            assert inside.precision in (precisions[computed], "lower")


def test_a_module_in_two_lists_follows_one_rule() -> None:
    layer = Layer()
    model = nn.ModuleDict({"a": nn.ModuleList([layer]), "b": nn.ModuleList([layer])})
    found = plan(model, TORCH.replace(modules={"a": "fp32"}))
    assert [m.name for m in found.modules if m.applied_rule] == ["a.0"]
    with pytest.raises(PolicyError, match=r"'a\.0' and 'b\.0' are one module.*fp32.*lower"):
        plan(model, TORCH.replace(modules={"a": "fp32", "b": "lower"}))


def test_a_rule_for_what_is_never_called_is_told() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    [complaint] = plan(model, TORCH.replace(modules={"**.out_proj": "fp32"})).complaints()
    assert "'**.out_proj' does nothing for '0.out_proj'" in complaint
    assert plan(model, TORCH.replace(modules={"0.**": "fp32"})).complaints() == []


def test_patterns_that_match_nothing_are_told() -> None:
    found = plan(
        net(), TORCH.replace(modules={"encodr": "fp32", "encoder.**": "fp32", "x.*": "fp32"})
    )
    assert found.unmatched == ("encodr", "x.*")
    assert "did you mean encoder" in found.complaints()[0]


def test_a_dtype_that_the_device_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    ruled(model, {"head": "float16"})
    monkeypatch.setattr("precast.attachment.module_hooks.ACCEPTED", set())
    monkeypatch.setattr("precast._torch.lower_dtypes", lambda _: (BRAIN,))
    with torch.autocast("cpu"):
        before = _state()
        with pytest.raises(RegionError, match=r"float16, which cpu has no autocast for"):
            model(X)
        assert _state() == before


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()
