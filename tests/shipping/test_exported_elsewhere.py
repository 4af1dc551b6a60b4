"""What becomes of an exported program further on: a package of AOTInductor, and ONNX."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import precast
from precast.errors import ExportError, MissingExtraError, OutputError
from precast.shipping.exported_file import FileCheck, check_file, differences, write_package
from precast.shipping.exported_onnx import write_onnx
from tests.shipping.exported_models import POLICIES

pytestmark = pytest.mark.filterwarnings("ignore")

RUN_PACKAGE = """
import sys
sys.modules["precast"] = None  # importing it fails
import torch
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(run(torch.load(sys.argv[2])), sys.argv[3])
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).eval()


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_a_package_runs_where_precast_is_not(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    program = precast.export(network(), (x,), dtype=torch.bfloat16)
    write_package(program, tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x")
    names = [str(tmp_path / name) for name in ("model.pt2", "x", "y")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN_PACKAGE, *names], check=True)
    found = torch.load(tmp_path / "y")
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, program.module()(x))


class Roundings(nn.Module):
    """Operations that AOTInductor joins by itself, between each of which the program rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.layer(x)
        for factor in (1.1, 0.7, 1.3):
            low = (low * factor + low) * 0.999
        low = (low @ low.mT).softmax(-1) @ low
        return torch.nn.functional.silu(low) * low


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_a_package_rounds_where_the_program_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Roundings().eval(), torch.randn(1, 2, 64, 32)
    program = precast.export(model, (x,), dtype=torch.bfloat16)
    write_package(program, tmp_path / "model.pt2")
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(x)
    assert torch.equal(found, program.module()(x))


class Sums(nn.Module):
    """What adds many numbers, in whose order the compiler's own loops would add differ from PyTorch's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = self.layer(self.norm(x))
        wide = nn.functional.layer_norm(low.float(), (512,))
        norms = nn.functional.instance_norm(low.float())
        return low, wide, norms, wide.mean(-1), wide.softmax(-1), wide.var(1), wide.sum((0, 2))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_a_package_adds_in_the_order_of_the_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Sums().eval(), torch.randn(2, 64, 512)
    program = precast.export(model, (x,), dtype=torch.bfloat16)
    write_package(program, tmp_path / "model.pt2")
    found = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))(x)
    for one, other in zip(found, program.module()(x), strict=True):
        assert torch.equal(one, other)


class Kernels(nn.Module):
    """What the compiler would compute with other functions, formulas and layouts than PyTorch's kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3)
        self.norm = nn.GroupNorm(4, 32)
        self.batch = nn.BatchNorm2d(32)
        self.layer = nn.Linear(36, 36)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = nn.functional.silu(self.norm(self.conv(x)))
        rows_of_norms = self.norm(low.flatten(2).mT.contiguous().mT)
        wide = self.batch(low.float()).flatten(2)
        loss = nn.functional.cross_entropy(wide[0], torch.arange(32))
        with torch.autocast("cpu", enabled=False):
            functions = wide.exp(), nn.functional.gelu(wide), nn.functional.silu(wide), wide.tanh()
            formulas = torch.add(wide, wide, alpha=0.3), wide.lerp(wide.exp(), 0.3), wide.mT.std(-1)
            rows = (
                wide[0] @ self.layer.weight.float()[:, 0],
                torch.einsum("bij,bij->bi", wide, wide),
            )
        low = self.layer(low.flatten(2))
        numbers = low + 0.1, 0.3 - low, (low > 0.1) * low, low.abs() ** 1.7, low.float() % 0.3
        joined = (
            self.layer(low) + low[0],
            nn.functional.glu(low, -1),
            (low @ low.mT) + low[..., :32],
        )
        return low, rows_of_norms, wide, loss, *functions, *formulas, *rows, *numbers, *joined


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_package_computes_what_kernels_compute(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Kernels().eval(), torch.randn(2, 3, 8, 8)
    program = precast.export(model, (x,), dtype=dtype)
    write_package(program, tmp_path / "model.pt2")
    run = torch._inductor.aoti_load_package(str(tmp_path / "model.pt2"))
    for number, (one, other) in enumerate(zip(run(x), program.module()(x), strict=True)):
        assert torch.equal(one, other), number


class AddedByIndex(nn.Module):
    """An operation of whose kernel packages of AOTInductor give the wrong arguments (2.13)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        return torch.index_add(low, 0, torch.tensor([0, 1]), low[:2])


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_a_package_that_does_not_run_is_not_called_checked(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    program = precast.export(AddedByIndex(), (x,), dtype=torch.bfloat16)
    write_package(program, tmp_path / "model.pt2")
    found = check_file(program, tmp_path / "model.pt2", "aoti", (x,), {})
    assert found.to_dict()["checked"] is False
    assert "AOTInductor of PyTorch" in str(found)
    assert "cannot run it: RuntimeError: " in str(found)


def test_a_file_with_other_results_is_said_to_differ_and_where(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    program, other = (precast.export(network(), (x,), dtype=torch.bfloat16) for _ in range(2))
    other.state_dict["1.bias"][2] += 1
    torch.export.save(other, tmp_path / "model.pt2")
    found = check_file(program, tmp_path / "model.pt2", "program", (x,), {})
    assert found.to_dict()["equal"] is False
    assert found.difference is not None
    assert found.difference.startswith("result 0 differs by up to ")
    assert float(found.difference.split()[-1]) == pytest.approx(1, abs=0.05)
    assert "differ from the model's: result 0 differs" in str(found)


INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "result", "difference"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], None),
        ([1.0, NAN], [1.0, 2.0], "inf"),
        ([1.0, 2.0], [1.0, INF], "inf"),
        ([-4.0, 2.0], [-4.0, 1.0], "1"),
        ([0.0, 0.0], [0.0, 0.5], "0.5"),
        ([True, False], [True, True], "1"),
        ([2**60, 1], [2**60, 1], None),
        ([1j], [1j], None),
        ([1j], [1 + 1j], "1"),
        ([], [], None),
    ],
)
def test_the_largest_difference_of_all_values(
    expected: list[Any], result: list[Any], difference: str | None
) -> None:
    found = list(differences([torch.tensor(expected)], [torch.tensor(result)]))
    words = [] if difference is None else [f"result 0 differs by up to {difference}"]
    assert found == words
    json.dumps(FileCheck("x", difference="; ".join(found)).to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "0 tensors instead of 1"),
        ([torch.ones(2).half()], "result 0 is torch.float16 instead of torch.float32"),
        ([torch.ones(3)], r"result 0 has the shape \(3,\) instead of \(2,\)"),
    ],
)
def test_results_of_another_kind_are_named(result: list[torch.Tensor], words: str) -> None:
    [found] = differences([torch.ones(2)], result)
    assert re.search(words, found)


