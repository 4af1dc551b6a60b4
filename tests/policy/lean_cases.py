"""What the errors of the policy `lean` are measured on: calls as models make them, for its rows and for rows left out.

Invariants:
    - Every row in which `lean` differs from `torch` and `default` has cases; a test compares.
    - Not part of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["CASES", "REFUSED", "Candidate", "Case"]


@dataclass(frozen=True)
class Case:
    """A call as models make it.

    Attributes:
        about: what it is, in a few words.
        call: the operation on the inputs.
        inputs: float32 tensors, which the measurement rounds to 16 bits, and integers.
        weights: how many of the last inputs stay float32, as parameters in a region do.
        into_float32: whether what follows takes float32, so that results are compared unrounded.
        gradients_on: the device type whose kernels the row is about in backward; any where empty.
    """

    about: str
    call: Callable[..., Tensor]
    inputs: Callable[[Generator], Sequence[Tensor]]
    weights: int = 0
    into_float32: bool = False
    gradients_on: str = ""


@dataclass(frozen=True)
class Candidate:
    """A row that was measured and is not in the policy."""

    device: str
    operation: str
    rule: str
    why: str
    cases: tuple[Case, ...]


# --- inputs ---


def _activations(*shape: int, scale: float = 1.0) -> Callable[[Generator], Tensor]:
    """Activations of a transformer: a few channels are much larger than the others, and the mean is not 0."""

    def draw(generator: Generator) -> Tensor:
        large = torch.where(torch.arange(shape[-1]) % 100 == 7, 20.0, 1.0)
        return (torch.randn(shape, generator=generator) * large + 0.5) * scale

    return draw


def _normal(*shape: int, mean: float = 0.0, scale: float = 1.0) -> Callable[[Generator], Tensor]:
    return lambda generator: (torch.randn(shape, generator=generator) + mean) * scale


def _scores(*shape: int, scale: float = 1.0, sink: float = 0.0) -> Callable[[Generator], Tensor]:
    """Scores of causal attention; `sink` is added to those of the first key, which many models attend to."""

    def draw(generator: Generator) -> Tensor:
        scores = torch.randn(shape, generator=generator) * scale
        scores[..., 0] += sink
        future = torch.ones(shape[-2:]).triu(1).bool()
        return scores.masked_fill(future, float("-inf"))

    return draw


def _classes(rows: int, count: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randint(count, (rows,), generator=generator)


def _places(rank: int) -> Callable[[Generator], Tensor]:
    """Where a max pooling of windows of 2 found its results, in an image of 16 each way."""

    def draw(generator: Generator) -> Tensor:
        image = torch.randn((2, 8, *[16] * rank), generator=generator)
        pool = F.max_pool2d if rank == 2 else F.max_pool3d
        places: Tensor = pool(image, 2, return_indices=True)[1]
        return places

    return draw


def _all(*draws: Callable[[Generator], Tensor]) -> Callable[[Generator], Sequence[Tensor]]:
    return lambda generator: [draw(generator) for draw in draws]


# --- cases of the rows ---

_WIDTHS = ((1e-3, 512), (1.0, 512), (30.0, 512), (1.0, 8192))


def _norm(
    call: Callable[..., Tensor], *means: float, gradients_on: str = "", weights: bool = False
) -> tuple[Case, ...]:
    """Cases of a norm over the last dimension, with parameters around the given means."""
    return tuple(
        Case(
            f"{width} channels, scale {scale:g}, {len(means)} parameters",
            call,
            _all(
                _activations(64, width, scale=scale),
                *(_normal(width, mean=10 * mean, scale=0.1) for mean in means),
            ),
            weights=len(means) if weights else 0,
            gradients_on=gradients_on,
        )
        for scale, width in _WIDTHS
    )


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _native_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)[0]


def _rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def _resize(rank: int, mode: str) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{mode}, {rank}d, by {factor:g}",
            lambda x, factor=factor: F.interpolate(x, scale_factor=factor, mode=mode),
            _all(_normal(2, 4, *[10] * rank)),
        )
        for factor in (2.0, 3.0, 1.5, 0.5)
    )


def _unpool(rank: int) -> tuple[Case, ...]:
    unpool = F.max_unpool2d if rank == 2 else F.max_unpool3d
    inputs = _all(_normal(2, 8, *[8] * rank), _places(rank))
    return (Case("windows of 2", lambda x, places: unpool(x, places, [2] * rank), inputs),)


def _pad(rank: int, mode: str, sizes: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"by {size}",
            lambda x, size=size: F.pad(x, (size,) * (2 * rank), mode=mode),
            _all(_normal(2, 8, *[16] * rank)),
        )
        for size in sizes
    )


CASES: dict[str, tuple[Case, ...]] = {
    # In 16 bits the CPU's backward keeps mean and deviation, and adds gradients, in 16 bits too.
    "layer_norm": _norm(_layer_norm, gradients_on="cuda")
    + _norm(_layer_norm, 1.0, 0.0, gradients_on="cuda"),
    "native_layer_norm": _norm(_native_layer_norm, gradients_on="cuda")
    + _norm(_native_layer_norm, 1.0, 0.0, gradients_on="cuda"),
    "rms_norm": _norm(_rms_norm) + _norm(_rms_norm, 1.0),
    "upsample_nearest1d.default": _resize(1, "nearest"),
    "upsample_nearest2d.default": _resize(2, "nearest"),
    "upsample_nearest3d.default": _resize(3, "nearest"),
    "_upsample_nearest_exact1d.default": _resize(1, "nearest-exact"),
    "_upsample_nearest_exact2d.default": _resize(2, "nearest-exact"),
    "_upsample_nearest_exact3d.default": _resize(3, "nearest-exact"),
    "max_unpool2d": _unpool(2),
    "max_unpool3d": _unpool(3),
    "reflection_pad1d": _pad(1, "reflect", (1, 3, 7)),
}
"""By the key of the row: what its error is measured on."""


# --- what was measured and left out ---


def _one(
    about: str, call: Callable[..., Tensor], *shape: int, mean: float = 0.0
) -> tuple[Case, ...]:
    return (Case(about, call, _all(_normal(*shape, mean=mean))),)


_SOFTMAX = tuple(
    Case(
        f"scale {scale:g}, sink {sink:g}",
        lambda scores: scores.softmax(-1),
        _all(_scores(4, 256, 256, scale=scale, sink=sink)),
    )
    for scale, sink in ((1.0, 0.0), (1.0, 8.0), (8.0, 0.0))
)
_LOSS = Case(
    "32000 classes",
    lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    _all(_normal(64, 32000), _classes(64, 32000)),
    into_float32=True,
)
_GROUPS = tuple(
    Case(
        f"mean {mean:g}",
        lambda x, weight, bias: F.group_norm(x, 8, weight, bias),
        _all(_normal(4, 64, 16, 16, mean=mean), _normal(64, mean=10, scale=0.1), _normal(64)),
    )
    for mean in (0.0, 2.0, 10.0)
)
_ROUNDED_WEIGHTS = _norm(_layer_norm, 1.0, 0.0, weights=True)
_VIDEO = (2, 8, 12, 12, 12)
_ROWS = (8, 4096)

_ADDS = "adds gradients in 16 bits"
_RANGE = "float16 overflows"

REFUSED: tuple[Candidate, ...] = (
    Candidate("cuda", "softmax", "keep", "backward computes from the rounded result", _SOFTMAX),
    Candidate("cuda", "log_softmax", "keep", "losses take its result in float32", (_LOSS,)),
    Candidate("cuda", "group_norm", "promote", "keeps mean and deviation in 16 bits", _GROUPS),
    Candidate(
        "cuda", "layer_norm", "lower", "rounds weights and their gradients", _ROUNDED_WEIGHTS
    ),
    *(
        Candidate("cuda", name, "keep", _RANGE, _one(name, call, *_ROWS, mean=30.0))
        for name, call in (
            ("sum", lambda x: x.sum(-1)),
            ("cumsum", lambda x: x.cumsum(-1)),
            ("prod", lambda x: x[:, :4].prod(-1)),
        )
    ),
    Candidate(
        "cuda",
        "linalg_vector_norm",
        "keep",
        _RANGE,
        _one("of rows", lambda x: torch.linalg.vector_norm(x, dim=-1), *_ROWS, mean=2000.0),
    ),
    Candidate(
        "cpu", "prod", "keep", _RANGE, _one("4", lambda x: x[:, :4].prod(-1), *_ROWS, mean=30)
    ),
    *(
        Candidate("cpu", name, "keep", why, _one(name, call, *_VIDEO))
        for name, why, call in (
            ("max_pool3d", _ADDS, lambda x: F.max_pool3d(x, 3, 1)),
            ("adaptive_max_pool3d", _ADDS, lambda x: F.adaptive_max_pool3d(x, 5)),
            ("adaptive_avg_pool3d", "adds in 16 bits", lambda x: F.adaptive_avg_pool3d(x, 5)),
        )
    ),
    Candidate("cpu", "reflection_pad2d", "keep", _ADDS, _pad(2, "reflect", (1, 3, 7))),
    Candidate("cpu", "replication_pad1d", "keep", _ADDS, _pad(1, "replicate", (1, 8))),
    Candidate("cpu", "replication_pad2d", "keep", _ADDS, _pad(2, "replicate", (1, 8))),
    Candidate("cpu", "replication_pad3d", "keep", _ADDS, _pad(3, "replicate", (1, 3))),
)
