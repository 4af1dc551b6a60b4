"""`precast.export`: a model as a program of `torch.export` with the policy's casts in its graph.

Invariants:

- the program has the same bits as the model in a region with the policy; unless `check=False`, both are run on the
  example and compared before the program is returned;
- it contains no region and no operator of precast's: it runs without precast;
- the model is unchanged, also after an error.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from precast import _torch
from precast._internal import cures
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment import module_hooks
from precast.autocast_mode.arguments import check_dtype, dtype_of
from precast.autocast_mode.region import autocast, disable, policies_in_exports
from precast.errors import ExportError, PrecastError, PrecastWarning
from precast.policy.module_plan import plan
from precast.policy.policy import Policy, as_policy
from precast.shipping import exported_file
from precast.shipping.dtype_errors import fake_as_real
from precast.shipping.exported_weights import StoredInputs, store_as_used
from precast.shipping.function_calls import counted
from precast.shipping.graph_nodes import placeholders
from precast.shipping.graph_policy import RegionState
from precast.shipping.graph_rewriter import GraphRewriter
from precast.shipping.observed_weights import unchanged_buffers

__all__ = ["export"]

_NAMESPACES = ("aten", "prim", "prims", "quantized", "sparse", "mkldnn", "onednn", "inductor", "profiler", "streams",
               "export", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor",
               "symm_mem")  # fmt: skip
"""The namespaces of operators that PyTorch registers (2.13)."""
_DEPENDS_ON_DATA = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
_FAKE_CONSTANT = (
    "torch.export cannot record the model, because it treats a tensor without values as a constant: usually a "
    f"tensor's `.data`. {cures.EXPORT_DETACH.text}"
)


@exported_file.without_deprecations()
def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    policy: Policy | str | os.PathLike[str] = "default",
    dtype: torch.dtype | str | None = None,
    dynamic_shapes: Any = None,
    strict: bool = False,
    check: bool = True,
) -> torch.export.ExportedProgram:
    """Export a model for inference, with a policy's casts as nodes of the graph.

    The program contains no region and no operator of precast's: PyTorch alone runs it. Weights are stored in the dtypes
    in which they are used. It computes the same as the model in `autocast(device_type, dtype, policy=policy)` under
    `torch.no_grad()`, in the model's current mode (training or evaluation); `nn.TransformerEncoderLayer` and
    `nn.MultiheadAttention` without their fused kernels, which `torch.export` never records.

    Args:
        model: the model. Its device is that of its parameters and of `args`.
        args: an example of its arguments.
        kwargs: an example of its keyword arguments.
        policy: a `Policy`, the name of a preset or the path of a policy file, including its rules for modules.
        dtype: the lower precision, torch.bfloat16 or torch.float16; None is that of `torch.get_autocast_dtype`: of the
            region around the call, or PyTorch's default for the device.
        dynamic_shapes: as in `torch.export.export`.
        strict: as in `torch.export.export`.
        check: run the model and the program on the example, and compare their results bit by bit.

    Returns:
        The program, as from `torch.export.export`.

    Raises:
        ExportError: `model` or the example is invalid; the policy has no rules for the device; `torch.export` cannot
            record the model; or the program's results differ from the model's.
        PolicyError: the policy cannot be read, or its rules for modules cannot be applied.
        RegionError: the device does not support the dtype.

    Examples:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> program = export(model, (torch.ones(3, 4),), dtype=torch.bfloat16)
        >>> program.state_dict["weight"].dtype
        torch.bfloat16
    """
    kwargs = {} if kwargs is None else kwargs
    device = _checked(model, args, kwargs)
    policy = as_policy(policy)
    others = [other for other in policy.tables if policy.tables[other]]
    if others and not policy.rules(device):
        raise ExportError(
            f"the policy {policy.name!r} has rules for {', '.join(others)} and none for {device}, where the model is. "
            f"{cures.EXPORT_RETARGET(device=device, like=others[0])}"
        )
    lower = torch.get_autocast_dtype(device) if dtype is None else dtype_of(dtype)
    check_dtype(lower, device)
    state = RegionState(device, lower, True, policy)
    # Composite operations have no parts in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        args, kwargs = map_tensors((args, kwargs), counted)
        with _in_region(model, state), policies_in_exports(), fake_as_real():
            recorded = _recorded(model, args, kwargs, dynamic_shapes, strict)
        _warn_of_other_packages(recorded)
        with disable():
            program: torch.export.ExportedProgram = _with_policy(recorded, state)
        if check:
            with _in_region(model, state):
                _compare(model, program, args, kwargs)
    return program


def _checked(model: object, args: object, kwargs: object) -> str:
    """Check a model and its example; return their device type."""
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"export(model, ...): expected a torch.nn.Module, got {type(model).__name__}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(
            f"export(model, ...): torch.export cannot record TorchScript; {cures.EXPORT_UNSCRIPTED.text}"
        )
    if not isinstance(args, tuple):
        raise ExportError(
            f"export(..., args): expected a tuple of the model's arguments, got {type(args).__name__}; "
            f"{cures.EXPORT_TUPLE.text}"
        )
    if not isinstance(kwargs, dict):
        raise ExportError(f"export(..., kwargs): expected a dict, got {type(kwargs).__name__}")
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    devices = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    if "meta" in devices:
        raise ExportError(
            "export(model, ...): the model or its example has tensors on the meta device, which have no values. Call "
            "model.to_empty(device=...), load its weights, and pass an example on that device"
        )
    if len(devices) > 1:
        raise ExportError(
            f"export(model, ...): the model and its example are on several devices: {', '.join(devices)}"
        )
    return (devices or ["cpu"])[0]


@contextlib.contextmanager
def _in_region(model: nn.Module, state: RegionState) -> Iterator[None]:
    """Enter the region of the program, with the policy's rules for modules."""
    planned = plan(model, state.policy)
    with warnings.catch_warnings():
        for complaint in planned.complaints():
            warnings.warn(complaint, PrecastWarning, stacklevel=4)
    applied = module_hooks.apply(model, planned)
    try:
        with autocast(state.device_type, state.dtype, policy=state.policy):
            yield
    finally:
        applied.remove()


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any, strict: bool
) -> torch.export.ExportedProgram:
    try:
        with _torch.drop_log_on_error(), _torch.unfused_attention():
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
            )
    except PrecastError:
        raise
    except Exception as error:
        raise ExportError(_why_not_recorded(error)) from error
    if any(map(_torch.is_fake, program.constants.values())):  # such a program cannot run (2.13)
        raise ExportError(_FAKE_CONSTANT)
    return program


