"""The measurements of converted models: what is in a row, and that targets are about rows that there are."""

from __future__ import annotations

import pytest
import torch

import precast
from benchmarks import islands, shipping
from benchmarks.tables import about, print_rows
from benchmarks.targets import TARGETS, judged


def test_a_row_has_time_weights_and_the_peak() -> None:
    rows = list(shipping.run(rounds=1, only=("MLP",)))
    assert [row["kind"] for row in rows] == list(shipping.KINDS)
    for row in rows:
        assert row["by_hand"] > 0 < row["same_islands"]
        assert row["weights"] == row["weights_same_islands"] == 1.0
        assert row["islands"] == []
        assert 1 <= row["call_peak"] <= row["peak"] < 3
        assert 1 <= row["peak_of_call"] < 2
    print_rows(about(), rows)
    found = {(row["work"], row["case"]): row["value"] for row in judged(about(), rows)}
    assert found["converted, weights", "MLP"] == 1.0


def test_what_the_policy_keeps_in_float32_is_named() -> None:
    row = next(shipping.run(rounds=1, only=("512, 1x1",)))
    assert row["islands"][0] == "tokens.weight"
    assert row["weights_same_islands"] == 1.0 < row["weights"]
    assert row["peak"] < 1.1


@pytest.mark.parametrize("case", ["decoder 512, 1x1", "convolutional", "MLP"])
def test_by_hand_with_the_same_float32_gives_the_bits_of_the_converted_model(case: str) -> None:
    network = shipping.CASES[case]()
    model, inputs = shipping.fresh(network)
    converted = precast.convert(model, example=inputs)
    low = [weight.name for weight in converted.precast_report.weights if weight.dtype == "bfloat16"]
    by_hand = islands.in_16_bits(network, low, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(by_hand(inputs), converted(inputs))
    stored = {name: tensor.dtype for name, tensor in by_hand.state_dict().items()}
    assert stored == {name: tensor.dtype for name, tensor in converted.state_dict().items()}


def test_every_network_has_its_targets() -> None:
    cases = [t.row["case"] for t in TARGETS if t.row["benchmark"] == "shipping"]
    assert set(cases) == set(shipping.CASES)
