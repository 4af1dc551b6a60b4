"""Facts about PyTorch in the rules about scalers and numbers, run with the installed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Step = Callable[[torch.nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler], object]


def _run(*steps: Step, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.5)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu")
    for step in steps:
        step(weight, optimizer, scaler)
    return weight.detach()


def _scaled(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    torch.autograd.backward(s.scale(w.sum()))


def _plain(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    torch.autograd.backward(w.sum())


def _step(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    s.step(o)


def _update(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    s.update()


def _unscale(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    s.unscale_(o)


def _zero(w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler) -> None:
    o.zero_grad()


def test_the_protocol_works() -> None:
    assert _run(_scaled, _unscale, _step, _update).tolist() == [0.5, 0.5]


RAISES = {
    "no update": ((_scaled, _step, _scaled, _step), "since the last update"),
    "update first": ((_scaled, _update, _step), "No inf checks"),
    "not scaled": ((_plain, _step), "script did not use scaler.scale"),
    "no gradients": ((_scaled, _zero, _step), "No inf checks"),
    "AMP208 unscaled twice": ((_scaled, _unscale, _unscale), "already been called"),
}


@pytest.mark.parametrize("name", RAISES)
def test_pytorch_refuses(name: str) -> None:
    steps, message = RAISES[name]
    with pytest.raises((RuntimeError, AssertionError), match=message):
        _run(*steps)


def test_pytorch_computes_wrongly_without_a_word() -> None:
    right = _run(_scaled, _step, _update)
    unseen = _run(_scaled, lambda w, o, s: o.step())  # AMP205: not divided at all
    assert unseen.abs().max() > 1000
    beside = _run(_scaled, _plain, _step)  # AMP215: the plain loss counts 65536 times less
    assert torch.allclose(beside, right, atol=1e-4)


def test_a_closure_is_refused_by_name_only() -> None:
    def with_closure(
        w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler
    ) -> None:
        s.step(o, closure=lambda: 0.0)

    def by_position(
        w: torch.nn.Parameter, o: torch.optim.Optimizer, s: torch.amp.GradScaler
    ) -> None:
        s.step(o, lambda: 0.0)

    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        _run(_scaled, with_closure)
    assert _run(_scaled, by_position).tolist() == [0.5, 0.5]
    with pytest.raises(TypeError, match="closure"):
        _run(_scaled, _step, kind=torch.optim.LBFGS)


def test_float16_has_no_such_numbers() -> None:
    x = torch.zeros(2, dtype=torch.float16)
    mask = torch.tensor([True, False])
    for value in (-1e9, torch.finfo(torch.float32).min, 65505.0):  # AMP404
        with pytest.raises(RuntimeError, match="without overflow"):
            x.masked_fill(mask, value)
    for value in (-1e4, float("-inf"), torch.finfo(x.dtype).min):
        x.masked_fill(mask, value)
    assert torch.tensor(1e5, dtype=torch.float16).isinf()
    assert (x + 65520.0).isinf().all()
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.full((2,), 7e4, dtype=torch.float16)
    for epsilon, lost in ((2.0**-25, True), (3e-8, False), (1e-8, True)):  # AMP403
        assert bool((x + epsilon == 0).all()) is lost
        assert bool((x.clamp(min=epsilon) == 0).all()) is lost
    for dtype, gap in ((torch.float16, 2.0**-12), (torch.bfloat16, 2.0**-9)):
        one, less = torch.tensor([1 - gap, 1 - 1.01 * gap], dtype=dtype)
        assert one == 1 > less
        whole = 2 ** (12 if dtype == torch.float16 else 9)  # AMP405
        assert torch.tensor(whole / 2 + 1, dtype=dtype) == whole / 2


def test_products_are_float16_in_a_region() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        for product in (x @ x, torch.einsum("ij,jk->ik", x, x), torch.nn.functional.linear(x, x)):
            assert (product / 2.0).dtype == torch.float16
        with pytest.raises(RuntimeError, match="without overflow"):
            (x @ x).masked_fill(x > 0, -1e9)


def test_a_checkpoint_by_hand_computes_something_else_again() -> None:  # AMP314
    records = []

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
            ctx.run, ctx.x = run, x
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x = ctx.x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(x)
            return None, *torch.autograd.grad(y, x, grad)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        records.append(y.dtype)
        return y

    with torch.autocast("cpu"):
        y = Checkpoint.apply(run, torch.randn(3, 3, requires_grad=True))
    y.sum().backward()
    assert records == [torch.bfloat16, torch.float32]
