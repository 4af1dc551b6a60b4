"""Custom functions: backward runs as forward did, in both styles, with any arguments."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import pytest
import torch

from precast.autocast_mode.custom_function import custom_bwd, custom_fwd
from precast.autocast_mode.region import autocast
from precast.errors import RegionError
from precast.policy.policy import Policy
from tests.support.functions import BOTH, OURS, TORCHS, State, make_matmul, operands, run, same

Tensor = torch.Tensor

REGIONS = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: autocast("cpu", torch.bfloat16),
    "float16": lambda: autocast("cpu", torch.float16),
    "off": lambda: autocast("cpu", enabled=False),
    "torch's": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("cast_inputs", [None, torch.float32, torch.float16, torch.bfloat16])
def test_with_setup_context_functions_give_what_torchs_other_style_gives(
    region: str, cast_inputs: Any
) -> None:
    """PyTorch's own other style is compared in tests/conformance/test_custom_functions.py."""
    inputs = operands(torch.float32, torch.float32)
    theirs = run(make_matmul(TORCHS, cast_inputs=cast_inputs), inputs, REGIONS[region]())
    function = make_matmul(OURS, "setup_context", cast_inputs=cast_inputs)
    assert same(run(function, inputs, REGIONS[region]()), theirs)


def test_where_torch_fails_with_setup_context() -> None:
    inputs = operands(torch.float32, torch.float32)
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        run(make_matmul(TORCHS, "setup_context"), inputs, torch.autocast("cpu"))
    assert "_fwd_used_autocast" in vars(inputs[0])  # it was written on the user's tensor

    inputs = operands(torch.float32, torch.float32)
    run(make_matmul(OURS, "setup_context"), inputs, autocast("cpu"))
    assert vars(inputs[0]) == {}


@BOTH
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("cache", [True, False])
def test_backward_sees_forwards_state(style: str, region: str, cache: bool) -> None:
    function = make_matmul(OURS, style)
    x, w = operands(torch.float32, torch.float32)
    before = State.now()
    with autocast("cpu", cache_enabled=cache), REGIONS[region]():
        output = function.apply(x, w)
    with autocast("cpu", torch.float16, cache_enabled=True):
        output.float().sum().backward()
    assert function.in_backward == function.in_forward
    assert State.now() == before


@BOTH
def test_backward_sees_forwards_state_in_another_thread(style: str) -> None:
    function = make_matmul(OURS, style)
    with autocast("cpu", torch.float16):
        output = function.apply(*operands(torch.float32, torch.float32))
    thread = threading.Thread(target=lambda: output.sum().backward())
    thread.start()
    thread.join()
    assert function.in_backward == function.in_forward == State(True, torch.float16, True)


@BOTH
def test_backward_runs_with_forwards_policy(style: str) -> None:
    """A policy that keeps matrix products in float32 does so in backward too."""
    policy = Policy.load("default").replace(ops={"matmul": "fp32", "mm": "fp32"})
    inputs = operands(torch.float32, torch.float32)
    function = make_matmul(OURS, style)
    kept = run(function, inputs, autocast("cpu", policy=policy))
    assert kept[0].dtype is torch.float32
    assert same(kept, run(function, inputs, contextlib.nullcontext()))
    lowered = run(function, inputs, autocast("cpu"))
    assert not torch.equal(lowered[1], kept[1])


@BOTH
def test_an_error_in_forward_leaves_the_state_as_it_was(style: str) -> None:
    before = State.now()
    with autocast("cpu"), pytest.raises(RuntimeError):
        make_matmul(OURS, style, cast_inputs=torch.float32).apply(
            torch.ones(2, 3), torch.ones(2, 3)
        )
    assert State.now() == before


# --- what is cast ---


class Pair(NamedTuple):
    first: Any
    second: Any = None


