"""convert: the model of a region, to the bit, with its weights stored as the policy uses them."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import precast
from precast.errors import ConversionError, PrecastWarning
from precast.shipping.function_calls import is_same
from tests.support.processor import runs_lstm_in_bfloat16

BF16, F16 = torch.bfloat16, torch.float16


class Tied(nn.Module):
    """A weight that is an embedding and a projection, one that two layers share, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.norm = nn.LayerNorm(16)
        self.unused = nn.Linear(16, 16)
        self.register_buffer("mask", torch.rand(16, 16))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.two(F.gelu(self.one(self.norm(self.embed(tokens)))))
        hidden = hidden @ self.mask
        self.count += 1
        return F.linear(hidden, self.embed.weight)


class Attention(nn.Module):
    """PyTorch's attention, called so that it takes its slow path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[:3], x[:3])[0]


class Recurrent(nn.Module):
    """An LSTM, or an RNN where PyTorch has no bfloat16 kernel for it, and a GRU in a row."""

    def __init__(self) -> None:
        super().__init__()
        recurrent = nn.LSTM if runs_lstm_in_bfloat16() else nn.RNN
        self.lstm, self.gru = recurrent(16, 16, 2, batch_first=True), nn.GRU(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


class Views(nn.Module):
    """Weights that are transposed, cut, and contracted by `einsum`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 24))
        self.c = nn.Parameter(torch.randn(2, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.a.t()
        x = torch.matmul(x, self.b[:, :16])  # not dense
        first, second = self.b.chunk(3, dim=1)[:2]
        return torch.einsum("bti,hij->bthj", x, self.c).flatten(2) + x @ torch.cat(
            [first, second], 1
        )


def _sequence() -> Tensor:
    return torch.randn(2, 5, 16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied": (Tied, lambda: torch.randint(11, (3, 5))),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
        ),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose1d(3, 8, 3), nn.GroupNorm(2, 8)),
        lambda: torch.randn(2, 3, 8),
    ),
    "attention": (Attention, _sequence),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        _sequence,
    ),
    "recurrent": (Recurrent, _sequence),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(16, 16)), _sequence),
    "views": (Views, _sequence),
}
POLICIES: dict[str, Any] = {
    "torch": "torch",
    "default": "default",
    "lean": "lean",
    "cuda's": precast.Policy.load("default").retarget("cpu", like="cuda"),
    "module rules": precast.Policy.load("default").replace(
        modules={"one": "fp32", "3": "float16", "**.linear1": "float16", "attention": "fp32"}
    ),
}


