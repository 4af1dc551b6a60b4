"""Ways to write a program differently that change nothing in what it does; mistakes have to be found in each."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from tests.lint.mutation.trees import (
    assigned,
    call_of,
    indented,
    is_import,
    lines,
    method,
    names,
    nodes,
    path,
    renamed,
    replaced,
    source,
    start_of_code,
    stmt,
    with_imports,
)

__all__ = ["WRAPPERS", "Wrapper"]

Wrapper = Callable[[cst.Module], cst.Module | None]
WRAPPERS: dict[str, Wrapper] = {}


def _wraps(wrapper: Wrapper) -> Wrapper:
    WRAPPERS[wrapper.__name__] = wrapper
    return wrapper


@_wraps
def torch_as_th(module: cst.Module) -> cst.Module | None:
    """`import torch as th`."""
    line = next((i for i in module.body if source(i).strip() == "import torch"), None)
    if line is None or any("import torch." in source(i) for i in module.body if is_import(i)):
        return None
    if any(
        isinstance(n, cst.Annotation) and '"torch.' in source(n.annotation) for n in nodes(module)
    ):
        return None  # what is quoted would have to be renamed as well
    done = replaced(module, {line: stmt("import torch as th\n")})
    return renamed(done, lambda name: "th" if name == "torch" else None)


def _by_import(
    module: cst.Module, owner: str, text: str, news: dict[str, str]
) -> cst.Module | None:
    """Dotted names become what an import brings."""
    imported = {n for node in nodes(module) if is_import(node) for n in nodes(node)}
    result = {
        node: cst.parse_expression(news[name])
        for node in nodes(module)
        if isinstance(node, cst.Attribute) and (name := path(node)) in news and node not in imported
    }
    if not result or owner not in source(module):
        return None
    done = replaced(module, result)
    used = [
        line
        for line in text.splitlines()
        if any(_brings(line) == source(v).partition(".")[0] for v in result.values())
    ]
    return with_imports(done, "\n".join(used) + "\n")


def _brings(line: str) -> str:
    return line.rsplit(maxsplit=1)[-1]


@_wraps
def from_imports(module: cst.Module) -> cst.Module | None:
    """`from torch.amp import GradScaler as Scaler`."""
    return _by_import(
        module,
        "torch",
        "from torch.amp import GradScaler as Scaler\nfrom torch import autocast as region_of\n"
        "from torch.cuda.amp import GradScaler as OldScaler\nfrom torch.cuda.amp import autocast as old_region",
        {
            "torch.amp.GradScaler": "Scaler",
            "torch.autocast": "region_of",
            "torch.cuda.amp.GradScaler": "OldScaler",
            "torch.cuda.amp.autocast": "old_region",
        },
    )


@_wraps
def amp_module(module: cst.Module) -> cst.Module | None:
    """`from torch import amp`."""
    if any("amp" in source(line) for line in module.body if is_import(line)):
        return None
    news = {"torch.amp.GradScaler": "amp.GradScaler", "torch.autocast": "amp.autocast"}
    return _by_import(module, "torch", "from torch import amp", news)


@_wraps
def exported_name(module: cst.Module) -> cst.Module | None:
    """`torch.GradScaler`, which is the same class."""
    result = {
        node: cst.parse_expression("torch.GradScaler")
        for node in nodes(module)
        if isinstance(node, cst.Attribute) and path(node) == "torch.amp.GradScaler"
    }
    return replaced(module, result) if result else None


_OTHERS = {
    "scaler": "grad_scaler",
    "optimizer": "opt",
    "loss": "objective",
    "model": "net",
    "output": "predicted",
    "hidden": "h",
    "scores": "attention_logits",
    "product": "outcome",
}


@_wraps
def other_names(module: cst.Module) -> cst.Module | None:
    """Variables and attributes of `self` with other names."""
    keywords = {n.keyword.value for n in nodes(module) if isinstance(n, cst.Arg) and n.keyword}
    if keywords & _OTHERS.keys():
        return None

    class Attributes(cst.CSTTransformer):
        def leave_Attribute(
            self, original_node: cst.Attribute, updated_node: cst.Attribute
        ) -> cst.Attribute:
            name = original_node.attr.value
            if path(original_node.value) == "self" and name in _OTHERS:
                return updated_node.with_changes(attr=cst.Name(_OTHERS[name]))
            return updated_node

    done = renamed(module, _OTHERS.get).visit(Attributes())
    assert isinstance(done, cst.Module)
    return None if source(done) == source(module) else done


def _split(module: cst.Module) -> tuple[list[cst.CSTNode], list[cst.CSTNode]]:
    """Imports (and what stands between them), and the rest."""
    at = start_of_code(module)
    return list(module.body[:at]), list(module.body[at:])


def _function(name: str, parameters: str, body: list[cst.CSTNode]) -> cst.CSTNode:
    [made] = stmt(f"def {name}({parameters}):\n    pass\n")
    assert isinstance(made, cst.FunctionDef)
    return made.with_changes(body=indented(body))


def _has_stray(body: list[cst.CSTNode]) -> bool:
    return any(is_import(line) for line in body) or not body


@_wraps
def in_main(module: cst.Module) -> cst.Module | None:
    """All but the imports in `main()`."""
    head, body = _split(module)
    if _has_stray(body):
        return None
    return module.with_changes(
        body=[*head, _function("everything", "", body), *stmt("everything()\n")]
    )


@_wraps
def in_method(module: cst.Module) -> cst.Module | None:
    """All but the imports in a method."""
    head, body = _split(module)
    if _has_stray(body):
        return None
    job = cst.ClassDef(name=cst.Name("Job"), body=indented([_function("run", "self", body)]))
    return module.with_changes(body=[*head, job, *stmt("Job().run()\n")])


@_wraps
def under_main_guard(module: cst.Module) -> cst.Module | None:
    """All but imports, functions and classes under `if __name__ == "__main__"`."""
    head, body = _split(module)
    if _has_stray(body):
        return None
    [guard] = stmt('if __name__ == "__main__":\n    pass\n')
    assert isinstance(guard, cst.If)
    return module.with_changes(body=[*head, guard.with_changes(body=indented(body))])


def _has_definitions(module: cst.Module) -> bool:
    return any(isinstance(line, (cst.FunctionDef, cst.ClassDef)) for line in module.body)


def _prepared(body: list[cst.CSTNode]) -> tuple[list[cst.CSTNode], list[cst.CSTNode]] | None:
    """Return the statements before the first loop, and the others."""
    first = next((i for i, line in enumerate(body) if isinstance(line, cst.For)), None)
    return None if first is None else (body[:first], body[first:])


def _bound(body: list[cst.CSTNode]) -> set[str]:
    result = set()
    for line in body:
        for node in nodes(line):
            if isinstance(node, cst.AssignTarget):
                result |= {n.value for n in nodes(node.target) if isinstance(n, cst.Name)}
    return result


@_wraps
def with_parameters(module: cst.Module) -> cst.Module | None:
    """A function that trains, and gets what it uses."""
    head, body = _split(module)
    parts = _prepared(body)
    if parts is None or _has_definitions(module) or _has_stray(body):
        return None
    before, after = parts
    used = sorted(_bound(before) & {n for line in after for n in names(line)})
    text = ", ".join(used)
    return module.with_changes(
        body=[*head, _function("fit", text, after), *before, *stmt(f"fit({text})\n")]
    )


def _on_self(module: cst.Module, bound: set[str]) -> cst.Module:
    return renamed(module, lambda name: f"self.{name}" if name in bound else None)


@_wraps
def on_self(module: cst.Module) -> cst.Module | None:
    """A class whose `__init__` makes things and whose `train` uses them."""
    head, body = _split(module)
    parts = _prepared(body)
    if parts is None or _has_definitions(module) or _has_stray(body):
        return None
    before, after = parts
    inside = {n for line in after for n in names(line)}
    bound = {n for n in _bound(before) & inside if n not in _bound(after)}
    inner = _on_self(cst.Module([*before]), bound)  # type: ignore[list-item]
    outer = _on_self(cst.Module([*after]), bound)  # type: ignore[list-item]
    methods = [
        _function("__init__", "self", list(inner.body)),
        _function("train", "self", list(outer.body)),
    ]
    job = cst.ClassDef(name=cst.Name("Trainer"), body=indented(methods))
    return module.with_changes(body=[*head, job, *stmt("Trainer().train()\n")])


@_wraps
def step_method(module: cst.Module) -> cst.Module | None:
    """Do as `on_self`, with the loop's body in another method."""
    done = on_self(module)
    return None if done is None else _loop_body_out(done)


