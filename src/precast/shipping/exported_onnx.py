"""ONNX files of exported programs.

Invariants:

- PyTorch's exporter writes the file, without its optimizer, which folds normalisations into float32 weights of
  convolutions in spite of their policy (2.13);
- every operator in the file supports the dtypes of its arguments;
- a file is written completely or not at all.
"""

from __future__ import annotations

import copy
import operator
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from precast import _torch
from precast._internal.missing import missing_extra
from precast.errors import ExportError
from precast.shipping import exported_file
from precast.shipping.graph_nodes import CAST, placeholders, value_of

__all__ = ["write_onnx"]

_OPSET = 23
"""The first version with operators for attention and normalisations, and convolutions in bfloat16."""
_aten = torch.ops.aten
_NORMS = (_aten.layer_norm.default, _aten.group_norm.default, _aten.rms_norm.default)
_SPLITS = (
    _aten.split.Tensor,
    _aten.unsafe_split.Tensor,
    _aten.split_with_sizes.default,
    _aten.chunk.default,
)


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program as ONNX; weights of more than 2 GB are in a separate file, ``<name>.data``.

    Args:
        program: the result of `precast.export`.
        path: path of the file.
    """
    onnx = _onnx()
    exported_file.check_replaceable(path)
    converted = _converted(_for_onnx(program))
    with exported_file.temporary_folder(path) as (folder, target):
        converted.save(str(folder / target.name))
        _check(onnx, folder / target.name)
        for file in sorted(folder.iterdir(), reverse=True):  # the file itself last
            file.replace(target.with_name(file.name))


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
        elif node.target is _aten.conv3d.default:
            _add_bias(module.graph, node)
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
    value = value_of(node)
    with graph.inserting_before(node):
        wide = graph.call_function(CAST, (source, torch.float32))
    wide.meta["val"] = value_of(source).to(torch.float32)
    node.replace_input_with(source, wide)
    with graph.inserting_after(node):
        back = graph.call_function(CAST, (node, value_of(source).dtype))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    back.meta["val"] = value
    node.meta["val"] = value.to(torch.float32)
    for spec in [spec for spec in signature.output_specs if spec.arg.name == node.name]:
        spec.arg.name = back.name


def _slice(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a split by slices, because ONNX's sequences of tensors do not support bfloat16."""
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    sizes = [part.shape[dim] for part in node.meta["val"]]
    users = list(node.users)
    is_static = all(isinstance(size, int) for size in sizes)
    if not is_static or not all(user.target is operator.getitem for user in users):
        return
    for user in users:
        number: Any = user.args[1]
        begin, end, name = sum(sizes[:number]), sum(sizes[: number + 1]), user.name
        with graph.inserting_before(user):
            part = graph.call_function(_aten.slice.Tensor, (node.args[0], dim, begin, end))
        part.meta.update(user.meta)
        user.replace_all_uses_with(part)
        graph.erase_node(user)
        part.name = name
    graph.erase_node(node)


def _add_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Give a 3-d convolution without bias one of zeros: the one that onnxscript writes has a wrong shape (0.7)."""
    source, weight, *rest = node.args
    if any(rest[:1]) or node.kwargs.get("bias") is not None:
        return
    assert isinstance(weight, fx.Node)
    value = value_of(weight)
    settings = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(node):
        bias = graph.call_function(_aten.zeros.default, ([value.shape[0]],), settings)
    bias.meta["val"] = value.new_zeros(value.shape[0])
    node.args = (source, weight, bias, *rest[1:])


def _floating(node: fx.Node) -> set[torch.dtype]:
    values = map(value_of, node.all_input_nodes)
    return {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}


def _converted(program: torch.export.ExportedProgram) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=_OPSET
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # only the first has no hints for developers
                cause = cause.__cause__
            first = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
            raise ExportError(f"PyTorch cannot write the program as ONNX: {first}") from error


def _check(onnx: Any, path: Path) -> None:
    model = onnx.load(str(path), load_external_data=False)
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        first = str(error).strip().splitlines()[-1]
        raise ExportError(
            f"ONNX has no operator for a dtype of the policy, so no file was written: {first}"
        ) from error
