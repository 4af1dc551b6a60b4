"""Samples for the layers and losses of neural networks, indexing and images."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.op_samples.draw import Build, Builders

__all__ = ["BUILDERS"]

BUILDERS = Builders()
add, add_all = BUILDERS.add, BUILDERS.add_all


def _convolutions() -> None:
    _convolutions_in_space(9)
    _convolutions_in_space(7, 6)
    _convolutions_in_space(5, 6, 4)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    add_all(
        {
            "convolution": lambda r: [
                (r(2, 4, 7, 6), r(6, 4, 3, 3), r(6), *geometry),
                (r(2, 4, 7, 6), r(4, 6, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
            ],
            "_convolution.deprecated": lambda r: [
                (r(2, 4, 7, 6), r(6, 4, 3, 3), r(6), *geometry, False, False, True),
            ],
            "_convolution": lambda r: [
                (r(2, 4, 7, 6), r(6, 4, 3, 3), r(6), *geometry, False, False, True, True),
            ],
            "cudnn_convolution": lambda r: [
                (r(2, 4, 7, 6), r(6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1, False, False, True),
            ],
            "cudnn_convolution_transpose": lambda r: [
                (
                    r(2, 4, 7, 6),
                    r(4, 6, 3, 3),
                    [1, 1],
                    [0, 0],
                    [1, 1],
                    [1, 1],
                    1,
                    False,
                    False,
                    True,
                ),
            ],
            "_mps_convolution": lambda r: [
                (r(2, 4, 7, 6), r(6, 4, 3, 3), r(6), [1, 1], [1, 1], [1, 1], 1),
            ],
            "conv_tbc": lambda r: [
                (r(6, 2, 4), r(3, 4, 5), r(5)),
                (r(6, 2, 4), r(3, 4, 5), r(5), 1),
            ],
        }
    )


def _convolutions_in_space(*space: int) -> None:
    n = len(space)
    add_all(
        {
            f"conv{n}d": lambda r: [
                (r(2, 4, *space), r(6, 4, *[3] * n), r(6)),
                (r(2, 4, *space), r(6, 2, *[3] * n), None, [2] * n, [1] * n, [1] * n, 2),
                (r(4, *space), r(6, 4, *[1] * n), r(6)),
            ],
            f"conv{n}d.padding": lambda r: [
                (r(2, 4, *space), r(6, 4, *[3] * n), r(6), [1] * n, "same"),
                (r(2, 4, *space), r(6, 4, *[2] * n), None, [2] * n, "valid"),
            ],
            f"conv_transpose{n}d{'.input' if n > 1 else ''}": lambda r: [
                (r(2, 4, *space), r(4, 3, *[3] * n), r(3)),
                (r(2, 4, *space), r(4, 3, *[2] * n), None, [2] * n, [0] * n, [1] * n, 2),
            ],
        }
    )


def _recurrent() -> None:
    def cell(gates: int) -> Build:
        shapes = ((gates * 5, 4), (gates * 5, 5), (gates * 5,), (gates * 5,))
        return lambda r: [
            (r(2, 4), r(2, 5), *(r(*shape) for shape in shapes)),
            (r(2, 4), r(2, 5), *(r(*shape) for shape in shapes[:2])),
        ]

    add("rnn_tanh_cell rnn_relu_cell", cell(1))
    add("gru_cell", cell(3))
    add_all(
        {
            "lstm_cell": lambda r: [
                (r(2, 4), [r(2, 5), r(2, 5)], r(20, 4), r(20, 5), r(20), r(20))
            ],
            "_thnn_fused_gru_cell": lambda r: [(r(2, 15), r(2, 15), r(2, 5), r(15), r(15))],
            "_thnn_fused_lstm_cell": lambda r: [(r(2, 20), r(2, 20), r(2, 5), r(20), r(20))],
            "mkldnn_rnn_layer": lambda r: [
                (
                    *(r(3, 2, 4), r(20, 4), r(20, 5), r(20), r(20), r(1, 2, 5), r(1, 2, 5)),
                    False,
                    [],
                    2,
                    5,
                    1,
                    True,
                    False,
                    False,
                    False,
                )
            ],
            "_cudnn_rnn": lambda r: [
                (
                    r(3, 2, 4),
                    [r(20, 4), r(20, 5), r(20), r(20)],
                    4,
                    None,
                    r(1, 2, 5),
                    r(1, 2, 5),
                    2,
                    5,
                    0,
                    1,
                    False,
                    0.0,
                    False,
                    False,
                    [],
                    None,
                )
            ],
            "miopen_rnn": lambda r: [
                (
                    r(3, 2, 4),
                    [r(20, 4), r(20, 5), r(20), r(20)],
                    4,
                    r(1, 2, 5),
                    r(1, 2, 5),
                    2,
                    5,
                    1,
                    False,
                    0.0,
                    False,
                    False,
                    [],
                    None,
                )
            ],
        }
    )


def _normalisation() -> None:
    add_all(
        {
            "layer_norm": lambda r: [(r(3, 4, 5), [5], r(5), r(5)), (r(3, 4, 5), [4, 5])],
            "native_layer_norm": lambda r: [
                (r(3, 4, 5), [5], r(5), r(5), 1e-5),
                (r(3, 4, 5), [4, 5], None, None, 1e-3),
            ],
            "rms_norm": lambda r: [(r(3, 4, 5), [5], r(5)), (r(3, 4, 5), [5], None, 1e-3)],
            "batch_norm": lambda r: [
                (r(4, 3, 5), r(3), r(3), None, None, True, 0.1, 1e-5, False),
                (r(4, 3, 5), r(3), r(3), r(3), r.between(0.5, 2, 3), False, 0.1, 1e-5, False),
            ],
            "group_norm": lambda r: [(r(2, 6, 5), 3, r(6), r(6)), (r(2, 6, 5), 2)],
        }
    )


def _losses() -> None:
    pairs = "l1_loss mse_loss smooth_l1_loss huber_loss"
    add(pairs, lambda r: [(r(3, 5), r(3, 5), k) for k in (0, 1, 2)])
    add(
        "soft_margin_loss hinge_embedding_loss",
        lambda r: [(r(3, 5), r.signs(3, 5)), (r(3, 5), r.signs(3, 5), {"reduction": 0})],
    )
    add(
        "multilabel_margin_loss multilabel_margin_loss_forward",
        lambda r: [(r(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2]]), k) for k in (0, 1)],
    )
    add("cosine_similarity", lambda r: [(r(3, 5), r(3, 5)), (r(3, 5), r(3, 5), 0)])
    add("cosine_embedding_loss", lambda r: [(r(3, 5), r(3, 5), r.signs(3), 0.1, k) for k in (0, 1)])
    add(
        "margin_ranking_loss", lambda r: [(r(3, 5), r(3, 5), r.signs(3, 5), 0.1, k) for k in (0, 1)]
    )
    add_all(
        {
            "poisson_nll_loss": lambda r: [
                (r(3, 5), r.between(0, 3, 3, 5), True, False, 1e-8, 1),
                (r.between(0.5, 2, 3, 5), r.between(0, 3, 3, 5), False, True, 1e-8, 0),
            ],
            "kl_div": lambda r: [
                (r(3, 5).log_softmax(-1), r(3, 5).softmax(-1)),
                (r(3, 5).log_softmax(-1), r(3, 5).log_softmax(-1), 0, {"log_target": True}),
            ],
            "binary_cross_entropy": lambda r: [
                (r.between(0.05, 0.95, 3, 5), r.between(0, 1, 3, 5)),
                (r.between(0.05, 0.95, 3, 5), r.between(0, 1, 3, 5), r.between(0.5, 2, 5), 0),
            ],
            "binary_cross_entropy_with_logits": lambda r: [
                (r(3, 5), r.between(0, 1, 3, 5)),
                (r(3, 5), r.between(0, 1, 3, 5), r.between(0.5, 2, 5), r.between(0.5, 2, 5), 0),
            ],
            "nll_loss": lambda r: [
                (r(4, 5).log_softmax(-1), r.below(5, 4)),
                (r(4, 5).log_softmax(-1), r.below(5, 4), r.between(0.5, 2, 5), 2),
            ],
            "nll_loss2d": lambda r: [
                (r(2, 5, 3, 4).log_softmax(1), r.below(5, 2, 3, 4)),
                (r(2, 5, 3, 4).log_softmax(1), r.below(5, 2, 3, 4), r.between(0.5, 2, 5), 0),
            ],
            "cross_entropy_loss": lambda r: [
                (r(4, 5), r.below(5, 4)),
                (r(4, 5), r(4, 5).softmax(-1), None, 1, -100, 0.1),
                (r(4, 5), r.below(5, 4), r.between(0.5, 2, 5), 0),
            ],
            "multi_margin_loss": lambda r: [
                (r(4, 5), r.below(5, 4)),
                (r(4, 5), r.below(5, 4), 2, 0.5, r.between(0.5, 2, 5), 0),
            ],
            "triplet_margin_loss": lambda r: [
                (r(3, 5), r(3, 5), r(3, 5)),
                (r(3, 5), r(3, 5), r(3, 5), 0.5, 1.0, 1e-6, True, 0),
            ],
            "ctc_loss.IntList": lambda r: [
                (r(6, 2, 4).log_softmax(-1), r.below(3, 2, 2) + 1, [6, 5], [2, 1]),
            ],
            "ctc_loss.Tensor": lambda r: [
                (
                    r(6, 2, 4).log_softmax(-1),
                    r.below(3, 2, 2) + 1,
                    torch.tensor([6, 5]),
                    torch.tensor([2, 1]),
                    0,
                    2,
                ),
            ],
            "dist": lambda r: [(r(3, 5), r(3, 5)), (r(3, 5), r(5), 1)],
            "pdist": lambda r: [(r(4, 5),), (r(4, 5), 1.0)],
            "cdist": lambda r: [(r(3, 5), r(4, 5)), (r(2, 3, 5), r(2, 4, 5), 1.0)],
        }
    )


def _indexing() -> None:
    add("cat stack", lambda r: [([r(3, 5), r(3, 5)],), ([r(3, 5), r(3, 5), r(3, 5)], 1)])
    add_all(
        {
            "index_copy": lambda r: [(r(4, 5), 0, r.permutation(4)[:2], r(2, 5))],
            "index_put": lambda r: [
                (r(4, 5), [r.permutation(4)[:2]], r(2, 5)),
                (r(4, 5), [None, r.below(5, 6)], r(4, 6), True),
            ],
            "scatter_add": lambda r: [(r(4, 5), 1, r.below(5, 4, 3), r(4, 3))],
        }
    )


def _images() -> None:
    _resizing("upsample_linear1d", (2, 3, 4), [7])
    _resizing("upsample_bilinear2d upsample_bicubic2d", (2, 3, 4, 5), [7, 6])
    _resizing("upsample_trilinear3d", (2, 3, 4, 5, 3), [5, 7, 6])
    add("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", BUILDERS["upsample_bicubic2d"])
    add("reflection_pad1d", BUILDERS["replication_pad1d"])
    add("reflection_pad2d", BUILDERS["replication_pad2d"])
    grids = "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback"
    add(
        grids,
        lambda r: [
            (r(2, 3, 5, 4), r.between(-1, 1, 2, 3, 4, 2), 0, 0, False),
            (r(2, 3, 5, 4), r.between(-1.2, 1.2, 2, 3, 4, 2), 1, 1, True),
        ],
    )
    add(
        "grid_sampler_3d",
        lambda r: [(r(2, 3, 5, 4, 3), r.between(-1, 1, 2, 3, 4, 2, 3), 0, 0, False)],
    )
    add(
        "avg_pool3d max_pool3d",
        lambda r: [(r(2, 3, 6, 6, 6), [2, 2, 2]), (r(3, 6, 6, 6), [3, 3, 3], [1, 1, 1], [1, 1, 1])],
    )
    add("adaptive_avg_pool3d adaptive_max_pool3d", lambda r: [(r(2, 3, 6, 5, 4), [3, 2, 2])])
    add_all(
        {
            "fractional_max_pool2d": lambda r: [
                (r(2, 3, 7, 7), [2, 2], [3, 3], r.between(0, 1, 2, 3, 2))
            ],
            "fractional_max_pool3d": lambda r: [
                (r(2, 3, 7, 7, 7), [2, 2, 2], [3, 3, 3], r.between(0, 1, 2, 3, 3))
            ],
            "max_unpool2d": lambda r: [(r(2, 3, 2, 2), _corners(2, 3, 4, 4), [4, 4])],
            "max_unpool3d": lambda r: [
                (r(2, 3, 2, 2, 2), _corners(2, 3, 4, 4, 4), [4, 4, 4], [2, 2, 2], [0, 0, 0])
            ],
        }
    )


def _resizing(smooth: str, shape: tuple[int, ...], output: list[int]) -> None:
    n = len(output)
    add(smooth, lambda r: [(r(*shape), output, False), (r(*shape), output, True)])
    nearest = f"upsample_nearest{n}d _upsample_nearest_exact{n}d"
    add(nearest, lambda r: [(r(*shape), output)])
    add(f"replication_pad{n}d", lambda r: [(r(*shape), [1, 2] * n)])


def _corners(*shape: int) -> Tensor:
    """The flat index of each pooling window's first element, for windows of 2 in each direction."""
    flat = torch.arange(torch.Size(shape[2:]).numel()).reshape(shape[2:])
    for dim in range(flat.dim()):
        flat = flat.narrow(dim, 0, flat.shape[dim]).index_select(
            dim, torch.arange(0, shape[dim + 2], 2)
        )
    return flat.expand(*shape[:2], *flat.shape).contiguous()


for _group in (_convolutions, _recurrent, _normalisation, _losses, _indexing, _images):
    _group()
