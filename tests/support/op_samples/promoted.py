"""Samples for the operations that only the policy `default` names: those that mixed dtypes break."""

from __future__ import annotations

import torch

from tests.support.op_samples.draw import Builders

__all__ = ["BUILDERS"]

BUILDERS = Builders()
add, add_all = BUILDERS.add, BUILDERS.add_all


def _functions() -> None:
    add("isclose allclose", lambda r: [(r(3, 5), r(3, 5))])
    add("complex heaviside heaviside_", lambda r: [(r(3, 5), r(3, 5))])
    add("cartesian_prod meshgrid", lambda r: [([r(3), r(4)],)])
    add_all(
        {
            "meshgrid.indexing": lambda r: [([r(3), r(4)], {"indexing": "ij"})],
            "histogram.bins_tensor": lambda r: [
                (r(9), torch.linspace(-2, 2, 5), {"weight": r.between(0, 1, 9)})
            ],
            "histogram.bin_ct": lambda r: [(r(9), 4, {"weight": r.between(0, 1, 9)})],
            "histogramdd": lambda r: [(r(9, 2), [3, 4], {"weight": r.between(0, 1, 9)})],
            "histogramdd.int_bins": lambda r: [(r(9, 2), 3, {"weight": r.between(0, 1, 9)})],
            "histogramdd.TensorList_bins": lambda r: [
                (r(9, 2), [torch.linspace(-2, 2, 4), torch.linspace(-1, 1, 3)])
            ],
            "native_group_norm": lambda r: [(r(2, 6, 5), r(6), r(6), 2, 6, 5, 3, 1e-5)],
            "embedding_bag": lambda r: [
                (r(6, 3), r.below(6, 8), torch.tensor([0, 3]), False, 0, False, r(8))
            ],
            "embedding_bag.padding_idx": lambda r: [
                (r(6, 3), r.below(6, 8), torch.tensor([0, 3]), False, 0, False, r(8), False, None)
            ],
        }
    )
    add("lerp.Scalar lerp_.Scalar", lambda r: [(r(3, 5), r(3, 5), 0.3)])
    add("lerp.Tensor lerp_.Tensor", lambda r: [(r(3, 5), r(3, 5), r.between(0, 1, 3, 5))])
    add("inner", lambda r: [(r(3, 4), r(5, 4)), (r(4), r(4))])


def _indexing() -> None:
    rows = "index_add index_add_"
    add(rows, lambda r: [(r(4, 5), 0, r.permutation(4)[:2], r(2, 5), {"alpha": 2})])
    add("index_copy_", lambda r: [(r(4, 5), 0, r.permutation(4)[:2], r(2, 5))])
    add("index_put_", lambda r: [(r(4, 5), [r.permutation(4)[:2]], r(2, 5))])
    reduced = "index_reduce index_reduce_"
    add(reduced, lambda r: [(r(4, 5), 0, r.permutation(4)[:2], r(2, 5), "prod")])
    add("put put_", lambda r: [(r(4, 5), r.permutation(9)[:3], r(3))])
    masked = "masked_scatter masked_scatter_"
    add(masked, lambda r: [(r(3, 5), r.below(2, 3, 5) == 1, r(3, 5))])
    scattered = "scatter.src scatter_.src scatter_add_"
    add(scattered, lambda r: [(r(4, 5), 0, r.permutation(4)[:1].expand(5)[None], r(1, 5))])
    add(
        "scatter.reduce scatter_.reduce",
        lambda r: [
            (r(4, 5), 0, r.permutation(4)[:1].expand(5)[None], r(1, 5), {"reduce": "multiply"})
        ],
    )
    add(
        "scatter_reduce.two scatter_reduce_.two",
        lambda r: [(r(4, 5), 0, r.permutation(4)[:1].expand(5)[None], r(1, 5), "amax")],
    )


def _linear_algebra() -> None:
    add("addmm_", lambda r: [(r(3, 5), r(3, 4), r(4, 5), {"beta": 0.5})])
    add("addmv_", lambda r: [(r(3), r(3, 4), r(4))])
    add("addbmm_", lambda r: [(r(3, 5), r(2, 3, 4), r(2, 4, 5))])
    add("baddbmm_", lambda r: [(r(2, 3, 5), r(2, 3, 4), r(2, 4, 5))])
    add("linalg_cross", lambda r: [(r(4, 3), r(4, 3))])
    add("linalg_solve_ex", lambda r: [(r.well_conditioned(4, 4), r(4, 2))])
    add("linalg_lu_solve", lambda r: [(*torch.linalg.lu_factor(r.well_conditioned(4, 4)), r(4, 2))])
    add(
        "linalg_ldl_solve",
        lambda r: [(*torch.linalg.ldl_factor(r.positive_definite(4, 4)), r(4, 2))],
    )


def _written_out() -> None:
    add("mm.out", lambda r: [(r(3, 4), r(4, 5), {"out": torch.zeros(3, 5)})])
    add("addmm.out", lambda r: [(r(5), r(3, 4), r(4, 5), {"out": torch.zeros(3, 5)})])
    add("abs.out softplus.out tril.out", lambda r: [(r(3, 5), {"out": torch.zeros(3, 5)})])
    add(
        "index_add.out",
        lambda r: [(r(4, 5), 0, r.permutation(4)[:2], r(2, 5), {"out": torch.zeros(4, 5)})],
    )
    add("where.self_out", lambda r: [(r(3, 5) > 0, r(3, 5), r(3, 5), {"out": torch.zeros(3, 5)})])
    add(
        "sort.values",
        lambda r: [
            (
                r(3, 5),
                -1,
                {"values": torch.zeros(3, 5), "indices": torch.zeros(3, 5, dtype=torch.long)},
            )
        ],
    )
    add("linalg_qr.out", lambda r: [(r(5, 3), {"Q": torch.zeros(5, 3), "R": torch.zeros(3, 3)})])


for _group in (_functions, _indexing, _linear_algebra, _written_out):
    _group()
