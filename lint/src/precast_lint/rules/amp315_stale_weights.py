"""AMP315: a model called after its optimizer's step in one region, with the weights from before the step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from precast_lint.meaning.functions import followed_call
from precast_lint.meaning.regions import Region, regions, regions_around
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, children, cst
from precast_lint.parsing.values import SCALERS
from precast_lint.training_step.flow_events import key
from precast_lint.training_step.frames import frame_of, nodes_of, own_nodes
from precast_lint.training_step.trained import home, trained

__all__ = ["RULE"]

_EVALUATES = re.compile(r"eval|valid|test|infer|predict|accuracy|sample|generate", re.IGNORECASE)
_MODEL = re.compile(r"(self\.)?_?(model|net|network|module)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"(self\.)?_?(optimizer|optim|opt)", re.IGNORECASE)
_AGAIN = "in the next iteration this uses the weights of the first: the region keeps its casts; open it in the loop"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each such call, the first for each model of each region."""
    models = _models(source)
    for region in regions(source):
        if region.enabled is False or _is_uncached(region):
            continue
        inside = list(_own_nodes(region.body))
        if any(_clears(source, node) for node in inside):
            continue
        pairs = {
            (optimizer, model)
            for optimizer, model, where in models
            if where is home(source, region.node, model) or _is_global(source, model, where)
        }
        for optimizer, model in sorted(pairs or _only_pair(source, inside)):
            yield from _stale(source, region, inside, optimizer, model)
            if (
                pairs
                and (call := _called_step(source, region, inside, optimizer, model)) is not None
            ):
                yield source.find(RULE, call, _AGAIN)


def _only_pair(source: Source, inside: list[Node]) -> set[tuple[str, str]]:
    """The optimizer that steps in a region and the model that is called, if there is one of each and a backward."""
    calls = [node for node in inside if isinstance(node, cst.Call)]
    methods = [call for call in calls if isinstance(call.func, cst.Attribute)]
    names = {
        key(source, c.func) or "" for c in calls if isinstance(c.func, (cst.Name, cst.Attribute))
    }
    called = {name for name in names if _MODEL.fullmatch(name)}
    stepped = {name for call in methods if (name := _stepped(source, call)) is not None}
    backward = any(
        isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
        for call in methods
    )
    if not backward or len(stepped) != 1 or len(called) != 1:
        return set()
    return {(stepped.pop(), called.pop())}


def _stepped(source: Source, call: cst.Call) -> str | None:
    """The optimizer that a call steps, by itself or by a scaler, if its name says that it is one."""
    assert isinstance(call.func, cst.Attribute)
    if call.func.attr.value != "step":
        return None
    first = Arguments.of(call).get("optimizer", 0)
    by_scaler = source.instance(call.func.value) in SCALERS
    name = key(source, first if by_scaler else call.func.value) or ""
    return name if _OPTIMIZER.fullmatch(name) else None


def _models(source: Source) -> set[tuple[str, str, Node | None]]:
    """Each optimizer with the model whose parameters it has, and where the two names mean that."""
    found: set[tuple[str, str, Node | None]] = set()
    for (model, where), call in trained(source).items():
        statement = source.parents[call]
        for target in statement.targets if isinstance(statement, cst.Assign) else ():
            found.add((key(source, target.target) or "", model, where))
    return found


def _is_global(source: Source, model: str, where: Node | None) -> bool:
    """Whether a name is one of the module's, and nothing else anywhere."""
    bound = [s for s in source.scopes.module.bindings if s == model]
    return where is None and bool(bound) and "." not in model


def _is_uncached(region: Region) -> bool:
    return Arguments.of(region.call).get("cache_enabled") is not None


def _clears(source: Source, node: Node) -> bool:
    return isinstance(node, cst.Call) and source.origin(node.func) == "torch.clear_autocast_cache"


