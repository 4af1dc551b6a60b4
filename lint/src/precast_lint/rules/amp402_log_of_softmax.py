"""AMP402: the logarithm of a softmax, of a sigmoid, or of a sum of exponentials."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.imports import name_for
from precast_lint.meaning.functions import called_forward, called_function
from precast_lint.meaning.tensors import Operation, modules_in, operation, value_of, written
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.returns import returned_by
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_NO_GRAD = ("torch.no_grad", "torch.inference_mode")
_SEARCHES = re.compile(r"beam|search|generate|translate|viterbi", re.IGNORECASE)
_SEARCHERS = re.compile(r"beam|search|tracker|predictor", re.IGNORECASE)
_MODULES = {
    "torch.nn.Softmax": "softmax",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_PICKS = (
    "gather",
    "index_select",
    "select",
    "squeeze",
    "unsqueeze",
    "transpose",
    "view",
    "reshape",
    "flatten",
)
_STEPS = 6  # parts of parts
_DEEP = 3  # functions that call one another
_BETTER = {"softmax": "log_softmax", "sigmoid": "logsigmoid", "sum": "logsumexp"}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each `log` of them, direct or through a name."""
    for call in source.all(cst.Call):
        log = operation(source, call, "log")
        if log is None or log.positional or log.keywords:
            continue
        inner = operation(source, value_of(source, log.operand), *_BETTER)
        name = inner.name if inner is not None else _probabilities(source, log.operand)
        if name is None or _is_meant(source, call, _BETTER[name]) or _only_ranks(source, call):
            continue
        if inner is not None and name == "sum" and not _is_of_exponentials(source, inner):
            continue
        is_direct = inner is not None and inner.call is log.operand
        fix = _fix(source, log, inner) if inner is not None and is_direct else None
        yield source.find(RULE, call, RULE.message.format(old=name, new=_BETTER[name]), fix)


def _probabilities(source: Source, node: Node, depth: int = _DEEP) -> str | None:
    """The operation, `softmax` or `sigmoid`, of which an expression is the result, or a part.

    `torch.softmax(x, 1).gather(1, y).squeeze(1)`, `p[:, 0]`, and what a function or a module of this file returns.
    """
    for _ in range(_STEPS):
        node = value_of(source, node)
        shape = operation(source, node, *_PICKS)
        if shape is not None:
            node = shape.operand
        elif isinstance(node, cst.Subscript):
            node = node.value
        else:
            break
    found = operation(source, node, "softmax", "sigmoid")
    if found is not None:
        return found.name
    if not isinstance(node, cst.Call) or depth == 0:
        return None
    module = _called_module(source, node)
    if module is not None:
        return module
    function = called_forward(source, node) or called_function(source, node)
    if function is None or function.decorators:
        return None
    names = {_probabilities(source, value, depth - 1) for value in returned_by(function)}
    return names.pop() if len(names) == 1 else None


def _called_module(source: Source, call: cst.Call) -> str | None:
    """The operation that a module computes last: `nn.Softmax(-1)`, or one at the end of `nn.Sequential(...)`."""
    inner = modules_in(source, call.func)
    last: Node = inner[-1] if inner else call.func
    return _MODULES.get(source.instance(last) or "")


def _is_meant(source: Source, call: Node, better: str) -> bool:
    """Whether somebody writes the better one itself, or what it is compared with: `reference_fn=lambda x: ...`."""
    for outer in source.around(call):
        name = ""
        if isinstance(outer, cst.FunctionDef):
            name = outer.name.value
        elif isinstance(outer, cst.Arg) and outer.keyword is not None:
            name = outer.keyword.value
        if better in name or "reference" in name:
            return True
    return False


def _only_ranks(source: Source, call: Node) -> bool:
    """Whether scores are only compared, of which `-inf` is a right one: in a search, or where no gradient is taken."""
    for outer in source.around(call):
        if isinstance(outer, (cst.FunctionDef, cst.ClassDef)):
            searches = _SEARCHES if isinstance(outer, cst.FunctionDef) else _SEARCHERS
            if searches.search(outer.name.value):
                return True
        entered: list[Node] = []
        if isinstance(outer, cst.FunctionDef):
            entered = [decorator.decorator for decorator in outer.decorators]
        elif isinstance(outer, cst.With):
            entered = [item.item for item in outer.items]
        for node in entered:
            if source.origin(node.func if isinstance(node, cst.Call) else node) in _NO_GRAD:
                return True
    return False


