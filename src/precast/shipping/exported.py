"""`precast.export`: a model as a program of `torch.export` that has the policy's casts in its graph.

Invariants:

- the program gives the bits that the model gives in a region with the policy; unless `check=False`, it is run on the
  example to see that it does, before anybody gets it;
- it has no region and no operator of precast's: it runs where precast is not installed;
- the model is left as it was, also by an error.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.backends import mha

from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment import module_hooks
from precast.autocast_mode.arguments import check_dtype, dtype_of
from precast.autocast_mode.region import autocast, disable, rewriting_regions
from precast.errors import ExportError, PrecastError, PrecastWarning
from precast.policy.module_plan import plan
from precast.policy.policy import Policy, as_policy
from precast.shipping.dtype_errors import as_with_numbers
from precast.shipping.exported_weights import Weights, store_as_used
from precast.shipping.graph_nodes import placeholders
from precast.shipping.graph_policy import InForce
from precast.shipping.graph_rewriter import GraphRewriter

__all__ = ["differences", "export"]

Told = Callable[[str], None]
_WITHOUT_NUMBERS = (
    "torch.export cannot record the model, because it takes a tensor for a constant that it has no numbers of: a "
    "tensor's `.data`, most often. Write `.detach()` in its place."
)
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]+)')
"""A line of code in what PyTorch says of an error."""


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
    told: Told = lambda _: None,
) -> torch.export.ExportedProgram:
    """Exports a model for inference, with a policy's casts as nodes of the graph.

    The program has no region and none of precast's operators: PyTorch alone runs it. Weights are stored in the dtypes
    in which they are used. It computes what the model computes in `autocast(device_type, dtype, policy=policy)` under
    `torch.no_grad()`, in the mode (training or evaluation) that the model is in; `nn.TransformerEncoderLayer` and
    `nn.MultiheadAttention` without their fused kernels, which `torch.export` never records.

    Args:
        model: the model. Its device is that of its parameters and of `args`.
        args: an example of its arguments.
        kwargs: an example of its keyword arguments.
        policy: a `Policy`, the name of a preset or the path of a policy file; its rules for modules hold too.
        dtype: the lower precision, torch.bfloat16 or torch.float16; None is PyTorch's default for the device.
        dynamic_shapes: as in `torch.export.export`.
        strict: as in `torch.export.export`.
        check: whether the model and the program are both run on the example, to compare their results bit by bit.
        told: called with each step before it begins.

    Returns:
        The program, as `torch.export.export` returns one.

    Raises:
        ExportError: `model` or the example does not fit; the policy has no rules for the device; `torch.export` cannot
            record the model; or the program's results differ from the model's.
        PolicyError: the policy cannot be read, or its rules for modules cannot be carried out.
        RegionError: a dtype that the device does not have.

    Examples:
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> program = export(model, (torch.ones(3, 4),), dtype=torch.bfloat16)
        >>> program.state_dict["weight"].dtype
        torch.bfloat16
    """
    with warnings.catch_warnings():
        # PyTorch's exporter uses what PyTorch has deprecated (2.13).
        warnings.filterwarnings("ignore", r"`isinstance\(treespec", FutureWarning)
        return _export(
            model,
            args,
            {} if kwargs is None else kwargs,
            policy,
            dtype,
            dynamic_shapes,
            strict,
            check,
            told,
        )


def _export(  # noqa: PLR0917 -- as `export`
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | str | os.PathLike[str],
    dtype: torch.dtype | str | None,
    dynamic_shapes: Any,
    strict: bool,
    check: bool,
    told: Told,
) -> torch.export.ExportedProgram:
    device = _checked(model, args, kwargs)
    chosen = as_policy(policy)
    _check_policy(chosen, device)
    lower = torch.get_autocast_dtype(device) if dtype is None else dtype_of(dtype)
    check_dtype(lower, device)
    in_force = InForce(device, lower, True, chosen)
    with torch.no_grad(), _in_region(model, in_force), rewriting_regions():
        told("recording the model")
        with _without_fused_transformers(), as_with_numbers():
            recorded = _recorded(model, args, kwargs, dynamic_shapes, strict)
    told("writing the casts")
    with disable():
        program: torch.export.ExportedProgram = _with_policy(recorded, in_force)
    if check:
        told("comparing the program with the model")
        with torch.no_grad(), _in_region(model, in_force):
            _compare(model, program, args, kwargs)
    return program


def _checked(model: object, args: object, kwargs: object) -> str:
    """The device type of a model and its example."""
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"export(model, ...): expected a torch.nn.Module, got {type(model).__name__}"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(
            "export(model, ...): torch.export records no TorchScript; export the module it was made of"
        )
    if not isinstance(args, tuple):
        raise ExportError(
            f"export(..., args): expected a tuple of the model's arguments, got {type(args).__name__}; "
            "a single argument is written `(x,)`"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ExportError(f"export(..., kwargs): expected a dict, got {type(kwargs).__name__}")
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    devices = sorted({tensor.device.type for tensor in tensors} - {"meta"})
    accelerators = [device for device in devices if device != "cpu"]
    if len(accelerators) > 1:
        raise ExportError(
            f"export(model, ...): the model and its example are on several devices: {', '.join(devices)}"
        )
    return (accelerators or devices or ["cpu"])[0]


def _check_policy(policy: Policy, device: str) -> None:
    others = [other for other in policy.tables if policy.tables[other]]
    if others and not policy.entries(device):
        raise ExportError(
            f"the policy {policy.name!r} has rules for {', '.join(others)} and none for {device}, where the model is. "
            f'Move the model, or apply the rules of another device: policy.retarget("{device}", like="{others[0]}")'
        )


@contextlib.contextmanager
def _in_region(model: nn.Module, here: InForce) -> Iterator[None]:
    """The region that the program stands for, with the policy's rules for modules."""
    applied = None
    if here.policy.modules:
        planned = plan(model, here.policy)
        with warnings.catch_warnings():
            for complaint in planned.complaints():
                warnings.warn(complaint, PrecastWarning, stacklevel=4)
        applied = module_hooks.apply(model, planned)
    try:
        with autocast(here.device_type, here.dtype, policy=here.policy):
            yield
    finally:
        if applied is not None:
            applied.remove()


