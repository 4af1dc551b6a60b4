"""AMP105: custom_fwd and custom_bwd without a device type."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import NEW_CUSTOM
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.kinds import is_text, the_device
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each bare decorator and each call without `device_type`."""
    for decorator in source.all(cst.Decorator):
        node = decorator.decorator
        if source.origin(node) in NEW_CUSTOM and not is_tried(source, decorator):
            text = _device(source)
            yield source.find(RULE, node, fix=_fix(source, source.after(node, f"({text})")))
    for call, arguments in source.calls(*NEW_CUSTOM):
        if arguments.starred or "device_type" in arguments.keywords or is_tried(source, call):
            continue
        yield source.find(RULE, call, fix=_fix(source, _argument(source, call, arguments)))


def _device(source: Source) -> str:
    """The argument to add. Nearly all such Functions are for CUDA: the old names were for nothing else."""
    return f"device_type={source.quote}{the_device(source) or 'cuda'}{source.quote}"


def _argument(source: Source, call: cst.Call, arguments: Arguments) -> Edit:
    first: Node | None = arguments.get("fwd", 0)
    if first in arguments.positional and is_text(source, first):
        return source.before(call.args[0], "device_type=")
    if call.args:
        return source.after(call.args[-1], f", {_device(source)}")
    end = source.span(call).end - 1
    return Edit(end, end, _device(source))


def _fix(source: Source, edit: Edit) -> Fix:
    return source.fix("Give the device type", edit, unsafe=True)


VALID = (
    Case("""
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x):
                return x * x
    """),
    Case(
        """
        from torch.cuda.amp import custom_bwd, custom_fwd

        class Square:
            @staticmethod
            @custom_fwd(cast_inputs=None)
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd
            def backward(ctx, grad):
                return grad
        """,
        note="The old names know their device.",
    ),
    Case("""
        import functools
        import torch

        if hasattr(torch.amp, "custom_fwd"):
            custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
        else:
            from torch.cuda.amp import custom_fwd

        @custom_fwd
        def forward(ctx, x):
            return x
    """),
    Case("""
        from torch.amp import custom_fwd

        def decorate(f, **options):
            return custom_fwd(f, **options)
    """),
    Case("""
        from mine.amp import custom_fwd

        @custom_fwd
        def forward(ctx, x):
            return x
    """),
)

INVALID = (
    Case(
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd
            def backward(ctx, grad):
                return grad
        """,
        """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x):
                return x * x

            @staticmethod
            @torch.amp.custom_bwd()
            def backward(ctx, grad):
                return grad
        """,
        """
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(cast_inputs=torch.float32, device_type="cuda")
            def forward(ctx, x):
                return x * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch

        @torch.amp.custom_fwd("cpu")
        def forward(ctx, x):
            return x
        """,
        """
        import torch

        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x
        """,
        unsafe=True,
        note="It can be given by keyword alone.",
    ),
)

RULE = Rule(
    code="AMP105",
    name="custom-fwd-without-device",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="`device_type` is missing, or not given by keyword: this raises TypeError",
    what="`torch.amp.custom_fwd` and `torch.amp.custom_bwd` without `device_type=`.",
    why=(
        "The old `torch.cuda.amp.custom_fwd` was a bare decorator. The new one needs a device type, and takes it by "
        "keyword alone. The fix takes the only device type that the file names, and CUDA if there is none."
    ),
    fine="Never: it raises when the class is defined.",
    words=("custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