def _own_nodes(body: Node) -> Iterator[Node]:
    """What runs when a block runs: no functions and classes in it, in the order of the text."""
    stack = [body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
            stack.extend(reversed(list(children(node))))


def _stale(
    source: Source, region: Region, inside: list[Node], optimizer: str, model: str
) -> Iterator[Finding]:
    steps = [i for i, node in enumerate(inside) if _steps(source, node, optimizer)]
    uses = [
        i for i, node in enumerate(inside) if _uses(source, node, model) and _is_on(source, node)
    ]
    for step in steps:
        before = [
            inside[i] for i in uses if i < step and not _excludes(source, inside[i], inside[step])
        ]
        after = [
            inside[i] for i in uses if i > step and not _excludes(source, inside[i], inside[step])
        ]
        if before and after:
            yield source.find(RULE, after[0])
            return
        again = [n for n in before if _loop(source, n, inside[step], region)]
        if again:
            yield source.find(RULE, again[0], _AGAIN)
            return


def _called_step(
    source: Source, region: Region, inside: list[Node], optimizer: str, model: str
) -> Node | None:
    """The call in a loop of a function that calls the model and steps the optimizer, and opens no region for that."""
    for call in inside:
        found = followed_call(source, call)
        if found is None or not _loop(source, call, call, region):
            continue
        frame = frame_of(source, *found, lambda node: key(source, node))
        nodes = list(own_nodes(frame.function))
        calls = [n for n in nodes if isinstance(n, cst.Call) and isinstance(n.func, cst.Attribute)]
        steps = any(
            c.func.attr.value == "step"  # type: ignore[attr-defined]
            and optimizer
            in (frame.named(c.func.value), frame.named(Arguments.of(c).get("optimizer", 0)))  # type: ignore[attr-defined]
            for c in calls
        )
        uses = any(
            isinstance(n, cst.Call)
            and frame.named(n.func) == model
            and next(regions_around(source, n), None) is None
            for n in nodes
        )
        if steps and uses:
            return call
    return None


def _steps(source: Source, node: Node, optimizer: str) -> bool:
    """`optimizer.step()`, `scaler.step(optimizer)`."""
    func = node.func if isinstance(node, cst.Call) else None
    if not isinstance(node, cst.Call) or not isinstance(func, cst.Attribute):
        return False
    if func.attr.value != "step":
        return False
    if key(source, func.value) == optimizer:
        return True
    first = Arguments.of(node).get("optimizer", 0)
    return source.instance(func.value) in SCALERS and key(source, first) == optimizer


def _uses(source: Source, node: Node, model: str) -> bool:
    """`model(x)`, `evaluate(model, batches)`, or a function of this file that calls the model."""
    if not isinstance(node, cst.Call):
        return False
    if isinstance(node.func, (cst.Name, cst.Attribute)) and key(source, node.func) == model:
        return True
    if _calls_model(source, node, model):
        return True
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    given = any(key(source, arg.value) == model for arg in node.args)
    return given and isinstance(name, cst.Name) and _EVALUATES.search(name.value) is not None


def _calls_model(source: Source, call: cst.Call, model: str) -> bool:
    """Whether a call runs a function of this file that calls the model, and opens no region and clears no casts."""
    found = followed_call(source, call)
    if found is None:
        return False
    frame = frame_of(source, *found, lambda node: key(source, node))
    nodes = nodes_of(source, frame.function)
    return not any(_clears(source, node) for node in nodes) and any(
        isinstance(node, cst.Call)
        and isinstance(node.func, (cst.Name, cst.Attribute))
        and frame.named(node.func) == model
        and next(regions_around(source, node), None) is None
        for node in nodes
    )


def _is_on(source: Source, node: Node) -> bool:
    """Whether the innermost region around a node is one that casts."""
    return all(region.enabled is not False for region in islice(regions_around(source, node), 1))


def _excludes(source: Source, one: Node, other: Node) -> bool:
    """Whether two nodes stand on two sides of one test."""
    sides = _sides(source, one)
    return any(sides.get(test, side) is not side for test, side in _sides(source, other).items())


def _sides(source: Source, node: Node) -> dict[Node, Node]:
    """The tests around a node, each with the part of it that the node is in."""
    found: dict[Node, Node] = {}
    inner = node
    for outer in source.around(node):
        if isinstance(outer, cst.FunctionDef):
            break
        if isinstance(outer, (cst.If, cst.IfExp, cst.Try, cst.Match)):
            found[outer] = inner
        inner = outer
    return found


def _loop(source: Source, one: Node, other: Node, region: Region) -> bool:
    """Whether a loop inside the region runs two nodes again."""
    loops = [
        {o for o in source.around(node) if isinstance(o, (cst.For, cst.While))}
        for node in (one, other)
    ]
    outside = set(source.around(region.body))
    return any(
        loop not in outside and not _is_header(source, one, loop) for loop in loops[0] & loops[1]
    )


def _is_header(source: Source, node: Node, loop: Node) -> bool:
    """Whether a node is in what a loop runs over, which is computed once."""
    assert isinstance(loop, (cst.For, cst.While))
    return loop.body not in set(source.around(node)) and isinstance(loop, cst.For)


VALID = (
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        note="The region ends with each iteration: AMP302 speaks of the step in it.",
    ),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            for x in batches:
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    """),
    Case(
        """
        import torch

        def train(model, teacher, batches, optimizer, steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for x in batches:
                    env.step(model(x))
                for x in batches:
                    loss = model(x).mean()
            loss.backward()
            optimizer.step()
        """,
        note="No optimizer steps in the region.",
    ),
    Case("""
        import torch

        optimizer = torch.optim.SGD(critic.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            critic(x).mean().backward()
            optimizer.step()
            score = actor(x)
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if training:
                model(x).mean().backward()
                optimizer.step()
            else:
                scores = model(x)
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for x in batches:
                model(x).mean().backward()
                optimizer.step()
                torch.clear_autocast_cache()
    """),
    Case("""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x).mean().backward()
            optimizer.step()
            with torch.autocast("cuda", enabled=False):
                scores = model(x)
    """),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
            loss.backward()

            def again():
                optimizer.step()
                return model(x)
        """,
        note="When the function runs is not known.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def step(self, x):
                self.model(x).mean().backward()
                self.optimizer.step()

            def train(self, batches):
                for x in batches:
                    with torch.autocast("cuda", dtype=torch.bfloat16):
                        self.step(x)
        """,
        note="Each call has a region of its own.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

            def loss(self, x):
                return self.net(x).mean()

            def exact(self, x):
                with torch.autocast("cuda", enabled=False):
                    return self.net(x).mean()

            def fresh(self, x):
                torch.clear_autocast_cache()
                return self.net(x).mean()

            def step(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    self.loss(x).backward()
                    self.opt.step()
                    scores = self.exact(x), self.fresh(x)
                with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
                    return scores, self.loss(x)
        """,
        note="What is computed behind the step uses no casts from before it.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(10):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for x in batches:
                    loss = model(x).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, x, held_out):
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cuda")
            for _ in range(100):
                with torch.autocast("cuda"):
                    loss = model(x).mean()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    with torch.no_grad():
                        print(model(held_out).mean())
        """,
        count=1,
        note="The evaluation does not see the step.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

            @torch.autocast("cuda", dtype=torch.bfloat16)
            def fit(self, batches, held_out):
                for x in batches:
                    self.model(x).mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        """,
        count=1,
    ),
    Case(
        """
        import torch

        model = Net()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            with torch.autocast("cpu"):
                model(x).mean().backward()
                opt.step()
                return evaluate(model)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, scaler):
            with torch.autocast("cuda", dtype=torch.float16):
                for x in batches:
                    loss = model(x).mean()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        """,
        count=1,
        note="The only model and the only optimizer there.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def step(self, x):
                self.optimizer.zero_grad()
                self.model(x).mean().backward()
                self.optimizer.step()

            def train(self, batches):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    for x in batches:
                        self.step(x)
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def loss_of(net, x):
            return net(x).mean()

        class Trainer:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

            def loss(self, x):
                return self.net(x).mean()

            def step(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    before = self.loss(x)
                    before.backward()
                    self.opt.step()
                    with torch.no_grad():
                        after = self.loss(x)
                return before.detach(), after

            def other_step(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss_of(self.net, x).backward()
                    self.opt.step()
                    return loss_of(self.net, x)
        """,
        count=2,
        note="A function that calls the model, before the step and after it.",
    ),
)

RULE = Rule(
    code="AMP315",
    name="stale-weights-in-region",
    severity=Severity.ERROR,
    fix=Applicability.NONE,
    message="this uses the weights from before the step: the region keeps its casts; end it before the step",
    what=(
        "A model that is called, stepped and called again within one region, in a loop or in an evaluation after the "
        "step."
    ),
    why=(
        "The region casts each weight once and keeps the copy until the outermost region ends. Steps change the "
        "weights, not the copies: training in a loop goes on with the weights of its first iteration, so the loss does "
        "not move, and an evaluation measures the model as it was before."
    ),
    fine="The weights are not float32, so nothing is cast, or `torch.set_autocast_cache_enabled(False)` was called.",
    words=("autocast .step(",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