def _recorded(
    model: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any, strict: bool
) -> torch.export.ExportedProgram:
    try:
        with _torch.log_of_what_succeeds():
            program = torch.export.export(
                model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
            )
    except PrecastError:
        raise
    except Exception as error:
        raise ExportError(_why_not_recorded(error)) from error
    _check_constants(program)
    return program


def _why_not_recorded(error: Exception) -> str:
    on_data = next(filter(_depends_on_data, _chain(error)), None)
    cause = error if on_data is None else on_data
    said = f"{type(cause).__name__}: {str(cause).strip()}"
    short = said.partition("\n\n")[0]  # what follows is advice on PyTorch's own settings
    line = _line_of(error)
    if line is not None:
        short = f"{short}\n  {line}"
    if on_data is not None:
        return (
            "torch.export cannot record the model, because its control flow depends on data; write it with torch.cond, "
            f"or make the decision outside of the model.\n{short}"
        )
    if "fake tensor in the exported program constant" in said:
        return _WITHOUT_NUMBERS
    return f"torch.export cannot record the model on this example.\n{short}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from: a policy that promotes tries an operation again when it raises."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _depends_on_data(error: BaseException) -> bool:
    name = type(error).__name__
    return name in {"GuardOnDataDependentSymNode", "DataDependentOutputException"} or (
        "data-dependent" in str(error).lower()
    )


