"""AMP304: a model or its inputs are made half precision by hand where autocast is to do it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.editing.lines import line_of, remove
from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.callers import runs_in_region
from precast_lint.meaning.regions import regions
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity, Span
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import is_optimizer, key
from precast_lint.training_step.trained import (
    Models,
    cast_dtype,
    cast_model,
    home,
    names_of,
    trained,
)

__all__ = ["RULE"]

_Known = tuple[str, Node | None]  # the text of a model, and where it means that
_USES = re.compile(
    r"eval|export|generate|infer|onnx|predict|sampl|save|test|trace|valid", re.IGNORECASE
)
_MODEL = re.compile(r"model|net|teacher|student|encoder|generator", re.IGNORECASE)
_SCALED = "the scaler refuses float16 gradients; leave the model in float32, the region casts"
_INPUTS = "the region casts inputs where that helps; by hand they lose digits where it does not"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each cast of a model that is trained in a region, and of inputs in its calls."""
    models = {**_stepped_here(source), **trained(source)}
    if not models or not any(region.enabled is not False for region in regions(source)):
        return
    called = _called_in_regions(source, models)
    scaled = any(
        source.instance(owner) in SCALERS for _, owner, _ in source.methods("scale", "step")
    )
    cast = set()
    for call, owner, arguments in source.methods("half", "bfloat16", "to"):
        dtype = cast_dtype(source, call, arguments)
        model = cast_model(source, call, owner, models) if dtype else None
        if model is None or _is_for_use(source, call) or not _known_as(source, model) & called:
            continue
        cast |= _known_as(source, model)
        is_error = scaled and dtype == "torch.float16"
        severity = Severity.ERROR if is_error else Severity.WARNING
        message = _SCALED if is_error else None
        yield source.find(RULE, call, message, _without(source, call, owner), severity)
    yield from _inputs(source, models, cast)


def _stepped_here(source: Source) -> Models:
    """The one model that a function gets that also runs the backward and steps the optimizer that it gets."""
    found: Models = {}
    for function in source.all(cst.FunctionDef):
        names = [p.name for p in function.params.params if _MODEL.search(p.name.value)]
        calls = {
            name: [c for c, _, _ in source.methods(name) if source.function(c) is function]
            for name in ("backward", "step")
        }
        steps = [call for call in calls["step"] if _steps(source, call)]
        if len(names) == 1 and names[0].value in ("model", "net") and calls["backward"] and steps:
            found[names[0].value, function] = steps[0]
    return found


def _steps(source: Source, call: cst.Call) -> bool:
    """`optimizer.step()` and `scaler.step(optimizer)`."""
    owner = call.func.value if isinstance(call.func, cst.Attribute) else None
    if owner is None:
        return False
    return is_optimizer(source, owner) or source.instance(owner) in SCALERS


def _called_in_regions(source: Source, models: Models) -> set[_Known]:
    """The names by which models are called in regions, and those that stand for the same in what hands them on."""
    found: set[_Known] = set()
    for call in source.all(cst.Call):
        is_named = isinstance(call.func, (cst.Name, cst.Attribute))
        if is_named and runs_in_region(source, call):
            found |= _known_as(source, call.func)
    return found & models.keys()


def _known_as(source: Source, model: Node) -> set[_Known]:
    texts = [(key(source, name) or "", name) for name in names_of(source, model)]
    return {(text, home(source, name, text)) for text, name in texts}


def _is_for_use(source: Source, node: Node) -> bool:
    """Whether a function makes the model ready for something else than training, by the function's name."""
    function = source.function(node)
    return function is not None and _USES.search(function.name.value) is not None


def _inputs(source: Source, models: Models, cast: set[_Known]) -> Iterator[Finding]:
    seen: set[Node] = set()
    for call in source.all(cst.Call):
        if not _is_trained_in_region(source, call, models) or _known_as(source, call.func) & cast:
            continue
        for arg in call.args:
            inner = _element(source, _input(source, arg.value, models))
            if (
                isinstance(inner, cst.Call)
                and isinstance(inner.func, cst.Attribute)
                and inner not in seen
                and cast_dtype(source, inner, Arguments.of(inner))
            ):
                seen.add(inner)
                fix = _without(source, inner, inner.func.value)
                yield source.find(RULE, inner, _INPUTS, fix)