def test_onnx_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    program = precast.export(network(), (torch.ones(3, 8),))
    with pytest.raises(MissingExtraError, match=r"pip install"):
        write_onnx(program, tmp_path / "model.onnx")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["default", "modules"])
def test_onnx_has_the_dtypes_of_the_policy(policy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    # With a large eps, a row of nearly equal numbers does not blow up what ONNX's kernels round otherwise.
    norm = nn.LayerNorm(4, eps=1.0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), norm).eval()
    x, path = torch.randn(3, 8), tmp_path / "model.onnx"
    program = precast.export(model, (x,), policy=POLICIES[policy], dtype=dtype)
    write_onnx(program, path)
    weights = {each.name: each.data_type for each in onnx.load(path).graph.initializer}
    low = {torch.bfloat16: 16, torch.float16: 10}[dtype]
    assert weights["0.weight"] == weights["2.weight"] == low
    [found] = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    expected = program.module()(x).float()
    torch.testing.assert_close(
        torch.from_numpy(found.astype("float32")), expected, atol=0.02, rtol=0.02
    )


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = self.layer(x).chunk(3, -1)
        d, e = self.layer(x).split([4, 20], -1)
        return a @ b.mT, c, d, e * 2


@pytest.fixture
def splits(tmp_path: Path) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Path]:
    """An input, the program's results, and the ONNX file."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    x, path = torch.randn(3, 8), tmp_path / "model.onnx"
    program = precast.export(Splits().eval(), (x,), dtype=torch.bfloat16)
    write_onnx(program, path)
    return x, program.module()(x), path


def test_onnx_splits_16_bit_values_though_its_sequences_have_none(
    splits: tuple[torch.Tensor, tuple[torch.Tensor, ...], Path],
) -> None:
    from onnx.reference import ReferenceEvaluator

    x, expected, path = splits
    found = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    for one, other in zip(found, expected, strict=True):
        assert one.dtype.name == "bfloat16"
        assert one.shape == other.shape
        wide = torch.from_numpy(one.astype("float32"))
        torch.testing.assert_close(wide, other.float(), atol=0.02, rtol=0.02)


def test_weights_lie_beside_a_file_that_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from torch.onnx._internal.exporter import _onnx_program

    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0)
    path = tmp_path / "model.onnx"
    write_onnx(precast.export(nn.Linear(8, 24), (torch.ones(1, 8),)), path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    inside = {
        each.name: each for each in onnx.load(path, load_external_data=False).graph.initializer
    }
    assert inside["weight"].data_location == onnx.TensorProto.EXTERNAL
    whole = {each.name: each for each in onnx.load(path).graph.initializer}
    assert len(whole["weight"].raw_data) == 8 * 24 * 2
    onnx.checker.check_model(str(path), full_check=True)


ON_ONNXRUNTIME: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layers": (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)),
        (3, 8),
    ),
    "3-d convolution without bias": (nn.Conv3d(2, 3, 3, bias=False), (1, 2, 5, 4, 3)),
}


@pytest.mark.parametrize("name", ON_ONNXRUNTIME)
def test_onnxruntime_computes_what_the_program_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, shape = ON_ONNXRUNTIME[name]
    x, path = torch.randn(shape), tmp_path / "model.onnx"
    model = model.eval()
    program = precast.export(model, (x,), dtype=torch.float16)
    write_onnx(program, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"input": x.numpy()})
    expected = program.module()(x)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-3, rtol=2e-3)


def test_what_onnx_cannot_say_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")

    class Decomposes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.qr(x)[0]

    program = precast.export(Decomposes(), (torch.randn(3, 3),), dtype=torch.bfloat16)
    with pytest.raises(ExportError, match="linalg_qr"):
        write_onnx(program, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not a model"):
        write_onnx(program, tmp_path / "model.txt")