def _loop_body_out(module: cst.Module) -> cst.Module | None:
    [job] = [line for line in module.body if isinstance(line, cst.ClassDef)]
    train = job.body.body[-1]
    assert isinstance(train, cst.FunctionDef)
    loop = next((i for i in train.body.body if isinstance(i, cst.For)), None)
    if loop is None or any(isinstance(n, (cst.Break, cst.Continue)) for n in nodes(loop)):
        return None
    targets = [n.value for n in nodes(loop.target) if isinstance(n, cst.Name)]
    rest = [line for line in train.body.body if line is not loop]
    bound = _bound(list(loop.body.body)) | set(targets)
    if bound & {n for line in rest for n in names(line)} or "losses" in names(loop):
        return None
    text = ", ".join(targets)
    step = _function("step", f"self, {text}", list(loop.body.body))
    called = loop.with_changes(body=indented(stmt(f"self.step({text})\n")))
    done = replaced(module, {loop: called})
    [job] = [line for line in done.body if isinstance(line, cst.ClassDef)]
    new = job.with_changes(body=indented([*job.body.body, step]))
    return replaced(done, {job: new})


@_wraps
def step_function(module: cst.Module) -> cst.Module | None:
    """The loop's body in a function that gets what it uses."""
    head, body = _split(module)
    parts = _prepared(body)
    if parts is None or _has_definitions(module) or _has_stray(body):
        return None
    before, (loop, *rest) = parts
    assert isinstance(loop, cst.For)
    if any(isinstance(n, (cst.Break, cst.Continue)) for n in nodes(loop)):
        return None
    targets = {n.value for n in nodes(loop.target) if isinstance(n, cst.Name)}
    if (_bound(list(loop.body.body)) | targets) & {n for line in rest for n in names(line)}:
        return None
    used = sorted((_bound(before) | targets) & {n for line in loop.body.body for n in names(line)})
    text = ", ".join(used)
    function = _function("one_step", text, list(loop.body.body))
    called = loop.with_changes(body=indented(stmt(f"one_step({text})\n")))
    return module.with_changes(body=[*head, function, *before, called, *rest])


