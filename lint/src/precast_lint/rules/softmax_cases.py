"""The cases of AMP401: softmaxes that are written out, and what only looks like one."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case(
        """
        import torch

        def weigh(x, limit, hard):
            e = torch.exp(x)
            if limit is not None:
                e = e.clamp(max=limit)
            w = torch.relu(x)
            if not hard:
                w = torch.exp(x)
            return e / e.sum(-1, keepdim=True) + w / w.sum(-1, keepdim=True)
        """,
        note="What is divided may be something else than an exponential.",
    ),
    Case(
        """
        import torch

        def weigh(x, y, mask):
            x -= x.max(-1, keepdim=True)[0]
            e = torch.exp(x)
            if mask is not None:
                e = e * mask
            y.sub_(y.amax(-1, keepdim=True))
            f = torch.exp(y)
            g = y.sub(y.amax(-1, keepdim=True)).exp()
            return e / e.sum(-1, keepdim=True) + f / f.sum(-1, keepdim=True) + g / g.sum(-1, keepdim=True)
        """,
        note="The maximum is subtracted in place.",
    ),
    Case("""
        import torch

        score = torch.nn.Linear(8, 1)
        e = torch.tanh(score(x))
        weights = torch.exp(e) / torch.exp(e).sum(dim=1, keepdim=True)
    """),
    Case("""
        import torch

        x = x * (1 / x.sum())
        e = torch.exp(x - x.max())
        p = e * e.sum().reciprocal()
        q = torch.exp(x) * (2 / torch.exp(y).sum())
    """),
    Case("""
        import torch

        weights = torch.softmax(x, dim=-1)
    """),
    Case(
        """
        import torch

        def in_place(scores, others, dim):
            scores.sub_(scores.amax(dim, keepdim=True))
            scores.exp_()
            total = scores.sum(dim, keepdim=True)
            scores.div_(total)
            others -= others.amax(dim, keepdim=True)
            others.exp_()
            return scores, others / others.sum(dim, keepdim=True)
        """,
        note="The maximum is subtracted in place.",
    ),
    Case(
        """
        import torch

        e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
        weights = e / e.sum(dim=-1, keepdim=True)
        """,
        note="The maximum is subtracted.",
    ),
    Case("""
        import torch

        shifted = x - torch.amax(x, 1, keepdim=True)
        weights = shifted.exp() / shifted.exp().sum(1, keepdim=True)
    """),
    Case(
        """
        import torch

        kernel = torch.exp(-((grid - 5) ** 2) / (2 * width**2))
        kernel = kernel / kernel.sum()
        blur = torch.exp(-(grid**2)) / torch.exp(-(grid**2)).sum()
        """,
        note="An exponent that is never above zero.",
    ),
    Case(
        """
        import torch

        x = torch.linspace(-3, 3, 50)
        weights = torch.exp(x) / torch.exp(x).sum()
        steps = torch.arange(8)
        decay = steps.exp() / steps.exp().sum()
        """,
        note="Numbers whose size is written down.",
    ),
    Case("""
        import numpy as np
        import torch

        weights = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    """),
    Case("""
        import torch

        e = torch.exp(x)
        e[mask] = other
        weights = e / e.sum(-1, keepdim=True)
    """),
    Case("""
        import torch

        ratio = torch.exp(x) / torch.exp(y).sum(-1, keepdim=True)
    """),
    Case(
        """
        import torch

        power = torch.exp(log_prob)
        weights = power / power.sum(dim=-1, keepdim=True)
        """,
    ),
)

INVALID = (
    Case(
        """
        import torch

        def attend(q, k, mask=None, causal=None):
            scores = q @ k.transpose(-2, -1)
            e = torch.exp(scores)
            if mask is not None:
                e = e * mask
            elif causal is not None:
                e = torch.where(causal, e, 0.0)
            return e / e.sum(dim=-1, keepdim=True)

        def pool(x, score, mask=None):
            a = score(x).squeeze(-1)
            a = a.exp()
            a = a if mask is None else a.masked_fill(mask, 0.0)
            a[:, 0] = 0
            a /= a.sum(1, keepdim=True) + 1e-8
            return (a * x).sum(1)

        def route(x, mask):
            e = torch.matmul(x, x)
            e.exp_()
            if mask is not None:
                e *= mask
            return e / e.sum(-1, keepdim=True)
        """,
        count=3,
        note="A mask is a factor, also under a test and in place.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def loss(logits, target):
            e = torch.exp(logits)
            p = e.gather(1, target[:, None]).squeeze(1) / e.sum(1)
            return F.nll_loss(F.normalize(logits.exp(), p=1, dim=1), target) + p.mean()
        """,
        count=2,
    ),
    Case("""
        import torch

        def softmax(x):
            power = torch.exp(x)
            total = power.sum(dim=-1)
            other = power / total.unsqueeze(-1)
            return power / total[..., None]
    """),
    Case("""
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, h):
                super().__init__()
                self.query, self.score = nn.Linear(h, h), nn.Linear(h, 1)

            def forward(self, hidden):
                e = self.score(torch.tanh(self.query(hidden))).squeeze(-1)
                return torch.exp(e) / torch.exp(e).sum(dim=1, keepdim=False)
    """),
    Case(
        """
        import torch

        def attend(scores, mask):
            e = scores.exp()
            e = e.masked_fill(mask, 0)
            return e / e.sum(1, keepdim=True).clamp(min=1e-6)

        def alpha(energy):
            alpha = torch.exp(energy)
            other = torch.exp(energy) * torch.exp(energy).sum(-1, keepdim=True).reciprocal()
            return alpha * (1 / alpha.sum(-1, keepdim=True))
        """,
        count=3,
    ),
    Case(
        """
        import torch

        def weights(scores):
            w = torch.exp(scores)
            w /= w.sum(1, keepdim=True)
            return w
        """,
        count=1,
    ),
    Case(
        """
        def masked_softmax(logits, mask):
            import torch

            weights = logits.exp() * mask
            return weights / weights.sum(-1, keepdim=True)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def weights(q, k):
            w = torch.matmul(q, k).exp()
            w = w / w.sum(dim=-1, keepdim=True)
            return w
        """,
    ),
    Case(
        """
        import torch

        weights = torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True)
        """,
        """
        import torch

        weights = torch.softmax(x, dim=-1)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch as th

        def attend(q, k):
            return (q @ k).exp() / th.sum((q @ k).exp(), 1, True)
        """,
        """
        import torch as th

        def attend(q, k):
            return th.softmax(q @ k, dim=1)
        """,
        unsafe=True,
    ),
    Case("""
        import torch

        def attend(x):
            e = torch.exp(x)
            return e / e.sum(1)[:, None]
    """),
    Case("""
        import torch

        def attend(x):
            e = x.exp()
            total = e.sum(-1, keepdim=True)
            return e / (total + 1e-6)
    """),
    Case(
        """
        import torch

        power = torch.exp(logits)
        weights = power / power.sum(dim=-1, keepdim=True)
        """,
    ),
    Case(
        """
        import torch

        def attend(catalog):
            power = torch.exp(catalog)
            return torch.div(power, power.sum(-1, keepdim=True))
        """,
    ),
)
