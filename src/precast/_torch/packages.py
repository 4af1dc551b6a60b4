"""AOTInductor: compile a program into a package that gives the same bits as the program.

Invariants:

- fused operations round where the program rounds;
- operations that the compiler computes differently from PyTorch's kernels, in another order or with another maths
  library, call PyTorch's kernels; the lists come from comparing operations one by one (2.13).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from precast._torch.patches import replace_names
from precast._torch.tensors import SIXTEEN_BIT

__all__ = ["compile_package", "load_package", "prefer_torch_kernels"]

_aten: Final = torch.ops.aten
_WIDE: Final = (torch.float32, torch.float64)


def _overloads(names: str) -> frozenset[Any]:
    """Return all overloads of operations; names that this PyTorch does not have are skipped."""
    packets = (getattr(_aten, name) for name in names.split() if hasattr(_aten, name))
    return frozenset(getattr(packet, each) for packet in packets for each in packet.overloads())


_SUMS: Final = _overloads(
    "native_layer_norm _softmax _log_softmax linalg_vector_norm sum mean var var_mean prod cumsum logsumexp "
    "nll_loss_forward nll_loss2d_forward std std_mean addmv mv dot vdot scatter_add _weight_norm_interface "
    "native_group_norm"
) | {
    _aten._native_batch_norm_legit.no_stats
}  # the other overloads write running statistics, and are decomposed first
"""Sums and products of many elements: the result depends on the order."""
_PRODUCTS: Final = _overloads("mm bmm addmm")
"""The compiler calls PyTorch's kernels for these, unless it decomposes them."""
_DOTS: Final = _overloads("bmm")
"""A product with one element per pair of rows: the kernel sums in another order if it writes into given memory."""
_BY_LAYOUT: Final = _overloads("native_group_norm")
"""The kernel supports only the program's memory layouts, and the compiler chooses others."""
_FORMULAS: Final = _overloads(
    "remainder fmod pow lerp addcmul addcdiv glu logit xlogy special_entr special_i0e grid_sampler_2d grid_sampler_3d"
)
"""The compiler's formula rounds in other places than PyTorch's kernel.

Not `addr`, `index_add` and `linalg.cross`: packages cannot call kernels with numbers as keyword arguments.
"""
_BATCH_NORMS: Final = _overloads("_native_batch_norm_legit_no_training")
"""The formula differs; with float32 weights and 16-bit inputs, rounding hides the difference."""
_IN_WIDE: Final = _overloads(
    "exp expm1 log log2 log10 sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh atan2 erf erfc erfinv sqrt "
    "gelu mish softplus i0 sinc special_i1 special_i1e special_ndtri special_log_ndtr special_bessel_j0 special_ndtr"
)
"""PyTorch and the compiler use different maths libraries; in float32 the last bits differ."""
_IN_LOW: Final = _overloads("rsqrt")
"""Functions with different 16-bit results."""
_SCALED: Final = _overloads("add sub")
"""PyTorch multiplies by `alpha` and adds with a single rounding."""
_WITH_NUMBERS: Final = _overloads("add sub rsub lt le gt ge eq ne")
"""PyTorch's CPU kernels round a Python number to the 16-bit dtype of the other operand."""


def compile_package(program: Any, path: str) -> None:
    """Compile an exported program with AOTInductor into a package; no public function does (2.13).

    The compiler fuses operations into float32 loops, without the roundings between them unless an option keeps them.
    Its passes on whole graphs replace attention written as matmul and softmax by a fused kernel, and a product with a
    sum by one operation; neither rounds in between.
    """
    from torch._inductor import aoti_compile_and_package

    keep_roundings = {
        "emulate_precision_casts": True,
        "use_joint_graph_passes": False,
        "pattern_matcher": False,
        "layout_optimization": False,
    }
    logger = logging.getLogger("torch._inductor.ir")
    level = logger.level
    logger.setLevel(
        logging.ERROR
    )  # it warns about each kernel that is called through the dispatcher
    try:
        with prefer_torch_kernels():
            aoti_compile_and_package(program, package_path=path, inductor_configs=keep_roundings)
    finally:
        logger.setLevel(level)


