"""AMP305: binary_cross_entropy in a region, which CUDA refuses."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.callers import regions_of_callers
from precast_lint.meaning.guards import is_tried
from precast_lint.meaning.regions import Region, region_in_force
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_CLASSES = ("torch.nn.BCELoss", "torch.nn.modules.loss.BCELoss")
_OF_LOGITS = {
    "torch.nn.BCEWithLogitsLoss",
    "torch.nn.modules.loss.BCEWithLogitsLoss",
    "torch.nn.functional.binary_cross_entropy_with_logits",
}
_DEEP = 5  # names of names
_SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call in a region of PyTorch for CUDA."""
    for call in source.all(cst.Call):
        is_function = source.origin(call.func) == _FUNCTION
        is_sure = is_function or _is_loss_object(source, call.func)
        if not is_sure and not _may_be_loss(source, call.func):
            continue
        region = region_in_force(source, call) or next(
            (r for r in regions_of_callers(source, call) if r is not None and r.device == "cuda"),
            None,
        )
        if region is None or region.device != "cuda" or is_tried(source, call):
            continue
        if not is_sure and (region.enabled is not True or _is_chosen(source, call)):
            continue
        is_pytorchs = (source.origin(region.call.func) or "").startswith("torch.")
        if is_pytorchs and not _is_off_by_default(source, region):
            yield source.find(RULE, call, fix=_fix(source, call) if is_function else None)


def _is_off_by_default(source: Source, region: Region) -> bool:
    """Whether a parameter says if the region is on, and its default is False."""
    if region.enabled is not None:
        return False
    for node in Arguments.of(region.call).keywords.values():
        for binding in source.names.bindings(node):
            value = binding.value
            if binding.kind == "param" and isinstance(value, cst.Name) and value.value == "False":
                return True
    return False


def _is_loss_object(source: Source, func: Node) -> bool:
    """`BCELoss()(x, y)`, and a name that holds one."""
    if isinstance(func, cst.Call):
        return source.origin(func.func) in _CLASSES
    return (
        isinstance(func, (cst.Name, cst.Attribute, cst.Subscript))
        and source.instance(func) in _CLASSES
    )


def _may_be_loss(source: Source, func: Node) -> bool:
    """Whether what a test or a table picks is this loss in one case: `LOSSES[name]()`, `BCELoss() if ... else ...`.

    Where it may be the one of logits, the test may be of whether there is a region.
    """
    if isinstance(func, (cst.Name, cst.Attribute, cst.Subscript)):
        if source.origin(func) is not None or source.instance(func) is not None:
            return False
        wanted = {_FUNCTION, *_CLASSES}
    elif isinstance(func, cst.Call):
        wanted = {*_CLASSES}
    else:
        return False
    found = _picked(source, func, _DEEP)
    return None not in found and bool(wanted & found) and not found & _OF_LOGITS


def _picked(source: Source, node: Node | None, depth: int) -> set[str | None]:
    """The functions that an expression may be, and the classes whose object it may be; None for what is not known."""
    if node is None or depth == 0:
        return {None}
    if isinstance(node, cst.IfExp):
        sides = (node.body, node.orelse)
        return {one for side in sides for one in _picked(source, side, depth)}
    if isinstance(node, cst.Call):
        returned = source.values.returned(node)
        if returned:
            return {one for value in returned for one in _picked(source, value, depth - 1)}
        return _picked(source, node.func, depth - 1)
    origin = source.origin(node)
    if origin is not None:
        return {origin}
    if isinstance(node, cst.Lambda):
        return {""}
    binding = source.names.only_binding(node)
    if binding is not None and binding.kind in ("class", "def"):
        return {""}
    given = source.values.sources(node)
    if not given or any(note is not None for _, note in given):
        return {None}
    return {one for value, _ in given for one in _picked(source, value, depth - 1)}


def _is_chosen(source: Source, call: Node) -> bool:
    """Whether a call is under a test of its function, which may be of which loss it is."""
    for outer in source.around(call):
        if isinstance(outer, cst.FunctionDef):
            return False
        if isinstance(outer, (cst.If, cst.IfExp, cst.Match)):
            return True
    return False


def _fix(source: Source, call: cst.Call) -> Fix | None:
    """Leaves a sigmoid out that is written in the call, or that a name holds which nothing else reads."""
    given = Arguments.of(call).get("input", 0)
    probabilities = _only_use(source, given) if isinstance(given, cst.Name) else given
    name = call.func.attr if isinstance(call.func, cst.Attribute) else None
    if not isinstance(probabilities, cst.Call) or name is None:
        return None
    logits = _logits(source, probabilities)
    if logits is None:
        return None
    return source.fix(
        "Compute it from the logits",
        source.replace(name, "binary_cross_entropy_with_logits"),
        source.replace(probabilities, source.code(logits)),
        unsafe=True,
    )


def _only_use(source: Source, name: cst.Name) -> Node | None:
    """What a name is given, if it is given nothing else and this is the only place that reads it."""
    binding = source.names.only_binding(name)
    home = source.scopes.scope_of[name].home(name.value)
    if binding is None or binding.kind != "assign" or home is None:
        return None
    reads = [n for n in source.scopes.references(home, name.value) if n is not binding.node]
    return binding.value if reads == [name] else None


def _logits(source: Source, call: cst.Call) -> Node | None:
    """The x of `torch.sigmoid(x)` and `x.sigmoid()`, if it needs no parentheses."""
    if source.origin(call.func) in _SIGMOIDS and len(call.args) == 1:
        only = call.args[0]
        return None if only.star or only.keyword else source.parents[only.value]
    func = call.func
    if not call.args and isinstance(func, cst.Attribute) and func.attr.value == "sigmoid":
        return func.value if isinstance(func.value, (cst.Name, cst.Call, cst.Attribute)) else None
    return None


