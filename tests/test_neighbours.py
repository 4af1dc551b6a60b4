"""What programs call beside plain operations gives PyTorch's bits: modules, composites, transforms, checkpoints."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import precast
from precast import engine
from precast._tree import map_tensors

POLICIES = ("torch", "default")
Step = Callable[[], Any]


@pytest.fixture(params=engine.ENGINES, autouse=True)
def _engine(request: pytest.FixtureRequest) -> Iterator[None]:
    with engine.use_engine(request.param):
        yield


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def _attention() -> Any:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    return module, lambda: module(x, x, x)


def _masked_attention() -> Any:
    module = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    q, k, v = torch.randn(5, 2, 8), torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    return module, lambda: module(q, k, v, attn_mask=mask)


def _encoder() -> Any:
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    return module, lambda: module(x)


def _transformer() -> Any:
    module = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    return module, lambda: module(x, x)


def _recurrent(kind: type[nn.RNNBase]) -> Callable[[], Any]:
    def make() -> Any:
        module = kind(4, 3, num_layers=2, bidirectional=True)
        x = torch.randn(5, 2, 4)
        return module, lambda: module(x)

    return make


def _packed() -> Any:
    module = nn.LSTM(4, 3, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 2]), batch_first=True)
    return module, lambda: module(packed)[0].data


def _cell(kind: type[nn.RNNCellBase]) -> Callable[[], Any]:
    def make() -> Any:
        module = kind(4, 4)
        x = torch.randn(3, 4)
        return module, lambda: module(x, module(x))

    return make


def _shared() -> Any:
    linear = nn.Linear(4, 4)
    module = nn.Sequential(linear, nn.LayerNorm(4), linear, nn.Softmax(-1), linear)
    x = torch.randn(3, 4)
    return module, lambda: module(x)


def _convolutions() -> Any:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)
    )
    x = torch.randn(2, 2, 6, 6)
    return module, lambda: module(x)


def _normed() -> Any:
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.orthogonal(nn.Linear(4, 4))
    )
    parametrize.register_parametrization(module[0], "bias", nn.Identity())
    x = torch.randn(3, 4)
    return module, lambda: module(x)


def _parametrized_once() -> Any:
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", Symmetric())
    x = torch.randn(3, 4)

    def step() -> Any:
        with parametrize.cached():
            return module(x) + module(2 * x)

    return module, step


def _composites() -> Any:
    module = nn.Bilinear(4, 4, 4)
    a, b, c = torch.randn(4, 4), torch.randn(4, 4), torch.randn(2, 4, 4)

    def step() -> Any:
        w = module.weight[0]
        return (
            torch.einsum("ij,jk,bkl->bil", a, w, c),
            torch.tensordot(a, module.weight, dims=([1], [2])),
            torch.linalg.multi_dot([a, w, b, w]),
            torch.kron(a, w),
            F.scaled_dot_product_attention(c, w.expand(2, 4, 4), c, is_causal=True),
            F.cosine_similarity(a @ w, b),
        )

    return module, step


def _sparse() -> Any:
    module = nn.Embedding(6, 4, sparse=True)
    linear = nn.Linear(4, 4)
    both = nn.ModuleList([module, linear])
    matrix, dense = torch.eye(3).to_sparse(), torch.randn(3, 4)
    rows = torch.tensor([1, 3, 1])
    return both, lambda: (linear(module(rows)), torch.sparse.mm(matrix, dense), matrix @ dense)


def _penalty() -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def step() -> Any:
        x = torch.ones(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return module(x).float().sum() + (gradient.norm(dim=1) - 1).square().sum()

    return module, step


def _transformed() -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4)

    def step() -> Any:
        parameters = dict(module.named_parameters())

        def loss(parameters: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(module, parameters, (x,)).float().sum()  # type: ignore[no-any-return]

        return (
            torch.func.grad(loss)(parameters, x),
            torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x),
            torch.vmap(module)(x),
            torch.func.jvp(lambda x: loss(parameters, x), (x,), (x,)),
        )

    return module, step


MAKERS = {
    "attention": _attention,
    "masked attention": _masked_attention,
    "encoder": _encoder,
    "transformer": _transformer,
    "LSTM": _recurrent(nn.LSTM),
    "GRU": _recurrent(nn.GRU),
    "RNN": _recurrent(nn.RNN),
    "packed": _packed,
    "GRU cell": _cell(nn.GRUCell),
    "RNN cell": _cell(nn.RNNCell),
    "shared": _shared,
    "convolutions": _convolutions,
    "normed": _normed,
    "parametrized": _parametrized_once,
    "composites": _composites,
    "sparse": _sparse,
    "penalty": _penalty,
    "transformed": _transformed,
}


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def outcome(region: Any, make: Callable[[], Any], *, inside: bool) -> list[Tensor]:
    """Results of two steps in one region, and the gradients of the second."""
    torch.manual_seed(3)
    module, step = make()
    with region:
        results = tensors_of(step()) + tensors_of(step())
        loss = torch.stack([t.float().square().sum() for t in results if t.requires_grad]).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    return [t.to_dense() if t.is_sparse else t for t in results + gradients]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is other.dtype
        assert not mine.isnan().any()
        assert torch.equal(mine, other)


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MAKERS)
def test_training_gives_pytorchs_bits(name: str, policy: str, inside: bool) -> None:
    ours = outcome(precast.autocast("cpu", policy=policy), MAKERS[name], inside=inside)
    assert_equal(ours, outcome(torch.autocast("cpu"), MAKERS[name], inside=inside))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"penalty", "transformed"}))
def test_inference_gives_pytorchs_bits(name: str, policy: str, mode: Any) -> None:
    """With the fast paths of attention and encoder layers, which look at autocast themselves."""

    def results(region: Any) -> list[Tensor]:
        torch.manual_seed(3)
        module, step = MAKERS[name]()
        module.eval()
        with region, mode():
            return [t.to_dense() for t in tensors_of(step()) + tensors_of(step())]

    assert_equal(results(precast.autocast("cpu", policy=policy)), results(torch.autocast("cpu")))


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_pytorchs_bits(reentrant: bool, policy: str, inside: bool) -> None:
    def make() -> Any:
        block, module = nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)

        def step() -> Tensor:
            y = x
            for _ in range(2):
                y = checkpoint(block, y, use_reentrant=reentrant)
            return module(y)  # type: ignore[no-any-return]

        return nn.ModuleList([block, module]), step

    ours = outcome(precast.autocast("cpu", policy=policy), make, inside=inside)
    assert_equal(ours, outcome(torch.autocast("cpu"), make, inside=inside))


def test_backward_in_another_thread() -> None:
    def gradient(region: Any) -> Tensor:
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        with region:
            loss = module(torch.randn(3, 4)).float().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert module.weight.grad is not None
        return module.weight.grad

    assert torch.equal(gradient(precast.autocast("cpu")), gradient(torch.autocast("cpu")))


def test_hooks_see_what_they_see_in_pytorchs_region() -> None:
    def seen(region: Any) -> list[tuple[str, torch.dtype]]:
        module, found = nn.Linear(4, 4), []
        module.register_forward_pre_hook(lambda m, a: found.append(("before", a[0].dtype)))
        module.register_forward_hook(lambda m, a, r: found.append(("after", r.dtype)))
        module.weight.register_hook(lambda g: found.append(("gradient", g.dtype)))
        module.weight.register_post_accumulate_grad_hook(
            lambda p: found.append(("accumulated", p.grad.dtype))
        )
        with region:
            result = module(torch.ones(2, 4))
            result.register_hook(lambda g: found.append(("result", g.dtype)))
            result.sum().backward()
        return found

    ours = seen(precast.autocast("cpu"))
    assert ours == seen(torch.autocast("cpu"))
    assert len(ours) == 5


@torch.library.custom_op("precast_neighbours::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return (x @ weight) * scale


def _backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient @ weight.mT * ctx.scale, x.mT @ gradient * ctx.scale, None


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


scaled_product.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize(
    ("rule", "dtype"), [("lower", torch.bfloat16), ("fp32", torch.float32), ("keep", None)]
)
def test_a_custom_operation_follows_its_rule(rule: str, dtype: torch.dtype | None) -> None:
    name = "precast_neighbours::scaled_product"
    policy = precast.Policy.load("torch").replace(name=rule, ops={name: rule})
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3).half()
    with precast.autocast("cpu", policy=policy):
        if dtype is None:
            with pytest.raises(RuntimeError, match="dtype"):
                scaled_product(x, weight, 2.0)
            return
        result = scaled_product(x, weight, 2.0)
        assert torch.equal(result, scaled_product(x, weight, 2.0))
    expected = (x.to(dtype) @ weight.detach().to(dtype)) * 2.0
    assert result.dtype is dtype
    assert torch.equal(result, expected)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (x.to(dtype).mT @ torch.ones(2, 3, dtype=dtype) * 2).float())


class Counting(TorchDispatchMode):
    """Counts what reaches the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["shared", "encoder", "LSTM", "normed"])
def test_a_dispatch_mode_sees_what_it_sees_in_pytorchs_region(name: str) -> None:
    def seen(region: Any) -> list[str]:
        torch.manual_seed(0)
        _, step = MAKERS[name]()
        with region, Counting() as mode:
            step()
            tensors_of(step())[0].float().sum().backward()
        return mode.counted

    assert seen(precast.autocast("cpu", policy="torch")) == seen(torch.autocast("cpu"))


def test_a_model_copied_inside_a_region_is_a_model_of_its_own() -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with precast.autocast("cpu"), torch.no_grad():
        before = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), before)
        twin.weight.zero_()
        twin.bias.zero_()
        assert twin(x).abs().sum() == 0
        assert torch.equal(model(x), before)
