"""An exported program gives the bits that the model gives in a region, stores weights as used, and needs no precast."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import Policy
from precast.errors import ExportError, PolicyError, PrecastWarning
from precast.shipping.exported_file import differences
from tests.shipping.exported_models import MODELS, POLICIES

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@contextlib.contextmanager
def region(model: nn.Module, policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        attachment = precast.attach(model, policy, hold=False) if policy.modules else None
    with attachment or contextlib.nullcontext(), torch.no_grad():
        with precast.autocast("cpu", dtype, policy=policy):
            yield


def eager(model: nn.Module, policy: Policy, dtype: torch.dtype, args: tuple[Any, ...]) -> Any:
    torch.backends.mha.set_fastpath_enabled(False)  # torch.export never records the fused kernels
    try:
        with region(model, policy, dtype):
            return model(*args)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [
        str(node.target)
        for graph in program.graph_module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


def equal(expected: Any, found: Any) -> None:
    assert list(differences(expected, found)) == []


def raises(model: nn.Module, policy: Policy, dtype: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Whether the model itself fails in a region, as PyTorch refuses mixed dtypes."""
    try:
        eager(model, policy, dtype, args)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize(
    ("policy", "dtype", "strict"),
    [
        ("torch", torch.bfloat16, False),
        ("default", torch.float16, True),
        ("lean", torch.bfloat16, False),
        ("rows", torch.bfloat16, False),
        ("like cuda", torch.float16, False),
        ("modules", torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_the_bits_of_the_model(
    name: str, policy: str, dtype: torch.dtype, strict: bool
) -> None:
    model, table = MODELS[name].make().eval(), POLICIES[policy]
    example = MODELS[name].example()
    if raises(model, table, dtype, example):
        with pytest.raises(ExportError):
            precast.export(model, example, policy=table, dtype=dtype, strict=strict)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecastWarning)
        program = precast.export(model, example, policy=table, dtype=dtype, strict=strict)
    found = targets(program)
    assert not [t for t in found if "autocast" in t or "precast" in t]
    decomposed = program.run_decompositions({}) if policy in {"default", "modules"} else program
    for run in {id(each): each.module() for each in (program, decomposed)}.values():
        for args in (example, MODELS[name].example()):
            equal(_again(model, table, dtype, args), _once(run, args))


def _once(run: nn.Module, args: tuple[Any, ...]) -> Any:
    """What a module gives, which is left as if it had not been called."""
    before = {name: value.clone() for name, value in run.named_buffers()}
    with torch.no_grad():
        found = run(*args)
    for name, value in before.items():
        run.get_buffer(name).copy_(value)
    return found


def _again(model: nn.Module, policy: Policy, dtype: torch.dtype, args: tuple[Any, ...]) -> Any:
    """What the model gives, which is left as if it had not been called."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = eager(model, policy, dtype, args)
    for name, value in before.items():
        model.get_buffer(name).copy_(value)
    return found


ONE_AFTER_THE_OTHER = """
import sys
sys.modules["precast"] = None  # importing it fails
import torch
for path in sys.argv[1:]:
    program, inputs = torch.export.load(path + ".pt2"), torch.load(path + ".inputs", weights_only=True)
    with torch.no_grad():
        torch.save(program.module()(*inputs), path + ".outputs")
        again = torch.export.load(path + ".pt2")  # the first has counted a call
        torch.save(again.run_decompositions({}).module()(*inputs), path + ".decomposed")
assert not [name for name in sys.modules if name.startswith("precast.")]
"""


def test_programs_run_where_precast_is_not(tmp_path: Path) -> None:
    expected, paths = {}, []
    for name, made in MODELS.items():
        model, path = made.make().eval(), str(tmp_path / name)
        policy = POLICIES["modules" if name in {"tied", "attention"} else "default"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecastWarning)
            program = precast.export(model, made.example(), policy=policy, dtype=torch.bfloat16)
        torch.export.save(program, path + ".pt2")
        inputs = made.example()
        torch.save(inputs, path + ".inputs")
        expected[path] = _again(model, policy, torch.bfloat16, inputs)
        paths.append(path)
    subprocess.run([sys.executable, "-W", "ignore", "-c", ONE_AFTER_THE_OTHER, *paths], check=True)
    for path, result in expected.items():
        equal(result, torch.load(path + ".outputs"))
        equal(result, torch.load(path + ".decomposed"))


def test_sizes_that_change(tmp_path: Path) -> None:
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes: dict[str, dict[int, Any]] = {
        key: {0: batch} for key in ["GRU", "LSTM", "composite", "convolutional"]
    }
    shapes |= {key: {0: batch, 1: length} for key in ["tied", "attention"]}
    for name, sizes in shapes.items():
        model, example = MODELS[name].make().eval(), MODELS[name].example()
        program = precast.export(model, example, policy=POLICIES["rows"], dynamic_shapes=(sizes,))
        larger = tuple(torch.cat([x, x.flip(0), x]) for x in example)
        if 1 in sizes:
            larger = tuple(torch.cat([x, x], 1) for x in larger)
        equal(
            eager(model, POLICIES["rows"], torch.bfloat16, larger), _once(program.module(), larger)
        )


class _Uses(nn.Module):
    """Weights that are used in one dtype, in several, in parts, tied, written, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.embed = nn.Embedding(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.embed.weight
        self.packed = nn.Parameter(torch.randn(12, 4))
        self.register_buffer("table", torch.randn(4, 4))
        self.register_buffer("written", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.written.add_(1)
        found = self.tied(self.low(x)) + self.embed.weight
        for part in self.packed.chunk(3):
            found = found @ part
        return found @ self.table @ self.written @ self.table


def test_each_weight_is_stored_as_it_is_used() -> None:
    model = _Uses()
    program = precast.export(model, (torch.randn(4, 4),))
    stored = {name: tensor.dtype for name, tensor in program.state_dict.items()}
    low, full = torch.bfloat16, torch.float32
    assert stored == {
        "low.weight": low,
        "low.bias": low,
        "embed.weight": full,
        "embed.weight_bfloat16": low,
        "packed_bfloat16": low,
        "packed_bfloat16_2": low,
        "packed_bfloat16_3": low,
        "table": low,
        "written": full,
    }
    assert all(p.dtype is full for p in model.parameters())
    assert (
        sum(target == "aten.to.dtype" for target in targets(program)) == 3
    )  # x, `written`, and what is added to
    x, before = torch.randn(4, 4), model.written.clone()
    run = program.module()
    assert torch.equal(run(x), run(x)) is False, "what the program has written counts"
    assert torch.equal(model.written, before), "what a program writes is its own"
    assert torch.equal(run.written, before + 1 + 1)


def test_nothing_of_the_model_is_changed() -> None:
    model = MODELS["writes"].make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    precast.export(model, MODELS["writes"].example(), policy=POLICIES["rows"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ExportError):
        precast.export(
            model, (torch.ones(3, 3),), policy=POLICIES["modules"].replace(modules={"10": None})
        )
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert not torch.is_autocast_enabled("cpu")


class _Compares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.allclose(x, x.bfloat16()) else x


class _Data(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.data


class _Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "args", "settings", "message"),
    [
        (torch.sin, (X,), {}, "expected a torch.nn.Module, got builtin"),
        (nn.Linear(4, 2), X, {}, r"expected a tuple .* `\(x,\)`"),
        (nn.Linear(4, 2), (X,), {"kwargs": [X]}, "expected a dict, got list"),
        (nn.Linear(4, 2, device="meta"), (X,), {}, "tensors on the meta device"),
        (nn.Linear(4, 2), (X.to("meta"),), {}, "tensors on the meta device"),
        (nn.Linear(4, 2), (torch.ones(2, 3),), {}, "cannot record the model on this example"),
        (_Decides(), (X,), {}, "control flow depends on data; write it with torch.cond"),
        (_Compares(), (X,), {}, "control flow depends on data; write it with torch.cond"),
        (_Data(), (X,), {}, r"usually a tensor's `\.data`\. Write `\.detach\(\)` instead"),
        (
            nn.Linear(4, 2),
            (X,),
            {"policy": Policy("gpu", {"cuda": {"aten::linear": "lower"}})},
            r'rules for cuda and none for cpu.*policy.retarget\("cpu", like="cuda"\)',
        ),
    ],
)
@STRICT
def test_what_cannot_be_exported_is_one_clear_error(
    model: Any, args: Any, settings: Any, message: str, strict: bool
) -> None:
    with pytest.raises(ExportError, match=message):
        precast.export(model, args, strict=strict, **settings)


def test_a_policy_that_is_none_is_its_own_error() -> None:
    with pytest.raises(PolicyError):
        precast.export(nn.Linear(4, 2), (X,), policy="no such policy")


def test_a_program_that_differs_is_not_given() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.compiler.is_exporting() else x + 1

    with pytest.raises(
        ExportError, match="results differ from the model's: result 0 differs by up to 1"
    ):
        precast.export(Changes(), (X,))
    assert precast.export(Changes(), (X,), check=False) is not None


def test_a_cast_of_a_cast_of_a_weight_is_rounded_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once = nn.Parameter(torch.randn(4, 4))
            self.both = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            first = self.once.bfloat16().float() @ x
            return first + (self.both.bfloat16().float() @ x) + self.both

    program = precast.export(Twice(), (torch.randn(4, 4),), dtype=torch.float16)
    stored = {tensor.dtype for tensor in program.state_dict.values()}
    assert stored == {torch.float16, torch.float32}


def test_what_cannot_be_recorded_is_one_error_and_nothing_is_logged_beside_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ExportError, match="must have same reduction dim"):
        precast.export(nn.Linear(4, 4).eval(), (torch.ones(2, 5),))
    with pytest.raises(ExportError, match="control flow depends on data"):
        precast.export(_Decides(), (X,))
    assert capfd.readouterr().err == ""


class _Solves(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_operation_that_is_promoted_is_written_once(dtype: torch.dtype) -> None:
    """The first try, in the dtypes as they are, raises an error: no call of it may stay in the program."""
    a, b = torch.eye(3) * 2, torch.ones(3, 1, dtype=dtype)
    program = precast.export(_Solves(), (a, b), dtype=torch.bfloat16, policy="default")
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("solve" in target for target in targets) == 1
    with precast.autocast("cpu", torch.bfloat16):
        expected = _Solves()(a, b)
    assert torch.equal(program.module()(a, b), expected)


def test_export_names_an_operator_of_another_package() -> None:
    """Such a program is saved, and does not load in a process that has not imported the package."""

    @torch.library.custom_op("elsewhere::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x) + 1

    with pytest.warns(PrecastWarning, match="calls elsewhere::double, which PyTorch does not have"):
        program = precast.export(Doubles().eval(), (X,))
    assert torch.equal(program.module()(X), X * 2 + 1)


class Refused(nn.Module):
    """Operations that PyTorch refuses in 16 bits; the second also in mixed dtypes, and with pivots that are 0."""

    def forward(self, x: Tensor, pivots: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        narrow = x.bfloat16()
        return torch.linalg.det(narrow), torch.linalg.lu_solve(narrow, pivots, b)


def test_what_pytorch_refuses_in_16_bits_is_exported_in_float32() -> None:
    x, pivots = torch.linalg.lu_factor(torch.randn(3, 3))
    arguments = x, pivots, torch.randn(3, 2)
    program = precast.export(Refused(), arguments, policy="default", dtype=torch.bfloat16)
    with precast.autocast("cpu"):
        expected = Refused()(*arguments)
    for result, reference in zip(program.module()(*arguments), expected, strict=True):
        assert result.dtype is torch.float32
        assert torch.equal(result, reference)
