"""What is recorded of a step: which sites there are, where their tensors come from, and what cannot be in 16 bits.

The oracle is a trace: whatever settled choice is made of what was recorded, its policy makes each site run as chosen.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import networks
from precast.policy.policy import Policy
from precast.tuning.policy_rows import explicit_policy
from precast.tuning.recorder import record
from precast.tuning.sites import OperationSite, TunedProgram
from tests.tuning.traced import assert_runs_as_chosen

BASE = Policy.load("default")


def _recorded(model, step) -> TunedProgram:
    program = record(model, step, BASE)
    draw = random.Random(0)
    some = [draw.sample(program.sites, len(program.sites) // 2) for _ in range(2)]
    for low in (program.sites, (), *some):
        choice = program.choose(low)
        policy = explicit_policy(choice, program, BASE)
        assert_runs_as_chosen(model, step, policy, choice, program)
    return program


def _of(forward, *modules, shape=(2, 8)):
    """A model that runs a function of itself and a random batch, and the step that runs it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, module in enumerate(modules):
                setattr(self, f"part{i}", module)

        def forward(self, x):
            return forward(self, x)

    batch = torch.randn(shape)
    return Model(), lambda model: model(batch).sum()


def _names(program: TunedProgram) -> list[str]:
    return [str(site) for site in program.sites]


def _site(program: TunedProgram, name: str) -> OperationSite:
    return next(site for site in program.sites if str(site) == name)


def _from(program: TunedProgram, name: str) -> list[str]:
    return [str(e.producer or e.weight or "given") for e in program.inputs(_site(program, name))]


@pytest.mark.parametrize(
    "network",
    [networks.decoder(64, 2, 8, layers=2), networks.convolutional(8, 2, 16)],
    ids=["decoder", "convolutional"],
)
def test_a_network(network):
    model, [(inputs, target)] = network.seeded(torch.device("cpu"), 1)
    program = _recorded(model, lambda model: network.loss(model(inputs), target))
    assert _site(program, "outside of modules: cross_entropy_loss").rule == "fp32"
    assert not any(site.barred for site in program.sites)
    weights = {edge.weight for edge in program.edges if edge.weight}
    assert weights == {name for name, _ in model.named_parameters()}


def test_attention():
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    program = _recorded(model, lambda model: model(x, x, x)[0].sum())
    assert "the model: _softmax" in _names(program)
    assert "the model: bmm" in _from(program, "the model: _softmax")
    assert "in_proj_weight" in _from(program, "the model: linear")


def test_recurrence():
    model, x = nn.LSTM(8, 8), torch.randn(5, 2, 8)
    program = _recorded(model, lambda model: model(x)[0].sum())
    assert _site(program, "the model: mkldnn_rnn_layer").rule == "lower"


def test_a_tied_weight_has_one_name():
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    model, _ = _of(lambda self, x: self.part1(self.part0(x)), embedding, head)
    tokens = torch.randint(10, (2, 3))
    program = _recorded(model, lambda model: model(tokens).sum())
    assert _from(program, "part0: embedding") == ["part0.weight"]
    assert _from(program, "part1: linear") == ["part0: embedding", "part0.weight"]


def test_views_lead_to_what_made_their_numbers():
    def forward(self, x):
        hidden = self.part0(x).view(2, 2, 4).transpose(0, 1)[1:]
        return torch.tanh(hidden)

    program = _recorded(*_of(forward, nn.Linear(8, 8)))
    assert _names(program) == ["part0: linear", "the model: tanh", "outside of modules: sum"]
    assert _from(program, "the model: tanh") == ["part0: linear"]
    assert program.inputs(_site(program, "the model: tanh"))[0].elements == 8


def test_an_operation_in_place_keeps_the_producer_and_the_dtype():
    def forward(self, x):
        hidden = self.part0(x)
        return torch.tanh(hidden.relu_())

    program = _recorded(*_of(forward, nn.Linear(8, 8)))
    [edge] = program.inputs(_site(program, "the model: relu_"))
    assert edge.is_written
    assert _from(program, "the model: tanh") == ["part0: linear"]


