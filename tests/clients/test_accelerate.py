"""Accelerate with precast in use: the bits of Accelerate's own, its scaler's methods, states and skipped steps.

Accelerate trains in float16 on no CPU: `fp16` gives it here what it would have on a GPU, PyTorch's scaler and float16.

Scenes of Accelerate's own tests that are played here, in tests of our own (its `test_script.py`, `test_sync.py`,
`test_accelerator.py` and `test_state_checkpointing.py`): training in each mixed precision, inside `accumulate` too,
gradients that are clipped unscaled, a skipped step that is told, a scaler that is saved and loaded with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import precast
from precast.integrations.accelerate import use
from precast.integrations.tensorboard import TensorBoard
from tests.clients.outcome import Outcome, differences, outcome
from tests.integrations.test_tensorboard import Writer

accelerate = pytest.importorskip("accelerate", reason="`make test-clients` runs these tests")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AutocastKwargs  # noqa: E402

BATCHES, BROKEN = 8, 3

pytestmark = pytest.mark.usefixtures("one_accelerator")


def accelerator(precision: str, **settings: Any) -> Any:
    """An accelerator on the CPU; for "fp16" with what it has on a GPU."""
    made = Accelerator(cpu=True, mixed_precision="bf16", **settings)
    if precision == "fp16":
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    assert made.mixed_precision == precision
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.again(self.again(self.first(rows).relu()).relu()))


def train(made: Any, *, start: Callable[..., Any], before: bool, **settings: Any) -> Outcome:
    """A loop as Accelerate's guide has it; `start` puts precast in use, before or after `prepare`."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    rows = torch.randn(BATCHES * 4, 8)
    losses, reports = [], []
    with start(made, model) if before else nullcontext():
        prepared, optimizer, loader = made.prepare(
            model, optimizer, DataLoader(list(rows), batch_size=4)
        )
        with nullcontext() if before else start(made, model):
            for number, batch in enumerate(loader):
                with made.accumulate(prepared):
                    output = prepared(batch)
                    with made.autocast():
                        loss = output.square().mean() + (batch @ batch.T).float().mean() * 0.0
                    made.backward(loss * (math.inf if made.scaler and number == BROKEN else 1.0))
                    if made.sync_gradients:
                        made.clip_grad_norm_(prepared.parameters(), 0.5)
                    optimizer.step()
                    reports.append(float(made.optimizer_step_was_skipped))
                    optimizer.zero_grad()
                losses.append(loss.detach())
    scale = {} if made.scaler is None else {"scale": torch.tensor(made.scaler.get_scale())}
    return outcome(model, [*losses, *reports], **scale)


def without(*_: Any) -> Any:
    return nullcontext()


def with_torchs_policy(made: Any, model: nn.Module) -> Any:
    return use(made, model, policy="torch")


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loop_has_the_bits_of_accelerates_own(
    precision: str, accumulated: int, before: bool
) -> None:
    runs = []
    for start in (with_torchs_policy, without):
        AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerator(precision, gradient_accumulation_steps=accumulated)
        runs.append(train(made, start=start, before=before))
    ours, theirs = runs
    assert differences(ours, theirs) == []
    reports = [float(ours[f"loss {BATCHES + number}"]) for number in range(BATCHES)]
    assert any(reports) == (precision == "fp16")


def test_the_scaler_is_precasts_under_every_reference_while_it_is_in_use() -> None:
    made = accelerator("fp16")
    scaler = made.scaler
    optimizer = made.prepare(torch.optim.SGD(Net().parameters(), lr=0.1))
    ours = precast.GradScaler("cpu", init_scale=64.0, on_diagnosis="ignore")
    with use(made, scaler=ours) as used:
        assert used.scaler is ours
        assert made.scaler is scaler is optimizer.scaler
        assert isinstance(scaler, precast.GradScaler)
        assert scaler.get_scale() == 64.0
        parameter = optimizer.param_groups[0]["params"][0]
        made.backward(parameter.sum() * math.nan)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert ours.counters.skipped == scaler.counters.skipped == 1
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 32.0, "PyTorch's goes on from where ours was"
    assert "counters" not in dir(scaler)


