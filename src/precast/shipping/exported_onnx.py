"""ONNX files of exported programs, with the dtypes of their nodes checked against the program.

Invariants:

- PyTorch's exporter writes the file, without its optimizer, which folds normalisations into float32 weights of
  convolutions in spite of their policy (2.13);
- every value in the file that corresponds to a node of the program has that node's dtype, every operator supports the
  dtypes of its arguments, and no weight is stored in float32 only to be cast;
- a file is written completely or not at all. Weights of more than 2 GB are in a separate file.
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
"""The first version with operators for attention and normalisations, and convolutions in bfloat16."""
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
"""A mask of the exponent of a float32 value, which rounds it down to a power of two."""
_LARGE = 2_000_000_000  # bytes; the limit of protobuf is 2 GiB


@dataclass(frozen=True)
class OnnxFile:
    """A written ONNX file.

    Attributes:
        path: path of the file.
        nodes: number of its operators.
        compared: number of their results that were compared with nodes of the program.
        weights_beside: the file of the weights; None if they are in the file itself.
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
    """Write a program as ONNX.

    Args:
        program: the result of `precast.export`.
        path: path of the file.
        opset: the version of ONNX's operators.
        beside_from: size of the weights, in bytes, from which they are in a separate file.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
        ExportError: the exporter cannot convert an operation, or the file would not follow the policy; then nothing is
            written.
        OutputError: it could not be written.
    """
    onnx = _onnx()
    exported_file.check_replaceable(path)
    size = sum(t.nbytes for t in program.state_dict.values() if isinstance(t, Tensor))
    is_large = size > beside_from
    weights = _weights_of(path)
    if is_large and weights.exists() and not path.exists():
        raise OutputError(
            errno.EEXIST, f"{weights.name} exists, and belongs to no {path.name}", str(path)
        )
    converted = _converted(_for_onnx(program), opset)
    with exported_file.temporary_folder(path) as (folder, target):
        temporary = folder / target.name
        converted.save(str(temporary), external_data=is_large)
        model = onnx.load(str(temporary), load_external_data=False)
        compared = _check(onnx, model, converted.exported_program)
        beside = _weights_of(target) if is_large else None
        if beside is not None:
            (folder / beside.name).replace(beside)
        temporary.replace(target)
    return OnnxFile(path, len(model.graph.node), compared, beside)


def _weights_of(path: Path) -> Path:
    """Return the path of the separate file of weights."""
    return path.with_name(f"{path.name}.data")


def _onnx() -> Any:
    for package in ("onnxscript", "onnx"):
        try:
            module = __import__(package)
        except ModuleNotFoundError as error:
            raise missing_extra("ONNX", package, "onnx") from error
    return module


def _for_onnx(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program with operations that ONNX has for its dtypes; their results are equal."""
    with exported_file.without_deprecations():
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
        elif node.target is _AMAX and len(node.args) < 2:  # the exporter needs dimensions
            node.args = (node.args[0], list(range(value_of(node.all_input_nodes[0]).dim())))
        elif node.target is _VIEW_AS:
            _power_of_two(module.graph, node)
    module.recompile()
    return _torch.updated_program(  # type: ignore[no-any-return]
        program, graph_module=module, graph_signature=signature
    )


def _widen_norm(graph: fx.Graph, node: fx.Node, signature: Any) -> None:
    """Compute a norm of a 16-bit value with float32 weights in float32, and cast its result back.

    ONNX's norms need one dtype for all arguments. PyTorch's compute in float32, too, and round their result once.
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
    """Replace a split by slices, because ONNX's sequences of tensors do not support bfloat16."""
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
    """Round values down to a power of two by arithmetic, where the program clears bits.

    ONNX has no operator that reads the bits of a value before opset 26. Dekker's splitting leaves one bit of a value,
    rounded to the nearest power of two; if that is above the value, half of it is not. Between 2 ** -126 and 2 ** 100,
    the range of the scales of the float8 rules, no step rounds twice or overflows.
    """
    masked = _before_detach(node)
    bits = _before_detach(masked) if masked.target is _MASK else masked
    if masked.args[1:] != (_EXPONENT_BITS,) or bits.target is not _VIEW_AS:
        return
    number = bits.all_input_nodes[0]

    def call(name: str, *args: Any) -> fx.Node:
        operation = getattr(torch.ops.aten, name.partition(".")[0])
        result = graph.call_function(getattr(operation, name.partition(".")[2]), args)
        result.meta["val"] = value_of(number) if name != "gt.Tensor" else value_of(number).bool()
        return result

    with graph.inserting_before(node):
        large = call("mul.Tensor", number, float(2**23 + 1))
        nearest = call("add.Tensor", large, call("sub.Tensor", number, large))
        half = call("mul.Tensor", nearest, 0.5)
        is_above = call("gt.Tensor", nearest, number)
        power = call("where.self", is_above, half, nearest)
    node.replace_all_uses_with(power)
    unused = node
    while not unused.users and unused is not number:
        source = unused.all_input_nodes[0]
        graph.erase_node(unused)
        unused = source


_MASK = torch.ops.aten.bitwise_and.Scalar


def _before_detach(node: fx.Node) -> fx.Node:
    """Return the argument of a node, without operations that only detach it."""
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
    """Return the first cause of an error, without the exporter's hints for its developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check(onnx: Any, model: Any, program: torch.export.ExportedProgram) -> int:
    """Compare the dtypes of the file with the program; return the number of compared values."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        first = str(error).strip().splitlines()[-1]
        raise ExportError(
            f"ONNX has no operator for a dtype of the policy, so no file was written: {first}"
        ) from error
    graph = inferred.graph
    of_type = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}
    of_type |= {torch.float8_e4m3fn: 17, torch.float8_e4m3fnuz: 18}
    types = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.output]}
    compared = 0
    for node in program.graph.nodes:
        value = node.meta.get("val")
        expected = of_type.get(value.dtype) if isinstance(value, Tensor) else None
        if node.op != "call_function" or expected is None or node.name not in types:
            continue
        compared += 1
        if types[node.name] != expected:
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