@_wraps
def in_epochs(module: cst.Module) -> cst.Module | None:
    """One more loop around the first one."""
    if any("scheduler" in source(line) and isinstance(line, cst.For) for line in module.body):
        return None
    loop = next((line for line in module.body if isinstance(line, cst.For)), None)
    if loop is None:
        return None
    outer = cst.For(
        target=cst.Name("epoch"), iter=cst.parse_expression("range(3)"), body=indented([loop])
    )
    return replaced(module, {loop: outer})


@_wraps
def until_interrupted(module: cst.Module) -> cst.Module | None:
    """The first loop in a `try`."""
    loop = next((n for n in nodes(module) if isinstance(n, cst.For)), None)
    if loop is None:
        return None
    [guard] = stmt("try:\n    pass\nexcept KeyboardInterrupt:\n    print('stopped')\n")
    assert isinstance(guard, cst.Try)
    return replaced(module, {loop: guard.with_changes(body=indented([loop]))})


@_wraps
def timed(module: cst.Module) -> cst.Module | None:
    """The body of the first loop in a context of the profiler's."""
    loop = next((n for n in nodes(module) if isinstance(n, cst.For)), None)
    if loop is None or not any(source(i).strip() == "import torch" for i in module.body):
        return None
    [context] = stmt('with torch.profiler.record_function("step"):\n    pass\n')
    assert isinstance(context, cst.With)
    return replaced(module, {loop.body: indented([context.with_changes(body=loop.body)])})


