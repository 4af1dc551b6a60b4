"""AMP316: weights that an optimizer of PyTorch's updates in 16 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.regions import regions
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, walk
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.trained import Models, cast_dtype, cast_model, home, trained

__all__ = ["RULE"]

_FLOAT16 = "these float16 weights are trained as they are: small gradients and updates become zero; train in float32"
_ADAM = "float16 has no `eps` of 1e-8: {name} divides by zero where a squared gradient is zero, too"
# Others that keep weights in float32, add up what is lost, or train something else than these weights.
_HANDLED = re.compile(
    r"master|fp32|fp16_optim|bf16_optim|deepspeed|apex|accelerat|fabric|kahan|stochastic|lora|peft|adapter|fsdp|"
    r"fully_shard|fullyshard|mixed_?precision|colossal|megatron",
    re.IGNORECASE,
)
_WEIGHTS = re.compile(r"(^|[._])(p|w|params?|parameters?|weights?|data)([._\[]|$)")
_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
_LOW = {
    "torch.float16": "torch.float16",
    "torch.half": "torch.float16",
    "torch.bfloat16": "torch.bfloat16",
}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each cast of a model whose parameters an optimizer then steps in a loop."""
    models = trained(source)
    if not models or any(r.enabled is not False for r in regions(source)):
        return  # in regions AMP304 speaks of it
    if _HANDLED.search(source.words) or not _trains(source) or _widens(source, models):
        return
    yield from _by_default(source, models)
    for call, model, dtype in _casts(source, models):
        name = key(source, model) or ""
        optimizer = models[name, home(source, model, name)]
        if not _certain(source, call, optimizer, name):
            continue
        kind = (source.origin(optimizer.func) or "").rpartition(".")[2]
        if dtype == "torch.bfloat16":
            yield source.find(RULE, call)
        elif kind in _ADAMS and Arguments.of(optimizer).get("eps", 3) is None:
            yield source.find(RULE, call, _ADAM.format(name=kind), severity=Severity.ERROR)
        else:
            yield source.find(RULE, call, _FLOAT16, severity=Severity.WARNING)


def _by_default(source: Source, models: Models) -> Iterator[Finding]:
    """The one default dtype of 16 bits with which the function, or the top level, makes a model that is trained."""
    found = source.calls("torch.set_default_dtype", "torch.set_default_tensor_type")
    calls = [(call, arguments.get("d", 0)) for call, arguments in found]
    if len(calls) != 1 or _branches(source, calls[0][0]):
        return
    call, dtype = calls[0]
    if source.origin(dtype) != "torch.bfloat16":
        return
    for text, _ in models:
        for made in source.all(cst.Assign):
            is_it = any(key(source, target.target) == text for target in made.targets)
            is_here = source.function(made) is source.function(call)
            is_after = source.span(made).start > source.span(call).start
            is_made = isinstance(made.value, cst.Call) and not _branches(source, made)
            if is_it and is_here and is_after and is_made:
                yield source.find(RULE, call)
                return


def _casts(source: Source, models: Models) -> Iterator[tuple[cst.Call, Node, str]]:
    """The casts of trained models: by a method, or by the dtype in which a model is loaded."""
    for call, owner, arguments in source.methods("half", "bfloat16", "to"):
        dtype = cast_dtype(source, call, arguments)
        model = cast_model(source, call, owner, models) if dtype else None
        if model is not None and dtype:
            yield call, model, dtype
    yield from _made(source, models)
    for call, _, arguments in source.methods("from_pretrained"):
        given = arguments.get("torch_dtype") or arguments.get("dtype")
        dtype = _LOW.get(source.origin(given) or "")
        whole = _whole(source, call)
        parent = source.parents[whole]
        if dtype is not None and isinstance(parent, cst.Return):
            text = key(source, whole) or ""
            if (text, home(source, whole, text)) in models:
                yield call, whole, dtype
            continue
        if dtype is None or not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
            continue
        target = parent.targets[0].target
        name = key(source, target) or ""
        if (name, home(source, target, name)) in models:
            yield call, target, dtype


def _made(source: Source, models: Models) -> Iterator[tuple[cst.Call, Node, str]]:
    """The layers of PyTorch that are made in 16 bits: `nn.Linear(8, 8, dtype=torch.bfloat16)`."""
    for call in source.all(cst.Call):
        dtype = _LOW.get(source.origin(Arguments.of(call).keywords.get("dtype")) or "")
        parent = source.parents[call]
        if dtype is None or not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
            continue
        target = parent.targets[0].target
        name = key(source, target) or ""
        is_layer = (source.origin(call.func) or "").startswith("torch.nn.")
        if is_layer and (name, home(source, target, name)) in models:
            yield call, target, dtype