VALID = (
    Case(
        """
        import torch
        from torch import nn

        LOSSES = {"bce": nn.BCELoss, "mse": nn.MSELoss}

        def train(name, model, x, y):
            criterion = LOSSES[name]()
            with torch.autocast("cuda", enabled=name != "bce"):
                loss = criterion(model(x), y)
            with torch.autocast("cuda"):
                p = model(x)
                if name != "bce":
                    loss = criterion(p, y)
            return loss + criterion(p.float(), y)

        def other(make, losses, name, x, y):
            criterion = losses[name]()
            made = make() or nn.BCELoss()
            with torch.autocast("cuda"):
                return criterion(x, y) + made(x, y)
        """,
        note="A region or a test that knows which one it is; and what is not known.",
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            logits = model(x)
            loss = F.binary_cross_entropy_with_logits(logits, y)
            with torch.autocast("cuda", enabled=False):
                loss = F.binary_cross_entropy(logits.float().sigmoid(), y)
        loss = F.binary_cross_entropy(torch.sigmoid(logits), y)
    """),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def loss(device, p, y):
            with torch.autocast("cpu"):
                a = F.binary_cross_entropy(p, y)
            with torch.autocast(device):
                return a + F.binary_cross_entropy(p, y)
        """,
        note="The CPU allows it; and this device is not known.",
    ),
    Case(
        """
        import precast
        import torch

        with precast.autocast("cuda"):
            loss = torch.nn.functional.binary_cross_entropy(p, y)
        """,
        note="precast runs it in float32.",
    ),
    Case(
        """
        import torch

        class Loss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.loss = torch.nn.BCELoss()

            def forward(self, p, y, amp=False):
                with torch.cuda.amp.autocast(enabled=amp):
                    return self.loss(p, y)
        """,
        note="The region is there to be off.",
    ),
    Case("""
        import torch

        criterion = torch.nn.BCELoss() if probabilities else torch.nn.BCEWithLogitsLoss()
        with torch.autocast("cuda"):
            loss = criterion(p, y)
    """),
)

INVALID = (
    Case(
        """
        import torch
        from torch import nn

        LOSSES = {"mean": nn.BCELoss(), "sum": nn.BCELoss(reduction="sum")}

        class Training:
            def loss(self, p, y):
                return nn.functional.binary_cross_entropy(p, y)

            def step(self, x, y):
                with torch.autocast("cuda"):
                    return self.loss(self.net(x), y), LOSSES["sum"](self.net(x), y)
        """,
        count=2,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        LOSSES = {"bce": nn.BCELoss, "mse": nn.MSELoss}
        FUNCTIONS = {"bce": F.binary_cross_entropy, "mse": lambda p, y: (p - y).square().mean()}

        class Trainer:
            def __init__(self, model, multi):
                self.model = model
                if multi:
                    self.criterion = nn.BCELoss()
                else:
                    self.criterion = nn.CrossEntropyLoss()

            def step(self, x, y):
                with torch.autocast("cuda"):
                    return self.criterion(self.model(x), y)

        def train(name, kind, x, y):
            criterion = LOSSES[name]()
            other = nn.MSELoss() if kind == "mse" else nn.BCELoss()
            function = FUNCTIONS[name]
            with torch.autocast("cuda"):
                return criterion(x, y) + other(x, y) + function(x, y)
        """,
        count=4,
        note="A test or a table picks it.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def loss(model, x, y):
            with torch.autocast("cuda"):
                p = torch.sigmoid(model(x))
                return F.binary_cross_entropy(p, y)
        """,
        """
        import torch
        import torch.nn.functional as F

        def loss(model, x, y):
            with torch.autocast("cuda"):
                p = model(x)
                return F.binary_cross_entropy_with_logits(p, y)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y, reduction="sum")
        """,
        """
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        with torch.cuda.amp.autocast():
            loss = torch.nn.functional.binary_cross_entropy(input=(logits).sigmoid(), target=y)
        """,
        """
        import torch

        with torch.cuda.amp.autocast():
            loss = torch.nn.functional.binary_cross_entropy_with_logits(input=logits, target=y)
        """,
        unsafe=True,
    ),
    Case(
        """
        from torch import nn
        from torch.amp import autocast

        class Trainer:
            def __init__(self):
                self.criterion = nn.BCELoss(reduction="none")

            @autocast("cuda")
            def loss(self, p, y):
                return self.criterion(p.float(), y) + nn.BCELoss()(p, y)
        """,
        count=2,
        note="It does not help that the probabilities are float32.",
    ),
    Case(
        """
        import torch
        from torch import nn

        class Loss(nn.Module):
            def forward(self, p, y):
                return nn.functional.binary_cross_entropy(p, y)

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.loss = Loss()

            def step(self, x, y):
                with torch.autocast("cuda"):
                    loss = self.loss(self.model(x), y)
                loss.backward()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP305",
    name="binary-cross-entropy",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="PyTorch's autocast refuses this loss on CUDA; compute it from the logits",
    what="`binary_cross_entropy` or a `BCELoss` in a region of PyTorch for CUDA.",
    why=(
        "It raises there, whatever the dtype of its arguments. A probability near 1 in float16 is 1, and its logarithm "
        "infinite; `binary_cross_entropy_with_logits` has neither problem and is allowed."
    ),
    fine="The tensors are on the CPU.",
    words=("autocast binary_cross_entropy", "autocast BCELoss"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
