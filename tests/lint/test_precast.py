"""`precast-lint fix --to precast`: what it moves, and that programs compute afterwards what they computed before."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import precast
from precast_lint.cli import main
from precast_lint.selecting.registry import expand

NETWORK = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.randn(4, 32, 8)
losses = []
"""
PROGRAMS = {
    "new names": """
        import torch
        {network}
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in data:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    """,
    "imported names": """
        import torch
        from torch import amp
        from torch.amp import GradScaler, autocast as region, is_autocast_available
        {network}
        class Square(torch.autograd.Function):
            @staticmethod
            @amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x @ x.mT

            @staticmethod
            @amp.custom_bwd(device_type="cpu")
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return (grad + grad.mT) @ x

        @region("cpu", enabled=is_autocast_available("cpu"))
        def forward(x):
            return Square.apply(model(x)).mean()

        scaler: "GradScaler" = GradScaler("cpu")
        assert isinstance(scaler, torch.amp.GradScaler)
        for x in data:
            loss = forward(x)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    """,
    "old names": """
        import torch
        from torch.cpu.amp import GradScaler, autocast
        {network}
        scaler = GradScaler(4.0)
        for x in data:
            with autocast(True, torch.bfloat16):
                loss = model(x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    """,
}


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "program"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what deprecated names say
        exec(compile(code, "program.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_moved_program_computes_what_it_did(name: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    before = textwrap.dedent(PROGRAMS[name]).replace("{network}", NETWORK)
    path.write_text(before)
    result = CliRunner().invoke(
        main, ["fix", "--to", "precast", "--no-cache", "--ignore", "AMP202", str(path)]
    )
    assert result.exit_code == 0, result.output
    after = path.read_text()
    assert "precast" in after
    one, other = run(before), run(after)
    assert other["losses"] == one["losses"]
    assert all(
        torch.equal(p, q)
        for p, q in zip(one["model"].parameters(), other["model"].parameters(), strict=True)
    )
    assert isinstance(other["scaler"], precast.GradScaler)
    assert other["scaler"].state_dict()["scale"] == one["scaler"].state_dict()["scale"]
    again = CliRunner().invoke(
        main, ["fix", "--to", "precast", "--no-cache", "--ignore", "AMP202", str(path)]
    )
    assert again.exit_code == 0
    assert path.read_text() == after


def test_what_cannot_be_moved_is_reported_and_keeps_its_import(tmp_path: Path) -> None:
    text = "from torch.amp import GradScaler\n\nclass Mine(GradScaler):\n    pass\n\nGradScaler()\n"
    (tmp_path / "a.py").write_text(text)
    result = CliRunner().invoke(
        main,
        ["fix", "--to", "precast", "--no-cache", "--output-format", "concise", str(tmp_path)],
    )
    assert result.exit_code == 1
    assert result.stdout.count("AMP601") == 2
    assert (tmp_path / "a.py").read_text() == text


def test_only_its_name_selects_the_move() -> None:
    assert "AMP601" not in expand(["ALL"])
    assert "AMP601" in expand(["to-precast"])


def test_a_move_does_not_ask_for_the_oldest_torch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    command = ["fix", "--to", "precast", "--no-cache", "--min-torch", "1.10", str(tmp_path)]
    assert CliRunner().invoke(main, command).exit_code == 0
    assert (tmp_path / "a.py").read_text() == (
        'import precast\nscaler = precast.GradScaler("cuda")\n'
    )
