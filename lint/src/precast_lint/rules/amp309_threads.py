"""AMP309: threads, which start without the region that is around them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.regions import AUTOCASTS, region_in_force
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["RULE"]

_PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
_POOLS = ("concurrent.futures.ThreadPoolExecutor", "concurrent.futures.thread.ThreadPoolExecutor")
_REPLICAS = "each replica has a thread of its own, with the default dtype and not this region's"
_MODELS = re.compile(r"(\w*_)?(model|net|network|module)(_\w+)?", re.IGNORECASE)


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each thread that is started in a region, and each DataParallel that runs in one."""
    for call in source.all(cst.Call):
        target = _target(source, call)
        if target is not None and _needs_region(source, target):
            region = region_in_force(source, call)
            if region is not None:
                yield source.find(RULE, call)
        elif isinstance(call.func, (cst.Name, cst.Attribute)) and _is_parallel(source, call.func):
            region = region_in_force(source, call)
            if region is not None and region.dtype == "torch.bfloat16" and region.device == "cuda":
                yield source.find(RULE, call, _REPLICAS)


def _target(source: Source, call: cst.Call) -> Node | None:
    """What a call runs in a thread: `Thread(target=f).start()`, `thread.start()`, `pool.submit(f, x)`."""
    if not isinstance(call.func, cst.Attribute):
        return None
    name, owner = call.func.attr.value, call.func.value
    if name == "start" and not call.args:
        made = source.values.constructed(owner)
        if isinstance(made, cst.Call) and source.origin(made.func) == "threading.Thread":
            return next(
                (a.value for a in made.args if a.keyword and a.keyword.value == "target"), None
            )
    if name in ("submit", "map") and call.args and not call.args[0].star:
        return call.args[0].value if _is_pool(source, owner) else None
    return None


def _is_pool(source: Source, node: Node) -> bool:
    for binding in source.names.bindings(node):
        if binding.kind == "with" and isinstance(binding.value, cst.Call):
            return source.origin(binding.value.func) in _POOLS
    return source.instance(node) in _POOLS


def _needs_region(source: Source, target: Node) -> bool:
    """Whether what runs in the thread calls a model, and enters no region by itself."""
    parts = (dotted(target) or "").split(".")
    if any(_MODELS.fullmatch(part) for part in parts):
        return True
    if isinstance(target, cst.Lambda):
        return _calls_model(source, target.body)
    binding = source.names.only_binding(target)
    if binding is None or not isinstance(binding.node, cst.FunctionDef):
        return False
    return _calls_model(source, binding.node)


def _calls_model(source: Source, node: Node) -> bool:
    """Whether code calls a model or multiplies matrices, and enters no region."""
    inside = list(walk(node))
    if any(
        source.origin(n) in AUTOCASTS for n in inside if isinstance(n, (cst.Name, cst.Attribute))
    ):
        return False
    return any(
        (isinstance(n, cst.BinaryOperation) and isinstance(n.operator, cst.MatrixMultiply))
        or (
            isinstance(n, cst.Call)
            and isinstance(n.func, (cst.Name, cst.Attribute))
            and _MODELS.fullmatch(
                n.func.value if isinstance(n.func, cst.Name) else n.func.attr.value
            )
        )
        for n in inside
    )


def _is_parallel(source: Source, func: Node) -> bool:
    """Whether a name holds a DataParallel, if only in one of its branches."""
    return any(
        isinstance(value, cst.Call) and source.origin(value.func) in _PARALLEL
        for value, _ in source.values.sources(func)
    )


VALID = (
    Case("""
        import threading
        import torch

        def work(x):
            with torch.autocast("cuda"):
                model(x)

        def log():
            print("on it")

        with torch.autocast("cuda"):
            threading.Thread(target=work, args=(x,)).start()
            threading.Thread(target=log).start()
    """),
    Case("""
        import torch

        model = torch.nn.DataParallel(model)
        with torch.autocast("cuda"):
            model(x)
        with torch.autocast("cuda", dtype=dtype):
            model(x)
    """),
    Case("""
        import threading
        import torch

        def work(x):
            model(x)

        threading.Thread(target=work).start()
        with torch.autocast("cuda", enabled=False):
            threading.Thread(target=work).start()
    """),
)

INVALID = (
    Case("""
        import threading
        import torch

        def work(x):
            outputs.append(model(x))

        with torch.autocast("cuda"):
            thread = threading.Thread(target=work, args=(x,))
            thread.start()
    """),
    Case(
        """
        from concurrent.futures import ThreadPoolExecutor
        import torch

        with torch.autocast("cuda"), ThreadPoolExecutor() as pool:
            outputs = list(pool.map(model, batches))
            pool.submit(lambda: self.model(x))
        """,
        count=2,
    ),
    Case("""
        from threading import Thread
        import torch

        class Speaker:
            def say(self, text):
                with torch.autocast(device_type=self.device, dtype=self.dtype):
                    thread = Thread(target=self.model.generate, kwargs={"text": text})
                    thread.start()
    """),
    Case("""
        import torch

        if torch.cuda.device_count() > 1:
            model = torch.nn.DataParallel(model)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x)
    """),
    Case(
        """
        import threading
        import torch

        def work(a, b):
            results.append(a @ b)

        with torch.autocast("cuda"):
            threading.Thread(target=work, args=(a, b)).start()
        """,
    ),
)

RULE = Rule(
    code="AMP309",
    name="thread-in-region",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="a new thread starts without this region: what it runs is in full precision",
    what=(
        "A thread that is started in a region and calls a model outside of any other, and a `DataParallel` model that "
        "runs in a bfloat16 region for CUDA."
    ),
    why=(
        "The state of autocast belongs to a thread. `DataParallel` switches autocast on in its threads, but with the "
        "default dtype: its replicas run in float16 where the region says bfloat16."
    ),
    fine="The thread enters a region in code that is not seen. With one device `DataParallel` starts no thread.",
    words=("autocast Thread", "autocast DataParallel"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