def test_settings_and_scale_of_accelerates_scaler_are_taken_up() -> None:
    made = accelerator("fp16")
    made.scaler.load_state_dict({**made.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 2})
    with use(made) as used:
        assert used.scaler.state_dict() == {
            "scale": 8.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 2,
        }


def test_a_state_is_saved_and_loaded_by_either_scaler(tmp_path: Path) -> None:
    def start() -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerator("fp16")
        model = made.prepare(Net())
        return made, model, made.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    made, model, optimizer = start()
    with use(made, model, scaler=precast.GradScaler("cpu", init_scale=64.0, min_scale=2.0)):
        made.backward(model(torch.ones(1, 8)).sum() * math.inf)
        optimizer.step()
        made.save_state(tmp_path)
    made, _, _ = start()
    made.load_state(tmp_path)
    assert made.scaler.get_scale() == 32.0
    made, model, _ = start()
    with use(made, model) as used:
        made.load_state(tmp_path)
        assert used.scaler.get_scale() == 32.0


def test_the_policy_and_its_rules_for_modules_hold_until_the_end() -> None:
    policy = precast.Policy.load("default").replace(modules={"last": "fp32"})
    made = accelerator("bf16")
    model = Net()
    records: list[torch.dtype] = []
    for layer in (model.first, model.last):
        layer.register_forward_hook(lambda _, __, output: records.append(output.dtype))
    prepared = made.prepare(model)
    with use(made, model, policy=policy):
        prepared(torch.ones(2, 8))
        with made.autocast(autocast_handler=AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        with made.autocast():  # PyTorch raises
            torch.cat([torch.ones(2).half(), torch.ones(2).bfloat16()])
    prepared(torch.ones(2, 8))
    lower = torch.bfloat16
    assert records == [lower, torch.float32, lower, lower]
    with made.autocast(), pytest.raises(RuntimeError):
        torch.cat([torch.ones(2).half(), torch.ones(2).bfloat16()])


def test_events_name_parameters_a_monitor_watches_and_tensorboard_is_told() -> None:
    made, writer = accelerator("fp16"), Writer()
    kept: list[Any] = []

    def start(made: Any, model: nn.Module) -> Any:
        kept.append(use(made, model, every=4))
        return kept[0]

    with precast.observe(TensorBoard(writer)):
        train(made, start=start, before=True)
    [monitor] = kept[0].monitors
    assert monitor.steps == BATCHES
    assert monitor.first.step == BROKEN
    assert [step for name, _, step in writer.scalars if name == "scaler/scale"] == list(range(8))
    assert any("first.weight" in text for _, text, _ in writer.texts)
    assert {step for name, _, step in writer.scalars if name.startswith("health")} == {0, 4}


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    made = accelerator("bf16")
    with pytest.raises(precast.errors.ScalerError, match=r"no scaler: .* 'bf16' on 'cpu'"):
        use(made, scaler=precast.GradScaler("cpu"))
    with pytest.raises(precast.errors.PolicyError):
        use(made, policy="nothing")
    with pytest.raises(precast.errors.AttachError):
        use(accelerator("fp16"), "no model")  # type: ignore[arg-type]
    with torch.autocast("cpu"), pytest.raises(RuntimeError):
        torch.cat([torch.ones(2).half(), torch.ones(2).bfloat16()])


def test_a_scaler_of_fsdp_is_left_alone() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    made = accelerator("bf16")
    made.scaler = ShardedGradScaler.__new__(ShardedGradScaler)
    with use(made) as used:
        assert used.scaler is None
        assert type(made.scaler) is ShardedGradScaler
    with pytest.raises(precast.errors.ScalerError, match="ShardedGradScaler"):
        use(made, scaler=precast.GradScaler("cpu"))
