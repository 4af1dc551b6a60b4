"""ONNX files of exported programs, checked node by node against the dtypes of the program.

Invariants:

- PyTorch's exporter writes the file, without its optimizer, which joins normalisations into float32 weights of
  convolutions whose policy is another (2.13);
- every value of the file that a node of the program has must have that node's dtype, every operator must take the
  dtypes that it gets, and no weight is stored in float32 only to be cast;
- a file is written completely or not at all. Weights of more than 2 GB lie beside it.
"""

from __future__ import annotations

import copy
import errno
import operator
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from precast import _torch
from precast._internal.missing import missing_extra
from precast.errors import ExportError, OutputError
from precast.shipping import exported_file
from precast.shipping.graph_nodes import CAST, placeholders, value_of

__all__ = ["OPSET", "OnnxFile", "write_onnx"]

OPSET = 23
"""The first in which attention and normalisations are operators, and convolutions take bfloat16."""
_NORMS = tuple(
    getattr(torch.ops.aten, name).default for name in ("layer_norm", "group_norm", "rms_norm")
)
_SPLITS = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("split", "Tensor"),
        ("unsafe_split", "Tensor"),
        ("split_with_sizes", "default"),
        ("chunk", "default"),
    )
)
_AMAX, _VIEW_AS = torch.ops.aten.amax.default, torch.ops.aten.view.dtype
_EXPONENT_BITS = 0x7F800000
"""The bits of a float32 number that are left of it where it is rounded down to a power of two."""
_LARGE = 2_000_000_000  # bytes; protobuf ends at 2 GiB


@dataclass(frozen=True)
class OnnxFile:
    """What was written.

    Attributes:
        path: of the file.
        nodes: how many operators it has.
        compared: how many of their results have a node of the program to be compared with.
        weights_beside: the file of the weights; None where they are inside.
    """

    path: Path
    nodes: int
    compared: int
    weights_beside: Path | None


def write_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    *,
    opset: int = OPSET,
    beside_from: int = _LARGE,
) -> OnnxFile:
    """Writes a program as ONNX.

    Args:
        program: what `precast.export` returned.
        path: of the file.
        opset: the version of ONNX's operators.
        beside_from: from how many bytes on weights lie in a file of their own.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
        ExportError: the exporter cannot convert an operation, or the file would not follow the policy; nothing is
            written then.
        OutputError: it could not be written.
    """
    onnx = _onnx()
    exported_file.check_replaceable(path)
    size = sum(t.nbytes for t in program.state_dict.values() if isinstance(t, Tensor))
    is_large = size > beside_from
    _check_beside(path, is_large)
    converted = _converted(_as_onnx_takes_it(program), opset)
    with exported_file.folder_beside(path) as (folder, target):
        written = folder / target.name
        converted.save(str(written), external_data=is_large)
        model = onnx.load(str(written), load_external_data=False)
        compared = _check(onnx, model, converted.exported_program)
        beside = _weights_of(target) if is_large else None
        if beside is not None:
            (folder / beside.name).replace(beside)
        written.replace(target)
    return OnnxFile(path, len(model.graph.node), compared, beside)


def _weights_of(path: Path) -> Path:
    """The file of the weights of one that would be too large with them."""
    return path.with_name(f"{path.name}.data")


def _check_beside(path: Path, is_large: bool) -> None:
    beside = _weights_of(path)
    if is_large and beside.exists() and not path.exists():
        raise OutputError(
            errno.EEXIST,
            f"its weights are to lie in {beside.name}, which is there and belongs to no {path.name}",
            str(path),
        )


def _onnx() -> Any:
    for package in ("onnxscript", "onnx"):
        try:
            found = __import__(package)
        except ModuleNotFoundError as error:
            raise missing_extra("ONNX", package, "onnx") from error
    return found


