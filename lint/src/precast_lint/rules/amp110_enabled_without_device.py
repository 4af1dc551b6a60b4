"""AMP110: a question about autocast on CUDA where the code is on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.functions import NEW_CUSTOM
from precast_lint.meaning.guards import is_guarded
from precast_lint.meaning.regions import regions_around
from precast_lint.model import Applicability, Case, Edit, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, strings

__all__ = ["RULE"]

_QUESTION = "torch.is_autocast_enabled"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call without a device on a path that is the CPU's."""
    for call, arguments in source.calls(_QUESTION):
        if call.args or arguments.starred or is_guarded(source, call):
            continue
        if not (
            _is_in_cpu_region(source, call)
            or _is_under_cpu_test(source, call)
            or _is_in_cpu_function(source, call)
        ):
            continue
        fix = None
        if source.allows("2.4"):
            end = source.span(call).end - 1
            edit = Edit(end, end, source.quoted("cpu", call))
            fix = source.fix("Ask for the CPU", edit, unsafe=True)
        yield source.find(RULE, call, fix=fix)


def _is_in_cpu_region(source: Source, node: Node) -> bool:
    around = list(regions_around(source, node))
    return bool(around) and all(region.device == "cpu" for region in around)


def _is_in_cpu_function(source: Source, node: Node) -> bool:
    """Whether a node is in a function that `custom_fwd(device_type="cpu")` or `custom_bwd` decorates."""
    function = source.function(node)
    for decorator in function.decorators if function is not None else ():
        made = decorator.decorator
        if isinstance(made, cst.Call) and source.origin(made.func) in NEW_CUSTOM:
            device = Arguments.of(made).keywords.get("device_type")
            return device is not None and strings(device) == "cpu"
    return False


def _is_under_cpu_test(source: Source, node: Node) -> bool:
    """Whether a node is only reached where some tensor or device is on the CPU."""
    inner = node
    for outer in source.around(node):
        if isinstance(outer, (cst.If, cst.IfExp)):
            if inner is outer.body and _says_cpu(outer.test):
                return True
        elif isinstance(outer, cst.BooleanOperation):
            is_and = isinstance(outer.operator, cst.And)
            if is_and and inner is outer.right and _says_cpu(outer.left):
                return True
            if is_and and inner is outer.left and _says_cpu(outer.right):
                return True
        elif isinstance(outer, (cst.FunctionDef, cst.Lambda)):
            return False
        inner = outer
    return False


def _says_cpu(test: Node) -> bool:
    """`x.device.type == "cpu"`, `device_type == "cpu"`, `x.is_cpu`, `not x.is_cuda`, and these with `and`."""
    if isinstance(test, cst.BooleanOperation):
        return isinstance(test.operator, cst.And) and (
            _says_cpu(test.left) or _says_cpu(test.right)
        )
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        inner = test.expression
        return isinstance(inner, cst.Attribute) and inner.attr.value == "is_cuda"
    if isinstance(test, cst.Attribute):
        return test.attr.value == "is_cpu"
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return False
    target = test.comparisons[0]
    return isinstance(target.operator, cst.Equal) and "cpu" in (
        _device_text(test.left),
        _device_text(target.comparator),
    )


def _device_text(node: Node) -> str | None:
    """The text in `torch.device("cpu")`, or the text itself."""
    if isinstance(node, cst.Call) and len(node.args) == 1:
        return strings(node.args[0].value) if (dotted(node.func) or "").endswith("device") else None
    return strings(node)


VALID = (
    Case("""
        import torch

        def f(x):
            if torch.is_autocast_enabled():
                return x.to(torch.get_autocast_gpu_dtype())
            if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
                return x.bfloat16()
            return x
    """),
    Case("""
        import torch

        def f(x):
            if x.device.type == "cpu" or torch.is_autocast_enabled():
                return x.float()
            if x.device.type != "cpu":
                return torch.is_autocast_enabled()
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            with torch.autocast("cpu"):
                assert torch.is_autocast_enabled()
    """),
    Case("""
        import torch

        def f(x):
            if x.device.type == "cpu":
                enabled = torch.is_autocast_cpu_enabled()
            else:
                enabled = torch.is_autocast_enabled()
    """),
    Case("""
        import torch

        def cast(x):
            if x.device == torch.device("cuda") and torch.is_autocast_enabled():
                return x.half()
            return x
    """),
)

INVALID = (
    Case(
        """
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu")
            def forward(ctx, x):
                ctx.amp = torch.is_autocast_enabled()
                return x @ x
        """,
        """
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu")
            def forward(ctx, x):
                ctx.amp = torch.is_autocast_enabled("cpu")
                return x @ x
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def linear(x, weight):
            if not x.is_cuda and torch.is_autocast_enabled():
                weight = weight.bfloat16()
            return x @ weight
        """,
        """
        import torch

        def linear(x, weight):
            if not x.is_cuda and torch.is_autocast_enabled("cpu"):
                weight = weight.bfloat16()
            return x @ weight
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def linear(x, weight):
            if x.device.type == "cpu" and torch.is_autocast_enabled():
                weight = weight.bfloat16()
            return x @ weight
        """,
        """
        import torch

        def linear(x, weight):
            if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
                weight = weight.bfloat16()
            return x @ weight
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        with torch.autocast("cpu"):
            print(torch.is_autocast_enabled( ))
        """,
        """
        import torch

        with torch.autocast("cpu"):
            print(torch.is_autocast_enabled( "cpu"))
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def dtype(x):
            if x.is_cpu:
                return torch.bfloat16 if torch.is_autocast_enabled() else x.dtype
        """,
        min_torch="2.2",
        note="PyTorch 2.2 takes no device here: there is no fix. It has `torch.is_autocast_cpu_enabled`.",
    ),
    Case(
        """
        import torch

        def cast(x):
            if x.device == torch.device("cpu") and torch.is_autocast_enabled():
                return x.bfloat16()
            return x
        """,
        """
        import torch

        def cast(x):
            if x.device == torch.device("cpu") and torch.is_autocast_enabled("cpu"):
                return x.bfloat16()
            return x
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP110",
    name="enabled-without-device",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="without a device type this asks about CUDA; here the tensors are on the CPU",
    what=(
        "`torch.is_autocast_enabled()` without a device type in a region of the CPU, or under a test that something is "
        "on the CPU."
    ),
    why="It answers for CUDA alone: in a region of the CPU it is False.",
    fine="The question is meant to be about CUDA.",
    words=("is_autocast_enabled",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