def _widens(source: Source, models: Models) -> bool:
    """Whether weights, or parts of a model, become float32 somewhere."""
    for call, owner, arguments in source.methods("float", "to", "double"):
        assert isinstance(call.func, cst.Attribute)
        given = [*arguments.positional, *arguments.keywords.values()]
        if call.func.attr.value == "to" and "torch.float32" not in map(source.origin, given):
            continue
        text = key(source, owner) or ""
        if _WEIGHTS.search(text) or any(f"{text}.".startswith(f"{name}.") for name, _ in models):
            return True
    return False


def _whole(source: Source, call: Node) -> Node:
    """`Net.from_pretrained(...).cuda().train()`, of which a call is the beginning."""
    outer = call
    while isinstance(source.parents[outer], (cst.Attribute, cst.Call)):
        if outer in getattr(source.parents[outer], "args", ()):
            return call
        outer = source.parents[outer]
    return outer


def _trains(source: Source) -> bool:
    """Whether there are a backward and a step in a loop."""
    return any(_in_loop(source, c) for c, _, _ in source.methods("step")) and any(
        True for _ in source.methods("backward")
    )


def _in_loop(source: Source, node: Node) -> bool:
    around = list(source.around(node))
    if any(isinstance(outer, (cst.For, cst.While)) for outer in around):
        return True
    function = source.function(node)  # a step of its own, which some loop calls
    return function is not None and "step" in function.name.value


def _certain(source: Source, cast: Node, optimizer: Node, name: str) -> bool:
    """Whether a cast happens whenever the optimizer is made, and nothing else becomes of the model."""
    if source.function(cast) is not source.function(optimizer):
        is_made = _is_builder(source, cast) or _is_made_first(source, cast, name)
        return is_made and not _branches(source, cast)
    if source.span(cast).start > source.span(optimizer).start:
        return False
    if not _branches(source, cast) <= _branches(source, optimizer):
        return False
    made = [v for v in _values(source, name, cast) if not _mentions(source, v, name)]
    return len(made) <= 1


def _is_builder(source: Source, cast: Node) -> bool:
    """Whether a cast is in a function that returns what it casts."""
    function = source.function(cast)
    line = source.statement(cast)
    own = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    made = own.targets[0].target if isinstance(own, cst.Assign) else None
    for node in walk(function) if function is not None else ():
        if isinstance(node, cst.Return) and node.value is not None:
            if cast in set(walk(node)):
                return True
            if made is not None and key(source, node.value) == key(source, made):
                return len(list(_values(source, key(source, made) or "", cast))) == 1
    return False


def _is_made_first(source: Source, cast: Node, name: str) -> bool:
    """Whether the `__init__` of a class casts an attribute that gets nothing else."""
    function = source.function(cast)
    is_init = function is not None and function.name.value == "__init__"
    if not is_init or not name.startswith("self."):
        return False
    return len([v for v in _values(source, name, cast) if not _mentions(source, v, name)]) == 1


def _values(source: Source, name: str, cast: Node) -> Iterator[Node]:
    """What a model's name is given in its function or class."""
    for statement in source.all(cst.Assign):
        named = any(key(source, target.target) == name for target in statement.targets)
        if named and home(source, statement, name) is home(source, cast, name):
            yield statement.value


def _mentions(source: Source, value: Node, name: str) -> bool:
    return any(
        isinstance(n, (cst.Name, cst.Attribute)) and key(source, n) == name for n in walk(value)
    )


def _branches(source: Source, node: Node) -> set[Node]:
    """The tests around a node in its function, but for that of `__main__`."""
    found: set[Node] = set()
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.FunctionDef) and inner is outer.body:
            break
        kinds = (cst.If, cst.IfExp, cst.ExceptHandler, cst.MatchCase)
        is_main = isinstance(outer, cst.If) and "__name__" in (key(source, outer.test) or "")
        if isinstance(outer, kinds) and not is_main:
            found.add(outer)
        inner = outer
    return found