@_wraps
def counted(module: cst.Module) -> cst.Module | None:
    """`enumerate` around what the first loop is over."""
    loop = next((n for n in nodes(module) if isinstance(n, cst.For)), None)
    if loop is None or "enumerate" in source(loop.iter):
        return None
    target = cst.parse_module(
        f"for number, ({source(loop.target)}) in enumerate({source(loop.iter)}):\n    pass\n"
    )
    head = target.body[0]
    assert isinstance(head, cst.For)
    return replaced(module, {loop: loop.with_changes(target=head.target, iter=head.iter)})


@_wraps
def scale_first(module: cst.Module) -> cst.Module | None:
    """`scaled = scaler.scale(loss)`, then `scaled.backward()`."""
    news: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for line in lines(module):
        result = method(line, "backward")
        if result and ".scale(" in result[0]:
            call = call_of(line)
            assert call is not None
            rest = source(call).removeprefix(result[0])
            news[line] = stmt(f"scaled_loss = {result[0]}\nscaled_loss{rest}\n")
    return replaced(module, news) if news else None


@_wraps
def region_by_name(module: cst.Module) -> cst.Module | None:
    """`region = torch.autocast(...)`, then `with region:`."""
    news: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for node in nodes(module):
        if isinstance(node, cst.With) and len(node.items) == 1:
            call = node.items[0].item
            if isinstance(call, cst.Call) and "autocast" in source(call.func):
                if any(isinstance(n, cst.With) for n in nodes(node.body)):
                    return None
                entered = node.with_changes(items=[cst.WithItem(cst.Name("mixed"))])
                news[node] = [*stmt(f"mixed = {source(call)}\n"), entered]
    return replaced(module, news) if news else None


@_wraps
def two_contexts(module: cst.Module) -> cst.Module | None:
    """`with torch.enable_grad(), torch.autocast(...)`, or the two of one statement in two."""
    for node in nodes(module):
        if isinstance(node, cst.With) and len(node.items) == 2:
            first, second = (
                item.with_changes(comma=cst.MaybeSentinel.DEFAULT) for item in node.items
            )
            inner = node.with_changes(items=[second])
            return replaced(module, {node: cst.With(items=[first], body=indented([inner]))})
    return None


@_wraps
def talks_about_it(module: cst.Module) -> cst.Module | None:
    """Comments and texts with words that the rules look for."""
    note = '"""TODO: GradScaler, skip connections, log_softmax, unscale_, detach."""\n'
    head, body = _split(module)
    if head and "__future__" in source(head[0]):
        return None
    news = [
        *stmt(note),
        *head,
        *stmt("print('scaler.update() comes later: skipped steps, found_inf')\n"),
        *body,
    ]
    return module.with_changes(body=news)


@_wraps
def prints_scale(module: cst.Module) -> cst.Module | None:
    """`print(scaler.get_scale())` after each update."""
    news: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for line in lines(module):
        result = method(line, "update")
        if result and "scaler" in result[0]:
            news[line] = [line, *stmt(f'print("scale", {result[0]}.get_scale())\n')]
    return replaced(module, news) if news else None


@_wraps
def annotated(module: cst.Module) -> cst.Module | None:
    """Names of the module with annotations."""
    news: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for line in module.body:
        result = assigned(line)
        if result and isinstance(result[1], cst.Call) and "GradScaler" in source(result[1].func):
            news[line] = stmt(f"{result[0]}: {source(result[1].func)} = {source(result[1])}\n")
    return replaced(module, news) if news else None
