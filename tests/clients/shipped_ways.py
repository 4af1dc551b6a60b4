"""The ways in which a model is shipped: each ships one, calls what it shipped, and returns the results.

Invariants:
    - A graph is recorded of one call, so that a model with several calls is shipped as the module that does them all.
    - ONNX runs on onnxruntime; on onnx's reference evaluator where onnxruntime's CPU provider lacks a kernel.
    - Policies that give a model the same program, to the last node and weight, share what was made of it.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.backends import mha

import precast
from precast._internal.pytree import tensors_in
from precast.errors import MissingExtraError, PrecastError
from precast.policy.policy import Policy
from precast.shipping.exported_file import write_package
from precast.shipping.exported_onnx import write_onnx
from precast.shipping.function_calls import is_same
from tests.clients.shipped_cases import POLICIES, Case, Shipped

__all__ = ["DTYPES", "WAYS", "NotShippedError", "Trial", "Way", "compared", "run_onnx"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class NotShippedError(Exception):
    """A way that does not exist for a model, or a result that nothing here can compute."""


@dataclass
class Trial:
    """A model, a policy and a dtype: what every way to ship is tried on.

    Attributes:
        case: the model.
        policy_name: one of `POLICIES`.
        dtype: the lower precision.
        made: what was made of programs of this model: (way, fingerprint of the program) -> results and note.
        note: what a way says about how it ran, for the cell.
    """

    case: Case
    policy_name: str
    dtype: torch.dtype
    made: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    note: str = field(default="", init=False)

    def policy_of(self, shipped: Shipped) -> Policy:
        """The policy, made for the model."""
        return POLICIES[self.policy_name](shipped.model, self.dtype)

    def in_region(self, shipped: Shipped) -> Any:
        """What the model computes in a region."""
        policy = self.policy_of(shipped)
        with (
            precast.attach(shipped.model, policy, hold=False),
            torch.inference_mode(),
            precast.autocast("cpu", self.dtype, policy=policy),
        ):
            return shipped.call(shipped.model)

    @cached_property
    def expected(self) -> Any:
        """What all its calls give in a region."""
        return self.in_region(self.case.make())

    @cached_property
    def expected_of_graph(self) -> Any:
        """The same as one call, without PyTorch's fused transformer kernels, which no graph has."""
        before = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)
        try:
            return self.in_region(self._graph())
        finally:
            mha.set_fastpath_enabled(before)

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The exported program; whether it gives the model's bits is for the table to say."""
        shipped = self._graph()
        args, kwargs = _arguments(shipped)
        return precast.export(
            shipped.model,
            args,
            kwargs,
            policy=self.policy_of(shipped),
            dtype=self.dtype,
            check=False,
        )

    def once(self, way: str, make: Callable[[], tuple[Any, str]]) -> Any:
        """What `make` gives for the program, and its note; it is called once for programs that are the same."""
        key = way, _fingerprint(self.program)
        if key not in self.made:
            self.made[key] = make()
        results, self.note = self.made[key]
        return results

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the graph's call."""
        return _arguments(self._graph())

    def _graph(self) -> Shipped:
        shipped = self.case.make_graph()
        if shipped is None:
            raise NotShippedError("no graph: a loop in Python around the calls above")
        return shipped


def _fingerprint(program: torch.export.ExportedProgram) -> str:
    """The same for programs with the same nodes and the same stored numbers."""
    found = hashlib.sha256(program.graph_module.print_readable(print_output=False).encode())
    for name, stored in (*program.state_dict.items(), *program.constants.items()):
        found.update(name.encode())
        if isinstance(stored, Tensor):
            found.update(f"{stored.dtype} {tuple(stored.shape)} {stored.stride()}".encode())
            found.update(stored.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _arguments(shipped: Shipped) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), shipped.example) if isinstance(shipped.example, dict) else (shipped.example, {})


@dataclass(frozen=True)
class Way:
    """A way to ship.

    Attributes:
        ship: ships a model, and returns what it computes then.
        is_graph: whether one call is recorded, and nothing else shipped.
    """

    ship: Callable[[Trial], Any]
    is_graph: bool


def _converted(trial: Trial) -> Any:
    shipped = trial.case.make()
    model = precast.convert(
        shipped.model, trial.policy_of(shipped), trial.dtype, example=shipped.example
    )
    with torch.inference_mode():
        return shipped.call(model)


def _exported(trial: Trial) -> Any:
    args, kwargs = trial.arguments()
    with torch.no_grad():
        return trial.program.module()(*args, **kwargs)


