"""Models with float8 rules are converted and exported, and give the bits of a region."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.engine import float8_kernels
from precast.policy.policy import Policy
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES
from precast.shipping.exported_file import write_package

BF16 = torch.bfloat16
rules = pytest.mark.parametrize("rule", FLOAT8_RULES)


@pytest.fixture(autouse=True)
def _warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_kernels, "_warned", {"cpu"})


class Net(nn.Module):
    """Products of each kind: by a module, by a weight of its own, and of two batches, which runs in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 48), nn.Linear(48, 24)
        self.weight = nn.Parameter(torch.randn(24, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.second(nn.functional.gelu(self.first(x)))
        return hidden @ self.weight, hidden @ hidden.transpose(-1, -2)


def policy(rule: str) -> Policy:
    return Policy.load("default").replace(name="in8", ops=dict.fromkeys(FLOAT8_OPERATIONS, rule))


def in_region(model: nn.Module, x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), precast.autocast("cpu", BF16, policy=policy(rule)):
        found: tuple[Tensor, Tensor] = model(x)
    return found


def assert_equal(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert all(one.equal(other) for one, other in zip(got, wanted, strict=True))


@rules
def test_an_exported_program_gives_the_bits_of_a_region(rule: str) -> None:
    model, x = Net().eval(), torch.randn(3, 9, 40)
    program = precast.export(model, (x,), policy=policy(rule), dtype=BF16)
    assert_equal(program.module()(x), in_region(model, x, rule))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not [target for target in targets if target.startswith("prim")]


@rules
def test_its_weights_are_stored_in_8_bits_with_their_scales(rule: str) -> None:
    model, x = Net().eval(), torch.randn(3, 9, 40)
    program = precast.export(model, (x,), policy=policy(rule), dtype=BF16)
    stored = program.state_dict.values()
    in_8_bits = sum(t.numel() for t in stored if t.dtype is torch.float8_e4m3fn)
    assert in_8_bits == 40 * 48 + 48 * 24 + 24 * 8
    scales = sum(t.numel() for t in stored if t.dtype is torch.float32)
    assert scales == (3 if rule in FLOAT8_RULES[:2] else 48 + 24 + 8)


@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable"
)  # PyTorch 2.11 says so of its own
def test_sizes_that_change_and_a_file(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 9, 40)
    sizes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}}
    chosen = policy("float8_rowwise")
    program = precast.export(model, (x,), policy=chosen, dtype=BF16, dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for shape in ((3, 9, 40), (5, 2, 40)):
        x = torch.randn(shape)
        assert_equal(loaded(x), in_region(model, x, "float8_rowwise"))


@rules
def test_a_converted_model_quantises_the_weights_that_it_keeps(rule: str) -> None:
    model, x = Net().eval(), torch.randn(3, 9, 40)
    wanted = in_region(model, x, rule)
    converted = precast.convert(model, policy(rule), BF16, example=(x,))
    assert_equal(converted(x), wanted)
    kept = {weight.name: weight.why for weight in precast.conversion_report(converted).kept}
    assert (
        kept["first.weight"]
        == "used in float32 by linear, which quantises it to 8 bits at each use"
    )
    # `linear` quantises its weight from float32; any other operand is rounded to 16 bits first.
    dtypes = {name: parameter.dtype for name, parameter in converted.named_parameters()}
    assert dtypes["first.weight"] is torch.float32
    assert dtypes["weight"] is BF16


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler uses what PyTorch has deprecated
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
@pytest.mark.parametrize("rule", ["float8", "float8_rowwise"])
def test_a_package_gives_the_bits_of_a_region(rule: str, tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 9, 40)
    write_package(
        precast.export(model, (x,), policy=policy(rule), dtype=BF16), tmp_path / "net.pt2"
    )
    run = torch._inductor.aoti_load_package(str(tmp_path / "net.pt2"))
    assert_equal(tuple(run(x)), in_region(model, x, rule))
