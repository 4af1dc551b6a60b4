"""AOTInductor: how a program is compiled so that the package gives the bits that the program gives.

Invariants:

- operations that the compiler joins round where the program rounds;
- what the compiler would compute in another way than PyTorch's kernels, in another order or with another library of
  functions, is left to these kernels; the lists were found by comparing operations one by one (2.13).
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

__all__ = ["compile_package", "left_to_kernels", "load_package"]

_aten: Final = torch.ops.aten
_WIDE: Final = (torch.float32, torch.float64)
_LOW: Final = (torch.bfloat16, torch.float16)


def _overloads(names: str) -> frozenset[Any]:
    """All overloads of operations; what this PyTorch has not is left out."""
    packets = (getattr(_aten, name) for name in names.split() if hasattr(_aten, name))
    return frozenset(getattr(packet, each) for packet in packets for each in packet.overloads())


_SUMS: Final = _overloads(
    "native_layer_norm _softmax _log_softmax linalg_vector_norm sum mean var var_mean prod cumsum logsumexp "
    "nll_loss_forward nll_loss2d_forward std std_mean addmv mv dot vdot scatter_add _weight_norm_interface "
    "native_group_norm"
) | {
    _aten._native_batch_norm_legit.no_stats
}  # others of it write running statistics, and are taken apart first
"""What adds or multiplies many numbers: its result depends on the order."""
_PRODUCTS: Final = _overloads("mm bmm addmm")
"""The compiler calls PyTorch's kernels for these by itself, where it does not take them apart."""
_DOTS: Final = _overloads("bmm")
"""One number for each pair of rows is a sum that this kernel adds in another order if it writes into given memory."""
_BY_LAYOUT: Final = _overloads("native_group_norm")
"""The kernel takes the layouts of the program alone, and the compiler chooses its own."""
_FORMULAS: Final = _overloads(
    "remainder fmod pow lerp addcmul addcdiv glu logit xlogy special_entr special_i0e grid_sampler_2d grid_sampler_3d"
)
"""What the compiler writes as a formula that rounds in other places than PyTorch's kernel.

Not `addr`, `index_add` and `linalg.cross`: packages cannot call kernels that have numbers as keyword arguments.
"""
_BATCH_NORMS: Final = _overloads("_native_batch_norm_legit_no_training")
"""The formula is another; float32 weights beside 16-bit values hide it."""
_IN_WIDE: Final = _overloads(
    "exp expm1 log log2 log10 sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh atan2 erf erfc erfinv sqrt "
    "gelu mish softplus i0 sinc special_i1 special_i1e special_ndtri special_log_ndtr special_bessel_j0 special_ndtr"
)
"""Functions that PyTorch takes from another library than the compiler; in float32 their last bits differ."""
_IN_LOW: Final = _overloads("rsqrt")
"""Functions whose 16-bit results differ."""
_SCALED: Final = _overloads("add sub")
"""PyTorch multiplies by `alpha` and adds in one rounding."""
_WITH_NUMBERS: Final = _overloads("add sub rsub lt le gt ge eq ne")
"""PyTorch's kernels on the CPU round a number to the 16 bits of the tensor that it is combined with."""


def compile_package(program: Any, path: str) -> None:
    """Compiles an exported program with AOTInductor into a package; nothing public does (2.13).

    The compiler joins operations into loops that compute in float32, and leaves out the roundings between them unless
    it is told to keep them. Its passes on whole graphs replace attention that is written as matmul and softmax by a
    fused kernel, and a product and a sum by one operation, neither of which rounds in between.
    """
    from torch._inductor import aoti_compile_and_package

    keep_roundings = {
        "emulate_precision_casts": True,
        "use_joint_graph_passes": False,
        "pattern_matcher": False,
        "layout_optimization": False,
    }
    with left_to_kernels(), _quiet():
        aoti_compile_and_package(program, package_path=path, inductor_configs=keep_roundings)


def load_package(path: Any) -> Callable[..., Any]:
    """Return the function that a package of AOTInductor is; nothing public loads one in Python (2.13)."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


@contextmanager
def left_to_kernels() -> Iterator[None]:
    """Has the compiler call PyTorch's kernels for what it would compute otherwise, instead of loops of its own.

    It has an option for that for all operations at once only, with which it joins none (2.13).
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler
    from torch._inductor.lowering import fallback_node_due_to_unsupported_type as is_unsupported
    from torch._inductor.virtualized import V

    def is_left(node: Any, allow_cpu_inputs: bool = True) -> Any:
        values = [each.meta.get("val") for each in node.all_input_nodes]
        made_of = _is_part(node) and node.target not in _SUMS
        left = not made_of and _is_left(node.target, values, node.kwargs)
        return left or is_unsupported(node, allow_cpu_inputs)

    def laid_out(operation: Any, **settings: Any) -> Any:
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
            fallback_node_due_to_unsupported_type=is_left,
            fallback_handler=laid_out,
        ),
    ]
    try:
        yield
    finally:
        for stop in stops:
            stop()


def _is_part(node: Any) -> bool:
    """Whether a node is of what the compiler made of another operation."""
    original = node.meta.get("original_aten")
    if original is None or not hasattr(node.target, "overloadpacket"):
        return False
    return _name(original).rstrip("_") != _name(node.target).rstrip("_")


def _name(operation: Any) -> str:
    return str(getattr(operation, "overloadpacket", operation))


def _is_left(operation: Any, values: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation on such values is left to PyTorch's kernel."""
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
        _WIDE if operation in _IN_WIDE else _LOW if operation in _IN_LOW else ()
    )


def _decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """What the compiler takes operations apart into, but for those that are left to PyTorch's kernels.

    An operation that another one is taken apart into is left only if it is a sum: the parts of a formula in the
    compiler's functions give the bits that PyTorch's kernel for the whole gives.
    """
    depth = 0

    def unless_left(operation: Any) -> Callable[..., Any]:
        def taken_apart(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            is_part = depth > 0
            if operation in _PRODUCTS or (
                not (is_part and operation not in _SUMS)
                and _is_left(operation, (*args, *kwargs.values()), kwargs)
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

        return taken_apart

    return {operation: unless_left(operation) for operation in (*table, *_WITH_NUMBERS)}


def _with_rounded_number(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose second is rounded, where it is a number beside a 16-bit tensor; the same ones where it is not."""
    if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], float):
        return args
    if args[0].dtype not in _LOW or args[0].device.type != "cpu":
        return args
    number = float(torch.tensor(args[1], dtype=args[0].dtype))
    return args if number == args[1] or math.isnan(number) else (args[0], number, *args[2:])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line in the log for each kernel that the package reaches by PyTorch's dispatcher."""
    logger = logging.getLogger("torch._inductor.ir")

    def is_news(record: logging.LogRecord) -> bool:
        return "missing a c-shim" not in record.getMessage()

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