def _is_trained_in_region(source: Source, call: Node, models: Models) -> bool:
    if not isinstance(call, cst.Call) or not isinstance(call.func, (cst.Name, cst.Attribute)):
        return False
    text = key(source, call.func) or ""
    is_trained = (text, home(source, call.func, text)) in models
    return is_trained and runs_in_region(source, call)


def _element(source: Source, node: Node) -> Node:
    """What each element of a comprehension is: `{name: x.half() for name, x in batch.items()}`, `tuple(...)` of one."""
    if isinstance(node, cst.Call) and len(node.args) == 1:
        is_made = source.names.builtin(node.func) in ("tuple", "list", "dict")
        node = node.args[0].value if is_made else node
    if isinstance(node, cst.DictComp):
        return node.value
    return node.elt if isinstance(node, (cst.ListComp, cst.GeneratorExp)) else node


def _input(source: Source, node: Node, models: Models) -> Node:
    """What an input of a model is: the expression, or what a name is given that only such models get."""
    if not isinstance(node, cst.Name):
        return node
    seen = values_seen(source, node)
    if len(seen) != 1 or seen[0].kind != "assign" or seen[0].value is None:
        return node
    scope = source.scope(node).home(node.value)
    inside = set(walk(seen[0].value))
    reads = [
        name
        for name in (source.scopes.references(scope, node.value) if scope else ())
        if name not in inside and not isinstance(source.parents.get(name), cst.AssignTarget)
    ]
    calls = [source.parents[source.parents[name]] for name in reads]
    if all(_is_trained_in_region(source, call, models) for call in calls):
        return seen[0].value
    return node


def _without(source: Source, call: cst.Call, owner: Node) -> Fix | None:
    message = "Leave it to the region"
    parent = source.parents[call]
    alone = isinstance(parent, cst.Expr) or (
        isinstance(parent, cst.Assign)
        and [key(source, t.target) for t in parent.targets] == [key(source, owner)]
    )
    if not alone or len(call.args) > 1:
        return source.fix(message, _bare(source, call), unsafe=True)
    line = line_of(source, parent)
    edit = remove(source, line) if line is not None else None
    return source.fix(message, edit, unsafe=True) if edit is not None else None


def _bare(source: Source, call: cst.Call) -> Edit:
    """Takes `.half()` off the end of a call's text, or the dtype out of `.to(device, torch.float16)`."""
    assert isinstance(call.func, cst.Attribute)
    span = source.span(call)
    if len(call.args) > 1:
        at = next(i for i, arg in enumerate(call.args) if _is_low(source, arg))
        if at:
            return Edit(source.span(call.args[at - 1]).end, source.span(call.args[at]).end, "")
        return Edit(source.span(call.args[0]).start, source.span(call.args[1]).start, "")
    owner = source.span(call.func.value)
    closing = len(getattr(call.func.value, "rpar", ()))
    if closing:  # the parentheses around what is cast stay
        text = source.text.data[owner.end : span.end]
        owner = Span(owner.start, owner.end + text.rindex(b")", 0, text.index(b".")) + 1)
    return Edit(owner.end, span.end, "")


def _is_low(source: Source, arg: cst.Arg) -> bool:
    return source.origin(arg.value) in ("torch.float16", "torch.half", "torch.bfloat16")


