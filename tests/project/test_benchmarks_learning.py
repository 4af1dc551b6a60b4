"""The benchmark that trains in 8 bits: what it compares, and what it makes of the figures."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import learning_float8
from benchmarks.learning_float8 import CASES, VARIANTS, layers_text, losses_text, policy_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="float8 is emulated")
        yield


@pytest.mark.parametrize("name", CASES)
def test_what_stays_in_16_bits_is_a_layer_of_the_model(name: str) -> None:
    case = CASES[name]()
    policy = policy_of(case, VARIANTS["float8, first and last in bfloat16"])
    layers = dict(case.model().named_modules())
    for layer, expected in (
        (case.first, "lower"),
        (case.last, "lower"),
        ("blocks.1.project", "float8"),
    ):
        assert layer in layers
        assert policy.resolve("linear", "cpu", layer).rule == expected


def test_seeds_and_batches_are_those_of_the_other_variants() -> None:
    """Before the first step of the optimizer, in bfloat16 and in 8 bits, the loss differs by rounding alone."""
    case = CASES["ViT on digits"]()
    found = {
        name: learning_float8.train(case, VARIANTS[name], 3, steps=1)["curve"][0]
        for name in ("bfloat16", "float8")
    }
    assert found["float8"] == pytest.approx(found["bfloat16"], rel=0.01)
    assert found["float8"] != found["bfloat16"]


def test_each_layer_alone_changes_less_than_all() -> None:
    found = learning_float8.sensitivity(CASES["ViT on digits"](), "float8", 0, steps=0)
    assert {"patches", "head", "all"} < found.keys()
    assert max(change for layer, change in found.items() if layer != "all") < 1.5 * found["all"]
    assert min(found.values()) > 0


def test_the_recipe_has_the_figures_that_were_measured() -> None:
    document = json.loads((ROOT / "docs" / "data" / "learning-float8.json").read_text())
    assert {"machine", "seeds", "command"} <= document.keys()
    for page in learning_float8.PAGES:
        text = page.read_text(encoding="utf-8")
        assert losses_text(document) in text
        assert layers_text(document) in text