def load_package(path: Any) -> Callable[..., Any]:
    """Return the function in a package of AOTInductor; no public function loads one in Python (2.13)."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


@contextmanager
def prefer_torch_kernels() -> Iterator[None]:
    """Make the compiler call PyTorch's kernels where its own loops would give other bits.

    The compiler has such an option only for all operations at once, which disables fusion (2.13).
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler
    from torch._inductor.lowering import fallback_node_due_to_unsupported_type as is_unsupported
    from torch._inductor.virtualized import V

    def uses_torch_kernel(node: Any, allow_cpu_inputs: bool = True) -> Any:
        values = [each.meta.get("val") for each in node.all_input_nodes]
        is_part = _is_decomposed_part(node) and node.target not in _SUMS
        preferred = not is_part and _uses_torch_kernel(node.target, values, node.kwargs)
        return preferred or is_unsupported(node, allow_cpu_inputs)

    def handler_in_layout(operation: Any, **settings: Any) -> Any:
        call = fallback_handler(operation, **settings)
        if operation not in _BY_LAYOUT:
            return call

        def call_in_layout(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = constrain_to_fx_strides(V.current_node, *args, **kwargs)
            return call(*args, **kwargs)

        return call_in_layout

    table = _decompositions(select_decomp_table())
    stops = [
        replace_names("torch._inductor.compile_fx", select_decomp_table=lambda: table),
        replace_names(
            "torch._inductor.graph",
            fallback_node_due_to_unsupported_type=uses_torch_kernel,
            fallback_handler=handler_in_layout,
        ),
    ]
    try:
        yield
    finally:
        for stop in stops:
            stop()


def _is_decomposed_part(node: Any) -> bool:
    """Return True if a node comes from the decomposition of another operation."""
    original = node.meta.get("original_aten")
    if original is None or not hasattr(node.target, "overloadpacket"):
        return False
    return _name(original).rstrip("_") != _name(node.target).rstrip("_")


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation))


def _uses_torch_kernel(operation: Any, values: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if PyTorch's kernel computes an operation on these values."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if operation in _SUMS or operation in _FORMULAS:
        return True
    if operation in _DOTS:
        rows, columns = (value.shape for value in tensors)
        return bool(rows[1] == 1 and columns[2] == 1)
    if operation in _SCALED:
        return bool(kwargs.get("alpha", 1) != 1)
    if operation in _BATCH_NORMS:
        return len(dtypes) == 1
    return not dtypes.isdisjoint(
        _WIDE if operation in _IN_WIDE else tuple(SIXTEEN_BIT) if operation in _IN_LOW else ()
    )


def _decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the compiler's decompositions, without those of operations that call PyTorch's kernels.

    Inside a decomposition, only sums call PyTorch's kernels: there the compiler's functions give the bits of PyTorch's
    kernel for the whole operation.
    """
    depth = 0

    def unless_kernel(operation: Any) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            is_part = depth > 0
            if operation in _PRODUCTS or (
                not (is_part and operation not in _SUMS)
                and _uses_torch_kernel(operation, (*args, *kwargs.values()), kwargs)
            ):
                return NotImplemented
            if operation in _WITH_NUMBERS and not is_part:
                rounded = _with_rounded_number(args)
                if rounded is not args:
                    return operation(*rounded, **kwargs)
            if operation not in table:
                return NotImplemented
            depth += 1
            try:
                return table[operation](*args, **kwargs)
            finally:
                depth -= 1

        return decompose

    return {operation: unless_kernel(operation) for operation in (*table, *_WITH_NUMBERS)}


def _with_rounded_number(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round a Python number that is combined with a 16-bit CPU tensor; other arguments are returned unchanged."""
    if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], float):
        return args
    if args[0].dtype not in SIXTEEN_BIT or args[0].device.type != "cpu":
        return args
    number = float(torch.tensor(args[1], dtype=args[0].dtype))
    return args if number == args[1] or math.isnan(number) else (args[0], number, *args[2:])
