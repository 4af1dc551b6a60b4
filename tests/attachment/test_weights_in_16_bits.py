"""Rules for modules whose weights are stored in 16 bits: the module computes as its float32 copy does, to the bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import precast
from precast import Policy
from precast._internal.pytree import map_tensors, tensors_in
from precast.errors import PolicyError

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def ruled(rules: dict[str, object], base: str = "default") -> Policy:
    return Policy.load(base).replace(modules=rules)


@pytest.fixture(autouse=True)
def _no_function_mode_is_left() -> Iterator[None]:
    yield
    assert not torch.overrides._get_current_function_mode_stack()


class Everything(nn.Module):
    """Parameters and buffers in functions that take nothing else, and written in every way that PyTorch has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8))
        self.several = nn.ParameterList([torch.randn(8) for _ in range(3)])
        self.linear = nn.Linear(8, 8)
        for name in ("mean", "count", "replaced", "last"):
            self.register_buffer(name, torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mean *= 0.9
        self.mean += 0.1 * x.detach().mean(0)
        self.count.data.mul_(0.3)
        self.last[0] = 7
        torch.exp(self.last, out=self.replaced)
        y = (x * self.a.exp()).to(self.a.dtype) + torch.stack(list(self.several)).sum(0)
        return y @ self.linear.weight.t() + self.a.norm() + self.mean + self.count, self.a


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight)  # type: ignore[no-any-return]


class Checkpointed(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        call: Any = super().forward
        x = x if x.requires_grad else x.requires_grad_()
        return checkpoint(call, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


ROWS, STEPS, TOKENS = (2, 8), (3, 2, 8), torch.tensor([[1, 2], [0, 4]])
Made = tuple[Callable[[], nn.Module], tuple[Any, ...]]
LAYERS: dict[str, Made] = {
    "Linear": (lambda: nn.Linear(8, 4), (ROWS,)),
    "LayerNorm": (lambda: nn.LayerNorm(8), (ROWS,)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (ROWS,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (ROWS,)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), (ROWS,)),
    "BatchNorm1d, evaluated": (lambda: nn.BatchNorm1d(8).eval(), (ROWS,)),
    "InstanceNorm1d": (
        lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
        ((2, 8, 4),),
    ),
    "Embedding": (lambda: nn.Embedding(5, 4), (TOKENS,)),
    "Embedding with max_norm": (lambda: nn.Embedding(5, 4, max_norm=0.5), (TOKENS,)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 4), (TOKENS,)),
    "RNN": (lambda: nn.RNN(8, 4), (STEPS,)),
    "LSTM": (lambda: nn.LSTM(8, 4, 2, bidirectional=True), (STEPS,)),
    "GRU": (lambda: nn.GRU(8, 4), (STEPS,)),
    "RNNCell": (lambda: nn.RNNCell(8, 4), (ROWS,)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 4), (ROWS,)),
    "GRUCell": (lambda: nn.GRUCell(8, 4), (ROWS,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), (STEPS,) * 3),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        (STEPS,),
    ),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        (STEPS,) * 2,
    ),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3), (ROWS,) * 2),
    "PReLU": (lambda: nn.PReLU(8), (ROWS,)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), (ROWS,)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), (ROWS,)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), (ROWS,)),
    "a module that does everything": (Everything, (ROWS,)),
    "a custom function": (Custom, (ROWS,)),
    "a checkpoint": (lambda: Checkpointed(False), (ROWS,)),
    "a reentrant checkpoint": (lambda: Checkpointed(True), (ROWS,)),
} | {
    f"{kind}{d}d": (lambda kind=kind, d=d: getattr(nn, f"{kind}{d}d")(3, 4, 2), ((2, 3, *[4] * d),))  # type: ignore[misc]
    for kind in ("Conv", "ConvTranspose")
    for d in (1, 2, 3)
}


def _loss(result: Any) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors_in(result) if t.requires_grad]).sum()


