"""CUDA without a GPU: tests marked `gpu`, and every kernel of small models, on a device whose kernels are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.engine import registration
from precast.weights import unversioned_writes
from tests.conformance.systems import TORCH, System, on_all_systems
from tests.gpu.networks import NETWORKS, loss_of, network
from tests.support import pretended_cuda
from tools.gpu import files_of_tests

NEEDS_A_GPU = {
    "tests/conformance/test_op_lists.py::test_the_lists_for_cuda[torch_fp16-": "cuDNN",
    "tests/diagnostics/hardware/": "speed",
    "tests/gpu/test_equal_to_torch.py::test_distributed_training_in_one_process": "NCCL",
    "tests/gpu/test_equal_to_torch.py::test_recurrent_networks_of_cudnn": "cuDNN",
    "tests/gpu/test_operations.py": "CUDA's kernels: not each of the CPU's runs on the device",
    "tests/gpu/test_other_features.py::test_a_region_inside_a_compiled_function": "Triton",
    "tests/gpu/test_other_features.py::test_commands": "a device in programs that a test starts",
    "tests/gpu/test_other_features.py::test_compiled_training": "Triton",
    "tests/gpu/test_other_features.py::test_tuning": "speed",
    "tests/policy/test_lean_preset.py": "the rounding of CUDA's kernels",
    "tests/processes/": "NCCL",
}
"""The beginnings of the names of tests that cannot run here, with what they need."""
LONGEST = "tests/gpu/test_equal_to_torch.py"


@pytest.mark.parametrize("part", ["the longest file", "the other files"])
def test_tests_marked_gpu(part: str, record_property: Callable[[str, object], None]) -> None:
    files = [name for name in files_of_tests() if (name == LONGEST) == ("longest" in part)]
    record_property("cases", pretended_cuda.run_tests(files, without=NEEDS_A_GPU))


# --- what runs on the device alone ---


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(100, 64), nn.LayerNorm(64), encoder, nn.Linear(64, 5))


MODELS = {**NETWORKS, "encoder": (_encoder, lambda: torch.randint(100, (4, 12)))}
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
NO_ARITHMETIC = tuple(
    f"aten::{name}" for name in ("copy_", "_foreach_copy_", "empty", "fill_", "view", "as_strided")
)

Steps = tuple[list[float], list[str], int]
"""Two training steps: losses and sums of gradients, kernels with their dtypes, waits of the host."""


def train(name: str, dtype: torch.dtype, system: System, *, attached: bool) -> Steps:
    model, x = network(name, MODELS)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    numbers: list[float] = []
    kernels: list[str] = []
    waits = 0
    with system() as region, precast.attach(model) if attached else nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            waits -= pretended_cuda.waits()
            with pretended_cuda.recorded_kernels() as of_step:
                with region("cuda", dtype=dtype):
                    loss = loss_of(model(x))
                loss.backward()
            waits += pretended_cuda.waits()
            optimizer.step()
            sums = (p.grad.double().sum() for p in model.parameters() if p.grad is not None)
            numbers += [loss.item(), *(each.item() for each in sums)]
            kernels += of_step
    assert len(numbers) > 6
    return numbers, kernels, waits


@cache
def train_by_torch(name: str, dtype: torch.dtype) -> Steps:
    return train(name, dtype, TORCH, attached=False)


def arithmetic(kernels: list[str]) -> list[str]:
    """Return the kernels other than casts, allocations, constants and views."""
    return [kernel for kernel in kernels if not kernel.startswith(NO_ARITHMETIC)]


@pytest.mark.gpu
@pytest.mark.skipif(not pretended_cuda.is_loaded(), reason="needs the pretended device")
class TestOnTheDevice:
    @pytest.fixture(autouse=True)
    def _copies_are_never_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some regions begin with the comparison of a copy with its weight."""
        monkeypatch.setattr(unversioned_writes, "comparison_queue", [])

    @each_dtype
    @each_model
    @on_all_systems
    @pytest.mark.parametrize("attached", [False, True])
    def test_every_kernel_of_a_training_step(
        self, name: str, dtype: torch.dtype, system: System, attached: bool
    ) -> None:
        numbers, kernels, waits = train(name, dtype, system, attached=attached)
        expected = train_by_torch(name, dtype)
        assert (numbers, waits) == (expected[0], expected[2])
        assert arithmetic(kernels) == arithmetic(expected[1])
        assert attached or kernels == expected[1]

    @each_dtype
    @each_model
    def test_every_kernel_of_a_converted_model(self, name: str, dtype: torch.dtype) -> None:
        model, x = network(name, MODELS)
        model.eval().requires_grad_(False)
        with torch.no_grad():
            with pretended_cuda.recorded_kernels() as expected, torch.autocast("cuda", dtype):
                output: Tensor = model(x)
            precast.convert(model, "torch", dtype, example=x, in_place=True)
            model(x)  # the first call observes how functions of Python use the weights
            with pretended_cuda.recorded_kernels() as kernels:
                result = model(x)
        assert torch.equal(result, output)
        assert arithmetic(kernels) == arithmetic(expected)
        assert len(kernels) < len(expected)

    def test_compiled_kernels_call_no_python_code_to_detect_a_capture(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, x = network("perceptron")
        calls: list[None] = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: calls.append(None))
        with registration.use_engine("native"), precast.attach(model), torch.no_grad():
            for _ in range(3):
                calls.clear()
                with precast.autocast("cuda", torch.bfloat16):
                    model(x)
        assert calls == []
