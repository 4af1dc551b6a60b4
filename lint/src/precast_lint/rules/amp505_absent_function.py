"""AMP505: functions that torch does not have."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted
from precast_lint.renaming.absent import (
    ABSENT,
    ABSENT_FFT,
    ABSENT_FUNCTIONAL,
    ABSENT_LINALG,
    ABSENT_NN,
    ABSENT_RANDOM,
)

__all__ = ["RULE"]

# Only names that look like nothing else are looked for behind `xp = torch` and in imports: others are everywhere.
_TELLING = tuple(
    name for name in ABSENT if name.startswith(("reduce_", "expand_dims", "gather_nd"))
)
_ACTIVATIONS = ("elu", "gelu", "leaky_relu", "mish", "silu", "softplus", "swish")  # handed on
_WORDS = (
    *(f"torch.{name}(" for name in ABSENT),
    *(f"torch {name}" for name in _TELLING),
    *(f"torch.{name}{end}" for name in _ACTIVATIONS for end in ",)}"),
    *(f"functional .{name}" for name in ABSENT_FUNCTIONAL),
    *(f"functional import {name}" for name in ABSENT_FUNCTIONAL),
    *(f"torch linalg .{name}(" for name in ABSENT_LINALG),
    *(f"torch linalg import {name}" for name in ABSENT_LINALG),
    *(f"torch fft .{name}(" for name in ABSENT_FFT),
    *(f"torch.random.{name}(" for name in ABSENT_RANDOM),
    *(f"torch nn .{name}" for name in ABSENT_NN),
    *(f"torch.nn import {name}" for name in ABSENT_NN),
)
_OF_MODULES = {
    "torch": ABSENT,
    "torch.nn.functional": ABSENT_FUNCTIONAL,
    "torch.linalg": ABSENT_LINALG,
    "torch.fft": ABSENT_FFT,
    "torch.random": ABSENT_RANDOM,
    "torch.nn": ABSENT_NN,
}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each of them that is called, handed on, or imported from torch."""
    set_here = {source.origin(n.target) for n in source.all(cst.AssignTarget)}
    for func in source.all(cst.Attribute):
        if not any(func.attr.value in table for table in _OF_MODULES.values()):
            continue
        path = source.names.path(func)
        there = _replacement(path)
        if not there or source.origin(func) in set_here:
            continue
        if not is_guarded(source, func):
            yield _found(source, func, path, there)
    for statement in source.all(cst.ImportFrom):
        if statement.relative or isinstance(statement.names, cst.ImportStar):
            continue
        for alias in statement.names:
            path = f"{dotted(statement.module)}.{dotted(alias.name)}"
            there = _replacement(path)
            if there and not is_guarded(source, statement):
                yield _found(source, alias, path, there)


def _replacement(path: str | None) -> str | None:
    """What PyTorch has in the place of a name that is nowhere in its module."""
    module, _, name = (path or "").rpartition(".")
    return _OF_MODULES.get(module, {}).get(name)


def _found(source: Source, node: Node, path: str | None, there: str) -> Finding:
    module, _, name = (path or "").rpartition(".")
    return source.find(RULE, node, RULE.message.format(module=module, name=name, there=there))


VALID = (
    Case("""
        import numpy as np
        import tensorflow as tf
        import torch

        y = torch.linalg.inv(a) + torch.inverse(b) + torch.linalg.matrix_norm(a) + torch.fft.rfft2(x)
        z = tf.linalg.logdet(a) + np.linalg.trace(b)
        try:
            act = torch.gelu
        except AttributeError:
            act = torch.nn.functional.gelu
    """),
    Case("""
        import torch
        import torch.nn.functional as F

        a = torch.amax(x, dim=1)
        b = F.gelu(x)
        c = torch.nn.functional.one_hot(x)
    """),
    Case("""
        import tensorflow as tf
        import numpy as np

        a = tf.reduce_max(x)
        b = np.expand_dims(x, 0)
    """),
    Case(
        """
        import torch

        torch.reduce_max = torch.amax
        y = torch.reduce_max(x)
        if hasattr(torch, "gelu"):
            y = torch.gelu(y)
        """,
        note="Put there by the file itself, or asked for.",
    ),
    Case("""
        from . import torch

        y = torch.reduce_max(x)
    """),
    Case("""
        from mine.nn.functional import swish
        from torch.nn.functional import silu
    """),
)

INVALID = (
    Case(
        """
        import torch
        import torch.linalg as LA
        from torch.linalg import inverse

        y = torch.linalg.inverse(a) @ b + LA.logdet(a) + inverse(b) + torch.linalg.transpose(a, 0, 1)
        z = torch.fft.dct(x) + torch.random.uniform(0, 1) + torch.view(x, -1)
        """,
        count=7,
    ),
    Case(
        """
        import torch
        from torch import nn
        import torch.nn.functional as F

        ACTIVATIONS = {"relu": torch.relu, "gelu": torch.gelu, "swish": F.swish}
        model = nn.Sequential(nn.Linear(8, 8), nn.Swish())
        """,
        count=3,
        note="Handed on, they raise as well.",
    ),
    Case(
        """
        import torch.nn.functional as F
        from torch.nn.functional import l2_normalize

        y = F.log_sigmoid(F.hard_swish(l2_normalize(x)))
        """,
        count=3,
    ),
    Case(
        """
        import torch

        y = torch.reduce_max(x, dim=1)
        """,
        count=1,
    ),
    Case(
        """
        import torch as th
        from torch import expand_dims

        y = th.reduce_sum(expand_dims(x, 0))
        """,
        count=2,
    ),
    Case(
        """
        import torch as th

        y = th.gelu(th.one_hot(x, 10).float())
        """,
        count=2,
    ),
    Case("""
        from torch.nn.functional import swish
    """),
)

RULE = Rule(
    code="AMP505",
    name="absent-function",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="{module} has no `{name}`: see `{there}`",
    what=(
        "Calls and imports of names that torch has never had, and other libraries, or other modules of PyTorch, have: "
        "`torch.reduce_max`, `torch.gelu`, `torch.nn.functional.swish`."
    ),
    why="It raises an AttributeError, maybe only after hours, where the code is rarely run.",
    fine="Something adds the name to torch.",
    words=_WORDS,
    check=check,
    valid=VALID,
    invalid=INVALID,
)