def _why_not_recorded(error: Exception) -> str:
    chain: list[BaseException] = [error]  # a policy that promotes repeats an operation that raises
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for cause in chain:
        name, text = type(cause).__name__, str(cause).strip()
        if name in _DEPENDS_ON_DATA or "data-dependent" in text.lower():
            return (
                "torch.export cannot record the model, because its control flow depends on data; "
                f"{cures.EXPORT_COND.text}\n{name}: {text}"
            )
    if "fake tensor in the exported program constant" in str(error):
        return _FAKE_CONSTANT
    return f"torch.export cannot record the model on this example.\n{type(error).__name__}: {str(error).strip()}"


def _warn_of_other_packages(program: torch.export.ExportedProgram) -> None:
    """Warn about operators that PyTorch does not have: a process that loads the program needs their package."""
    operators = {
        _torch.schema_of(node.target).name
        for module in program.graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, _torch.OpOverload)
    }
    missing = sorted(name for name in operators if name.partition("::")[0] not in _NAMESPACES)
    if missing:
        warnings.warn(
            f"the exported program calls {', '.join(missing)}, which PyTorch does not have: a process that loads it "
            "must first import the package that registers this operator",
            PrecastWarning,
            stacklevel=3,
        )


def _with_policy(recorded: torch.export.ExportedProgram, state: RegionState) -> Any:
    old = recorded.graph_module
    signature = recorded.graph_signature
    weights = StoredInputs(
        list(signature.input_specs), dict(recorded.state_dict), dict(recorded.constants)
    )
    inputs = placeholders(old.graph)
    rewriter = GraphRewriter(_torch.fake_mode_of(inputs), inputs)
    result = rewriter.write(old.graph, old, {state.device_type: state})
    rewriter.graph.output(result)
    graph_module = fx.GraphModule(dict(rewriter.modules), rewriter.graph)
    graph_module.meta.update(old.meta)
    stored = store_as_used(rewriter.graph, weights)
    rewriter.graph.lint()
    graph_module.recompile()
    renamed = copy.deepcopy(signature)
    renamed.input_specs[:] = stored.specs
    outputs = rewriter.graph.output_node().args[0]  # casts of weights may be inputs by now
    for spec, node in zip(renamed.output_specs, outputs, strict=True):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    return _torch.updated_program(
        recorded,
        graph_module=graph_module,
        graph_signature=renamed,
        state_dict=stored.state_dict,
        constants=stored.constants,
    )


def _compare(model: nn.Module, program: Any, args: Any, kwargs: Any) -> None:
    """Raise an error if the program's results differ from the model's in any bit."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    devices = list({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
    device_type = devices[0].type if devices else "cuda"

    def result_of(run: nn.Module, subject: str) -> Any:
        own_args, own_kwargs = map_tensors((args, kwargs), torch.clone)
        with torch.random.fork_rng(devices, device_type=device_type), unchanged_buffers(run):
            torch.manual_seed(0)
            try:
                return run(*own_args, **own_kwargs)
            except Exception as error:
                raise ExportError(
                    f"{subject} fails on the example: {type(error).__name__}: {error}"
                ) from error

    with _torch.unfused_attention():
        expected = result_of(model, "the model")
    with disable():
        actual = result_of(program.module(), "the exported program")
    different = list(exported_file.differences(expected, actual))
    if different:
        raise ExportError(
            "the exported program's results differ from the model's: " + "; ".join(different[:5])
        )