def _model(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    make, example = MODELS[name]
    return make().eval(), example(), example()


def _in_region(model: nn.Module, x: Tensor, policy: Any, dtype: torch.dtype) -> Any:
    model = copy.deepcopy(model)
    with precast.attach(model, policy, hold=False), precast.autocast("cpu", dtype, policy=policy):
        return model(x)


@pytest.mark.filterwarnings("ignore:.*matches no module")
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_model_in_a_region(
    name: str, policy: str, dtype: torch.dtype
) -> None:
    model, example, other = _model(name)
    is_lstm = name == "recurrent" and isinstance(model.lstm, nn.LSTM)
    if is_lstm and dtype is F16 and policy != "cuda's":
        with torch.no_grad(), pytest.raises(RuntimeError, match="could not create a primitive"):
            _in_region(model, example, POLICIES[policy], dtype)  # PyTorch itself cannot
        return
    converted = precast.convert(model, POLICIES[policy], dtype, example=example)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected = _in_region(model, other, POLICIES[policy], dtype)
            assert is_same(converted(other), expected)
            assert is_same(converted(other), expected)
    low = [p for p in converted.parameters() if p.dtype in (BF16, F16)]
    assert low or policy == "module rules" or name == "encoder", precast.conversion_report(
        converted
    )


def test_the_report_says_what_became_of_each_weight_and_why() -> None:
    model, example, _ = _model("tied")
    report = precast.conversion_report(precast.convert(model, example=example))
    found = {w.name: (w.dtype, w.why, w.low) for w in report.weights}
    assert found == {
        "embed.weight": ("float32", "used in float32 by embedding", "bfloat16"),
        "one.weight": ("bfloat16", "used in bfloat16 only", None),
        "one.bias": ("bfloat16", "used in bfloat16 only", None),
        "two.bias": ("bfloat16", "used in bfloat16 only", None),
        "norm.weight": ("float32", "used in float32 by native_layer_norm", None),
        "norm.bias": ("float32", "used in float32 by native_layer_norm", None),
        "unused.weight": ("float32", "the example did not use it", None),
        "unused.bias": ("float32", "the example did not use it", None),
        "mask": ("bfloat16", "used in bfloat16 only", None),
        "count": ("float32", found["count"][1], None),
    }
    tensors = {id(p): p for p in model.parameters()}.values()
    assert report.bytes_before == sum(t.nbytes for t in (*tensors, *model.buffers()))
    assert report.bytes == report.bytes_before - 2 * (16 * 16 * 2 + 16 * 2)
    text = str(report)
    assert (
        "embed.weight: float32, 704 bytes; used in float32 by embedding; cast to bfloat16" in text
    )


def test_the_model_is_left_as_it_was() -> None:
    model, example, _ = _model("tied")
    before = {
        name: (id(p), type(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()
    }
    kind, numbers = type(model), copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    precast.convert(model, example=example)
    assert {
        n: (id(p), type(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()
    } == before
    assert type(model) is kind
    assert all(torch.equal(v, numbers[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model._forward_pre_hooks


def test_what_is_converted_in_place_is_the_model_itself_and_frees_what_it_had() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()
    x, kept = torch.randn(2, 64), model[1].weight
    expected = _in_region(model, x, "default", BF16)
    converted = precast.convert(model, example=x, in_place=True)
    assert converted is model
    assert model[1].weight is kept
    assert kept.untyped_storage().nbytes() == 64 * 64 * 2
    assert is_same(model(x), expected)


def test_tied_weights_stay_tied_and_shared_memory_stays_shared() -> None:
    for in_place in (False, True):
        model, example, other = _model("tied")
        model.one.bias.data = model.two.bias.data
        expected = _in_region(model, other, "default", BF16)
        converted: Any = precast.convert(model, example=example, in_place=in_place)
        assert converted.one.weight is converted.two.weight
        assert converted.one.bias.data_ptr() == converted.two.bias.data_ptr()
        assert is_same(converted(other), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_converted_model_is_one(how: str) -> None:
    model, example, other = _model("tied")
    policy = precast.Policy.load("default").replace(modules={"one": "fp32"})
    converted = precast.convert(model, policy, example=example)
    if how == "deepcopy":
        again = copy.deepcopy(converted)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(converted))
    else:
        file = io.BytesIO()
        torch.save(converted, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert is_same(again(other), converted(other))
    assert type(again) is type(converted)
    assert again.two.weight is again.one.weight
    assert again.mask.dtype is BF16
    assert again.mask.data_ptr() != converted.mask.data_ptr()


def test_the_state_dict_has_the_same_keys_and_plain_tensors_and_loads_strictly() -> None:
    model, example, other = _model("tied")
    converted = precast.convert(model, example=example)
    state = converted.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(type(value) is Tensor for value in state.values())
    assert {str(value.dtype) for value in state.values()} == {"torch.bfloat16", "torch.float32"}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.manual_seed(5)
    fresh = precast.convert(Tied().eval(), example=example)
    assert not is_same(fresh(other), converted(other))
    fresh.load_state_dict(torch.load(file))
    assert is_same(fresh(other), converted(other))
    fresh.load_state_dict(
        model.state_dict()
    )  # the float32 numbers are rounded as a region rounds them
    assert is_same(fresh(other), converted(other))


class Branches(nn.Module):
    """A weight that a branch, which the input chooses, uses in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x) * self.linear.weight.sum()
        return self.linear(x)


def test_a_path_that_needs_what_was_rounded_is_an_error_and_no_wrong_number() -> None:
    model, x = Branches().eval(), torch.ones(2, 8)
    converted = precast.convert(model, example=-x)
    assert is_same(converted(-x), _in_region(model, -x, "default", BF16))
    with pytest.raises(
        ConversionError, match=r"stores 'linear\.weight' in torch\.bfloat16, and sum"
    ):
        converted(x)
    assert is_same(converted(-x), _in_region(model, -x, "default", BF16))
    both = precast.convert(model, example=[-x, x])
    assert is_same(both(x), _in_region(model, x, "default", BF16))
    assert both.linear.weight.dtype is torch.float32
    assert both.linear.bias.dtype is BF16


class Asks(nn.Module):
    """Computes in the dtype of a weight, as libraries do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.how == "dtype":
            x = x.to(weight.dtype) * (1 / 3)
        elif self.how == "type_as":
            x = x.type_as(weight) * (1 / 3)
        elif self.how == "to":
            x = x.to(weight) * (1 / 3)
        elif self.how == "new":
            x = x + weight.new_full((1,), 1 / 3)
        elif self.how == "finfo":
            x = x.clamp(max=torch.finfo(weight.dtype).max) + torch.finfo(weight.dtype).eps
        elif self.how == "size":
            x = x * weight.element_size()
        return self.linear(x) if self.how != "island" else self._island(x)

    def _island(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x)


@pytest.mark.parametrize("how", ["dtype", "type_as", "to", "new", "finfo", "size", "island"])
def test_a_model_that_asks_for_the_dtype_of_a_weight_gets_the_answer_of_a_region(how: str) -> None:
    torch.manual_seed(0)
    model, x = Asks(how).eval(), torch.randn(3, 8)
    converted = precast.convert(model, example=x)
    assert is_same(converted(x), _in_region(model, x, "default", BF16))
    is_told = how in ("dtype", "finfo")
    assert converted.linear.weight.dtype is (BF16 if is_told else torch.float32)


@pytest.mark.parametrize("how", ["type_as", "to", "size"])
def test_what_the_examples_did_not_show_gets_the_answer_too(how: str) -> None:
    model: Any = Asks("").eval()
    x = torch.randn(3, 8)
    converted: Any = precast.convert(model, example=x)
    converted.how = model.how = how
    assert is_same(converted(x), _in_region(model, x, "default", BF16))


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1, bias=False)]
)
@pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
def test_an_island_that_the_example_did_not_show_is_refused(region: Any, layer: nn.Module) -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.is_open = layer, False

        def forward(self, x: Tensor) -> Tensor:
            with region("cpu", enabled=not self.is_open):
                return self.layer(x)

    x = torch.randn(2, 8, 3) if isinstance(layer, nn.Conv1d) else torch.randn(2, 8)
    converted: Any = precast.convert(Island().eval(), example=x)
    converted(x)
    converted.is_open = True
    with pytest.raises(ConversionError, match=r"'layer\.(weight|bias)' in torch\.bfloat16"):
        converted(x)


@pytest.mark.parametrize("how", ["new", "island"])
def test_what_the_examples_did_not_show_is_refused_where_numbers_are_lost(how: str) -> None:
    model, x = Asks("").eval(), torch.randn(3, 8)
    converted: Any = precast.convert(model, example=x)
    converted.how = how
    with pytest.raises(ConversionError, match=r"'linear\.(weight|bias)'"):
        converted(x)


def test_float64_inputs_are_promoted_with_the_weights_as_they_were() -> None:
    model = nn.Linear(8, 8).eval()
    x = torch.randn(2, 8)
    converted = precast.convert(model, example=x)
    with pytest.raises(ConversionError, match=r"'weight'|'bias'"):
        converted(x.double())


def test_a_region_around_changes_nothing_and_one_that_disagrees_is_told() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    converted = precast.convert(model, example=x)
    expected = _in_region(model, x, "default", BF16)
    with precast.autocast("cpu", BF16):
        assert is_same(converted(x), expected)
    with precast.autocast("cpu", enabled=False):
        assert is_same(converted(x), expected)
    with (
        torch.autocast("cpu", F16),
        pytest.warns(PrecastWarning, match=r"surrounding region has torch\.float16"),
    ):
        assert is_same(converted(x), expected)
    with torch.autocast("cpu", F16):  # it is told once
        assert is_same(converted(x), expected)


def test_a_part_of_a_converted_model_runs_in_a_region_of_the_program() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    x = torch.randn(2, 8)
    converted: Any = precast.convert(model, example=x)
    with precast.autocast("cpu"):
        assert is_same(converted[0](x), _in_region(model[0], x, "default", BF16))
    with precast.autocast("cpu"), pytest.raises(ConversionError, match=r"'0\.weight'"):
        converted[0].weight + 1
    assert (converted[0].weight + 1).dtype is BF16


@pytest.mark.parametrize("how", ["data", "set_", "copy_", "transpose_", "parameter", "load"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_layer_computes_with_the_memory_that_its_weight_has_now(kind: str, how: str) -> None:
    layer: nn.Module = nn.Linear(8, 8) if kind == "linear" else nn.Conv2d(8, 8, 1)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    x = torch.randn(2, 8) if kind == "linear" else torch.randn(2, 8, 3, 3)
    converted: Any = precast.convert(model, example=x)
    before = converted(x)
    weight = converted[0].weight
    with torch.no_grad():
        other = torch.randn_like(weight, dtype=BF16)
        if how == "data":
            weight.data = other
        elif how == "set_":
            weight.set_(other)
        elif how == "copy_":
            weight.copy_(other)
        elif how == "transpose_":
            other = weight.detach().clone().transpose(0, 1)
            weight.transpose_(0, 1)
        elif how == "parameter":
            converted[0].weight = nn.Parameter(other, requires_grad=False)
        else:
            converted.load_state_dict({**converted.state_dict(), "0.weight": other})
        layer.weight.copy_(other)
    after = converted(x)
    assert is_same(after, _in_region(model, x, "default", BF16))
    assert not torch.equal(after, before)


def test_methods_run_under_the_policy_too() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

        def encode(self, x: Tensor) -> Tensor:
            return self.linear(x).exp()

        def generate(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model, x = Encoder().eval(), torch.randn(2, 8)
    converted: Any = precast.convert(model, example=x, methods=("encode",))
    assert converted.encode(x).dtype is BF16
    assert is_same(converted.forward(x), converted.encode(x))
    with pytest.raises(RuntimeError):
        converted.generate(x)
    assert precast.convert(model, example=x).generate(x).dtype is BF16  # type: ignore[operator]
    assert isinstance(converted, Encoder)
    assert type(converted).__name__ == "Encoder"


def test_threads_run_one_converted_model() -> None:
    model, example, _ = _model("encoder")
    converted = precast.convert(model, example=example)
    expected, found = converted(example), []
    threads = [threading.Thread(target=lambda: found.append(converted(example))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(is_same(each, expected) for each in found)
    assert len(found) == 4


def test_an_error_in_the_model_leaves_no_region_behind() -> None:
    model = Branches().eval()
    converted = precast.convert(model, example=-torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="shapes"):
        converted(-torch.ones(2, 7))
    assert not torch.is_autocast_enabled("cpu")
    assert converted.linear.weight.dtype is BF16


def _bad() -> dict[str, tuple[Callable[[], Any], str]]:
    def linear() -> nn.Module:
        return nn.Linear(8, 8).eval()

    x = torch.randn(2, 8)
    return {
        "no module": (lambda: precast.convert(3, example=x), "takes a torch.nn.Module"),  # type: ignore[arg-type]
        "compiled": (lambda: precast.convert(torch.compile(linear()), example=x), "a wrapper"),
        "no weights": (lambda: precast.convert(nn.ReLU().eval(), example=x), "has no weights"),
        "example elsewhere": (
            lambda: precast.convert(linear(), example=x.to("meta")),
            "a tensor on meta, but the model is on cpu",
        ),
        "no example": (lambda: precast.convert(linear(), example=[]), "at least one example"),
    }


@pytest.mark.parametrize("case", _bad())
def test_what_cannot_be_converted_is_one_error(case: str) -> None:
    call, message = _bad()[case]
    with pytest.raises(ConversionError, match=message):
        call()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_converted_model_is_one_graph_and_gives_the_same(backend: str) -> None:
    model, example, other = _model("convolutions")
    converted = precast.convert(model, example=example)
    torch.compiler.reset()
    compiled = torch.compile(converted, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert is_same(compiled(other), converted(other))
    torch.compiler.reset()


def test_the_text_of_a_converted_model_has_the_stored_dtypes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)).eval()
    converted = precast.convert(model, example=torch.ones(1, 8))
    lines = repr(converted).splitlines()
    assert lines[1].endswith("bias=True, stored in bfloat16)")
    assert lines[2].endswith("stored in float32)")
    assert lines[3] == "  (2): ReLU()"
    assert "stored" not in repr(model)
    assert not any("extra_repr" in vars(module) for module in converted.modules())