def test_a_module_that_is_called_twice_is_one_site_with_two_calls():
    program = _recorded(*_of(lambda self, x: self.part0(self.part0(x)), nn.Linear(8, 8)))
    assert sum(call.count for call in _site(program, "part0: linear").calls) == 2
    assert _from(program, "part0: linear").count("part0: linear") == 1


def test_a_module_with_two_names_is_pinned():
    shared = nn.Linear(8, 8)
    program = _recorded(*_of(lambda self, x: self.part1(torch.relu(self.part0(x))), shared, shared))
    assert _names(program)[0] == "part0: linear"
    assert _site(program, "part0: linear").pinned
    assert not _site(program, "the model: relu").pinned


def test_a_module_whose_parent_is_not_called_is_pinned():
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    program = _recorded(*_of(lambda self, x: self.part0[0](x), inner))
    assert _site(program, "part0.0: linear").pinned


def test_a_list_of_modules_is_never_called_so_what_is_in_it_is_not_pinned():
    parts = nn.ModuleList([nn.Linear(8, 8)])
    program = _recorded(*_of(lambda self, x: self.part0[0](x), parts))
    assert not _site(program, "part0.0: linear").pinned


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_counted_as_such(reentrant):
    def forward(self, x):
        x = torch.tanh(self.part0(x))
        return checkpoint(self.part1, x, use_reentrant=reentrant)

    program = _recorded(*_of(forward, nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    calls = _site(program, "part1.0: linear").calls
    assert sum(call.count for call in calls) == 1
    assert sum(call.recomputed for call in calls) == 1
    assert sum(call.recomputed for call in _site(program, "part0: linear").calls) == 0


def test_what_the_program_casts_to_float32_is_barred():
    def forward(self, x):
        hidden = self.part0(x)
        return torch.tanh(hidden.float() ** 2).to(hidden.dtype)

    program = _recorded(*_of(forward, nn.Linear(8, 8)))
    barred = {str(site): site.barred for site in program.sites if site.barred}
    assert set(barred) == {"the model: pow", "the model: tanh"}
    assert "runs in float32 in the program" in barred["the model: pow"]


def test_what_has_no_16_bit_kernel_is_barred_with_the_error():
    model, step = _of(
        lambda self, x: torch.linalg.inv(self.part0(x) + torch.eye(8)),
        nn.Linear(8, 8),
        shape=(8, 8),
    )
    program = _recorded(model, step)
    assert "bfloat16" in _site(program, "the model: linalg_inv").barred.lower()


def test_statistics_are_not_written_in_16_bits():
    program = _recorded(
        *_of(lambda self, x: self.part1(self.part0(x)), nn.Linear(8, 8), nn.BatchNorm1d(8))
    )
    norm = _site(program, "part1: native_batch_norm")
    assert not norm.casts_down
    assert program.choose([norm])[norm] is torch.float32


def test_numbers_without_dimensions_and_weights_of_norms_decide_nothing():
    scale = torch.tensor(2.0)
    program = _recorded(
        *_of(lambda self, x: self.part1(self.part0(x) * scale), nn.Linear(8, 8), nn.LayerNorm(8))
    )
    free = [(str(e.consumer), e.weight) for e in program.edges if not e.decides]
    assert free == [
        ("the model: mul", ""),
        ("part1: layer_norm", "part1.weight"),
        ("part1: layer_norm", "part1.bias"),
    ]


def test_calls_that_are_alike_are_one_with_a_count():
    model, step = _of(lambda self, x: self.part0(x) + self.part0(x), nn.Linear(8, 8))
    [call] = _site(_recorded(model, step), "part0: linear").calls
    assert call.count == 2


def test_an_inference_has_sites_too():
    model, step = _of(lambda self, x: torch.tanh(self.part0(x)), nn.Linear(8, 8))

    def infer(model):
        with torch.no_grad():
            return step(model)

    assert _names(_recorded(model, infer))[:2] == ["part0: linear", "the model: tanh"]
