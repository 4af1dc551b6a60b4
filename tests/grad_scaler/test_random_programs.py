"""Random sequences of good and bad gradients: the decisions, the scale and every bit are those of PyTorch's scaler."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits

Tensor = torch.Tensor
BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


turns = st.fixed_dictionaries(
    {
        "gradient": st.sampled_from(["good", "good", "good", "tiny", *BAD, "absent"]),
        "unscale first": st.booleans(),
    }
)
iterations = st.fixed_dictionaries(
    {
        "turns": st.lists(turns, min_size=3, max_size=3),
        "new scale": st.none() | st.none() | st.sampled_from([3.0, 1024.0, 2.0**-10]),
        "state moves": st.booleans(),
    }
)


class Training:
    """Three optimizers under one scaler, driven by a script."""

    def __init__(self, scaler: Any, kinds: list[str]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.scaler = scaler
        self.parameters = [
            [torch.nn.Parameter(torch.randn(n, 2, generator=generator, dtype=d)) for n, d in shapes]
            for shapes in [
                [(2, torch.float32), (1, torch.float64)],
                [(3, torch.float32)],
                [(1, torch.float32)],
            ]
        ]
        self.optimizers = [KINDS[k](ps) for k, ps in zip(kinds, self.parameters, strict=True)]

    def run(self, script: dict[str, Any], seed: int) -> list[Any]:
        loss = self.scaler.scale(torch.ones(2))
        checked = False
        for turn, optimizer, parameters in zip(
            script["turns"], self.optimizers, self.parameters, strict=True
        ):
            if turn["gradient"] != "absent":
                checked = True
                self.take(turn, optimizer, parameters, torch.Generator().manual_seed(seed))
        if checked or script["new scale"]:
            self.scaler.update(script["new scale"])
        if script["state moves"]:
            self.scaler.load_state_dict(self.scaler.state_dict())
        everything = [loss, self.scaler.get_scale(), self.scaler._get_growth_tracker()]
        for optimizer, parameters in zip(self.optimizers, self.parameters, strict=True):
            everything += [x for p in parameters for x in (p, p.grad)]
            everything += [v for s in optimizer.state.values() for v in s.values()]
        return [bits(x) for x in everything]

    def take(self, turn: Any, optimizer: Any, parameters: list[Tensor], generator: Any) -> None:
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = gradient * (1e-44 if turn["gradient"] == "tiny" else 100.0)
        if turn["gradient"] in BAD:
            parameters[-1].grad[0, 1] = BAD[turn["gradient"]]
        if turn["unscale first"]:
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3),
    numbers=st.tuples(
        st.sampled_from([1.0, 2.0**16, 2.0**-40, 1e38, 3.3e38, 12345.678]),
        st.sampled_from([2.0, 1.5, 1000.0]),
        st.sampled_from([0.5, 0.1, 0.001]),
        st.integers(1, 3),
    ),
    script=st.lists(iterations, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_scale_tracker_and_parameters_equal_torchs(
    kinds: list[str], numbers: tuple[float, float, float, int], script: list[Any], seed: int
) -> None:
    # Below 2**-126, where PyTorch goes on, ours stays: 8 iterations of 0.001 do not get there.
    scaler = GradScaler("cpu", *numbers, min_scale=2.0**-126, on_diagnosis="ignore")
    ours = Training(scaler, kinds)
    theirs = Training(torch.amp.GradScaler("cpu", *numbers), kinds)
    for number, iteration in enumerate(script):
        assert ours.run(iteration, seed + number) == theirs.run(iteration, seed + number)