def _as_onnx_takes_it(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in operations that ONNX has for its dtypes; their results are the same."""
    with warnings.catch_warnings():
        # PyTorch's copies use what PyTorch has deprecated (2.13).
        warnings.filterwarnings("ignore", r"`isinstance\(treespec", FutureWarning)
        module, signature = (
            copy.deepcopy(part) for part in (program.graph_module, program.graph_signature)
        )
    for new, old in zip(placeholders(module.graph), placeholders(program.graph), strict=True):
        new.name = new.target = old.name  # a copy renames `input`
    for node in list(module.graph.nodes):
        if node.target in _NORMS:
            _widen_norm(module.graph, node, signature)
        elif node.target in _SPLITS:
            _slice(module.graph, node)
        elif (
            node.target is _AMAX and len(node.args) < 2
        ):  # the exporter has it with dimensions only
            node.args = (node.args[0], list(range(value_of(node.all_input_nodes[0]).dim())))
        elif node.target is _VIEW_AS:
            _power_of_two(module.graph, node)
    module.recompile()
    found: torch.export.ExportedProgram = _torch.updated_program(
        program, graph_module=module, graph_signature=signature
    )
    return found


def _widen_norm(graph: fx.Graph, node: fx.Node, signature: Any) -> None:
    """Puts a norm of a 16-bit value and float32 weights in float32, and casts its result back.

    ONNX's take one dtype for all arguments. PyTorch's compute in float32, too, and round their result once.
    """
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(_floating(node)) < 2:
        return
    before, value = value_of(source).dtype, value_of(node)
    with graph.inserting_before(node):
        wide = graph.call_function(CAST, (source, torch.float32))
    wide.meta["val"] = value_of(source).to(torch.float32)
    node.replace_input_with(source, wide)
    with graph.inserting_after(node):
        back = graph.call_function(CAST, (node, before))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    back.meta["val"] = value
    node.meta["val"] = value.to(torch.float32)
    for spec in signature.output_specs:
        if spec.arg.name == node.name:
            spec.arg.name = back.name


def _slice(graph: fx.Graph, node: fx.Node) -> None:
    """Takes the parts of a split by slices, because ONNX's sequences of tensors have no bfloat16."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    sizes = [part.shape[dim] for part in node.meta["val"]]
    users = list(node.users)
    if not all(isinstance(size, int) for size in sizes) or not all(
        user.target is operator.getitem for user in users
    ):
        return
    for user in users:
        number = user.args[1]
        assert isinstance(number, int)
        begin = sum(sizes[:number])
        with graph.inserting_before(user):
            part = graph.call_function(
                torch.ops.aten.slice.Tensor, (node.args[0], dim, begin, begin + sizes[number])
            )
        name = user.name
        part.meta.update(user.meta)
        user.replace_all_uses_with(part)
        graph.erase_node(user)
        part.name = name
    graph.erase_node(node)


def _power_of_two(graph: fx.Graph, node: fx.Node) -> None:
    """Rounds numbers down to a power of two by arithmetic, where the program clears bits of theirs.

    ONNX has no operator that reads a number's bits before opset 26. Dekker's splitting leaves one bit of a number,
    rounded to the nearest, and where that is above the number its half is at or below. Nothing of it is rounded twice
    or overflows between 2 ** -126 and 2 ** 100, where the scales of the float8 rules are.
    """
    masked = _before_detach(node)
    bits = _before_detach(masked) if masked.target is _MASK else masked
    if masked.args[1:] != (_EXPONENT_BITS,) or bits.target is not _VIEW_AS:
        return
    number = bits.all_input_nodes[0]

    def written(name: str, *args: Any) -> fx.Node:
        operation = getattr(torch.ops.aten, name.partition(".")[0])
        made = graph.call_function(getattr(operation, name.partition(".")[2]), args)
        made.meta["val"] = value_of(number) if name != "gt.Tensor" else value_of(number).bool()
        return made

    with graph.inserting_before(node):
        large = written("mul.Tensor", number, float(2**23 + 1))
        nearest = written("add.Tensor", large, written("sub.Tensor", number, large))
        half = written("mul.Tensor", nearest, 0.5)
        is_above = written("gt.Tensor", nearest, number)
        power = written("where.self", is_above, half, nearest)
    node.replace_all_uses_with(power)
    unused = node
    while not unused.users and unused is not number:
        source = unused.all_input_nodes[0]
        graph.erase_node(unused)
        unused = source


_MASK = torch.ops.aten.bitwise_and.Scalar


def _before_detach(node: fx.Node) -> fx.Node:
    """What a node is computed from, without what only detaches it."""
    source = node.all_input_nodes[0]
    return _before_detach(source) if source.target is torch.ops.aten.detach.default else source


def _floating(node: fx.Node) -> set[torch.dtype]:
    values = map(value_of, node.all_input_nodes)
    return {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}


def _converted(program: torch.export.ExportedProgram, opset: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=opset
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportError(
                f"PyTorch cannot write the program as ONNX: {_root(error)}"
            ) from error


def _root(error: BaseException) -> str:
    """The first cause of an error, without what the exporter says to its own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check(onnx: Any, model: Any, program: torch.export.ExportedProgram) -> int:
    """Compares the file with the program; returns how many values were compared."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        first = str(error).strip().splitlines()[-1]
        raise ExportError(
            f"ONNX has no operator for what the policy asks, so that no file was written: {first}"
        ) from error
    graph = inferred.graph
    of_type = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
    of_type |= {torch.float8_e4m3fn: 17, torch.float8_e4m3fnuz: 18}
    types = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.output]}
    compared = 0
    for node in program.graph.nodes:
        value = node.meta.get("val")
        wanted = of_type.get(value.dtype) if isinstance(value, Tensor) else None
        if node.op != "call_function" or wanted is None or node.name not in types:
            continue
        compared += 1
        if types[node.name] != wanted:
            raise ExportError(
                f"the exporter gives {node.name} ({node.target}) another dtype than the policy's {value.dtype}"
            )
    _check_weights(graph)
    return compared


def _check_weights(graph: Any) -> None:
    users: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, set()).add(node.op_type)
    for weight in graph.initializer:
        if weight.data_type == 1 and users.get(weight.name) == {"Cast"}:
            raise ExportError(f"the weight {weight.name} is stored in float32, and only cast")
