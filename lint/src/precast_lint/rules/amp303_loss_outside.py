"""AMP303: a loss that is computed behind the region in which its inputs were."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.regions import Region, region_in_force, regions
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key

__all__ = ["RULE"]

_FUNCTIONS = frozenset(
    f"torch.nn.functional.{name}"
    for name in (
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "gaussian_nll_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "nll_loss",
        "smooth_l1_loss",
    )
)
_CLASSES = re.compile(r"torch\.nn\.(modules\.loss\.)?\w+Loss$")
_MODELS = re.compile(
    r"(model|net|network|module|generator|discriminator|unet|classifier)", re.IGNORECASE
)
_KEEPS = {"view", "reshape", "squeeze", "flatten", "transpose", "permute", "contiguous", "logits"}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each loss of a region's outputs behind the region that is propagated back."""
    for region in regions(source):
        if isinstance(region.node, cst.With) and region.enabled is not False:
            yield from _behind(source, region)


def _behind(source: Source, region: Region) -> Iterator[Finding]:
    function = source.function(region.node)
    outputs = dict(_outputs(source, region))
    if not outputs:
        return
    for call in source.all(cst.Call):
        if source.function(call) is not function or not _is_loss(source, call):
            continue
        if source.span(call).start < source.span(region.node).end:
            continue
        used = [n for arg in call.args[:2] if (n := _plain(arg.value)) and n.value in outputs]
        fresh = all(_is_latest(source, function, outputs[n.value], call) for n in used)
        if not used or _is_widened(call) or not fresh or region_in_force(source, call) is not None:
            continue
        if _is_propagated(source, function, call):
            yield source.find(RULE, call)


def _is_widened(call: cst.Call) -> bool:
    """Whether one of a loss's inputs is made float32, to which the other one is promoted."""
    casts = [arg.value.func for arg in call.args[:2] if isinstance(arg.value, cst.Call)]
    return any(isinstance(func, cst.Attribute) and func.attr.value == "float" for func in casts)


def _outputs(source: Source, region: Region) -> Iterator[tuple[str, Node]]:
    """The names that a region's own statements give a model's output."""
    body = region.body
    lines = body.body if isinstance(body, cst.IndentedBlock) else ()
    simple = [line for line in lines if isinstance(line, cst.SimpleStatementLine)]
    for statement in (statement for line in simple for statement in line.body):
        if isinstance(statement, cst.Assign) and _is_forward(source, statement.value):
            for target in statement.targets:
                yield from ((name.value, name) for name in _names(target.target))


def _names(target: Node) -> list[cst.Name]:
    """The names that an assignment gives values: one, or those of `mean, deviation = model(x)`."""
    if isinstance(target, (cst.Tuple, cst.List)):
        return [element.value for element in target.elements if isinstance(element.value, cst.Name)]
    return [target] if isinstance(target, cst.Name) else []


def _is_forward(source: Source, node: Node) -> bool:
    """`model(x)`, `self.model(x)`, `model.forward(x)`: by what the name says, or by whose parameters are asked for."""
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    if isinstance(func, cst.Attribute) and func.attr.value == "forward":
        func = func.value
    if _has_parameters(source, func):
        return True
    last = func.attr.value if isinstance(func, cst.Attribute) else getattr(func, "value", "")
    return isinstance(last, str) and _MODELS.search(last) is not None and "loss" not in last.lower()


def _has_parameters(source: Source, func: Node) -> bool:
    """Whether the file asks what is called, or the value that `self` gets it from, for its parameters."""
    known = source.cache.setdefault("what has parameters", None)
    if known is None:
        owners = (owner for _, owner, _ in source.methods("parameters"))
        known = source.cache["what has parameters"] = {key(source, owner) for owner in owners}
    assert isinstance(known, set)
    values = [func, *(value for value, _ in source.values.sources(func) if value is not None)]
    plain = (v for v in values if isinstance(v, (cst.Name, cst.Attribute)))
    return any(key(source, value) in known for value in plain)


def _is_loss(source: Source, call: cst.Call) -> bool:
    if source.origin(call.func) in _FUNCTIONS:
        return True
    if isinstance(call.func, cst.Call):
        return _CLASSES.match(source.origin(call.func.func) or "") is not None
    if isinstance(call.func, (cst.Name, cst.Attribute, cst.Subscript)):
        return _CLASSES.match(source.instance(call.func) or "") is not None
    return False


