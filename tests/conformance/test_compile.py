"""torch.compile: compiled equals eager, whatever the policy, and a change of policy is never ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import precast
from precast import Policy, _torch
from precast.engine import compile_guards, registration
from precast.engine.thread_state import regions
from tests.conformance.systems import SYSTEMS, TORCH, System

OTHER = Policy.load("torch").replace(name="other", ops={"linear": "fp32", "mm": "fp32"})
POLICIES = {"torch": Policy.load("torch"), "default": Policy.load("default"), "other": OTHER}
BACKENDS = ("eager", "aot_eager")
LOWER = torch.get_autocast_dtype("cpu")
# Dynamo reads `.grad` of whatever crosses a graph break, and hides the warning where it is printed, not where it is
# made an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated"),  # Dynamo does
]
weight = Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 4)


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> Iterator[None]:
    torch.compiler.reset()
    registration.unregister()
    weight.grad = None
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts the graphs it gets."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def layers(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight)) @ weight


def a_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            return layers(x * 2)

    return forward


def operations_in_a_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = x * 2
        with precast.autocast("cpu", torch.float16, policy=policy):
            x = F.linear(x, weight)
        return x * 2

    return forward


def a_decorated_function(policy: Policy) -> Callable[[Tensor], Tensor]:
    decorated = precast.autocast("cpu", policy=policy)(layers)
    return lambda x: decorated(x * 2) * 2


def nested_regions(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            with precast.autocast("cpu", torch.float16, policy=policy):
                x = F.linear(x, weight)
                with precast.autocast("cpu", enabled=False):
                    x = layers(x.float())
                with precast.autocast("cpu", torch.bfloat16):
                    x = layers(x)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    x = layers(x)
            return layers(x)

    return forward


def an_error_inside(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        try:
            with precast.autocast("cpu", policy=policy):
                x = F.linear(x, weight)
                raise ValueError
        except ValueError:
            return F.linear(x.float(), weight)

    return forward


def a_custom_function(policy: Policy) -> Callable[[Tensor], Tensor]:
    class Product(torch.autograd.Function):
        @staticmethod
        @precast.custom_fwd(device_type="cpu")
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return torch.mm(a, b)

        @staticmethod
        @precast.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return torch.mm(g, b.t()), torch.mm(a.t(), g)

    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            return Product.apply(x, weight)

    return forward


def a_checkpoint(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy):
            return checkpoint(layers, x, use_reentrant=False)

    return forward


def a_kept_region(policy: Policy) -> Callable[[Tensor], Tensor]:
    region = precast.autocast("cpu", policy=policy)

    def forward(x: Tensor) -> Tensor:
        with region:
            return F.linear(layers(x), weight)

    return forward


def a_broken_graph(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = F.linear(x, weight)
        with precast.autocast("cpu", policy=policy):
            x = F.linear(x, weight)
            torch._dynamo.graph_break()
            x = layers(x)
        return x * 2

    return forward


def no_region_here(policy: Policy) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=policy), precast.disable():
            return layers(x)

    return forward


WHOLE = [
    a_region,
    operations_in_a_region,
    a_decorated_function,
    nested_regions,
    an_error_inside,
    a_custom_function,
    a_checkpoint,
]
IN_PIECES = [a_kept_region, a_broken_graph, no_region_here]


def computed(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradients of a loss of it."""
    result = function(x)
    return result, *torch.autograd.grad(result.float().square().sum(), [x, weight])


def same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        mine.dtype is other.dtype and torch.equal(mine, other)
        for mine, other in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write", [*WHOLE, *IN_PIECES])
def test_a_region_inside_a_compiled_function_runs_its_policy(
    write: Any, policy: str, backend: str
) -> None:
    # Compiled first: what registers the kernels must not end up in a graph either.
    function = write(POLICIES[policy])
    compiled = torch.compile(function, backend=backend, fullgraph=write in WHOLE)
    x = torch.randn(3, 4, requires_grad=True)
    results = [computed(compiled, x) for _ in range(3)]
    torch.compiler.reset()
    expected = computed(function, x)
    for result, *gradients in results:
        assert same((result,), expected[:1])
        assert close(gradients, expected[1:])


@pytest.mark.parametrize("write", [a_kept_region, no_region_here])
def test_what_cannot_be_in_one_graph_is_refused_not_ignored(write: Any) -> None:
    compiled = torch.compile(write(OTHER), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"precast|context manager"):
        compiled(torch.randn(3, 4))