def _check_constants(program: torch.export.ExportedProgram) -> None:
    """Refuses a program that cannot run, as `torch.export(strict=True)` makes some without an error (2.13)."""
    if any(map(_torch.is_fake, program.constants.values())):
        raise ExportError(_WITHOUT_NUMBERS)


def _line_of(error: Exception) -> str | None:
    """The line of the model's code that an error is from; None where all of it is from PyTorch."""
    ran = traceback.extract_tb(error.__traceback__)[::-1]
    places = [*_PLACE.findall(str(error))[::-1], *((f.filename, f.lineno, f.line) for f in ran)]
    for path, number, code in places:
        if code and _is_users(path):
            return f"{path}, line {number}: {code.strip()}"
    return None


def _is_users(path: str) -> bool:
    """Whether a file is part of neither PyTorch nor precast nor Python's own library."""
    packages = Path(torch.__file__).parent, Path(__file__).parents[1]
    if path.startswith(("<", *(f"{package}{os.sep}" for package in packages))):
        return False
    return not path.startswith(sysconfig.get_path("stdlib")) or "site-packages" in path


def _with_policy(recorded: torch.export.ExportedProgram, here: InForce) -> Any:
    old = recorded.graph_module
    signature = recorded.graph_signature
    weights = Weights(
        list(signature.input_specs), dict(recorded.state_dict), dict(recorded.constants)
    )
    inputs = placeholders(old.graph)
    rewriter = GraphRewriter(
        _torch.fake_mode_of(inputs),
        inputs,
        weights=[weights.is_weight(i) for i in range(len(inputs))],
    )
    result = rewriter.write(old.graph, old, {here.device_type: here})
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
    """Raises an error where the program's results differ from the model's, in any bit."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    if any(tensor.device.type == "meta" for tensor in tensors):
        return
    accelerators = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    device_type = next((device.type for device in accelerators), "cuda")

    def result_of(run: nn.Module, what: str) -> Any:
        before = {buffer: buffer.clone() for buffer in run.buffers()}
        given_args, given_kwargs = map_tensors((args, kwargs), torch.clone)
        with torch.random.fork_rng(list(accelerators), device_type=device_type):
            torch.manual_seed(0)
            try:
                return run(*given_args, **given_kwargs)
            except Exception as error:
                raise ExportError(
                    f"{what} fails on the example: {type(error).__name__}: {error}"
                ) from error
            finally:
                for buffer, value in before.items():
                    buffer.copy_(value)

    with _without_fused_transformers():
        expected = result_of(model, "the model")
    with disable():
        found = result_of(program.module(), "the exported program")
    different = list(differences(expected, found))
    if different:
        raise ExportError(
            "the exported program's results differ from the model's: " + "; ".join(different[:5])
        )


@contextlib.contextmanager
def _without_fused_transformers() -> Iterator[None]:
    """Without PyTorch's fused kernels for `nn.TransformerEncoder`, which `torch.export` never records."""
    is_fused = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(is_fused)


def differences(expected: Any, found: Any) -> Iterator[str]:
    """What differs between two results, in any bit; the order of the tensors in them names them."""
    ours, theirs = list(tensors_in(expected)), list(tensors_in(found))
    if len(ours) != len(theirs):
        yield f"{len(theirs)} tensors instead of {len(ours)}"
        return
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        name = f"result {number}"
        if one.dtype is not other.dtype:
            yield f"{name} is {other.dtype} instead of {one.dtype}"
        elif one.shape != other.shape:
            yield f"{name} has the shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        elif not torch.equal(_bits(one), _bits(other)):
            worst = (one.double() - other.double()).abs().nan_to_num().max().item()
            yield f"{name} differs by up to {worst:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    """A tensor whose equality is that of numbers, but for NaN, which equals itself."""
    return (
        torch.view_as_real(tensor.resolve_conj()).nan_to_num(0.123)
        if tensor.is_complex()
        else (torch.where(tensor.isnan(), 0.123, tensor) if tensor.is_floating_point() else tensor)
    )