def seen_by(decorators: Any, *args: Any) -> tuple[Any, ...]:
    """What `forward` gets for `args` in a region, with inputs cast to float32."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        @decorators[0](device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, *args: Any) -> Tensor:
            Keeps.seen = args
            return torch.ones(1)

    with torch.autocast("cpu"):
        Keeps.apply(*args)
    return Keeps.seen


@pytest.mark.parametrize("decorators", [OURS, TORCHS], ids=["ours", "torch's"])
def test_only_eligible_tensors_are_cast(decorators: Any) -> None:
    inputs = [
        torch.ones(1, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, dtype=torch.int32),
        torch.ones(1, dtype=torch.complex64),
        torch.ones(1, dtype=torch.bfloat16, device="meta"),
    ]
    lower, *others = seen_by(decorators, *inputs)
    assert lower.dtype is torch.float32
    assert all(
        a.dtype is b.dtype and a.device == b.device for a, b in zip(others, inputs[1:], strict=True)
    )


def test_arguments_in_containers_are_cast_without_breaking_them() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    [broken] = seen_by(TORCHS, Pair(half))
    assert not isinstance(broken.first, Tensor)  # torch put a generator into the first field

    [pair, nested, text] = seen_by(OURS, Pair(half), {"a": [Pair(half, 1)]}, "text")
    assert pair.first.dtype is torch.float32
    assert pair.second is None
    assert nested["a"][0].first.dtype is torch.float32
    assert nested["a"][0].second == 1
    assert text == "text"


def test_a_function_may_be_decorated_for_two_devices() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(x: Tensor) -> Tensor:
            return x.square()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cuda")
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            assert x.dtype is torch.float32
            return 2 * gradient * x

    x = torch.full((2,), 3.0, dtype=torch.bfloat16, requires_grad=True)
    with autocast("cpu"):
        result = Square.apply(x)
    result.sum().backward()
    assert result.dtype is torch.float32
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_setup_context_sees_the_inputs_that_forward_saw() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(x: Tensor, pair: Pair) -> Tensor:
            Keeps.in_forward = x.dtype, pair.first.dtype, State.now()
            Keeps.output = x * 2
            return Keeps.output

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            x, pair = inputs
            Keeps.in_setup = x.dtype, pair.first.dtype, State.now()
            assert output is Keeps.output

    half = torch.ones(2, dtype=torch.bfloat16)
    with autocast("cpu"):
        Keeps.apply(half, Pair(half))
    assert Keeps.in_setup == Keeps.in_forward
    assert Keeps.in_setup[:2] == (torch.float32, torch.float32)
    assert Keeps.in_setup[2].enabled is False


# --- how it is written ---


def test_without_parentheses() -> None:
    def double(ctx: Any, x: Tensor) -> Tensor:
        """Doubles."""
        ctx.save_for_backward()
        return x * 2

    class Double(torch.autograd.Function):
        forward = staticmethod(custom_fwd(double, device_type="cpu", cast_inputs=torch.float32))

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    assert Double.forward.__doc__ == "Doubles."
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    with autocast("cpu"):
        y = Double.apply(x)
    y.backward()
    assert y.dtype is torch.float32
    assert x.grad.item() == 2.0


def test_the_class_is_left_as_it_was_written() -> None:
    function = make_matmul(OURS, "setup_context")
    assert {n for n in vars(function) if "precast" in n} == set()
    assert function.setup_context.__name__ == "setup_context"
    assert make_matmul(OURS).setup_context is torch.autograd.Function.setup_context


@pytest.mark.parametrize("decorator", OURS)
def test_the_old_spelling_without_a_device_type(decorator: Any) -> None:
    name = decorator.__name__
    for attempt in (decorator, lambda: decorator(lambda ctx: None)):
        with pytest.raises(
            RegionError, match=rf"needs a device type.*@{name}\(device_type='cuda'\)"
        ):
            attempt()
    with pytest.raises(RegionError, match="got 3"):
        decorator(device_type=3)
    with pytest.raises(RegionError, match="'gpu' is not a device type"):
        decorator(device_type="gpu")


def test_the_device_need_not_be_there(recwarn: pytest.WarningsRecorder) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="xpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @custom_bwd(device_type="xpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.ones(1, requires_grad=True)
    Double.apply(x).backward()
    assert x.grad.item() == 2.0
    assert recwarn.list == []


# --- functions that are decorated by half or not at all ---


def test_backward_without_a_decorated_forward_says_what_to_do() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    output = Half.apply(torch.ones(1, requires_grad=True))
    with pytest.raises(RegionError, match=r"HalfBackward .*@custom_fwd\(device_type='cpu'\)"):
        output.backward()


def test_an_undecorated_function_needs_the_decorators() -> None:
    """Its backward gets a bfloat16 gradient and the float32 inputs it saved, with autocast off."""

    def plain(device_type: str, **options: Any) -> Any:
        return lambda function: function

    inputs = operands(torch.float32, torch.float32)
    for region in (torch.autocast("cpu"), autocast("cpu")):
        with pytest.raises(RuntimeError, match="same dtype"):
            run(make_matmul((plain, plain)), inputs, region)
    assert run(make_matmul(OURS), inputs, autocast("cpu"))[1].dtype is torch.float32
