"""The cases of AMP404."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case(
        """
        import torch

        def mask_logits(logits, mask):
            return logits.masked_fill(~mask, -1e9)

        def hide(scores, mask):
            scores -= scores.max()
            return scores.masked_fill(mask, -1e9)

        def attend(q, k, keep):
            with torch.autocast("cuda", dtype=torch.float16):
                y = q @ k
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    z = q @ k
                    z = hide(z, keep)
            return mask_logits((q @ k).float(), keep), mask_logits(q @ k, keep), y
        """,
        note="Not all that the function gets is float16.",
    ),
    Case(
        """
        import torch
        from torch import nn

        class Attention(nn.Module):
            def forward(self, q, k, pad):
                scores = q @ k.transpose(1, 2)
                return scores.masked_fill(pad, -1e9).softmax(-1)

        def train(model, batches):
            for q, k, pad in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(q, k, pad).sum()
                loss.backward()
        """,
    ),
    Case(
        """
        import torch

        def mask(q, k, m, value=-1e4):
            s = q @ k.t()
            return s.masked_fill(m, value)
        """,
    ),
    Case(
        """
        import torch

        def mask(s, m, value=-1e9):
            return s.float().masked_fill(m, value)
        """,
    ),
    Case("""
        import torch

        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    """),
    Case(
        """
        import torch

        scores = torch.matmul(q, k)
        a = scores.masked_fill(mask, float("-inf"))
        b = scores.masked_fill(mask, -torch.inf)
        c = scores.masked_fill(mask, -1e4)
        """,
        note="Infinity and -1e4 are fine.",
    ),
    Case("""
        import torch

        labels = batch["labels"].masked_fill(mask, 10000000)
        rewards = rewards.masked_fill(done, -1e9)
    """),
    Case(
        """
        import torch

        scores = torch.matmul(q, k).float()
        scores = scores.masked_fill(mask, -1e9)
        """,
        note="In float32.",
    ),
    Case("""
        import torch

        def attend(scores, q):
            scores = torch.softmax(scores @ q, -1)
            return scores.masked_fill(mask, -1e9).to(q.dtype)
    """),
    Case(
        """
        import torch

        def additive(mask):
            lower = mask.to(torch.float16)
            return (1.0 - lower) * -1e4
        """,
    ),
    Case(
        """
        import torch

        def attend(q, k, mask):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                scores = q @ k
                scores = scores.masked_fill(mask, -1e9)
            scores = scores.float()
            scores[mask] = -1e9
            lengths = torch.where(mask, torch.arange(8), 100000)
            return scores + (1 - mask.float()) * -1e9
        """,
        note="bfloat16 has these numbers, and float32 has them.",
    ),
    Case("""
        import torch

        def causal(q, k, mask):
            weights = torch.matmul(q, k)
            low = torch.tensor(-1e4)
            weights = torch.where(mask, weights, low)
            return torch.where(mask, weights, torch.full(weights.shape, -1e9))
    """),
    Case("""
        import torch

        LOW = -torch.finfo(torch.float16).max

        def attend(q, k, mask):
            energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
            other = torch.matmul(q, k).masked_fill(mask, LOW)
            return energy.masked_fill(mask == 0, float("-1e4")).masked_fill(mask, float("-inf")), other
    """),
)

INVALID = (
    Case(
        """
        import math
        import torch
        from einops import rearrange

        def mask_logits(logits, mask):
            return logits.masked_fill(~mask, -1e9)

        def attend(q, k, keep, bias):
            s = torch.einsum("bhid,bhjd->bhij", q, k)
            s /= math.sqrt(q.shape[-1])
            if bias is not None:
                s += bias
            s.masked_fill_(keep, -1e9)
            t = torch.div(torch.matmul(q, k), 8).add(0.1)
            t = rearrange(t, "b h i j -> (b h) i j")
            return s.softmax(-1), t.masked_fill(keep, -1e9), mask_logits(q @ k, keep)
        """,
        """
        import math
        import torch
        from einops import rearrange

        def mask_logits(logits, mask):
            return logits.masked_fill(~mask, torch.finfo(logits.dtype).min)

        def attend(q, k, keep, bias):
            s = torch.einsum("bhid,bhjd->bhij", q, k)
            s /= math.sqrt(q.shape[-1])
            if bias is not None:
                s += bias
            s.masked_fill_(keep, torch.finfo(s.dtype).min)
            t = torch.div(torch.matmul(q, k), 8).add(0.1)
            t = rearrange(t, "b h i j -> (b h) i j")
            return s.softmax(-1), t.masked_fill(keep, torch.finfo(t.dtype).min), mask_logits(q @ k, keep)
        """,
        unsafe=True,
        count=3,
        note="In place, by methods, in another shape, and in a function that gets the scores.",
    ),
    Case(
        """
        import torch

        def nearest(q, k, ids):
            sims = torch.matmul(q, k.t())
            sims.fill_diagonal_(-1e9)
            return sims.index_fill(1, ids, -1e9)

        def attend(q, k, mask):
            s = torch.bmm(q, k)
            return s - 1e9 * (1 - mask.type_as(s))
        """,
        """
        import torch

        def nearest(q, k, ids):
            sims = torch.matmul(q, k.t())
            sims.fill_diagonal_(torch.finfo(sims.dtype).min)
            return sims.index_fill(1, ids, torch.finfo(sims.dtype).min)

        def attend(q, k, mask):
            s = torch.bmm(q, k)
            return s - 1e9 * (1 - mask.type_as(s))
        """,
        unsafe=True,
        count=3,
    ),
    Case(
        """
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.low = float(-1e9)
                self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, mask):
                scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2))
                return scores.masked_fill(mask, self.low).softmax(-1)

        def masked(q, k, mask, value=-1e30):
            scores = torch.matmul(q, k)
            return scores.masked_fill(~mask, value)
        """,
        """
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.low = float(-1e9)
                self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, mask):
                scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2))
                return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)

        def masked(q, k, mask, value=-1e30):
            scores = torch.matmul(q, k)
            return scores.masked_fill(~mask, value)
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch

        scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
        scores = scores.masked_fill(mask == 0, -1e9)
        """,
        """
        import torch

        scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        NEVER = torch.finfo(torch.float32).min

        def attend(q, k, mask, causal):
            dots = torch.einsum("bid,bjd->bij", q, k) * 0.125
            if causal:
                dots.masked_fill_(mask, value=NEVER)
            return dots.softmax(-1)
        """,
        """
        import torch

        NEVER = torch.finfo(torch.float32).min

        def attend(q, k, mask, causal):
            dots = torch.einsum("bid,bjd->bij", q, k) * 0.125
            if causal:
                dots.masked_fill_(mask, value=torch.finfo(dots.dtype).min)
            return dots.softmax(-1)
        """,
        unsafe=True,
        count=1,
    ),
    Case("""
        import torch

        weights = torch.softmax((q @ k).masked_fill(mask, -1e10), dim=-1)
    """),
    Case(
        """
        import math
        import torch

        def attend(q, k, mask):
            with torch.autocast("cuda", dtype=torch.float16):
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
                scores[mask == 0] = -1e9
                return scores.softmax(-1)
        """,
        """
        import math
        import torch

        def attend(q, k, mask):
            with torch.autocast("cuda", dtype=torch.float16):
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
                scores[mask == 0] = torch.finfo(scores.dtype).min
                return scores.softmax(-1)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def additive(mask):
            lower = mask.to(torch.float16)
            return (1.0 - lower) * -1e9
        """,
        note="The product is minus infinity, and a row of only that is NaN after softmax.",
    ),
    Case(
        """
        import math
        import torch

        def attend(q, k, mask, pad):
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            scores[mask == 0] = -1e9
            scores = torch.where(pad, scores, -1e9)
            scores = scores + (1.0 - mask.to(scores.dtype)) * -1e9
            zero = -9e15 * torch.ones_like(scores)
            return scores.softmax(-1)
        """,
        """
        import math
        import torch

        def attend(q, k, mask, pad):
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            scores[mask == 0] = torch.finfo(scores.dtype).min
            scores = torch.where(pad, scores, torch.finfo(scores.dtype).min)
            scores = scores + (1.0 - mask.to(scores.dtype)) * -1e9
            zero = -9e15 * torch.ones_like(scores)
            return scores.softmax(-1)
        """,
        unsafe=True,
        count=4,
        note="The number becomes minus infinity in each of these.",
    ),
    Case(
        """
        import torch

        class Head(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(8, 8)

            def forward(self, x, mask):
                x = self.project(x)
                x = torch.relu(x)
                x = x.masked_fill(mask, -1e9)
                return x
        """,
        """
        import torch

        class Head(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.project = torch.nn.Linear(8, 8)

            def forward(self, x, mask):
                x = self.project(x)
                x = torch.relu(x)
                x = x.masked_fill(mask, torch.finfo(x.dtype).min)
                return x
        """,
        unsafe=True,
        note="One name for all of it.",
    ),
    Case(
        """
        import torch

        class Attention(torch.nn.Module):
            def forward(self, q, k, v, mask=None):
                scores = torch.matmul(q, k.transpose(2, 3))
                if mask is not None:
                    scores = scores.masked_fill(mask == 0, -1e9)
                return torch.softmax(scores, dim=-1) @ v
        """,
        """
        import torch

        class Attention(torch.nn.Module):
            def forward(self, q, k, v, mask=None):
                scores = torch.matmul(q, k.transpose(2, 3))
                if mask is not None:
                    scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
                return torch.softmax(scores, dim=-1) @ v
        """,
        unsafe=True,
        note="A warning, as nothing in the file hands a mask over.",
    ),
    Case(
        """
        import torch

        def causal(q, k, mask):
            weights = torch.matmul(q, k)
            return torch.where(mask, weights, torch.tensor(-1e9))
        """,
        """
        import torch

        def causal(q, k, mask):
            weights = torch.matmul(q, k)
            return torch.where(mask, weights, torch.tensor(torch.finfo(weights.dtype).min))
        """,
        unsafe=True,
        note="A tensor without dimensions takes the dtype of the other one.",
    ),
    Case(
        """
        import torch

        LOW = -torch.finfo(torch.float32).max

        def attend(q, k, mask):
            energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
            other = torch.matmul(q, k).masked_fill(mask, LOW)
            return energy.masked_fill(mask == 0, float("-1e20")), other
        """,
        """
        import torch

        LOW = -torch.finfo(torch.float32).max

        def attend(q, k, mask):
            energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
            other = torch.matmul(q, k).masked_fill(mask, LOW)
            return energy.masked_fill(mask == 0, torch.finfo(energy.dtype).min), other
        """,
        unsafe=True,
        count=2,
    ),
)
