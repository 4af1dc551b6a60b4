"""The operations of random programs on three squares, what changes a tensor in place, and what changes a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["HOOKS", "IN_PLACE", "LOWERED", "OPERATIONS", "SIDE"]

SIDE = 4
Operation = Callable[[Tensor, Tensor, Tensor], Any]


def _classes(a: Tensor) -> Tensor:
    """A class for each row, from nothing but the shape."""
    return torch.arange(len(a)) % SIDE


def _signs(a: Tensor) -> Tensor:
    return torch.tensor([1, -1]).repeat(len(a))[: len(a)]


LOWERED: dict[str, Operation] = {
    "linear": lambda a, b, c: F.linear(a, b),
    "linear with bias": lambda a, b, c: F.linear(a, b, c[0]),
    "linear of a batch": lambda a, b, c: F.linear(a[None], b, c[0]),
    "mm": lambda a, b, c: torch.mm(a, b),
    "matmul": lambda a, b, c: a @ b,
    "matmul of a transposed": lambda a, b, c: a @ b.t(),
    "matmul of a slice": lambda a, b, c: a @ b[:, :2],
    "matmul of chunks": lambda a, b, c: [a @ part for part in b.chunk(2, 1)],
    "matmul of a broadcast": lambda a, b, c: torch.matmul(a[None, None], b.expand(2, SIDE, SIDE)),
    "vector": lambda a, b, c: a @ b[0],
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]),
    "addmm": torch.addmm,
    "addbmm": lambda a, b, c: torch.addbmm(a, b[None], c[None]),
    "baddbmm": lambda a, b, c: torch.baddbmm(a[None], b[None], c[None]),
    "conv1d": lambda a, b, c: F.conv1d(a, b[..., None], c[0]),
    "conv2d": lambda a, b, c: F.conv2d(a[None, None], b.view(SIDE, 1, 2, 2), c[0], padding=1),
    "conv3d": lambda a, b, c: F.conv3d(a.view(1, 1, 2, 2, 4), b.view(2, 1, 2, 2, 2)),
    "conv_transpose1d": lambda a, b, c: F.conv_transpose1d(a, b[..., None], c[0]),
    "conv_transpose2d": lambda a, b, c: F.conv_transpose2d(a[None, None], b[None, None], stride=2),
    "multi_dot": lambda a, b, c: torch.linalg.multi_dot([a, b, c]),
    "einsum": lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c),
    "einsum, a trace": lambda a, b, c: torch.einsum("ij,ji->i", a, b),
    "tensordot": lambda a, b, c: torch.tensordot(a, b, dims=2),
    "inner": lambda a, b, c: torch.inner(a, b),
    "chain of layers": lambda a, b, c: F.linear(F.relu(F.linear(a, b)), b.t(), c[1]),
    "attention": lambda a, b, c: F.scaled_dot_product_attention(a[None], b[None], c[None]),
    "attention, causal": lambda a, b, c: F.scaled_dot_product_attention(
        a[None, None], b[None, None], c[None, None], is_causal=True
    ),
    "bilinear": lambda a, b, c: F.bilinear(a, b, c[None], None),
    "cdist": lambda a, b, c: torch.cdist(a, b),
    "rnn_tanh_cell": lambda a, b, c: torch.rnn_tanh_cell(a, b, c, c, b[0], b[1]),
    "mv": lambda a, b, c: torch.mv(a, b[0]),
    "dot": lambda a, b, c: torch.dot(a[0], b[1]),
    "outer": lambda a, b, c: torch.outer(a[0], b[1]),
    "addmv": lambda a, b, c: torch.addmv(a[0], b, c[0]),
    "addr": lambda a, b, c: torch.addr(a, b[0], c[1]),
    "vecdot": lambda a, b, c: torch.linalg.vecdot(a, b),
    "matrix_power": lambda a, b, c: torch.matrix_power(a, 3),
    "matrix_exp": lambda a, b, c: torch.matrix_exp(a),
}

_FLOAT32: dict[str, Operation] = {
    "mse_loss": lambda a, b, c: F.mse_loss(a, b, reduction="none"),
    "l1_loss": lambda a, b, c: F.l1_loss(a, b),
    "smooth_l1_loss": lambda a, b, c: F.smooth_l1_loss(a, b, reduction="sum"),
    "huber_loss": lambda a, b, c: F.huber_loss(a, b),
    "kl_div": lambda a, b, c: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
    "cross_entropy": lambda a, b, c: F.cross_entropy(a, _classes(a), b[0].abs()),
    "cross_entropy, soft": lambda a, b, c: F.cross_entropy(a, b.softmax(-1), label_smoothing=0.1),
    "nll_loss": lambda a, b, c: F.nll_loss(a.log_softmax(-1), _classes(a)),
    "binary_cross_entropy": lambda a, b, c: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "with_logits": lambda a, b, c: F.binary_cross_entropy_with_logits(a, b.sigmoid(), c[0].abs()),
    "cosine_embedding_loss": lambda a, b, c: F.cosine_embedding_loss(a, b, _signs(a)),
    "margin_ranking_loss": lambda a, b, c: F.margin_ranking_loss(a, b, _signs(a)[:, None]),
    "triplet_margin_loss": F.triplet_margin_loss,
    "poisson_nll_loss": lambda a, b, c: F.poisson_nll_loss(a, b, full=True),
    "gaussian_nll_loss": lambda a, b, c: F.gaussian_nll_loss(a, b, c.square() + 1),
    "hinge_embedding_loss": lambda a, b, c: F.hinge_embedding_loss(a, _signs(a)),
    "multi_margin_loss": lambda a, b, c: F.multi_margin_loss(a, _classes(a)),
    "soft_margin_loss": lambda a, b, c: F.soft_margin_loss(a, _signs(a)[:, None]),
    "fft": lambda a, b, c: torch.fft.fft(a).real,
    "qr": lambda a, b, c: torch.linalg.qr(a),
    "svdvals": lambda a, b, c: torch.linalg.svdvals(a),
    "solve": lambda a, b, c: torch.linalg.solve(a + 3 * torch.eye(SIDE, dtype=a.dtype), b),
    "cholesky": lambda a, b, c: torch.linalg.cholesky(a @ a.t() + torch.eye(SIDE, dtype=a.dtype)),
    "inv": lambda a, b, c: torch.linalg.inv(a + 3 * torch.eye(SIDE, dtype=a.dtype)),
    "det": lambda a, b, c: torch.linalg.det(a),
    "matrix_norm": lambda a, b, c: torch.linalg.matrix_norm(a),
    "avg_pool1d": lambda a, b, c: F.avg_pool1d(a[None], 3, 1, 1),
    "adaptive_avg_pool2d": lambda a, b, c: F.adaptive_avg_pool2d(a[None], 2),
    "max_pool1d": lambda a, b, c: F.max_pool1d(a[None], 2),
    "reflection_pad": lambda a, b, c: F.pad(a[None], (1, 1), mode="reflect"),
    "replication_pad": lambda a, b, c: F.pad(a[None], (1, 1), mode="replicate"),
    "interpolate": lambda a, b, c: F.interpolate(a[None, None], scale_factor=2, mode="bilinear"),
    "grid_sample": lambda a, b, c: F.grid_sample(
        a[None, None], b[None, :, :2, None].expand(1, SIDE, 2, 2), align_corners=False
    ),
}

_PROMOTED: dict[str, Operation] = {
    "cat": lambda a, b, c: torch.cat([a, b]),
    "cat of three": lambda a, b, c: torch.cat([a, b, c], 1),
    "stack": lambda a, b, c: torch.stack([a, b, c]),
    "stack of two": lambda a, b, c: torch.stack([a[0], b[1]]),
    "index_copy": lambda a, b, c: a.index_copy(0, torch.tensor([1]), b[:1]),
}

_WITHOUT_A_RULE: dict[str, Operation] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: torch.sub(a, b, alpha=2),
    "multiply": lambda a, b, c: a * c,
    "divide": lambda a, b, c: a / (b.abs() + 1),
    "scale": lambda a, b, c: 0.5 * a + 1,
    "pow": lambda a, b, c: a.square() ** 1.5,
    "exp": lambda a, b, c: a.clamp(-4, 4).exp(),
    "log": lambda a, b, c: a.abs().add(1).log(),
    "tanh": lambda a, b, c: a.tanh(),
    "sigmoid": lambda a, b, c: a.sigmoid(),
    "relu": lambda a, b, c: F.relu(a),
    "gelu": lambda a, b, c: F.gelu(a),
    "silu": lambda a, b, c: F.silu(a),
    "glu": lambda a, b, c: F.glu(a),
    "softplus": lambda a, b, c: F.softplus(a),
    "prelu": lambda a, b, c: F.prelu(a, b[0]),
    "dropout": lambda a, b, c: F.dropout(a, 0.5),
    "softmax": lambda a, b, c: a.softmax(-1),
    "softmax in float32": lambda a, b, c: F.softmax(a, -1, dtype=torch.float32),
    "log_softmax": lambda a, b, c: a.log_softmax(0),
    "logsumexp": lambda a, b, c: a.logsumexp(1),
    "layer_norm": lambda a, b, c: F.layer_norm(a, (SIDE,), b[0], c[1]),
    "rms_norm": lambda a, b, c: F.rms_norm(a, (SIDE,), b[0]),
    "group_norm": lambda a, b, c: F.group_norm(a, 2, b[0], c[1]),
    "batch_norm": lambda a, b, c: F.batch_norm(a, None, None, b[0], c[1], training=True),
    "instance_norm": lambda a, b, c: F.instance_norm(a[None]),
    "normalize": lambda a, b, c: F.normalize(a),
    "cosine_similarity": lambda a, b, c: F.cosine_similarity(a, b),
    "sum": lambda a, b, c: a.sum(0),
    "mean": lambda a, b, c: a.mean(),
    "var": lambda a, b, c: a.var(1),
    "norm": lambda a, b, c: a.norm(dim=1),
    "prod": lambda a, b, c: a.prod(0),
    "cumsum": lambda a, b, c: a.cumsum(0),
    "amax": lambda a, b, c: a.amax(1),
    "max": lambda a, b, c: torch.max(a, 1),
    "sort": lambda a, b, c: a.sort(),
    "topk": lambda a, b, c: a.topk(2),
    "argmax": lambda a, b, c: a.argmax(),
    "all close": lambda a, b, c: torch.allclose(a, b),
    "equal": lambda a, b, c: torch.equal(a, b),
    "compare": lambda a, b, c: a > b,
    "where": lambda a, b, c: torch.where(a > 0, b, c),
    "masked_fill": lambda a, b, c: a.masked_fill(b > 0, 0.0),
    "lerp": lambda a, b, c: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c.abs() + 1),
    "atan2": lambda a, b, c: torch.atan2(a, b),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "gather": lambda a, b, c: a.gather(0, torch.tensor([[0, 1, 2, 3]])),
    "index": lambda a, b, c: a[[2, 0]],
    "index_select": lambda a, b, c: a.index_select(1, torch.tensor([0, 3])),
    "embedding": lambda a, b, c: F.embedding(torch.tensor([0, 2, 2, 1]), a),
    "embedding_bag": lambda a, b, c: F.embedding_bag(torch.tensor([[0, 2], [2, 1]]), a),
    "scatter_add": lambda a, b, c: a.scatter_add(0, torch.tensor([[0, 1, 2, 3]]), b[:1]),
    "index_add": lambda a, b, c: a.index_add(0, torch.tensor([2]), b[:1]),
    "index_put": lambda a, b, c: a.index_put((torch.tensor([2]),), b[1]),
    "tril": lambda a, b, c: a.tril(),
    "roll": lambda a, b, c: a.roll(1, 0),
    "flip": lambda a, b, c: a.flip(0),
    "repeat": lambda a, b, c: a.repeat(2, 1),
    "kron": lambda a, b, c: torch.kron(a[:2, :2], b[:2, :2]),
    "to double": lambda a, b, c: a.double(),
    "to float": lambda a, b, c: a.float(),
    "to bfloat16": lambda a, b, c: a.bfloat16(),
    "to half": lambda a, b, c: a.half(),
    "clone": lambda a, b, c: a.clone(),
}

_VIEWS: dict[str, Operation] = {
    "itself": lambda a, b, c: a,
    "transposed": lambda a, b, c: a.t(),
    "expanded": lambda a, b, c: a[0].expand(SIDE, SIDE),
    "viewed": lambda a, b, c: a.reshape(2, 2 * SIDE),
    "narrowed": lambda a, b, c: a.narrow(0, 1, 2),
    "chunk": lambda a, b, c: a.chunk(2)[1],
    "split": lambda a, b, c: a.split(3)[0],
    "unbind": lambda a, b, c: a.unbind(1)[2],
    "diagonal": lambda a, b, c: a.diagonal(),
    "strided": lambda a, b, c: a[::2, 1:],
    "detached": lambda a, b, c: a.detach(),
    "its data": lambda a, b, c: a.data,
}

OPERATIONS: dict[str, Operation] = LOWERED | _FLOAT32 | _PROMOTED | _WITHOUT_A_RULE | _VIEWS
"""Name -> an operation on three squares; the result may be anything."""


def _set_row(t: Tensor, u: Tensor) -> None:
    t[0] = u[1]


def _add_to_columns(t: Tensor, u: Tensor) -> None:
    t[:, 1:3] += u[:, :2]


def _copies(*operands: Tensor) -> list[Tensor]:
    """Copies, for operations that do not refuse operands in the memory that they write (PyTorch 2.13).

    Their threads read what others have written, so that PyTorch does not repeat its own results.
    """
    return [operand.clone() for operand in operands]


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda t, u: t.add_(u),
    "sub_": lambda t, u: t.sub_(u, alpha=0.5),
    "mul_": lambda t, u: t.mul_(u),
    "mul_ by a number": lambda t, u: t.mul_(1.5),
    "div_": lambda t, u: t.div_(u.abs() + 1),
    "copy_": lambda t, u: t.copy_(u),
    "copy_ into a view": lambda t, u: t[1:3].copy_(u[:2]),
    "mul_ through a transposed": lambda t, u: t.t().mul_(0.5),
    "fill_ through a view": lambda t, u: t.view(-1)[::5].fill_(0.25),
    "set a row": _set_row,
    "add to columns": _add_to_columns,
    "zero_": lambda t, u: t.zero_(),
    "clamp_": lambda t, u: t.clamp_(-1, 1),
    "relu_": lambda t, u: F.relu_(t),
    "sigmoid_": lambda t, u: t.sigmoid_(),
    "softplus out=": lambda t, u: torch.ops.aten.softplus.out(u, out=t),
    "masked_fill_": lambda t, u: t.masked_fill_(u > 0, 0.0),
    "addcmul_": lambda t, u: t.addcmul_(u, u, value=0.5),
    "lerp_": lambda t, u: t.lerp_(u, 0.3),
    "addmm_": lambda t, u: t.addmm_(u, u),
    "addmv_": lambda t, u: t[0].addmv_(*_copies(u, u[0])),
    "addbmm_": lambda t, u: t.addbmm_(u[None], u[None]),
    "baddbmm_": lambda t, u: t[None].baddbmm_(u[None], u[None]),
    "index_add_": lambda t, u: t.index_add_(0, torch.tensor([2]), u[:1]),
    "index_copy_": lambda t, u: t.index_copy_(0, torch.tensor([2]), u[:1]),
    "index_put_": lambda t, u: t.index_put_((torch.tensor([2]),), u[0]),
    "scatter_": lambda t, u: t.scatter_(0, torch.tensor([[0, 1, 2, 3]]), u[:1]),
    "masked_scatter_": lambda t, u: t.masked_scatter_(u > 0, u),
    "cumsum_": lambda t, u: t.cumsum_(0),
    "tril_": lambda t, u: t.tril_(),
    "renorm_": lambda t, u: t.renorm_(2, 0, 1.0),
    "add out=": lambda t, u: torch.add(u, 1, out=t),
    "mm out=": lambda t, u: torch.mm(u, u, out=t),
    "addmm out=": lambda t, u: torch.addmm(u, u, u, out=t),
    "cat out=": lambda t, u: torch.cat([u[:2], u[2:]], out=t),
    "stack out=": lambda t, u: torch.stack([u[0], u[1], u[2], u[3]], out=t),
    "linear out=": lambda t, u: torch.ops.aten.linear.out(*_copies(u, u), out=t),
    "foreach_mul_": lambda t, u: torch._foreach_mul_([t], 0.5),
    "of the detached": lambda t, u: t.detach().mul_(0.75),
}
"""Name -> what changes the first square in place; what it returns is not looked at."""


def _on_gradient(change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
    return lambda t: t.register_hook(change)


def _halve(leaf: Tensor) -> None:
    if leaf.grad is not None:
        leaf.grad.mul_(0.5)


def _step(leaf: Tensor) -> None:
    """An optimizer that steps in backward, and keeps no gradient."""
    if leaf.grad is not None:
        with torch.no_grad():
            leaf.sub_(leaf.grad, alpha=0.1)
        leaf.grad = None


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "double": _on_gradient(lambda g: g * 2),
    "clip": _on_gradient(lambda g: g.clamp(-0.5, 0.5)),
    "round": _on_gradient(lambda g: g.bfloat16().to(g.dtype)),
    "multiply": _on_gradient(lambda g: torch.mm(g, g) if g.dim() == 2 else g),
    "in place, of a copy": _on_gradient(lambda g: g.clone().mul_(3)),
    "only look": _on_gradient(lambda g: None),
    "halve the sum": lambda t: t.register_post_accumulate_grad_hook(_halve),
    "step": lambda t: t.register_post_accumulate_grad_hook(_step),
}
"""Name -> what puts a hook on a tensor."""
