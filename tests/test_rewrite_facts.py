"""What rules say of PyTorch is so: programs that they find fail as they say, and run once they are fixed."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator

import pytest
import torch

from precast.rewrite.engine import check, fix
from precast.rewrite.settings import Settings
from precast.rewrite.text import decode

# code, program, what it raises; all of them end with `assert`s on what they are meant to do
FAILING = [
    (
        "AMP101",
        """
        import torch

        x = torch.ones(2, 2, device="cpu")
        with torch.autocast(dtype=torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16
        """,
        TypeError,
    ),
    (
        "AMP101",
        """
        import torch

        x = torch.ones(2, 2, device="cpu")
        with torch.autocast(torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16
        """,
        ValueError,
    ),
    (
        "AMP102",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast("cpu", False):
            assert (x @ x).dtype is torch.float32
        """,
        TypeError,
    ),
    (
        "AMP102",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast("cpu", dtype="bfloat16"):
            assert (x @ x).dtype is torch.bfloat16
        """,
        TypeError,
    ),
    (
        "AMP103",
        """
        import torch

        @torch.cpu.amp.autocast
        def f(x):
            return x @ x

        assert f(torch.ones(2, 2)).dtype is torch.bfloat16
        """,
        TypeError,
    ),
    (
        "AMP103",
        """
        import torch

        @torch.autocast
        def f(x):
            return x @ x

        assert f(torch.ones(2, 2, device="cpu")).dtype is torch.bfloat16
        """,
        ValueError,
    ),
    (
        "AMP104",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast(torch.device("cpu")):
            assert (x @ x).dtype is torch.bfloat16
        """,
        ValueError,
    ),
    (
        "AMP104",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast("cpu"):
            assert torch.is_autocast_enabled(torch.device("cpu"))
        """,
        TypeError,
    ),
    (
        "AMP105",
        """
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd
            def forward(ctx, x):
                return x @ x

        with torch.autocast("cpu"):
            assert Square.apply(torch.ones(2, 2)).dtype is torch.bfloat16
        """,
        TypeError,
    ),
    (
        "AMP106",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.cpu.amp.autocast(device_type="cpu"):
            assert (x @ x).dtype is torch.bfloat16
        """,
        TypeError,
    ),
    (
        "AMP106",
        """
        from torch.cpu.amp import GradScaler
        import torch

        scaler = GradScaler("cpu")
        assert scaler.scale(torch.ones(())) == 65536
        """,
        TypeError,
    ),
    (
        "AMP107",
        """
        import torch

        scaler = torch.amp.GradScaler(not torch)
        assert not scaler.is_enabled()
        """,
        AssertionError,
    ),
    (
        "AMP107",
        """
        import torch

        scaler = torch.cpu.amp.GradScaler(bool(torch))
        assert scaler.scale(torch.ones(())) == 65536
        """,
        AssertionError,
    ),
    (
        "AMP108",
        """
        import torch.amp.autocast as region
        import torch

        x = torch.ones(2, 2)
        with region("cpu"):
            assert (x @ x).dtype is torch.bfloat16
        """,
        ModuleNotFoundError,
    ),
    (
        "AMP110",
        """
        import torch

        with torch.autocast("cpu"):
            assert torch.is_autocast_enabled()
        """,
        AssertionError,
    ),
    (
        "AMP302",
        """
        import torch

        linear = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(linear.parameters(), 0.1)
        losses = []
        for _ in range(2):
            with torch.autocast("cpu"):
                for _ in range(2):
                    loss = linear(torch.ones(1, 2)).square().sum() + 1
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        assert losses[0] != losses[1]
        """,
        AssertionError,
    ),
    (
        "AMP310",
        """
        import torch

        x = torch.full((8, 8), 3.0)
        with torch.autocast("cpu"):
            h = x @ x
            with torch.autocast("cpu", enabled=False):
                assert torch.exp(h).dtype is torch.float32
        """,
        AssertionError,
    ),
    (
        "AMP311",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ x
        assert h.cpu().numpy().sum() == 8
        """,
        TypeError,
    ),
    (
        "AMP311",
        """
        import torch

        x = torch.eye(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ x
        assert torch.linalg.inv(h).sum() == 2
        """,
        RuntimeError,
    ),
    (
        "AMP112",
        """
        import torch

        region = torch.autocast("cpu")
        with region:
            with region:
                pass
        assert not torch.is_autocast_enabled("cpu")
        """,
        AssertionError,
    ),
    (
        "AMP112",
        """
        import torch

        @torch.autocast("cpu")
        def f(n):
            return f(n - 1) if n else 0

        f(2)
        assert not torch.is_autocast_enabled("cpu")
        """,
        AssertionError,
    ),
    (
        "AMP307",
        """
        import torch

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cpu")
            def backward(ctx, grad):
                return grad * 2

        Twice.apply(torch.ones(2, requires_grad=True)).sum().backward()
        """,
        AttributeError,
    ),
    (
        "AMP308",
        """
        import torch

        class Twice(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu")
            def forward(x):
                return x * 2

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            @torch.amp.custom_bwd(device_type="cpu")
            def backward(ctx, grad):
                return grad * 2

        Twice.apply(torch.ones(2, requires_grad=True)).sum().backward()
        """,
        AttributeError,
    ),
    (
        "AMP306",
        """
        import torch

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                return grad @ weight.T, x.T @ grad

        with torch.autocast("cpu"):
            y = Linear.apply(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
        y.sum().backward()
        """,
        RuntimeError,
    ),
    (
        "AMP312",
        """
        import torch

        x = torch.ones(2, 2)
        with torch.autocast("cpu"):
            h = x @ x
            x.addmm_(h, h)
        """,
        RuntimeError,
    ),
]
NO_FIX = {"AMP112", "AMP302", "AMP306", "AMP307", "AMP308", "AMP312"}


def _run(program: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, "program.py", "exec"), {"__name__": "program"})


@pytest.fixture(autouse=True)
def _autocast_as_before() -> Iterator[None]:
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()


@pytest.mark.parametrize(
    ("code", "program", "error"), FAILING, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(FAILING)]
)
def test_what_a_rule_finds_fails_and_what_it_fixes_runs(
    code: str, program: str, error: type[Exception]
) -> None:
    text = decode(textwrap.dedent(program).encode())
    with pytest.raises(error):
        _run(text.string)
    settings = Settings(codes=frozenset({code}), unsafe_fixes=True)
    assert check(text, "program.py", settings).findings
    fixed = fix(text, "program.py", settings)
    assert bool(fixed.fixed) == (code not in NO_FIX)
    if fixed.fixed:
        _run(fixed.text.string)


def test_backward_in_a_region_loses_digits_and_the_fix_keeps_them() -> None:
    program = """
    import torch

    torch.manual_seed({seed})
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with torch.autocast("cpu"):
        with torch.autocast("cpu", enabled=False):
            loss = (x @ w).square().sum()
        loss.backward()
    exact = 2 * x.double().T @ (x.double() @ w.detach().double())
    error = ((w.grad - exact).norm() / exact.norm()).item()
    """
    text = decode(textwrap.dedent(program.format(seed=torch.randint(1000, ()).item())).encode())
    fixed = fix(text, "program.py", Settings(codes=frozenset({"AMP301"}), unsafe_fixes=True))
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    exec(text.string, before)
    exec(fixed.text.string, after)
    # float32 has 2**-24, the region's bfloat16 2**-9
    assert after["error"] < 2.0**-20 < 2.0**-12 < before["error"]
