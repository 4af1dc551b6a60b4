"""AMP309: threads, which start without the region that is around them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.assignments import values_seen
from precast_lint.meaning.functions import called_forward, methods_of
from precast_lint.meaning.regions import AUTOCASTS, region_in_force
from precast_lint.meaning.tensors import LAYERS
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.names import is_none
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["RULE"]

_PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
_POOLS = (
    "concurrent.futures.ThreadPoolExecutor",
    "concurrent.futures.thread.ThreadPoolExecutor",
    "multiprocessing.pool.ThreadPool",
    "multiprocessing.dummy.Pool",
    "torch.multiprocessing.pool.ThreadPool",
)
_STARTERS = ("threading.Thread", "threading.Timer")
_SUBMITS = (
    "apply",
    "apply_async",
    "imap",
    "imap_unordered",
    "map",
    "map_async",
    "starmap",
    "submit",
)
_PRODUCTS = re.compile(
    r"torch\.(addmm|baddbmm|bmm|einsum|matmul|mm|mv|nn\.functional\.(bilinear|conv[123]d|linear|scaled_dot_product_attention))"
)
_REPLICAS = "each replica has a thread of its own, with the default dtype and not this region's"
_RUNS = ("forward", "generate")
_MAKERS = re.compile(
    r"torch\.nn\.Sequential$|torchvision\.models\.|timm\.create_model$|transformers\.(AutoModel\w*|\w+Model|\w+For[A-Z]\w+)\.from_pretrained$"
)
_MOVES = ("cuda", "to", "train", "eval")
_MODELS = re.compile(
    r"(\w*_)?(model|net|network|module)(_\w+)?|net_?[dg]"
    r"|((image|text|vision)_)?(backbone|classifier|decoder|discriminator|encoder|unet)",
    re.IGNORECASE,
)
_DEEP = 4  # names and lists in one another


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
        made = [source.values.constructed(owner)]
        if None in made:
            made = _made(source, owner)
        found = [_started(source, one) if isinstance(one, cst.Call) else None for one in made]
        return found[0] if found and None not in found else None
    if source.origin(call.func) == "asyncio.to_thread" and call.args and not call.args[0].star:
        return call.args[0].value
    if name == "run_in_executor" and len(call.args) > 1 and not any(a.star for a in call.args[:2]):
        executor = call.args[0].value
        return call.args[1].value if is_none(executor) or _is_pool(source, executor) else None
    if name in _SUBMITS and call.args and not call.args[0].star:
        return call.args[0].value if _is_pool(source, owner) else None
    return None


def _made(source: Source, node: Node | None, depth: int = _DEEP) -> list[Node | None]:
    """The calls that make what a name, or an item of a list, may be; None for what is not known."""
    if isinstance(node, cst.Call) or depth == 0:
        return [node] if depth else [None]
    if not isinstance(node, cst.Name):
        return [source.values.constructed(node)]
    found: list[Node | None] = []
    for binding in values_seen(source, node):
        if binding.kind == "assign":
            found += _made(source, binding.value, depth - 1)
        else:
            items = _items(source, binding.node)
            found += [call for item in items for call in _made(source, item, depth - 1)] or [None]
    return found


def _items(source: Source, target: Node) -> list[Node]:
    """What a loop, or a comprehension, gives to its target."""
    loop = source.parents.get(target)
    if not isinstance(loop, (cst.For, cst.CompFor)):
        return []
    if isinstance(loop.iter, cst.GeneratorExp):
        return [loop.iter.elt]
    return source.values.contents.of_loop(target) or []


def _started(source: Source, made: cst.Call) -> Node | None:
    """What a thread runs: its `target`, or the method `run` of a class of this file."""
    if source.origin(made.func) in _STARTERS:
        given = Arguments.of(made)
        return given.get("target", 1) or given.get("function", 1)
    binding = source.names.only_binding(made.func)
    home = binding.node if binding is not None else None
    if not isinstance(home, cst.ClassDef):
        return None
    if not any(source.origin(base.value) == "threading.Thread" for base in home.bases):
        return None
    method = methods_of(source, home).get("run")
    return method.node if method is not None else None


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
    function = target if isinstance(target, cst.FunctionDef) else _function(source, target)
    return function is not None and _calls_model(source, function)


def _function(source: Source, target: Node) -> cst.FunctionDef | None:
    """The function of this file that a name stands for, the method that `self.name` does, or what `partial` gets."""
    if isinstance(target, cst.Call) and source.origin(target.func) == "functools.partial":
        return _function(source, target.args[0].value) if target.args else None
    binding = source.names.only_binding(target)
    if binding is not None:
        return binding.node if isinstance(binding.node, cst.FunctionDef) else None
    if not isinstance(target, cst.Attribute):
        return None
    is_own = dotted(target.value) == "self"
    home: Node | None = source.values.object_class(target.value)
    if is_own:
        home = source.values.enclosing_class(target)
    if not isinstance(home, cst.ClassDef):
        return None
    method = methods_of(source, home).get(target.attr.value)
    return method.node if method is not None else None


def _calls_model(source: Source, node: Node) -> bool:
    """Whether code calls a model or multiplies matrices, and enters no region."""
    inside = list(walk(node))
    if any(
        source.origin(n) in AUTOCASTS for n in inside if isinstance(n, (cst.Name, cst.Attribute))
    ):
        return False
    calls = [n for n in inside if isinstance(n, cst.Call)]
    return any(_is_product(source, n) for n in inside) or any(_is_forward(source, n) for n in calls)


def _is_forward(source: Source, call: cst.Call) -> bool:
    """Whether a call runs a model: `model(x)`, `self.net.generate(x)`, or of what is a module by its class."""
    func = call.func
    if isinstance(func, cst.Attribute) and func.attr.value in _RUNS:
        func = func.value
    if not isinstance(func, (cst.Name, cst.Attribute)):
        return False
    last = func.value if isinstance(func, cst.Name) else func.attr.value
    if isinstance(last, str) and _MODELS.fullmatch(last):
        return True
    if called_forward(source, call) is not None:
        return True
    made = _moved(source.values.constructed(func))
    maker = source.origin(made.func) or "" if isinstance(made, cst.Call) else ""
    return _MAKERS.match(maker) is not None


def _is_product(source: Source, node: Node) -> bool:
    """`a @ b`, `torch.mm(a, b)`, and a layer."""
    if isinstance(node, cst.BinaryOperation):
        return isinstance(node.operator, cst.MatrixMultiply)
    if not isinstance(node, cst.Call):
        return False
    called = source.origin(node.func) or ""
    return bool(_PRODUCTS.fullmatch(called) or LAYERS.match(source.instance(node.func) or ""))


def _is_parallel(source: Source, func: Node) -> bool:
    """Whether a name holds a DataParallel, if only in one of its branches."""
    return any(
        isinstance(made, cst.Call) and source.origin(made.func) in _PARALLEL
        for made in _all_made(source, func, _DEEP)
    )


def _all_made(source: Source, node: Node, depth: int) -> Iterator[Node]:
    """The calls that make what a name may be, as far as they are seen: through other names, and what calls hand on."""
    for value, _ in source.values.sources(node):
        made = _moved(value)
        if isinstance(made, cst.Call):
            yield made
            for returned in source.values.returned(made):
                yield _moved(returned) or returned
        elif isinstance(made, (cst.Name, cst.Attribute)) and depth:
            yield from _all_made(source, made, depth - 1)


def _moved(node: Node | None) -> Node | None:
    """The module in `module.cuda()` and `module.to(device).train()`."""
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value not in _MOVES:
            break
        node = node.func.value
    return node


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
        other = torch.nn.DataParallel(model).cuda().module
        with torch.autocast("cuda", dtype=torch.bfloat16):
            other(x)
    """),
    Case(
        """
        import torch
        from torch import nn

        def run_epoch(model, batches):
            for x in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    model(x)

        net = nn.DataParallel(Net()).cuda()
        run_epoch(net.module, batches)
        """,
        note="It gets the model inside, which runs in the thread that calls it.",
    ),
    Case("""
        import threading
        import torch

        def work(x):
            model(x)

        threading.Thread(target=work).start()
        with torch.autocast("cuda", enabled=False):
            threading.Thread(target=work).start()
    """),
    Case(
        """
        import threading
        from multiprocessing import Pool
        import torch

        class Writer(threading.Thread):
            def run(self):
                self.path.write_text("x")

        def work(x):
            return x @ x

        with torch.autocast("cuda"):
            Writer().start()
            with Pool(2) as pool:
                pool.map(work, [1])
        """,
        note="It only writes, and processes never have the region.",
    ),
    Case("""
        import threading
        import torch

        def read(queue, file):
            queue.append(file.read())

        def run(files):
            queue = []
            threads = [threading.Thread(target=read, args=(queue, file)) for file in files]
            with torch.autocast("cuda"):
                for thread in threads:
                    thread.start()
    """),
    Case(
        """
        import asyncio
        import threading
        import torch
        from concurrent.futures import ProcessPoolExecutor
        from torchvision.transforms import Resize
        from transformers import AutoTokenizer

        resize = Resize(224)
        tokenizer = AutoTokenizer.from_pretrained("name")

        def work():
            results.append(tokenizer(resize(requests.get())))

        async def serve(x):
            thread = threading.Thread(target=work)
            with torch.autocast("cuda"):
                thread.start()
                await asyncio.to_thread(work)
                await asyncio.get_running_loop().run_in_executor(ProcessPoolExecutor(), model, x)
        """,
    ),
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
    Case("""
        import torch

        class Trainer:
            def __init__(self, net, device):
                self.net = torch.nn.DataParallel(net).to(device).train()

            def step(self, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return self.net(x).mean()
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
    Case(
        """
        import threading
        from multiprocessing.pool import ThreadPool
        import torch

        class Server:
            def work(self, x):
                self.result = torch.nn.functional.linear(x, self.weight)

            def run(self, x):
                def task(part):
                    return part @ self.weight

                with torch.autocast("cpu"):
                    threading.Thread(target=self.work, args=(x,)).start()
                    return ThreadPool(2).map(task, x)

        class Worker(threading.Thread):
            def run(self):
                self.result = torch.matmul(self.x, self.y)

        with torch.autocast("cuda"):
            worker = Worker()
            worker.start()
        """,
        count=3,
        note="Methods, functions inside, and threads of a class of their own.",
    ),
    Case(
        """
        import threading
        import torch

        def work(results, a, b):
            results.append(a @ b)

        def run(a, b):
            results = []
            with torch.autocast("cuda"):
                threads = [threading.Thread(target=work, args=(results, a, b)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        """,
        count=1,
    ),
    Case(
        """
        import asyncio
        import queue
        import threading
        import torch
        from torchvision.models import resnet50
        from transformers import AutoModelForCausalLM

        backbone = resnet50().cuda().eval()
        captioner = AutoModelForCausalLM.from_pretrained("name").cuda()

        def work():
            while (images := requests.get()) is not None:
                results.append(backbone(images))

        def describe(pixels):
            return captioner.generate(pixels)

        def serve(batches):
            threads = []
            with torch.autocast("cuda", dtype=torch.float16):
                for _ in range(2):
                    thread = threading.Thread(target=work, daemon=True)
                    thread.start()
                    threads.append(thread)
                for thread in threads:
                    thread.join()

        async def answer(pixels):
            loop = asyncio.get_running_loop()
            with torch.autocast("cuda", dtype=torch.float16):
                await loop.run_in_executor(None, describe, pixels)
                return await asyncio.to_thread(describe, pixels)
        """,
        count=3,
        note="Models of the module, by what makes them.",
    ),
    Case(
        """
        import threading
        import torch

        class Server:
            def __init__(self, encoder):
                self.encoder = encoder

            def work(self, x):
                self.results.append(self.encoder(x))

            def run(self, batches):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    threads = []
                    for x in batches:
                        t = threading.Thread(target=self.work, args=(x,))
                        threads.append(t)
                    for t in threads:
                        t.start()
                    for t in threads:
                        t.join()
        """,
        count=1,
        note="Threads that are put into a list one by one.",
    ),
    Case(
        """
        import torch
        from torch import nn

        def build(device):
            return nn.DataParallel(Net()).to(device)

        def run_epoch(model, batches):
            for x in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    model(x)

        def evaluate(net, batches):
            run_epoch(net, batches)

        class Server:
            def __init__(self, net):
                self.net = net

            @torch.autocast("cuda", dtype=torch.bfloat16)
            def answer(self, x):
                return self.net(x)

        model = nn.DataParallel(Net()).cuda()
        run_epoch(model, batches)
        evaluate(model, batches)
        server = Server(model)
        built = build("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            built(x)
        """,
        count=3,
        note="Functions and objects that are handed the replicated model.",
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
    words=(
        "autocast Thread",
        "autocast DataParallel",
        "autocast multiprocessing.dummy",
        "autocast to_thread",
        "autocast run_in_executor",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
