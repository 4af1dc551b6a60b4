"""Comparison of a written file with its program: both run on the example, the file in its own runtime.

Invariants:

- results are compared only if the file ran on this machine; otherwise the reason is reported;
- the file runs as its user runs it: read from the disk, by PyTorch, AOTInductor or ONNX Runtime, without a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.autocast_mode.region import disable

__all__ = ["FileCheck", "check_file", "differences"]


@dataclass(frozen=True)
class FileCheck:
    """Comparison of the results of a file with those of its program.

    Attributes:
        runtime: the runtime that ran the file, with its version; None where none did.
        error: the reason why there are no results to compare; None where they were compared.
        difference: the results that differ, and by how much; None where all values are equal, or nothing was compared.
    """

    runtime: str | None
    error: str | None = None
    difference: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        is_compared = self.error is None
        return {
            "checked": is_compared,
            "runtime": self.runtime,
            "error": self.error,
            "equal": self.difference is None if is_compared else None,
            "difference": self.difference,
        }

    def __str__(self) -> str:
        if self.error is not None:
            runs = f"{self.runtime} cannot run it: " if self.runtime else ""
            return f"{runs}{self.error}. The file's results were not compared with the model's"
        if self.difference is None:
            return f"run by {self.runtime}, it gives exactly the model's results on the example"
        return f"run by {self.runtime}, its results on the example differ from the model's: {self.difference}"


def check_file(
    program: torch.export.ExportedProgram,
    path: Path,
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> FileCheck:
    """Run a file ("program", "aoti" or "onnx") on the example, and compare its results with those of its program."""
    if kind == "onnx" and find_spec("onnxruntime") is None:
        return FileCheck(None, "onnxruntime is not installed (pip install onnxruntime)")
    runtime, run = _RUNTIMES[kind]

    def results_of(run: Callable[..., Any]) -> list[Tensor]:
        own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
        with torch.random.fork_rng([]), torch.no_grad(), disable():
            torch.manual_seed(0)
            return tensors_in(run(*own_args, **own_kwargs))

    expected = results_of(program.module())
    name = runtime()
    try:
        results = results_of(run(path))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return FileCheck(name, f"{type(error).__name__}: {first_line}")
    return FileCheck(name, difference="; ".join(differences(expected, results)) or None)


def differences(expected: Any, actual: Any) -> Iterator[str]:
    """Yield the differences between the tensors of two results, named by their order; NaN equals NaN."""
    ours, theirs = tensors_in(expected), tensors_in(actual)
    if len(ours) != len(theirs):
        yield f"{len(theirs)} tensors instead of {len(ours)}"
        return
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        name = f"result {number}"
        if one.dtype is not other.dtype:
            yield f"{name} is {other.dtype} instead of {one.dtype}"
        elif one.shape != other.shape:
            yield f"{name} has the shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        else:
            worst = _largest_distance(_real(one), _real(other))
            if worst > 0:
                yield f"{name} differs by up to {worst:.3g}"


def _largest_distance(one: Tensor, other: Tensor) -> float:
    is_equal = (one == other) | (one.isnan() & other.isnan())
    distances = (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)[~is_equal]
    return distances.max().item() if distances.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """Return the values on the CPU; those of a complex tensor as pairs, in a last dimension."""
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _load_program(path: Path) -> Callable[..., Any]:
    return torch.export.load(path).module()


def _load_onnx(path: Path) -> Callable[..., Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are also raised, so they need no log
    session = onnxruntime.InferenceSession(str(path), options, providers=[_PROVIDER])
    names = [each.name for each in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        inputs = [tensor.detach().cpu().numpy() for tensor in tensors_in((args, kwargs))]
        return [
            torch.as_tensor(each)
            for each in session.run(None, dict(zip(names, inputs, strict=True)))
        ]

    return run


_PROVIDER: Final = "CPUExecutionProvider"
_RUNTIMES: Final[dict[str, tuple[Callable[[], str], Callable[[Path], Callable[..., Any]]]]] = {
    "program": (lambda: f"PyTorch {torch.__version__}", _load_program),
    "aoti": (lambda: f"AOTInductor of PyTorch {torch.__version__}", _torch.load_package),
    "onnx": (lambda: f"onnxruntime {version('onnxruntime')} on the CPU", _load_onnx),
}
