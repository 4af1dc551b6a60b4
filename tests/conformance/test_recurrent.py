"""Recurrent networks: LSTM, GRU, RNN and their cells, with layers, directions, projections and packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_map

from tests.conformance.compare import Make, assert_same, in_both_dtypes, refused, used
from tests.conformance.systems import MakeRegion, System, on_all_systems
from tests.support.processor import runs_lstm_in_bfloat16

LENGTHS = torch.tensor([2, 5])

# What PyTorch says once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")


def _network(kind: type[nn.RNNBase], use: Callable[..., Any], **options: Any) -> Make:
    def make() -> Any:
        module = kind(4, 3, **{"batch_first": True, **options})
        x = torch.randn(2, 5, 4)
        # oneDNN refuses a float16 LSTM on many machines; and does so alike.
        return module, lambda: refused(lambda: use(module, x))

    return make


def _call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def _first_state(module: nn.RNNBase, x: Tensor) -> Any:
    torch.default_generator.manual_seed(1)
    layers = module.num_layers * (1 + module.bidirectional)
    hidden = torch.randn(layers, len(x), module.proj_size or module.hidden_size)
    if module.mode != "LSTM":
        return module(x, hidden)
    return module(x, (hidden, torch.randn(layers, len(x), module.hidden_size)))


def _state_of_before(module: nn.RNNBase, x: Tensor) -> Any:
    """The last state of one call is in 16 bits, and the first state of the next."""
    y, state = module(x)
    return module(torch.cat([y, y], -1)[..., :4], state)


def _packed(module: nn.RNNBase, x: Tensor) -> Any:
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    result, state = module(packed)
    return result.data, pad_packed_sequence(result, batch_first=True), state


def _packed_list(module: nn.RNNBase, x: Tensor) -> Any:
    return module(pack_sequence([x[0], x[1, :3]]))[0].data


USES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "one layer": (_call, {}),
    "sequence first": (_call, {"batch_first": False}),
    "two layers": (_call, {"num_layers": 2, "dropout": 0.5}),
    "both directions": (_call, {"num_layers": 2, "bidirectional": True}),
    "no bias": (_call, {"bias": False}),
    "first state": (_first_state, {"bidirectional": True}),
    "state of before": (_state_of_before, {}),
    "packed": (_packed, {"bidirectional": True}),
    "packed, two layers": (_packed_list, {"num_layers": 2}),
}
NETWORKS: dict[str, Make] = {
    f"{kind.__name__}, {name}": _network(kind, use, **options)
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for name, (use, options) in USES.items()
} | {
    "LSTM, projections": _network(nn.LSTM, _first_state, proj_size=2, num_layers=2),
    "LSTM, projections, packed": _network(nn.LSTM, _packed, proj_size=2, bidirectional=True),
    "RNN, relu": _network(nn.RNN, _call, nonlinearity="relu", num_layers=2),
}


def _cell(kind: type[nn.RNNCellBase]) -> Make:
    def make() -> Any:
        module = kind(4, 4)
        x = torch.randn(5, 2, 4)

        def step() -> Any:
            state = None
            for part in x:
                state = module(part, state)
            return state

        return module, step

    return make


CELLS = {kind.__name__: _cell(kind) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)}


@in_both_dtypes
@pytest.mark.parametrize("name", NETWORKS | CELLS)
@on_all_systems
def test_networks(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, (NETWORKS | CELLS)[name], dtype)


@on_all_systems
def test_weights_in_one_memory(system: System) -> None:
    """Make each weight a view of one buffer, as `flatten_parameters` does on other devices."""

    def make() -> Any:
        module = (nn.LSTM if runs_lstm_in_bfloat16() else nn.GRU)(4, 3)
        flat = torch.nn.utils.parameters_to_vector(module.parameters())
        torch.nn.utils.vector_to_parameters(flat, module.parameters())
        x = torch.randn(5, 2, 4)
        return module, lambda: module(x)

    assert_same(system, used, make, torch.bfloat16)


@on_all_systems
def test_truncated_backpropagation(system: System) -> None:
    """One region around a loop that detaches the state and steps backward every two inputs."""

    def program(region: MakeRegion) -> Any:
        module = (nn.LSTM if runs_lstm_in_bfloat16() else nn.GRU)(4, 4)
        x = torch.randn(6, 2, 4)
        state, results = None, []
        with region("cpu"):
            for part in x.split(2):
                y, state = module(part, state)
                y.float().square().sum().backward()
                state = tree_map(Tensor.detach, state)
                results.append(y)
        return results, [p.grad for p in module.parameters()]

    assert_same(system, program)