VALID = (
    Case("""
        import torch

        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda"):
            loss = model(x)
    """),
    Case(
        """
        import torch

        teacher = Net().half()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda"):
            loss = model(x) - teacher(x.half())
        """,
        note="A frozen model may be in half precision.",
    ),
    Case(
        """
        import torch

        model = Net().half()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x.half()).sum().backward()
        with torch.autocast("cuda", enabled=False):
            model(x)
        """,
        note="No region is on.",
    ),
    Case("""
        import torch

        model = Net().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss(x):
            return model(x).sum()

        loss(x).backward()
        with torch.autocast("cuda"):
            print(loss(x))
    """),
    Case("""
        import torch

        def train(model):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with torch.autocast("cuda"):
                loss = model(x)

        def export(model):
            model.half()
            torch.save(model, "model.pt")
    """),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model, teacher):
                self.model = model
                self.teacher = teacher.half()
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.model(batch).sum() + self.teacher(batch).sum()

            def export(self):
                torch.save(self.model.half(), "model.pt")
        """,
    ),
    Case(
        """
        import torch

        def train(model, teacher, batches, device):
            teacher.to(device, torch.float16)
            optimizer = torch.optim.AdamW(model.parameters())
            for images in batches:
                images = images.to(device, torch.float16)
                target = teacher(images)
                with torch.autocast("cuda"):
                    loss = (model(images) - target).square().mean()
        """,
        note="The teacher needs the images in its dtype.",
    ),
    Case(
        """
        import torch

        def train(model, teacher_net, optimizer, batches, scaler):
            for images in batches:
                with torch.autocast("cuda"):
                    loss = (model(images) - teacher_net(images.half())).square().mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        def test(model, batches, optimizer):
            for images in batches:
                with torch.autocast("cuda"):
                    model(images.half())
        """,
        note="Which of two models is trained is not seen.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, net, device):
                self.net = net.to(device)
                self.optimizer = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, images):
                images = images.to(self.device, torch.float16)
                with torch.autocast("cuda"):
                    loss = self.net(images).sum()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

        model = Net()
        model.to("cuda", torch.float16)
        trainer = Trainer(model, "cuda")
        """,
        """
        import torch

        class Trainer:
            def __init__(self, net, device):
                self.net = net.to(device)
                self.optimizer = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, images):
                images = images.to(self.device)
                with torch.autocast("cuda"):
                    loss = self.net(images).sum()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

        model = Net()
        model.to("cuda")
        trainer = Trainer(model, "cuda")
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, device):
            optimizer = torch.optim.AdamW(model.parameters())
            for images in batches:
                images = images.to(device, dtype=torch.float16)
                with torch.autocast("cuda"):
                    loss = model(images)
        """,
        """
        import torch

        def train(model, batches, device):
            optimizer = torch.optim.AdamW(model.parameters())
            for images in batches:
                images = images.to(device)
                with torch.autocast("cuda"):
                    loss = model(images)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, optimizer, batches):
            for batch in batches:
                with torch.autocast("cuda"):
                    loss = model(batch)

        model = Net().half()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, batches)
        """,
        """
        import torch

        def train(model, optimizer, batches):
            for batch in batches:
                with torch.autocast("cuda"):
                    loss = model(batch)

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, batches)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        model = Net().half().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        """,
        """
        import torch

        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            model.to(torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters())
            for x in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(x)
        """,
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.AdamW(model.parameters())
            for x in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(x)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.AdamW(model.parameters())
            for x in batches:
                with torch.autocast("cuda"):
                    loss = model(x.half(), mask=mask.to(torch.float16))
        """,
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.AdamW(model.parameters())
            for x in batches:
                with torch.autocast("cuda"):
                    loss = model(x, mask=mask)
        """,
        unsafe=True,
        count=2,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model.half()
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def loss(self, batch):
                return self.model(batch).sum()

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.loss(batch)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def loss(self, batch):
                return self.model(batch).sum()

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.loss(batch)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def build(config):
            model = Net(config).half()
            return model

        def train(config, batches):
            model = build(config)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for batch in batches:
                with torch.autocast("cuda"):
                    loss = model(batch)
        """,
        """
        import torch

        def build(config):
            model = Net(config)
            return model

        def train(config, batches):
            model = build(config)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for batch in batches:
                with torch.autocast("cuda"):
                    loss = model(batch)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, optimizer, batches, scaler):
            for images, labels in batches:
                images = images.cuda(non_blocking=True).half()
                with torch.autocast("cuda"):
                    loss = torch.nn.functional.cross_entropy(model(images), labels.cuda())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        """
        import torch

        def train(model, optimizer, batches, scaler):
            for images, labels in batches:
                images = images.cuda(non_blocking=True)
                with torch.autocast("cuda"):
                    loss = torch.nn.functional.cross_entropy(model(images), labels.cuda())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        unsafe=True,
    ),
)

RULE = Rule(
    code="AMP304",
    name="half-by-hand",
    severity=Severity.WARNING,
    fix=Applicability.UNSAFE,
    message="leave the model in float32: the region casts what may be cast, and the optimizer needs the digits",
    what="`.half()`, `.bfloat16()` or `.to(dtype)` on a model that is trained in a region, or on its inputs there.",
    why=(
        "Autocast rests on float32 parameters: updates that are small beside a parameter are lost in 16 bits, and "
        "`scaler.step` raises on float16 gradients."
    ),
    fine="Training in pure bfloat16 is meant; then the region does little.",
    words=("autocast .half", "autocast bfloat16", "autocast float16"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
