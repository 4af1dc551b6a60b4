"""Comparison of a written file with its program: both run on the example, the file by the runtime that is to run it.

Invariants:

- results are compared of files that ran here, and of no others; where a file did not run, the reason is given;
- the file runs as its user runs it: read from the disk, by PyTorch, AOTInductor or ONNX Runtime, without a region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.autocast_mode.region import disable

__all__ = ["FileCheck", "LargestDifference", "check_file", "difference_of"]


@dataclass(frozen=True)
class LargestDifference:
    """The largest difference between a result and the expected one.

    Attributes:
        result: the number of the result, from 0.
        index: the place in it.
        value: the value there.
        expected: the value that was expected there.
        absolute: their distance; infinite where one of them is not finite.
        relative: the distance as a share of the largest finite value of the expected result.
    """

    result: int
    index: tuple[int, ...]
    value: float
    expected: float
    absolute: float
    relative: float

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return (
            f"by up to {self.absolute:.3g} ({self.relative:.2g} of the largest value): result {self.result}{place} is "
            f"{self.value:.9g} instead of {self.expected:.9g}"
        )


@dataclass(frozen=True)
class FileCheck:
    """Comparison of the results of a file with those of its program.

    Attributes:
        runtime: the runtime that ran the file, with its version; None where none did.
        error: the reason why there are no results to compare; None where they were compared.
        difference: the largest difference, or words where results cannot be subtracted; None where all values are
            equal, or nothing was compared.
    """

    runtime: str | None
    error: str | None = None
    difference: LargestDifference | str | None = None

    @property
    def is_compared(self) -> bool:
        """Return True if the file was run and its results were compared."""
        return self.error is None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        differs: Any = self.difference
        if isinstance(differs, LargestDifference):
            values = asdict(differs).items()
            differs = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in values
            }
        return {
            "checked": self.is_compared,
            "runtime": self.runtime,
            "error": self.error,
            "equal": differs is None if self.is_compared else None,
            "difference": differs,
        }

    def __str__(self) -> str:
        if self.error is not None:
            runs = f"{self.runtime} cannot run it: " if self.runtime else ""
            return f"{runs}{self.error}. The file's results were not compared with the model's"
        if self.difference is None:
            return f"run by {self.runtime}, it gives exactly the model's results on the example"
        return f"run by {self.runtime}, its results on the example differ from the model's {self.difference}"


def check_file(
    program: torch.export.ExportedProgram,
    path: Path,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> FileCheck:
    """Run a file on the example, and compare its results with those of the program that it was written from.

    Args:
        program: the program, which `precast.export` has compared with the model.
        path: the file.
        kind: its kind: "program", "aoti" or "onnx".
        args: the example's arguments.
        kwargs: the example's keyword arguments.
    """
    stored = [*program.state_dict.values(), *program.constants.values()]
    if any(tensor.device.type == "meta" for tensor in tensors_in([stored, args, kwargs])):
        return FileCheck(None, "the model or its example has no values, being on the meta device")
    if kind == "onnx" and find_spec("onnxruntime") is None:
        return FileCheck(None, "onnxruntime is not installed (pip install onnxruntime)")
    runtime, run = _RUNTIMES[kind]

    def results_of(run: Callable[..., Any]) -> list[Tensor]:
        given_args, given_kwargs = map_tensors((args, kwargs), torch.clone)
        with torch.random.fork_rng([]), torch.no_grad(), disable():
            torch.manual_seed(0)
            return tensors_in(run(*given_args, **given_kwargs))

    expected = results_of(program.module())
    name = runtime()
    try:
        results = results_of(run(path))
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return FileCheck(name, f"{type(error).__name__}: {first}")
    return FileCheck(name, difference=difference_of(expected, results))


def difference_of(
    expected: Sequence[Tensor], results: Sequence[Tensor]
) -> LargestDifference | str | None:
    """Return how results differ from the expected ones: in words, or the largest difference; None if in no value."""
    if len(expected) != len(results):
        return f"in their number: {len(results)} tensors instead of {len(expected)}"
    differences = []
    for number, (one, other) in enumerate(zip(expected, results, strict=True)):
        if one.dtype is not other.dtype:
            return f"in dtype: result {number} is {other.dtype} instead of {one.dtype}"
        if one.shape != other.shape:
            return (
                f"in shape: result {number} is {tuple(other.shape)} instead of {tuple(one.shape)}"
            )
        differences.append(_largest(number, one, other))
    return max(
        (each for each in differences if each is not None),
        key=lambda each: each.relative,
        default=None,
    )


def _largest(number: int, expected: Tensor, result: Tensor) -> LargestDifference | None:
    one, other = (_real(tensor.detach().cpu()) for tensor in (expected, result))
    is_equal = (one == other) | (one.isnan() & other.isnan())
    if is_equal.all():
        return None
    distances = (one.double() - other.double()).abs().nan_to_num(math.inf, math.inf)
    distances = torch.where(is_equal, 0.0, distances)
    place = int(distances.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), distances.shape))
    scale = one.double().abs().nan_to_num(0.0, 0.0).max().item()
    absolute = distances.flatten()[place].item()
    return LargestDifference(
        number,
        index,
        other.flatten()[place].item(),
        one.flatten()[place].item(),
        absolute,
        absolute / scale if scale else math.inf,
    )


def _real(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, exactly; those of a complex one as pairs, in a last dimension."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double() if tensor.is_floating_point() else tensor


def _load_program(path: Path) -> Callable[..., Any]:
    return torch.export.load(path).module()


def _load_onnx(path: Path) -> Callable[..., Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised, too
    session = onnxruntime.InferenceSession(str(path), options, providers=[_PROVIDER])
    names = [each.name for each in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        inputs = [tensor.detach().cpu().contiguous() for tensor in tensors_in((args, kwargs))]
        feed = dict(zip(names, map(_to_onnx, inputs), strict=True))
        return [_from_onnx(value) for value in session.run_with_ort_values(None, feed)]

    return run


def _to_onnx(tensor: Tensor) -> Any:
    from onnxruntime import OrtValue

    if tensor.dtype is not torch.bfloat16:
        return OrtValue.ortvalue_from_numpy(tensor.numpy())
    bits = tensor.view(torch.uint16).numpy()  # NumPy has no such dtype
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)


def _from_onnx(value: Any) -> Tensor:
    if "bfloat16" in value.data_type():
        return from_dlpack(value)  # NumPy has no such dtype
    return torch.as_tensor(value.numpy())


_PROVIDER: Final = "CPUExecutionProvider"
_ONNX_BFLOAT16: Final = 16
_RUNTIMES: Final[dict[str, tuple[Callable[[], str], Callable[[Path], Callable[..., Any]]]]] = {
    "program": (lambda: f"PyTorch {torch.__version__}", _load_program),
    "aoti": (lambda: f"AOTInductor of PyTorch {torch.__version__}", _torch.load_package),
    "onnx": (lambda: f"onnxruntime {version('onnxruntime')} on the CPU", _load_onnx),
}