def _compiled(trial: Trial) -> Any:
    def make() -> tuple[Any, str]:
        args, kwargs = trial.arguments()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt2"
            write_package(trial.program, path)
            run = torch._inductor.aoti_load_package(str(path))
            with torch.no_grad():
                return run(*args, **kwargs), ""

    return trial.once("AOTInductor", make)


def _onnx(trial: Trial) -> Any:
    def make() -> tuple[Any, str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            write_onnx(trial.program, path)
            return run_onnx(path, tensors_in(trial.arguments()))

    return trial.once("ONNX", make)


def run_onnx(path: Path, given: list[Tensor]) -> tuple[list[Tensor], str]:
    """The results of an ONNX file, and what computed them."""
    import onnx
    import onnxruntime
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops.op_conv import Conv as _Conv
    from onnx.reference.ops.op_instance_normalization import (
        InstanceNormalization as _InstanceNormalization,
    )

    def in_float32(self: Any, base: Any, arrays: Any, attributes: Any) -> Any:
        """Adds in float32, as kernels do; the evaluator's own adds in the dtype of its arguments."""
        wide = (None if a is None else a.astype("float32") for a in arrays)
        [found] = base._run(self, *wide, **attributes)
        return (found.astype(arrays[0].dtype),)

    class Conv(_Conv):
        op_domain = ""

        def _run(self, *arrays: Any, **attributes: Any) -> Any:
            return in_float32(self, _Conv, arrays, attributes)

    class InstanceNormalization(_InstanceNormalization):
        op_domain = ""

        def _run(self, *arrays: Any, **attributes: Any) -> Any:
            return in_float32(self, _InstanceNormalization, arrays, attributes)

    model = onnx.load(path)
    inputs = [value.name for value in model.graph.input]
    feed = dict(zip(inputs, (tensor.numpy() for tensor in given), strict=True))
    onnxruntime.set_default_logger_severity(4)
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise NotShippedError(f"onnxruntime refuses it: {error}") from error
        results = ReferenceEvaluator(model, new_ops=[Conv, InstanceNormalization]).run(None, feed)
        return [_tensor(array) for array in results], "on the reference evaluator"
    return [_tensor(array) for array in session.run(None, feed)], "on onnxruntime"


def _tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # numpy has it from ml_dtypes
        return torch.from_numpy(array.astype("float32")).bfloat16()
    return torch.as_tensor(array)


WAYS: dict[str, Way] = {
    "converted": Way(_converted, is_graph=False),
    "exported": Way(_exported, is_graph=True),
    "AOTInductor": Way(_compiled, is_graph=True),
    "ONNX": Way(_onnx, is_graph=True),
}
"""The columns of the table."""


# --- comparison with a region ---


def compared(case: Case, policy: str, dtype: torch.dtype, ways: Iterable[str]) -> dict[str, str]:
    """Return how the result of each way of shipping compares with the model in a region.

    A value is "equal", "differs by" the largest difference over the largest element, or "refused" with the reason.
    """
    trial = Trial(case, policy, dtype, {})
    return {way: _cell_of(WAYS[way], trial) for way in ways}


def _cell_of(way: Way, trial: Trial) -> str:
    try:
        expected = trial.expected_of_graph if way.is_graph else trial.expected
    except MissingExtraError:
        raise
    except NotShippedError as error:
        return str(error)
    except PrecastError as error:
        return f"refused in a region too: {_first(error)}"
    except RuntimeError as error:
        return f"refused by PyTorch in a region too: {_first(error)}"
    trial.note = ""
    try:
        return f"{_compare(expected, way.ship(trial))} {trial.note}".strip()
    except (PrecastError, NotShippedError) as error:
        return f"refused: {_first(error)}"


def _first(error: Exception) -> str:
    """The first sentence; for what torch.export says, also the first of its own."""
    first, _, rest = str(error).partition("\n")
    said = first.partition(". ")[0].rstrip(".")
    if first.endswith("on this example."):
        said = f"{said}: {rest.partition(chr(10))[0].partition('. ')[0]}"
    return said.replace("|", "/").replace("<", "`").replace(">", "`")


def _compare(expected: Any, found: Any) -> str:
    ours, theirs = _values(found), _values(expected)
    assert theirs, "a case computes tensors"
    if len(ours) == len(theirs) and all(map(is_same, ours, theirs)):
        return "equal"
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return "differs in shape"
    if [t.dtype for t in ours] != [t.dtype for t in theirs]:
        return "differs in dtype"
    return f"differs by {max(map(_distance, ours, theirs)):.1g}"


def _values(result: Any) -> list[Tensor]:
    return tensors_in(result) or tensors_in(list(vars(result).values()))


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, divided by the largest number."""
    one, other = one.double(), other.double()
    distance = ((one - other).abs().max() / other.abs().max()).item()
    return math.inf if math.isnan(distance) else distance
