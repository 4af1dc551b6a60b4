"""A trace of other libraries' training counts the casts that an independent mode counts, and changes nothing."""

from __future__ import annotations

import pytest

import precast
from tests.clients.clients import CASES
from tests.clients.outcome import differences
from tests.diagnostics.tracing.test_trace import Casts, asked_for

for library in ("lightning", "transformers"):
    pytest.importorskip(library, reason="`make test-clients` runs these tests")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
TRACED = [
    "transformers, GPT-2: Trainer, bfloat16",
    "transformers, Llama: Trainer with activation checkpointing, bfloat16",
    "lightning, BERT: Fabric, bfloat16",
    "lightning, T5: Trainer, bfloat16",
]


@pytest.mark.parametrize("case", TRACED)
def test_a_trace_of_a_client_counts_every_cast(case: str) -> None:
    client, dtype = CASES[case]
    with precast.install("torch"):
        expected = client.run(dtype)
        with Casts() as independent:
            client.run(dtype)
        with precast.trace() as trace:
            traced = client.run(dtype)
        with precast.trace() as beside, Casts() as inside:
            client.run(dtype)
    assert differences(traced, expected) == []
    assert (
        asked_for(beside)[0] == inside.number > 0
    )  # an independent mode sees no casts inside operations
    assert asked_for(trace)[:2] == (independent.number, independent.bytes)
    assert trace.totals.steps > 0
    assert {row.phase for row in trace.rows} >= {"forward", "backward", "optimizer"}
