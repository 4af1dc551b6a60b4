"""install() and torch.compile: programs of PyTorch's compute the same, compiled or not, installed or not."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import precast
from tests.attack.scenarios import scenario
from tests.attack.tools import DTYPES, equal, net, same_state, together, trained

torch_autocast = torch.autocast
pytorchs_scaler = torch.amp.GradScaler


def _training(dtype: torch.dtype, attached: bool) -> Callable[[], None]:
    def run() -> None:
        batches = [torch.randn(3, 2, 8) for _ in range(4)]
        mine = net()
        theirs = copy.deepcopy(mine)
        optimizer = torch.optim.Adam(theirs.parameters(), 0.01)
        expected = trained(theirs, optimizer, lambda: torch.autocast("cpu", dtype), batches)
        optimizer = torch.optim.Adam(mine.parameters(), 0.01)
        with precast.install():
            if attached:
                precast.attach(mine)
            result = trained(mine, optimizer, lambda: torch.autocast("cpu", dtype), batches)
        equal(result, expected)
        same_state(mine, theirs)

    return run


for _of, _dtype in DTYPES.items():
    for _attached in (False, True):
        scenario(
            "install",
            f"a training in {_of} computes the same bits with and without install()"
            f"{', attached' if _attached else ''}",
            "plain PyTorch",
            name=f"a training in {_of} under install{', attached' if _attached else ''}",
        )(_training(_dtype, _attached))


@scenario(
    "install",
    "uninstall gives back every name, and keeps what another library patched since",
    "by hand",
)
def patches_of_others() -> None:
    before = torch.amp.GradScaler, torch.autocast.__enter__, torch.amp.custom_fwd
    installation = precast.install("default")

    class Patched:
        pass

    torch.amp.GradScaler = Patched  # type: ignore[misc,assignment]
    installation.uninstall()
    assert torch.amp.GradScaler is Patched
    torch.amp.GradScaler = before[0]  # type: ignore[misc]
    assert (torch.amp.GradScaler, torch.autocast.__enter__, torch.amp.custom_fwd) == before


@scenario(
    "install", "installations end in any order, and the last that is left is in force", "by hand"
)
def installations_in_any_order() -> None:
    rules = {"fp32": torch.float32, "lower": torch.bfloat16, "keep": torch.float32}
    for _ in range(5):
        live = [
            (
                precast.install(
                    precast.Policy.load("torch").replace(name=f"{rule}{n}", ops={"matmul": rule})
                ),
                rule,
            )
            for n, rule in enumerate(random.choices(list(rules), k=4))
        ]
        while live:
            with torch.autocast("cpu"):
                assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is rules[live[-1][1]]
            live.pop(random.randrange(len(live)))[0].__exit__()
        with torch.autocast("cpu"):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.bfloat16


@scenario("install", "a scaler that was pickled before install() steps under it", "plain PyTorch")
def scalers_from_before() -> None:
    old = pytorchs_scaler("cpu", init_scale=64.0)
    old.scale(torch.ones(1))
    data = pickle.dumps(old)
    with precast.install():
        scaler = pickle.loads(data)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.5)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 64.0
        assert weight.item() == 0.5


@scenario(
    "install", "a scaler that was made before install() can be pickled under it", "plain PyTorch"
)
def scalers_made_before() -> None:
    old = pytorchs_scaler("cpu", init_scale=64.0)
    old.scale(torch.ones(1))
    with precast.install():
        assert pickle.loads(pickle.dumps(old)).get_scale() == 64.0


@scenario("install", "warnings of deprecated names have PyTorch's words", "plain PyTorch")
def words_of_warnings() -> None:
    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.amp.GradScaler(enabled=False)
            torch.cpu.amp.autocast(enabled=False)
            torch.cuda.amp.autocast(enabled=False)
        return [str(w.message) for w in caught if issubclass(w.category, FutureWarning)]

    expected = said()
    with precast.install():
        assert said() == expected


@scenario("install", "threads of PyTorch's regions follow what is installed", "by hand")
def threads_under_install() -> None:
    policy = precast.Policy.load("torch").replace(ops={"matmul": "fp32"})

    def run() -> None:
        for _ in range(50):
            with torch.autocast("cpu"):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

    with precast.install(policy):
        together(*[run] * 4)


@scenario(
    "install",
    "custom_fwd and custom_bwd compute the same with and without install()",
    "plain PyTorch",
)
def custom_functions() -> None:
    def gradients() -> list[Tensor]:
        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cpu")
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return 2 * g * ctx.saved_tensors[0]

        x = torch.full((2, 2), 1.1, requires_grad=True)
        with torch.autocast("cpu"):
            out = Square.apply(x @ x)
        out.sum().backward()
        return [out.detach(), x.grad]  # type: ignore[list-item]

    expected = gradients()
    with precast.install():
        equal(gradients(), expected)


# --- torch.compile ---


def _compiled(backend: str, attached: bool) -> Callable[[], None]:
    def run() -> None:
        model = net()
        x = torch.randn(2, 2, 8)
        results = []
        for region in (torch.autocast, precast.autocast):
            mine = copy.deepcopy(model)
            if attached and region is precast.autocast:
                precast.attach(mine)
            call = torch.compile(mine, backend=backend)
            for _ in range(2):
                mine.zero_grad()
                with region("cpu"):
                    out = call(x)
                out.float().square().sum().backward()
            results.append([out.detach(), *[p.grad for p in mine.parameters()]])
        equal(results[1], results[0])

    return run


for _backend in ("eager", "aot_eager"):
    for _attached in (False, True):
        scenario(
            "compile",
            f"{'an attached' if _attached else 'a'} model compiled with {_backend} gives the bits that it gives "
            "compiled with torch.autocast around",
            "plain PyTorch",
            name=f"compiled with {_backend}{', attached' if _attached else ''}",
            quick=_backend == "eager",
        )(_compiled(_backend, _attached))


@scenario(
    "compile", "a compiled function runs the policy of each region that it is called in", "by hand"
)
def policies_of_compiled_functions() -> None:
    compiled = torch.compile(lambda a: a @ a, backend="eager")
    rules = {"fp32": torch.float32, "lower": torch.bfloat16}
    policies = {rule: precast.Policy.load("torch").replace(ops={"matmul": rule}) for rule in rules}
    for rule in random.choices(list(rules), k=10):
        with precast.autocast("cpu", policy=policies[rule]):
            assert compiled(torch.ones(2, 2)).dtype is rules[rule]


@scenario(
    "compile", "a compiled function is right when its policy went and an equal one came", "by hand"
)
def policies_that_went() -> None:
    import gc

    compiled = torch.compile(lambda a: a @ a, backend="eager")
    for number in range(6):
        rule = ("fp32", "lower")[number % 2]
        policy = precast.Policy.load("torch").replace(ops={"matmul": rule})
        with precast.autocast("cpu", policy=policy):
            result = compiled(torch.ones(2, 2)).dtype
        assert result is (torch.float32, torch.bfloat16)[number % 2]
        del policy
        gc.collect()


@scenario(
    "compile",
    "compiled autograd compiles beside an attachment of an unrelated model",
    "plain PyTorch",
    quick=False,
)
def compiled_autograd() -> None:
    precast.attach(nn.Linear(2, 2))
    layer = nn.Linear(3, 3)
    x = torch.ones(1, 3)

    def step() -> None:
        layer(x).sum().backward()

    step()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")()
    equal(layer.weight.grad, expected)


@scenario(
    "compile", "a region inside a compiled function is a region when the graph runs", "by hand"
)
def regions_in_graphs() -> None:
    weight = torch.randn(3, 3)

    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        with precast.autocast("cpu", dtype=torch.float16):
            inside = F.linear(x, weight)
        return inside, F.linear(x, weight)

    inside, outside = torch.compile(compute, backend="aot_eager")(torch.ones(2, 3))
    assert (inside.dtype, outside.dtype) == (torch.float16, torch.float32)


@scenario("compile", "a generator's rule holds in a compiled model", "by hand")
def generators_in_compiled_models() -> None:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            for _ in range(2):
                yield self.inner(x).dtype

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = Generates(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return list(self.steps(x)), self.head(x).dtype

    model = Model()
    precast.attach(model, precast.Policy.load("torch").replace(modules={"steps": "fp32"}))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with precast.autocast("cpu"):
            assert compiled(torch.ones(1, 2)) == ([torch.float32] * 2, torch.bfloat16)