def _plain(node: Node) -> cst.Name | None:
    """The name in `out`, `out.logits`, `out[0]`, `out.view(-1)`: nothing that changes the dtype."""
    while not isinstance(node, cst.Name):
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            node = node.func
        if (isinstance(node, cst.Attribute) and node.attr.value in _KEEPS) or isinstance(
            node, cst.Subscript
        ):
            node = node.value
        else:
            return None
    return node


def _is_latest(source: Source, function: Node | None, target: Node, call: Node) -> bool:
    """Whether nothing else gives the name a value between the region and the loss."""
    name = target.value if isinstance(target, cst.Name) else ""
    start, end = source.span(target).start, source.span(call).start
    return not any(
        start < source.span(node).start < end
        for binding in source.names.bindings(target)
        if (node := binding.node) is not target
        and isinstance(node, cst.Name)
        and node.value == name
        and source.function(node) is function
    )


def _made_of(source: Source, function: Node | None, names: set[str]) -> set[str]:
    """Some names, and those that get a value made of them: `total = loss + penalty`, `scaled = scaler.scale(loss)`."""
    made = set(names)
    for assign in source.all(cst.Assign):
        assert isinstance(assign, cst.Assign)
        used = {
            key(source, n) for n in walk(assign.value) if isinstance(n, (cst.Name, cst.Attribute))
        }
        if source.function(assign) is function and used & names and not used & {"item", "detach"}:
            made |= {t.target.value for t in assign.targets if isinstance(t.target, cst.Name)}
    return made


def _is_propagated(source: Source, function: Node | None, call: cst.Call) -> bool:
    """Whether `backward` is called on the loss: directly, scaled, or through its name."""
    statement = source.parents.get(call)
    while isinstance(statement, cst.BinaryOperation):  # a sum of losses
        statement = source.parents.get(statement)
    names = {"\0"}
    if isinstance(statement, cst.Assign):
        names = {key(source, t.target) or "" for t in statement.targets}
        while (more := _made_of(source, function, names)) > names:
            names = more
    for other, owner, arguments in source.methods("backward"):
        if source.function(other) is not function:
            continue
        parts = [owner, *arguments.positional]
        inside = [n for part in parts for n in walk(part)]
        if call in inside or any(
            key(source, n) in names for n in inside if isinstance(n, cst.Name)
        ):
            return True
    return False


VALID = (
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
    """),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()

        with torch.autocast("cuda"):
            out = model(x)
        out = out.float()
        loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case(
        """
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
            loss = criterion(out, y)
        error = F.mse_loss(out, y)
        loss.backward()
        """,
        note="A metric is not propagated back.",
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            for x in xs:
                out = model(x)
            if debug: print(out)
        with torch.autocast("cuda"): out = model(x).float()
        with torch.autocast("cuda"):
            out = model(x).float()
            other = model(x).softmax(-1)
        with torch.autocast("cuda"):
            loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            logits, y = model(x)
        loss = torch.nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
    """),
)

INVALID = (
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        LOSSES = {"first": nn.L1Loss(), "second": nn.MSELoss()}

        def train(net, optimizer, batches):
            for x, y in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    mean, variance = net(x)
                loss = F.gaussian_nll_loss(mean, y, variance) + LOSSES["first"](mean, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        count=2,
    ),
    Case(
        """
        import torch

        class Fit:
            def __init__(self, m):
                self.m = m
                self.criterion = torch.nn.CrossEntropyLoss()
                self.optimizer = torch.optim.SGD(m.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, x, y):
                self.optimizer.zero_grad()
                with torch.autocast("cuda"):
                    out = self.m(x)
                loss = self.criterion(out, y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        count=1,
        note="A model by its parameters.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def train(model, batches, scaler):
            for x, y in batches:
                with torch.autocast("cuda"):
                    out = model(x)
                loss = F.cross_entropy(out, y)
                total = loss + 0.1 * model.penalty()
                scaled = scaler.scale(total)
                scaled.backward()
        """,
        count=1,
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case("""
        import torch
        from torch import nn

        def train(model, batches, scaler):
            criterion = nn.MSELoss()
            for x, y in batches:
                with torch.cuda.amp.autocast():
                    out = model(x)
                scaler.scale(criterion(out.squeeze(1), y)).backward()
    """),
)

RULE = Rule(
    code="AMP303",
    name="loss-outside-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="this loss is computed in the lower precision of its inputs; compute it inside the region",
    what="A loss of PyTorch's that gets what a model returned in a region, stands behind it, and is propagated back.",
    why=(
        "Inside a region for CUDA losses run in float32, which is part of why autocast is safe. Behind it they run in "
        "the dtype of their inputs: sums over many elements lose digits, and may overflow in float16."
    ),
    fine="The model returns float32, because its last operation does.",
    words=("autocast backward",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
