"""AMP313: custom_fwd on the backward of an autograd Function."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import CUSTOM_FWD, functions
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such decorator."""
    for _, methods in functions(source):
        backward = methods.get("backward")
        found = backward.decorator(CUSTOM_FWD) if backward is not None else None
        if found is not None:
            yield source.find(RULE, found[0].decorator, fix=_fix(source, found[0].decorator))


def _fix(source: Source, decorator: Node) -> Fix | None:
    """`custom_bwd` in its place, by the same way; None where it is told of inputs, or where that has no name here."""
    name = decorator.func if isinstance(decorator, cst.Call) else decorator
    given = decorator.args if isinstance(decorator, cst.Call) else ()
    told = [arg.keyword.value if arg.keyword else None for arg in given]
    edits = _renamed(source, name)
    if edits is None or any(keyword != "device_type" for keyword in told):
        return None
    return source.fix("Use custom_bwd", edits, unsafe=True)


def _renamed(source: Source, name: Node) -> list[Edit] | None:
    wanted = (source.names.path(name) or "").replace("custom_fwd", "custom_bwd")
    if isinstance(name, cst.Attribute) and name.attr.value == "custom_fwd":
        return [source.replace(name.attr, "custom_bwd")]
    bound = source.scope(name).lookup("custom_bwd")
    if bound:
        is_it = all(b.kind == "from" and b.path == wanted for b in bound)
        return [source.replace(name, "custom_bwd")] if is_it else None
    binding = source.names.only_binding(name)
    if binding is None or binding.kind != "from" or binding.name != "custom_fwd":
        return None
    return [source.before(binding.node, "custom_bwd, "), source.replace(name, "custom_bwd")]


VALID = (
    Case("""
        import torch

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                x, w = ctx.saved_tensors
                return grad @ w.T, x.T @ grad
    """),
    Case("""
        import torch
        from torch.amp import custom_fwd

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            def backward(ctx, grad):
                return grad, grad
    """),
    Case(
        """
        import torch
        from mine import custom_fwd

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            @custom_fwd
            def backward(ctx, grad):
                return grad, grad
        """,
        note="A decorator that has the same name.",
    ),
    Case(
        """
        import torch
        from torch.amp import custom_fwd

        class Layer(torch.nn.Module):
            @custom_fwd(device_type="cuda")
            def backward(self, grad):
                return grad
        """,
        note="No Function.",
    ),
    Case(
        """
        import torch
        from torch.amp import custom_fwd

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            @custom_fwd(device_type="cuda")
            def jvp(ctx, x, w):
                return x @ w
        """,
        note="Another method, which runs beside forward.",
    ),
)

INVALID = (
    Case(
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            @custom_fwd(device_type="cuda")
            def backward(ctx, grad):
                x, w = ctx.saved_tensors
                return grad @ w.T, x.T @ grad

        class Sum(torch.autograd.Function):
            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Product(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                x, w = ctx.saved_tensors
                return grad @ w.T, x.T @ grad

        class Sum(torch.autograd.Function):
            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Embedding(torch.autograd.Function):
            @staticmethod
            @torch.cuda.amp.custom_fwd
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            @torch.cuda.amp.custom_fwd
            def backward(ctx, grad):
                return grad, None
        """,
        """
        import torch

        class Embedding(torch.autograd.Function):
            @staticmethod
            @torch.cuda.amp.custom_fwd
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            @torch.cuda.amp.custom_bwd
            def backward(ctx, grad):
                return grad, None
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch
        from torch.cuda.amp import custom_fwd

        class Embedding(torch.autograd.Function):
            @staticmethod
            @custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x):
                return x.exp()

            @staticmethod
            @custom_fwd(cast_inputs=torch.float32)
            def backward(ctx, grad):
                return grad
        """,
        count=1,
        note="What was meant by `cast_inputs` is for its author to say: there is no fix.",
    ),
    Case(
        """
        import functools
        import torch

        forward_32 = functools.partial(torch.amp.custom_fwd, device_type="cuda")

        class Product(torch.autograd.Function):
            @staticmethod
            @forward_32
            def forward(ctx, x, w):
                return x @ w

            @staticmethod
            @forward_32
            def backward(ctx, grad):
                return grad, grad
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP313",
    name="custom-fwd-on-backward",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="`custom_fwd` is for forward; the decorator of a backward is `custom_bwd`",
    what="`custom_fwd` on the `backward` of an autograd Function.",
    why=(
        "It writes down whether a region is on in the backward, where none is, and enters none. Products of the saved "
        "tensors run outside the region of the forward: where a gradient in lower precision meets a float32 weight, "
        'that raises "expected m1 and m2 to have the same dtype". `custom_bwd` runs the backward in the state of the '
        "forward."
    ),
    fine="The backward multiplies nothing.",
    words=("custom_fwd backward",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
