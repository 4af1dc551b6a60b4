"""The cases of AMP402: logarithms of probabilities and of sums of exponentials."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case(
        """
        import torch

        def entropy(p):
            return -(p * p.log()).sum(-1)

        def split(x):
            return torch.softmax(x, -1), x

        a = entropy(torch.softmax(x, -1)) + entropy(counts / counts.sum())
        b = torch.log(1 - torch.softmax(x, -1)) + torch.log(2 - torch.sigmoid(x))
        p, x = split(y)
        c = torch.log(x) + torch.log1p(torch.exp(x)) + torch.log1p(torch.sigmoid(x)) + torch.log(x.mean())
        """,
        note="Not all that the function gets are probabilities; the second result is not.",
    ),
    Case("""
        import torch
        from torch import nn

        net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(dim=1), nn.Linear(8, 1), nn.Softplus())
        y = torch.log(net(x))
    """),
    Case("""
        import torch

        a = torch.log_softmax(x, dim=1)
        b = torch.nn.functional.logsigmoid(x)
        c = torch.logsumexp(x, dim=1)
    """),
    Case(
        """
        import torch

        m = x.max(dim=1, keepdim=True).values
        total = torch.log(torch.exp(x - m).sum(dim=1, keepdim=True)) + m
        """,
        note="The maximum is subtracted.",
    ),
    Case(
        """
        import torch

        def logsumexp(x, dim):
            if x.numel() == 0:
                return torch.sum(torch.exp(x), dim).log()
            return torch.logsumexp(x, dim)
        """,
        note="What would be called is written here.",
    ),
    Case(
        """
        import torch

        test = dict(name="LogSigmoid", reference_fn=lambda x: x.sigmoid().log())

        def loss_reference(t, x):
            return t * x.sigmoid().log()
        """,
        note="What a test compares with.",
    ),
    Case("""
        import torch

        p = torch.softmax(x, dim=1) * weights
        entropy = -(p * torch.log(p)).sum()
        q = torch.log(torch.sum(x, dim=1))
    """),
    Case("""
        import numpy as np
        import torch

        y = np.log(np.sum(np.exp(x)))

        def entropy(xp, x):
            return torch.log(xp.sigmoid(x)) + xp.log(xp.softmax(x, 1))
    """),
    Case("""
        import torch

        p = torch.softmax(x, dim=1)
        p[mask] = 1
        y = torch.log(p)
    """),
    Case(
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def forward(self, x):
                if self.training:
                    return self.logits(x)
                return torch.softmax(self.logits(x), dim=1)

            def loss(self, x):
                return torch.log(self(x))

        class Smooth(nn.Module):
            def forward(self, x):
                return torch.softmax(x, dim=1)

            def loss(self, x):
                return torch.log(self(x))

        class Smoother(Smooth):
            def forward(self, x):
                return super().forward(x) + 1e-3

        def safe(x):
            return torch.sigmoid(x).clamp(1e-4)

        y = torch.log(safe(x))
        """,
        note="Not all that is returned is a bare softmax.",
    ),
    Case(
        """
        import torch

        def generate_beam(model, tokens, beams):
            scores = model(tokens)[:, -1].softmax(-1).log()
            return scores.topk(beams)

        @torch.no_grad()
        def rank(logits):
            return torch.log(torch.sigmoid(logits)).argsort()
        """,
        note="Where scores are only compared, `-inf` is the score of what is impossible.",
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        def uniformity(x, t=2):
            squares = torch.pdist(F.normalize(x, dim=-1), p=2).pow(2)
            return squares.mul(-t).exp().mean().log() + torch.log(torch.exp(-2 * squares).mean())

        class Pool(torch.nn.Module):
            def forward(self, x):
                top = x.amax(dim=1, keepdim=True)
                powers, more = torch.exp(self.r * (x - top)), torch.exp((x - top) / self.r)
                return torch.log(powers.mean(dim=1)) + torch.log(more.sum(dim=1))
    """),
)

INVALID = (
    Case(
        """
        import torch
        from collections import OrderedDict
        from torch import nn

        class Critic(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.main = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1), nn.Sigmoid())

            def forward(self, x):
                return self.main(x).view(-1)

        classify = nn.Sequential(OrderedDict([("fc", nn.Linear(8, 3)), ("p", nn.Softmax(dim=1))]))
        critic = Critic(8)
        loss = -torch.log(critic(x)).mean() - classify(x).log().gather(1, y).mean()
        """,
        count=2,
        note="The last module of a `Sequential`.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        class Critic(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())

            def forward(self, x):
                return self.net(x)

        class ActorCritic(nn.Module):
            def __init__(self):
                super().__init__()
                self.pi, self.v = nn.Linear(8, 4), nn.Linear(8, 1)

            def forward(self, x):
                return F.softmax(self.pi(x), dim=-1), self.v(x)

        class Categorical:
            def __init__(self, logits):
                self.probs = torch.softmax(logits, dim=-1)

            def log_prob(self, action):
                return torch.log(self.probs).gather(-1, action)

        def entropy(p):
            return -(p * torch.log2(p)).sum(-1)

        def bound(joint, marginal):
            return joint.mean() - torch.log(torch.mean(torch.exp(marginal)))

        def losses(x, real, fake, action):
            critic, model = Critic(), ActorCritic()
            probs, value = model(x)
            h = entropy(torch.softmax(x, -1)) - value * torch.log(probs[action])
            return h + torch.log(1 - critic(fake)) + torch.log1p(-torch.sigmoid(real))
        """,
        count=6,
        note="The other probability, a mean, several results, attributes and parameters.",
    ),
    Case(
        """
        import torch

        def loss(x, y):
            p = torch.softmax(x, dim=-1)
            picked = p.gather(1, y[:, None]).squeeze(1)
            return torch.log(picked).mean() + p[:, 0].log()
        """,
        count=2,
    ),
    Case("""
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.normalize = nn.Softmax(dim=-1)
                self.gate = nn.Sigmoid()

            def forward(self, x):
                p = self.normalize(x)
                return p.log() + torch.log(self.gate(x))
    """),
    Case(
        """
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.softmax = nn.Softmax(dim=-1)

            def forward(self, x):
                p = self.softmax(x)
                return torch.log(p)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        y = torch.log(torch.softmax(x, dim=1))
        """,
        """
        import torch

        y = torch.log_softmax(x, dim=1)
        """,
        count=1,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        a = F.softmax(x / t, dim=-1, dtype=torch.float32).log()
        b = x.softmax(-1).log()
        c = torch.log(torch.sigmoid(x))
        d = torch.log(torch.sum(torch.exp(x), 1, keepdim=True))
        e = x.exp().sum(dim=(0, 1)).log()
        """,
        """
        import torch
        import torch.nn.functional as F

        a = F.log_softmax(x / t, dim=-1, dtype=torch.float32)
        b = x.log_softmax(-1)
        c = F.logsigmoid(x)
        d = torch.logsumexp(x, dim=1, keepdim=True)
        e = torch.logsumexp(x, dim=(0, 1))
        """,
        count=5,
    ),
    Case(
        """
        from torch import log
        from torch.nn.functional import softmax

        y = log(softmax(x, dim=1))
        """,
        """
        import torch
        from torch import log
        from torch.nn.functional import softmax

        y = torch.nn.functional.log_softmax(x, dim=1)
        """,
    ),
    Case(
        """
        import torch

        p = torch.softmax(x, dim=1)
        entropy = -(p * torch.log(p)).sum()
        total = torch.log(torch.exp(x).sum())
        """,
        count=2,
        note="The softmax is needed elsewhere; `logsumexp` wants a dim.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def f(F, x):
            return torch.log(torch.sigmoid(x))
        """,
        """
        import torch
        import torch.nn.functional as F

        def f(F, x):
            return torch.nn.functional.logsigmoid(x)
        """,
        note="`F` is something else here.",
    ),
    Case(
        """
        def f(x):
            import torch
            return torch.log(torch.exp(x).sum(1)) + torch.log(torch.sigmoid(x))
        """,
        """
        def f(x):
            import torch
            return torch.logsumexp(x, dim=1) + torch.nn.functional.logsigmoid(x)
        """,
    ),
    Case(
        """
        from torch import exp, log

        def f(torch, x):
            return log(exp(x).sum(1))
        """,
        note="There is no name for the module `torch` here.",
    ),
    Case(
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.logits = nn.Linear(8, 3)

            def forward(self, x):
                return torch.softmax(self.logits(x), dim=1)

            def loss(self, x, one_hot):
                p = self(x)
                return -(one_hot * torch.log(p)).sum(1).mean()

        def chance(x):
            gate = x.sigmoid()
            return gate[:, 0]

        net = Net()
        total = net(x)[:, 0].log().mean() + torch.log(chance(x)).mean()
        """,
        count=3,
        note="A function, or a module, of the file returns the probabilities.",
    ),
)