def _is_of_exponentials(source: Source, total: Operation) -> bool:
    """Whether it sums `exp(x)` of an x from which nothing is subtracted, a maximum for example."""
    power = operation(source, value_of(source, total.operand), "exp")
    if power is None:
        return False
    exponent = value_of(source, power.operand)
    is_shifted = isinstance(exponent, cst.BinaryOperation) and isinstance(
        exponent.operator, cst.Subtract
    )
    return not is_shifted


def _fix(source: Source, log: Operation, inner: Operation) -> Fix | None:
    """One call with the inner one's arguments."""
    text = None
    imports: tuple[Edit, ...] = ()
    if inner.name == "softmax":
        text, imports = _log_softmax(source, inner)
    elif inner.name == "sum":
        text, imports = _logsumexp(source, inner)
    elif not inner.positional and not inner.keywords:
        name = _functional(source, log.call)
        if name is not None:
            text, imports = f"{name[0]}.logsigmoid({source.code(inner.operand)})", name[1]
    if text is None or b"#" in source.code(log.call).encode():
        return None
    message = f"Call {_BETTER[inner.name]}"
    return source.fix(message, source.replace(log.call, text), imports)


def _log_softmax(source: Source, inner: Operation) -> tuple[str | None, tuple[Edit, ...]]:
    """The same call of another function; None without a dim, whose default is deprecated."""
    func = inner.call.func
    rest = _after(source, inner.call)
    if inner.get("dim", 0) is None:
        return None, ()
    if isinstance(func, cst.Attribute):
        return f"{source.code(func.value)}.log_softmax{rest}", ()
    name = _functional(source, inner.call)
    return (f"{name[0]}.log_softmax{rest}", name[1]) if name else (None, ())


def _logsumexp(source: Source, total: Operation) -> tuple[str | None, tuple[Edit, ...]]:
    power = operation(source, total.operand, "exp")
    dim, keep = total.get("dim", 0), total.get("keepdim", 1)
    known = {"dim", "keepdim"} >= set(total.keywords) and len(total.positional) <= 2
    if power is None or power.positional or power.keywords or dim is None or not known:
        return None, ()
    name = name_for(source, "torch", total.call)
    if name is None:
        return None, ()
    more = f", keepdim={written(source, keep)}" if keep is not None else ""
    x = source.code(power.operand)
    return f"{name[0]}.logsumexp({x}, dim={written(source, dim)}{more})", name[1]


def _functional(source: Source, at: Node) -> tuple[str, tuple[Edit, ...]] | None:
    """A name for torch.nn.functional."""
    scope = source.scope(at)
    for name, bindings in source.scopes.module.bindings.items():
        is_it = all(b.path == "torch.nn.functional" for b in bindings)
        if is_it and scope.lookup(name) is bindings:
            return name, ()
    found = name_for(source, "torch", at)
    return (f"{found[0]}.nn.functional", found[1]) if found else None


def _after(source: Source, call: cst.Call) -> str:
    """The text of a call after the name of what it calls."""
    start, end = source.span(call.func).end, source.span(call).end
    return source.text.data[start:end].decode("utf-8")


VALID = (
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

RULE = Rule(
    code="AMP402",
    name="log-of-softmax",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="the logarithm of `{old}` is -inf or inf where it need not be: use `{new}`",
    what="The logarithm of a softmax, of a sigmoid, or of a sum of exponentials.",
    why=(
        "A probability below 6e-8 is zero in float16, below 1e-45 in float32, and its logarithm -inf; gradients become "
        "NaN. `log_softmax`, `logsigmoid` and `logsumexp` compute the same without that step."
    ),
    fine="The probabilities are known to be far from zero.",
    words=tuple(
        f"torch log( {inner}"
        for inner in ("softmax(", "Softmax(", "sigmoid(", "Sigmoid(", "exp( sum(")
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
