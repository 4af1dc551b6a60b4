"""Samples for elementwise operations, reductions, matrix products, spectra and linear algebra."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.op_samples.draw import Builders, Draw

__all__ = ["BUILDERS"]

BUILDERS = Builders()
add, add_all = BUILDERS.add, BUILDERS.add_all


def _elementwise() -> None:
    add("acos asin erfinv", lambda r: [(r.between(-0.9, 0.9, 3, 5),)])
    add("cosh exp expm1 sinh tan", lambda r: [(r.between(-1.2, 1.2, 3, 5),), (r(7),)])
    add("log log10 log2 log1p reciprocal rsqrt", lambda r: [(r.between(0.2, 4, 3, 5),)])
    add_all(
        {
            "softplus": lambda r: [(r(3, 5),), (r(3, 5), 2.0, 1.5)],
            "pow.Tensor_Scalar": lambda r: [(r(3, 5), 2), (r.between(0.2, 3, 3, 5), 1.7)],
            "pow.Tensor_Tensor": lambda r: [(r.between(0.2, 3, 3, 5), r(5))],
            "pow.Scalar": lambda r: [(2.5, r(3, 5))],
            "polar": lambda r: [(r.between(0.2, 3, 3, 5), r(3, 5))],
            "atan2": lambda r: [(r(3, 5), r(3, 5)), (r(3, 5), r(5))],
            "addcdiv": lambda r: [
                (r(3, 5), r(3, 5), r.between(0.5, 2, 3, 5)),
                (r(3, 5), r(5), r.between(0.5, 2, 3, 1), {"value": 0.5}),
            ],
            "addcmul": lambda r: [
                (r(3, 5), r(3, 5), r(3, 5)),
                (r(3, 5), r(5), r(3, 1), {"value": -2}),
            ],
            "prelu": lambda r: [(r(2, 3, 4), r(3)), (r(4, 5), r(1))],
            "fake_quantize_per_tensor_affine": lambda r: [(r(3, 5), 0.1, 0, -128, 127)],
            "renorm": lambda r: [(r(4, 5), 2, 0, 1.0), (r(4, 5), 1, 1, 0.5)],
            "view_as_complex": lambda r: [(r(3, 4, 2),)],
            "trace": lambda r: [(r(4, 4),), (r(3, 5),)],
        }
    )


def _reductions() -> None:
    add("sum prod", lambda r: [(r(3, 5),), (r(3, 5), {"dtype": torch.float64})])
    add("softmax.int log_softmax.int", lambda r: [(r(3, 5), -1), (r(3, 5), 0, torch.float64)])
    add("cumsum cumprod", lambda r: [(r(3, 5), 1), (r(3, 5), 0, {"dtype": torch.float64})])
    add(
        "quantile nanquantile",
        lambda r: [(r(3, 5), r.between(0, 1, 2), 1), (r(9), r.between(0, 1))],
    )
    add("quantile.scalar nanquantile.scalar", lambda r: [(r(3, 5), 0.3), (r(3, 5), 0.7, 0, True)])
    add("norm.Scalar", lambda r: [(r(3, 5),), (r(3, 5), 1)])
    add("norm.ScalarOpt_dim", lambda r: [(r(3, 5), 2, [1]), (r(3, 5), None, [0], True)])
    add(
        "frobenius_norm.dim nuclear_norm.dim",
        lambda r: [(r(3, 5), [0, 1]), (r(2, 3, 4), [1, 2], True)],
    )
    add_all(
        {
            "sum.dim_IntList": lambda r: [(r(3, 5), [1]), (r(3, 5), [0], True)],
            "prod.dim_int": lambda r: [(r(3, 5), 1), (r(3, 5), 0, True)],
            "logsumexp": lambda r: [(r(3, 5), [1]), (r(3, 5), [0, 1], True)],
            "nuclear_norm": lambda r: [(r(3, 5),)],
            "linalg_vector_norm": lambda r: [
                (r(3, 5),),
                (r(3, 5), 1, [1], True),
                (r(3, 5), 2, [0], {"dtype": torch.float64}),
            ],
            "linalg_matrix_norm": lambda r: [
                (r(3, 5), 1),
                (r(2, 3, 4), float("inf"), [-2, -1], True),
            ],
            "linalg_matrix_norm.str_ord": lambda r: [(r(3, 5),), (r(3, 5), "nuc")],
        }
    )


def _matrix_products() -> None:
    add(
        "addmm _addmm_activation",
        lambda r: [
            (r(3, 5), r(3, 4), r(4, 5)),
            (r(5), r(3, 4), r(4, 5), {"beta": 0.5, "alpha": 2}),
        ],
    )
    add("mm", lambda r: [(r(3, 4), r(4, 5)), (r(3, 4), r(5, 4).t())])
    add("dot vdot", lambda r: [(r(6), r(6))])
    add(
        "chain_matmul linalg_multi_dot",
        lambda r: [([r(3, 4), r(4, 5), r(5, 2)],), ([r(3, 4), r(4, 2)],)],
    )
    add_all(
        {
            "addmv": lambda r: [
                (r(3), r(3, 4), r(4)),
                (r(3), r(3, 4), r(4), {"beta": 0.5, "alpha": 2}),
            ],
            "addr": lambda r: [
                (r(3, 4), r(3), r(4)),
                (r(4), r(3), r(4), {"beta": 0.5, "alpha": 2}),
            ],
            "matmul": lambda r: [
                (r(3, 4), r(4, 5)),
                (r(4), r(4)),
                (r(2, 3, 4), r(4, 5)),
                (r(2, 3, 4), r(2, 4, 5)),
            ],
            "mv": lambda r: [(r(3, 4), r(4))],
            "bmm": lambda r: [(r(2, 3, 4), r(2, 4, 5))],
            "addbmm": lambda r: [
                (r(3, 5), r(2, 3, 4), r(2, 4, 5)),
                (r(5), r(2, 3, 4), r(2, 4, 5), {"beta": 0.5}),
            ],
            "baddbmm": lambda r: [
                (r(2, 3, 5), r(2, 3, 4), r(2, 4, 5)),
                (r(5), r(2, 3, 4), r(2, 4, 5), {"alpha": 2}),
            ],
            "linear": lambda r: [
                (r(3, 4), r(5, 4), r(5)),
                (r(2, 3, 4), r(5, 4)),
                (r(4), r(5, 4), r(5)),
            ],
            "bilinear": lambda r: [
                (r(3, 4), r(3, 5), r(2, 4, 5), r(2)),
                (r(3, 4), r(3, 5), r(2, 4, 5)),
            ],
            "linalg_vecdot": lambda r: [(r(3, 4), r(3, 4)), (r(3, 4), r(3, 4), {"dim": 0})],
            "tensordot": lambda r: [(r(2, 3, 4), r(3, 4, 5), [1, 2], [0, 1])],
            "einsum": lambda r: [
                ("ij,jk->ik", [r(3, 4), r(4, 5)]),
                ("bi,bj->bij", [r(2, 3), r(2, 4)]),
            ],
            "cross": lambda r: [(r(4, 3), r(4, 3)), (r(3, 4), r(3, 4), 0)],
            "_scaled_dot_product_flash_attention": lambda r: [
                (r(2, 2, 4, 8), r(2, 2, 5, 8), r(2, 2, 5, 8)),
            ],
            "scaled_dot_product_attention": lambda r: [
                (r(2, 2, 4, 8), r(2, 2, 5, 8), r(2, 2, 5, 8)),
                (r(2, 2, 4, 8), r(2, 2, 5, 8), r(2, 2, 5, 8), r(4, 5)),
                (r(2, 2, 4, 8), r(2, 2, 4, 8), r(2, 2, 4, 8), None, 0.0, True, {"scale": 0.5}),
            ],
            "_native_multi_head_attention": lambda r: [_native_attention(r)],
        }
    )


def _native_attention(r: Draw) -> tuple[Any, ...]:
    x = r(2, 3, 8)
    return (x, x, x, 8, 2, r(24, 8), r(24), r(8, 8), r(8), {"need_weights": False})


def _spectra() -> None:
    one = "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"
    add(one, lambda r: [(r(3, 8),), (r(8, 3), 6, 0, "ortho")])
    two = "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn"
    add(two, lambda r: [(r(3, 4, 6),), (r(3, 4, 6), [4, 4], [0, 2], "ortho")])
    window = torch.hann_window(8)
    add("stft stft.center", lambda r: [(r(2, 32), 8, 4, 8, window, {"return_complex": True})])


def _linear_algebra() -> None:
    square = "inverse linalg_inv linalg_inv_ex linalg_eig linalg_eigvals linalg_cond pinverse"
    add(square, lambda r: [(r.well_conditioned(4, 4),), (r.well_conditioned(2, 3, 3),)])
    add("_lu_with_info", BUILDERS["inverse"])
    definite = "cholesky linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh"
    add(definite, lambda r: [(r.positive_definite(4, 4),), (r.positive_definite(2, 3, 3),)])
    tall = "geqrf qr linalg_qr svd linalg_svd linalg_svdvals"
    add(tall, lambda r: [(r(5, 3),), (r(2, 4, 4),)])
    add("orgqr linalg_householder_product", lambda r: [(r(5, 3), r.between(0.2, 1, 3))])
    add_all(
        {
            "linalg_matrix_sqrth": lambda r: [(r.positive_definite(4, 4),)],
            "cholesky_inverse": lambda r: [(torch.linalg.cholesky(r.positive_definite(4, 4)),)],
            "cholesky_solve": lambda r: [
                (r(4, 2), torch.linalg.cholesky(r.positive_definite(4, 4)))
            ],
            "linalg_cond.p_str": lambda r: [(r.well_conditioned(4, 4), "fro")],
            "linalg_lstsq": lambda r: [
                (r(5, 3), r(5, 2)),
                (r(5, 3), r(5, 2), None, {"driver": "gelsd"}),
            ],
            "linalg_matrix_rank": lambda r: [(r.well_conditioned(4, 4), 1e-3)],
            "linalg_matrix_rank.atol_rtol_float": lambda r: [
                (r.well_conditioned(4, 4), {"atol": 1e-3})
            ],
            "linalg_matrix_rank.atol_rtol_tensor": lambda r: [
                (
                    r.well_conditioned(4, 4),
                    {"atol": r.between(1e-4, 1e-3), "rtol": r.between(0, 1e-3)},
                )
            ],
            "linalg_matrix_rank.tol_tensor": lambda r: [
                (r.well_conditioned(4, 4), r.between(1e-4, 1e-3))
            ],
            "linalg_solve": lambda r: [
                (r.well_conditioned(4, 4), r(4, 2)),
                (r.well_conditioned(4, 4), r(4)),
            ],
            "linalg_tensorinv": lambda r: [(r.well_conditioned(4, 4).reshape(2, 2, 4), 2)],
            "linalg_tensorsolve": lambda r: [(r.well_conditioned(4, 4).reshape(2, 2, 4), r(2, 2))],
            "lu_solve": lambda r: [(r(4, 2), *torch.linalg.lu_factor(r.well_conditioned(4, 4)))],
            "ormqr": lambda r: [(r(5, 3), r.between(0.2, 1, 3), r(5, 2))],
            "triangular_solve": lambda r: [
                (r(4, 2), r.well_conditioned(4, 4)),
                (r(4, 2), r.well_conditioned(4, 4), False),
            ],
        }
    )


for _group in (_elementwise, _reductions, _matrix_products, _spectra, _linear_algebra):
    _group()