VALID = (
    Case("""
        import torch

        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        for x in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).mean()
            loss.backward()
            optimizer.step()
    """),
    Case(
        """
        import torch

        teacher = Net().bfloat16()
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        for x in batches:
            (model(x) - teacher(x.bfloat16())).square().mean().backward()
            optimizer.step()
        """,
        note="The model that is cast is not trained.",
    ),
    Case(
        """
        import torch

        model = Net().bfloat16()
        master = [p.detach().clone().to(torch.float32) for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        for x in batches:
            model(x).mean().backward()
            step(optimizer, master)
            optimizer.step()
        """,
        note="Somebody keeps float32 weights.",
    ),
    Case(
        """
        import torch

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        if args.half:
            model.half()
        for x in batches:
            model(x).mean().backward()
            optimizer.step()
        """,
        note="What the flag goes with is not known.",
    ),
    Case(
        """
        import torch
        from mine import AdamW

        model = Net().bfloat16()
        optimizer = AdamW(model.parameters(), 1e-5)
        for x in batches:
            model(x).mean().backward()
            optimizer.step()
        """,
        note="An optimizer that may round as it should.",
    ),
    Case(
        """
        import torch

        model = Net.from_pretrained(name, torch_dtype=torch.bfloat16)
        model = add_lora(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        for x in batches:
            model(x).mean().backward()
            optimizer.step()
        """,
        note="Other weights are trained.",
    ),
    Case(
        """
        import torch

        model = Net().half()
        for p in model.parameters():
            p.data = p.data.float()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
        for x in batches:
            model(x).mean().backward()
            optimizer.step()
        torch.save(model.half(), "model.pt")
        """,
        note="The weights are float32 again, and what is saved is cast for inference.",
    ),
    Case("""
        import torch

        def train(model, batches):
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            for x in batches:
                model(x).mean().backward()
                optimizer.step()

        def export(model):
            torch.save(model.half(), "model.pt")
    """),
    Case("""
        import torch

        def frozen(name):
            return Net(name).bfloat16()

        encoder = frozen("large")
        head = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW([p for p in head.parameters()], 1e-5)
        for x in batches:
            head(encoder(x).float()).mean().backward()
            optimizer.step()
    """),
)

INVALID = (
    Case("""
        import torch
        from transformers import AutoModel

        class Tuner:
            def __init__(self, name):
                self.model = AutoModel.from_pretrained(name, dtype=torch.bfloat16)
                self.optim = self.make_optimizer()

            def make_optimizer(self):
                return torch.optim.AdamW(self.model.parameters(), lr=1e-5)

            def train(self, loader):
                for batch in loader:
                    self.model(**batch).loss.backward()
                    self.optim.step()
                    self.optim.zero_grad()
    """),
    Case("""
        import torch

        def build(config):
            model = Net(config).to(device="cuda", dtype=torch.bfloat16)
            return model

        def main(config):
            model = build(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
            for batch in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    """),
    Case(
        """
        import torch

        net = torch.nn.Linear(8, 8, dtype=torch.bfloat16, device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x in batches:
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        model = Net().to("cuda").to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for x in batches:
            loss = model(x.to(torch.bfloat16)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            model.half()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for x in batches:
                model(x.half()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, net):
                self.net = net.bfloat16()
                self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

            def train_step(self, x):
                self.net(x).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        model = Net()
        model.to("cuda", dtype=torch.float16)
        optimizer = torch.optim.SGD(params=model.parameters(), lr=0.01)
        for x in batches:
            model(x.half()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch
        from transformers import AutoModelForCausalLM

        def build(name):
            return AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)

        model = build("small").cuda()
        optimizer = torch.optim.AdamW([{"params": model.parameters()}], lr=2e-5)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        torch.set_default_dtype(torch.bfloat16)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
        """,
        count=1,
    ),
)

RULE = Rule(
    code="AMP316",
    name="low-precision-weights",
    severity=Severity.INFORMATION,
    fix=Applicability.NONE,
    message="bfloat16 weights have 8 bits: updates below 1/256 of one round to nothing; train float32 weights",
    what=(
        "A model cast to float16 or bfloat16, or loaded in it, whose parameters an optimizer of `torch.optim` gets: "
        "nothing keeps them in float32."
    ),
    why=(
        "An update that is small beside its weight is lost in rounding, in every step anew. With AdamW and a learning "
        "rate of 1e-5, nine of ten bfloat16 weights of a layer are unchanged after five steps. In float16 Adam's "
        "`eps` of 1e-8 is zero: where a squared gradient is, too, a weight becomes infinite in the first step. "
        "Regions of `torch.autocast` compute in 16 bits with float32 weights."
    ),
    fine="Memory decides, and the learning rate is large enough for the updates to count.",
    words=(
        "torch optim backward( .half( parameters(",
        "torch optim backward( bfloat16 parameters(",
        "torch optim backward( float16 parameters(",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
