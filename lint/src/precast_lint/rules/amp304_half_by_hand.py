"""AMP304: a model or its inputs are made half precision by hand where autocast is to do it."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.editing.lines import line_of, remove
from precast_lint.meaning.regions import region_in_force, regions
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity, Span
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.trained import cast_dtype, cast_model, home
from precast_lint.training_step.trained import trained as trained_models

__all__ = ["RULE"]

_SCALED = "the scaler refuses float16 gradients; leave the model in float32, the region casts"
_INPUTS = "the region casts inputs where that helps; by hand they lose digits where it does not"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each cast of a model that is trained in a region, and of inputs in its calls."""
    trained = trained_models(source)
    if not trained or not any(region.enabled is not False for region in regions(source)):
        return
    scaled = any(
        source.instance(owner) in SCALERS for _, owner, _ in source.methods("scale", "step")
    )
    models = set()
    for call, owner, arguments in source.methods("half", "bfloat16", "to"):
        dtype = cast_dtype(source, call, arguments)
        name = cast_model(source, call, owner, trained) if dtype else None
        if name is not None and _runs_in_region(source, call, name):
            models.add(name)
            is_error = scaled and dtype == "torch.float16"
            severity = Severity.ERROR if is_error else Severity.WARNING
            message = _SCALED if is_error else None
            yield source.find(RULE, call, message, _without(source, call, owner), severity)
    yield from _inputs(source, trained, models)


def _inputs(source: Source, trained: dict[str, Node | None], models: set[str]) -> Iterator[Finding]:
    for call in source.all(cst.Call):
        name = key(source, call.func) if isinstance(call.func, (cst.Name, cst.Attribute)) else None
        if name not in trained or name in models or region_in_force(source, call) is None:
            continue
        if trained[name] is not home(source, call, name):
            continue
        for arg in call.args:
            inner = arg.value
            if not isinstance(inner, cst.Call) or not isinstance(inner.func, cst.Attribute):
                continue
            if cast_dtype(source, inner, Arguments.of(inner)):
                fix = source.fix("Leave it to the region", _bare(source, inner), unsafe=True)
                yield source.find(RULE, inner, _INPUTS, fix)


def _runs_in_region(source: Source, call: cst.Call, name: str) -> bool:
    """Whether the model is called in a region of the same function or class, or of one that it is handed to."""
    return any(
        any(
            key(source, model) == name and home(source, model, name) is home(source, call, name)
            for model in (other.func, *_handed(source, other.func))
        )
        and region_in_force(source, other) is not None
        for other in source.all(cst.Call)
        if isinstance(other.func, (cst.Name, cst.Attribute))
    )


def _handed(source: Source, name: Node) -> Iterator[Node]:
    """What the calls of this file hand to a parameter."""
    binding = source.names.only_binding(name)
    values = source.values.handed.to(binding) if binding is not None else ()
    yield from (value for value in values if value is not None)


def _without(source: Source, call: cst.Call, owner: Node) -> Fix | None:
    message = "Leave it to the region"
    parent = source.parents[call]
    alone = isinstance(parent, cst.Expr) or (
        isinstance(parent, cst.Assign)
        and [key(source, t.target) for t in parent.targets] == [key(source, owner)]
    )
    if not alone:
        return source.fix(message, _bare(source, call), unsafe=True)
    line = line_of(source, parent)
    edit = remove(source, line) if line is not None else None
    return source.fix(message, edit, unsafe=True) if edit is not None else None


def _bare(source: Source, call: cst.Call) -> Edit:
    """Takes `.half()` off the end of a call's text."""
    assert isinstance(call.func, cst.Attribute)
    span = source.span(call)
    owner = source.span(call.func.value)
    closing = len(getattr(call.func.value, "rpar", ()))
    if closing:  # the parentheses around what is cast stay
        text = source.text.data[owner.end : span.end]
        owner = Span(owner.start, owner.end + text.rindex(b")", 0, text.index(b".")) + 1)
    return Edit(owner.end, span.end, "")


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
        """,
    ),
)

INVALID = (
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

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.model(batch).sum()
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

            def step(self, batch):
                with torch.autocast("cuda"):
                    loss = self.model(batch).sum()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
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
    words=("autocast half(", "autocast bfloat16", "autocast float16"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