@pytest.mark.parametrize("stored", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_float32_rule_computes_what_the_float32_module_does(
    layer: str, stored: torch.dtype
) -> None:
    make, shapes = LAYERS[layer]
    module = make().to(stored)
    full = copy.deepcopy(module).float()
    inputs = [s if isinstance(s, Tensor) else torch.randn(s).to(stored) for s in shapes]
    floats = [t if t is TOKENS else t.float() for t in inputs]
    model = nn.Sequential(module)
    with precast.attach(model, ruled({"0": "fp32"})):
        with precast.autocast("cpu", dtype=BRAIN):
            result = module(*inputs)
        expected = full(*floats)
        for one, other in zip(tensors_in(result), tensors_in(expected), strict=True):
            assert one.dtype is FULL
            assert torch.equal(one, other)
        _loss(result).backward()
    _loss(expected).backward()
    for (name, parameter), reference in zip(
        module.named_parameters(), full.parameters(), strict=True
    ):
        assert parameter.dtype is stored, name
        if reference.grad is not None:
            assert parameter.grad is not None
            assert parameter.grad.dtype is stored, name
            assert torch.equal(parameter.grad, reference.grad.to(stored)), name
        assert torch.equal(parameter, reference.to(stored)), name
    for (name, buffer), other in zip(module.named_buffers(), full.buffers(), strict=True):
        assert torch.equal(buffer, other.to(buffer.dtype)), name
        assert buffer.dtype is (stored if other.is_floating_point() else other.dtype), name


class Language(nn.Module):
    """A model whose output layer is its embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.middle = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.middle(self.embedding(tokens))))  # type: ignore[no-any-return]


def by_hand(model: Language, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BRAIN):
        hidden = model.norm(model.middle(model.embedding(tokens)))
    return F.linear(hidden.float(), model.lm_head.weight.float())


WORDS = torch.randint(50, (2, 5), generator=torch.Generator().manual_seed(0))
HEAD = {"lm_head": "fp32"}


@pytest.mark.parametrize("policy", ["default", "torch", "lean"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_last_layer_of_a_bfloat16_model_runs_in_float32(policy: str, tied: bool) -> None:
    model = Language(tied=tied).to(BRAIN)
    expected = by_hand(model, WORDS)
    expected.square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with precast.attach(model, ruled(HEAD, policy)):
        with torch.autocast("cpu", dtype=BRAIN):
            result = model(WORDS)
        assert torch.equal(result, expected)
        result.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("rule", ["float16", "bfloat16"])
def test_a_rule_for_the_other_16_bit_dtype(rule: str) -> None:
    """The weights act as the float32 values that they have, which the region casts to its dtype."""
    dtype = getattr(torch, rule)
    stored = HALF if dtype is BRAIN else BRAIN
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).to(stored)
    full = copy.deepcopy(model).float()
    x = torch.randn(2, 8)
    with precast.attach(model, ruled({"": rule})), precast.autocast("cpu", dtype=stored):
        result = model(x)
    with precast.autocast("cpu", dtype=dtype):
        expected = full(x.to(dtype))
    assert result.dtype is expected.dtype is dtype
    assert torch.equal(result, expected)
    for each in (result, expected):
        each.float().square().sum().backward()
    for parameter, reference in zip(model.parameters(), full.parameters(), strict=True):
        assert parameter.grad is not None
        assert reference.grad is not None
        assert torch.equal(parameter.grad, reference.grad.to(stored))


def test_the_innermost_rule_decides() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Linear(4, 4)).to(BRAIN)
    x = torch.randn(2, 4, dtype=BRAIN)
    rules = {"0": "fp32", "0.1": "lower", "0.2": "float16"}
    with precast.attach(model, ruled(rules)), precast.autocast("cpu", dtype=BRAIN):
        result = model(x)
    layers: Any = [inner[0], inner[1], inner[2], model[1]]
    expected = x
    for layer, dtype in zip(layers, (FULL, BRAIN, HALF, BRAIN), strict=True):
        weights = [p.float().to(dtype) for p in layer.parameters()]
        expected = F.linear(expected.float().to(dtype), *weights)
    assert torch.equal(result, expected)


def test_threads_do_not_share_casts() -> None:
    model = Language().to(BRAIN)
    results: dict[bool, Tensor] = {}
    both = threading.Barrier(2)

    def run(records: bool) -> None:
        for _ in range(20):
            both.wait()
            with torch.set_grad_enabled(records), precast.autocast("cpu", dtype=BRAIN):
                results[records] = model(WORDS)

    with precast.attach(model, ruled(HEAD)):
        threads = [threading.Thread(target=run, args=(records,)) for records in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results[True].requires_grad
    assert not results[False].requires_grad
    assert torch.equal(results[True], results[False])


def test_a_transform_of_the_parameters() -> None:
    model = Language().to(BRAIN)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        with precast.autocast("cpu", dtype=BRAIN):
            result: Tensor = torch.func.functional_call(model, parameters, (WORDS,))
        return result.square().mean()

    with precast.attach(model, ruled(HEAD)):
        gradients = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})
        loss(dict(model.named_parameters())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name])


def test_a_write_that_pytorch_refuses_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(2)
            return super().forward(x)

    model = nn.Sequential(Writes(4, 4)).to(BRAIN)
    with (
        precast.attach(model, ruled({"0": "fp32"})),
        precast.autocast("cpu", dtype=BRAIN),
        pytest.raises(RuntimeError, match="a leaf Variable that requires grad"),
    ):
        model(torch.ones(1, 4))


def test_scripted_weights_are_refused_with_rule_module_and_cure() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4).to(BRAIN))
    model = nn.Sequential(scripted)
    with (
        precast.attach(model, ruled({"0": "fp32"})),
        precast.autocast("cpu", dtype=BRAIN),
        pytest.raises(
            PolicyError, match=r"'0' = fp32 for the module '0': .* Linear .*module.float\(\)"
        ),
    ):
        model(torch.ones(1, 4))


def test_an_error_about_dtypes_says_what_gives_float32_weights() -> None:
    class Foreign(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():  # as a C++ extension does
                return F.linear(x, self.weight)

    model = nn.Sequential(Foreign(4, 4)).to(BRAIN)
    with precast.attach(model, ruled({"0": "fp32"})), precast.autocast("cpu", dtype=BRAIN):
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(1, 4))
    assert "[modules] '0' = fp32 for the module '0'" in error.value.__notes__[0]


def test_an_error_of_a_layer_that_the_rule_does_not_concern_says_which_rule_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(BRAIN)
    x = torch.ones(2, 4)
    with (
        precast.attach(model, ruled({"": "lower_out_fp32"})),
        precast.autocast("cpu", dtype=BRAIN),
        pytest.raises(RuntimeError, match="mixed dtype") as error,
    ):
        model(x)
    assert error.value.__notes__ == [
        "precast: [modules] '' = lower_out_fp32 for the module '' is a rule for operations: other layers use 16-bit "
        "weights as they are stored. Add the rule fp32 for the layer that failed, or call module.float() before attach."
    ]
    with (
        precast.attach(model, ruled({"": "lower_out_fp32", "1": "fp32"})),
        precast.autocast("cpu", dtype=BRAIN),
    ):
        assert model(x).isfinite().all()


def test_an_error_of_a_float32_model_gets_no_advice_on_16_bit_weights() -> None:
    class Failing(nn.Linear):
        def forward(self, _: Tensor) -> Tensor:
            raise RuntimeError("expected another dtype")

    model = Failing(4, 4)
    with (
        precast.attach(model, ruled({"": "lower_out_fp32"})),
        precast.autocast("cpu", dtype=BRAIN),
        pytest.raises(RuntimeError) as error,
    ):
        model(torch.ones(2, 4))
    assert not getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(backend: str) -> None:
    model = Language().to(BRAIN)
    with precast.attach(model, ruled({**HEAD, "norm": "fp32"})):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with precast.autocast("cpu", dtype=BRAIN):
            expected, result = model(WORDS), compiled(WORDS)
        assert torch.equal(result, expected)
        result.square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BRAIN}


def test_a_compiled_model_with_buffers_that_are_written() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).to(BRAIN)
    other = copy.deepcopy(model)
    x = torch.randn(3, 8, dtype=BRAIN)
    with precast.attach(model, ruled({"0": "fp32"})), precast.attach(other, ruled({"0": "fp32"})):
        compiled = torch.compile(model, backend="aot_eager")
        with precast.autocast("cpu", dtype=BRAIN):
            result, expected = compiled(x), other(x)
    assert torch.equal(result, expected)
    result.float().sum().backward()
    for one, reference in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, reference)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model(tied: bool) -> None:
    model = Language(tied=tied).to(BRAIN).eval()
    converted = precast.convert(model, ruled(HEAD), BRAIN, example=WORDS)
    with torch.inference_mode():
        assert torch.equal(converted(WORDS), by_hand(model, WORDS))
        assert torch.equal(copy.deepcopy(converted)(WORDS), by_hand(model, WORDS))


def test_an_exported_model() -> None:
    model = Language().to(BRAIN).eval()
    program = precast.export(model, (WORDS,), policy=ruled(HEAD), dtype=BRAIN)
    assert torch.equal(program.module()(WORDS), by_hand(model, WORDS))


def test_a_float32_model_gets_no_function_mode() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.overrides._get_current_function_mode_stack()
            return super().forward(x)

    model = nn.Sequential(Asks(4, 4))
    with precast.attach(model, ruled({"0": "fp32"})), precast.autocast("cpu"):
        assert map_tensors(model(torch.ones(1, 4)), lambda t: t).dtype is FULL