def test_a_region_that_cannot_be_is_refused_with_its_own_message() -> None:
    def forward(x: Tensor) -> Tensor:
        with precast.autocast("cpu", torch.float32):
            return x

    with pytest.raises(RuntimeError, match=r"write enabled=False"):
        torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_the_compiled_function_leaves_nothing_behind(backend: str) -> None:
    def fails(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=OTHER):
            return layers(x) @ torch.ones(5)

    compiled = torch.compile(fails, backend=backend)
    with pytest.raises(RuntimeError):
        compiled(torch.randn(3, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_around_a_compiled_function_equals_eager(policy: str, backend: str) -> None:
    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    x = torch.randn(3, 4, requires_grad=True)
    with precast.autocast("cpu", policy=POLICIES[policy]):
        expected = computed(layers, x)
        for _ in range(2):
            result, *gradients = computed(compiled, x)
            assert same((result,), expected[:1])
            assert close(gradients, expected[1:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", POLICIES)
def test_inference(policy: str, mode: Any) -> None:
    x = torch.randn(3, 4)
    compiled = torch.compile(a_region(POLICIES[policy]), backend="aot_eager", fullgraph=True)
    with mode():
        assert same((compiled(x),), (a_region(POLICIES[policy])(x),))
        with precast.autocast("cpu", policy=POLICIES[policy]):
            around = torch.compile(layers, backend="aot_eager", fullgraph=True)
            assert same((around(x),), (layers(x),))


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_compiled_under_each_system_equals_pytorch_compiled(system: System) -> None:
    def found(each: System) -> tuple[Tensor, ...]:
        torch.compiler.reset()
        x = torch.ones(3, 4, requires_grad=True)
        with each() as region:

            def inside(x: Tensor) -> Tensor:
                with region("cpu", dtype=torch.float16):
                    return layers(x)

            def outside(x: Tensor) -> Tensor:
                with region("cpu", dtype=torch.bfloat16):
                    return around(x)

            around = torch.compile(layers, backend="aot_eager", fullgraph=True)
            compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
            return computed(compiled, x) + computed(outside, x)

    assert same(found(system), found(TORCH))


@pytest.mark.parametrize("policy", POLICIES)
def test_pytorchs_region_inside_runs_the_installed_policy(policy: str) -> None:
    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.mm(F.linear(x, weight), weight)

    x = torch.randn(3, 4, requires_grad=True)
    with precast.install(POLICIES[policy]):
        expected = computed(inside, x)
        result = computed(torch.compile(inside, backend="aot_eager", fullgraph=True), x)
    assert same(result[:1], expected[:1])
    assert close(result[1:], expected[1:])
    assert result[0].dtype is (torch.float32 if policy == "other" else torch.bfloat16)


def test_a_change_of_policy_compiles_again_and_a_return_to_one_does_not() -> None:
    counting = Counting()
    compiled = torch.compile(lambda a: torch.mm(a, a), backend=counting)
    a = torch.randn(3, 3)
    everything = [*POLICIES.values(), OTHER.replace(ops={"mm": "lower"}, name="lowered")]
    for round_ in range(3):
        for number, policy in enumerate(everything, 1):
            for _ in range(2):
                with precast.autocast("cpu", policy=policy):
                    assert compiled(a).dtype is torch.mm(a, a).dtype
            assert counting.graphs == (number if round_ == 0 else len(everything))
        with torch.autocast("cpu"):
            assert compiled(a).dtype is torch.bfloat16
            assert counting.graphs == len(everything)  # PyTorch's own policy is the policy "torch"


def test_new_region_objects_new_weights_and_steps_do_not_compile_again() -> None:
    counting = Counting()
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    compiled = torch.compile(layer, backend=counting)
    for _ in range(4):
        with precast.autocast("cpu", policy=OTHER):
            compiled(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counting.graphs == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_dynamic_shapes(policy: str) -> None:
    counting = Counting()
    inside = torch.compile(
        a_region(POLICIES[policy]), backend=counting, fullgraph=True, dynamic=True
    )
    around = torch.compile(layers, backend=counting, fullgraph=True, dynamic=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4)
        assert same((inside(x),), (a_region(POLICIES[policy])(x),))
        with precast.autocast("cpu", policy=POLICIES[policy]):
            assert same((around(x),), (layers(x),))
    assert counting.graphs == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_inductor(policy: str) -> None:
    # Two products, nothing to fuse with them: the same kernels run, so the bits are the same.
    def product(x: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, weight), weight)

    def inside(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=POLICIES[policy]):
            return product(x)

    x = torch.randn(3, 4, requires_grad=True)
    expected = computed(inside, x)
    compiled = torch.compile(inside, fullgraph=True)
    assert close(computed(compiled, x), expected)
    around = torch.compile(product, fullgraph=True)

    def outside(x: Tensor) -> Tensor:
        with precast.autocast("cpu", policy=POLICIES[policy]):
            return around(x)

    assert close(computed(outside, x), expected)


def close(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Of the same dtypes, and a few roundings to 16 bits apart.

    A compiled backward adds the gradients of a weight in an order of its own, and Inductor keeps float32 where two
    16-bit operations round between; under `torch.autocast` too.
    """
    return all(
        mine.dtype is other.dtype
        and bool((mine.float() - other.float()).abs().max() <= 2**-6 * other.float().abs().max())
        for mine, other in zip(ours, expected, strict=True)
    )


def test_weights_written_between_calls_are_seen() -> None:
    compiled = torch.compile(layers, backend="aot_eager")
    x, before = torch.randn(3, 4), weight.detach().clone()
    with precast.autocast("cpu"), torch.no_grad():
        assert compiled(x).abs().sum() > 0
        weight.zero_()
        assert compiled(x).abs().sum() == 0
        weight.copy_(before)


def test_policies_of_two_devices_are_one_mark() -> None:
    def mark(*regions: AbstractContextManager[Any]) -> object:
        if not regions:
            return torch.get_autocast_dtype("ipu"), torch.is_autocast_enabled("ipu")
        with regions[0]:
            return mark(*regions[1:])

    cpu, xpu = precast.autocast("cpu", policy=OTHER), precast.autocast("xpu", policy=OTHER)
    assert mark(cpu, xpu) == mark(xpu, cpu)
    assert len({mark(), mark(cpu), mark(xpu), mark(cpu, xpu)}) == 4
    assert mark(precast.autocast("cpu", policy="torch")) == mark()


def test_more_policies_than_marks_compile_again_each_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(compile_guards, "LIMIT", len(compile_guards._guard_ids))
    compiled = torch.compile(lambda a: torch.mm(a, a), backend="aot_eager")
    a = torch.ones(2, 2)
    new = [
        OTHER.replace(name=f"{op} {rule}", ops={"mm": rule, op: "lower"})
        for op in ("aten::cosh", "aten::sinh")
        for rule in ("fp32", "lower")
    ]
    for policy in new * 2:
        with precast.autocast("cpu", policy=policy):
            assert compiled(a).dtype is torch.mm(a, a).dtype


def _open_in_this_thread() -> tuple[bool, torch.dtype, int, bool]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        _torch.autocast_nesting(),
        regions.is_open,
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", Counting()])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", [False, True])
def test_an_error_in_a_compiled_region_ends_it(backend: Any, policy: str, around: bool) -> None:
    def looks_up(table: Tensor, index: Tensor) -> Tensor:
        with precast.autocast("cpu", torch.float16, policy=POLICIES[policy]):
            with torch.autocast("cpu", torch.bfloat16):
                return table.index_select(0, index)

    compiled = torch.compile(looks_up, backend=backend, fullgraph=True)
    for _ in range(2):  # the second is not compiled any more
        with precast.autocast("cpu", policy=OTHER) if around else nullcontext():
            before = _open_in_this_thread()
            with pytest.raises(IndexError) as raised:
                compiled(torch.ones(4, 4), torch.tensor([77]))
            assert _open_in_this_thread() == before, raised  # while the error is kept
            compiled(torch.ones(4, 4), torch.tensor([1]))
            assert _open_in_this_thread() == before
    with torch.autocast("cpu"):
        assert F.linear(torch.ones(2, 4), weight).dtype is torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_without_a_dtype_follows_that_of_the_caller(backend: str) -> None:
    def product(x: Tensor) -> Tensor:
        with precast.autocast("cpu"):
            return x @ x

    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        call: Callable[..., Any] = torch._dynamo.lookup_backend(backend)(graph, inputs)
        return call

    compiled = torch.compile(product, backend=counted)
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16):
            torch.set_autocast_dtype("cpu", dtype)
            assert compiled(torch.ones(4, 4)).dtype is dtype
    finally:
        torch.set_autocast_dtype("cpu", LOWER)
    assert len(graphs) == 2, "once for each dtype"


@pytest.mark.parametrize("is_rule", [False, True])
def test_what_is_float32_in_a_compiled_region_is_differentiated_in_float32(is_rule: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x @ torch.ones(4, 4)
            if is_rule:
                return self.head(x)
            with precast.autocast("cpu", enabled=False):
                return self.head(x.float())

    def gradient(backend: str | None) -> Tensor | None:
        model = Model()
        rules = Policy.load("default").replace(modules={"head": "fp32"} if is_rule else {})
        with precast.attach(model, rules):
            call = model if backend is None else torch.compile(model, backend=backend)
            with precast.autocast("cpu", torch.float16):
                output = call(torch.ones(1, 4))
            (output * 16384).sum().backward()
        return model.head.weight.grad

    eager, compiled = gradient(None), gradient("aot_eager")
    assert eager is not None
    assert compiled is not None
    assert eager.isfinite().all()
    assert torch.equal(eager, compiled)


def test_the_users_own_setting_for_compiled_backward_passes_comes_first() -> None:
    config: Any = torch._functorch.config
    with precast.autocast("cpu"):
        assert config.backward_pass_autocast == "off"
        with config.patch(backward_pass_autocast="same_as_forward"):
            assert config.backward_pass_autocast == "same_as_forward"
        assert config.backward_pass_autocast == "off"
    assert config.backward_pass_autocast == "same_as_forward"
    with config.patch(backward_pass_autocast="off"):
        assert config.backward_pass_autocast == "off"
    with precast.autocast("cpu"):
        assert config.backward_pass_autocast == "off"
    with torch.autocast("cpu"):
        assert config.backward_pass_autocast == "same_as_forward"
