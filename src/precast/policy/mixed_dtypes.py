"""The operations that refuse every mixture of floating dtypes, by device type.

`python -m tools.probe_tables mixed` found them, with PyTorch 2.13 on the CPU and 2.11 on CUDA.
`tests/policy/test_mixed_dtypes.py` compares them with the installed PyTorch.

Invariants:
    - Each of them raises an error for any mixture of tensors with several elements, so it runs in the widest dtype at
      once.
    - Any other operation is first called with the mixture, and runs in the widest dtype after an error. It may accept
      some mixtures, resize an output before the error, or be unknown here, as those of extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["REFUSED", "refuses_mixtures"]

_ON_BOTH: Final = (
    "addmm_ addmv_ allclose baddbmm_ cartesian_prod embedding_bag embedding_bag.padding_idx heaviside"
    " heaviside_ index_add index_add_ index_copy_ index_put_ index_reduce index_reduce_ isclose"
    " lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor linalg_cross masked_scatter masked_scatter_"
    " meshgrid meshgrid.indexing put put_ scatter.reduce scatter.src scatter_.reduce scatter_.src"
    " scatter_add_ scatter_reduce.two scatter_reduce_.two"
)
_ON_CPU: Final = (
    "addmv bilinear cross dot index_put inner linalg_multi_dot mv scatter_add tensordot vdot"
)
_ON_CUDA: Final = "grid_sampler_2d grid_sampler_3d index_copy"

REFUSED: Final[Mapping[str, frozenset[str]]] = {
    device_type: frozenset(f"aten::{name}" for name in f"{_ON_BOTH} {others}".split())
    for device_type, others in (("cpu", _ON_CPU), ("cuda", _ON_CUDA))
}
"""Names in the dispatcher, by device type; empty for other device types."""


def refuses_mixtures(name: str, device_type: str) -> bool:
    """Return True if an operation, such as "aten::addmv", refuses every mixture of floating dtypes."""
    return name in REFUSED.get(device_type, ())
