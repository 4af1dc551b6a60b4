"""The Transformers Trainer with precast's callback: the bits of its own, its logs, and training that goes on.

On a CPU the Trainer has no scaler: `fp16` gives its accelerator here what it has on a GPU. Scenes of the Trainer's own
tests that are played here, in tests of our own (its `test_trainer.py`): mixed precision trains, the logs are
right, resuming gives what a run without a break does, gradients are accumulated and clipped, NaN is seen.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.integrations.tensorboard import TensorBoard
from tests.clients.outcome import Outcome, differences, outcome
from tests.integrations.test_tensorboard import Writer
from tests.support import pretended_cuda

transformers = pytest.importorskip("transformers", reason="`make test-clients` runs these tests")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from precast.integrations.transformers import PrecastCallback  # noqa: E402

STEPS, BROKEN = 8, 3

pytestmark = pytest.mark.usefixtures("one_accelerator")


class Net(nn.Module):
    """A network whose loss is infinite in one batch, if it is asked for."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.broken, self.calls = broken, 0
        self.seen: list[torch.dtype] = []

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        output = self.last(self.first(rows).relu())
        self.seen.append(output.dtype)
        loss = output.float().square().mean() * (math.inf if self.calls == self.broken else 1.0)
        self.calls += self.training
        return {"loss": loss, "output": output}


def rows(number: int = STEPS * 4) -> list[dict[str, Tensor]]:
    sample = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return [{"rows": row} for row in sample]


def trainer(
    folder: Path, model: nn.Module, *callbacks: Any, precision: str = "bf16", **settings: Any
) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {"max_steps": STEPS, **settings}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        **{**quiet, **settings},
    )
    made = Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(4), callbacks=[*callbacks]
    )
    if precision == "fp16":
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return made


def run(folder: Path, *callbacks: Any, broken: int = -1, **settings: Any) -> tuple[Any, Outcome]:
    torch.manual_seed(0)
    model = Net(broken)
    made = trainer(folder, model, *callbacks, **settings)
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    reports = [
        float(entry[key]) for key in ("loss", "grad_norm", "learning_rate") for entry in logs
    ]
    scaler = made.accelerator.scaler
    scale = {} if scaler is None else {"scale": torch.tensor(scaler.get_scale())}
    return made, outcome(model, [*torch.tensor(reports).nan_to_num(-1.0, posinf=-2.0)], **scale)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_has_the_bits_of_the_trainers_own(
    tmp_path: Path, precision: str, accumulated: int
) -> None:
    settings = {
        "precision": precision,
        "gradient_accumulation_steps": accumulated,
        "max_grad_norm": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "broken": BROKEN if precision == "fp16" else -1,
        "max_steps": STEPS // accumulated,
    }
    _, ours = run(tmp_path / "ours", PrecastCallback("torch"), **settings)
    _, theirs = run(tmp_path / "theirs", **settings)
    assert differences(ours, theirs) == []
    assert precision == "bf16" or theirs["output scale"] == 2.0**9


def test_the_logs_say_what_the_scaler_and_the_monitor_saw(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    class Listens(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            heard.append(dict(logs))

    callback = PrecastCallback(every=4)
    made, _ = run(tmp_path, callback, Listens(), precision="fp16", broken=BROKEN)
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["loss_scale"] for entry in logs] == [1024.0] * BROKEN + [512.0] * (STEPS - BROKEN)
    assert [entry["skipped_steps"] for entry in logs] == [0] * BROKEN + [1] * (STEPS - BROKEN)
    reports = [entry.get("first_nonfinite") for entry in logs]
    assert [step for step, text in enumerate(reports) if text] == [BROKEN]
    assert "In step 3 the output of" in reports[BROKEN]
    assert [entry.get("loss_scale") for entry in heard if "loss" in entry] == [
        entry["loss_scale"] for entry in logs
    ]
    assert "loss_scale" not in made.state.log_history[-1], "the summary has no loss of its own"


def test_in_bfloat16_the_logs_stay_as_they_are(tmp_path: Path) -> None:
    made, _ = run(tmp_path, PrecastCallback(every=100))
    assert set(made.state.log_history[0]) == {"loss", "grad_norm", "learning_rate", "epoch", "step"}


def test_what_is_in_use_ends_with_training(tmp_path: Path) -> None:
    policy = precast.Policy.load("default").replace(modules={"last": "fp32"})
    callback = PrecastCallback(policy)
    made, _ = run(tmp_path, callback, precision="fp16")
    model = made.model
    assert set(model.seen) == {torch.float32}
    assert type(made.accelerator.scaler) is torch.amp.GradScaler
    assert callback.used.scaler.counters.steps == STEPS
    with torch.autocast("cpu"):
        assert model.last(torch.ones(1, 16)).dtype is torch.bfloat16
        with pytest.raises(RuntimeError):
            torch.cat([torch.ones(2).half(), torch.ones(2).bfloat16()])


def test_after_an_exception_the_callback_is_closed_by_hand(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, rows: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(rows)["loss"] * math.nan}

    callback = PrecastCallback(scaler=precast.GradScaler("cpu", max_nonfinite_losses=1))
    made = trainer(tmp_path, Broken(), callback, precision="fp16")
    with pytest.raises(precast.errors.BrokenModelError):
        made.train()
    assert isinstance(made.accelerator.scaler, precast.GradScaler)
    callback.close()
    assert type(made.accelerator.scaler) is torch.amp.GradScaler


@pytest.mark.parametrize("saver", ["ours", "theirs"])
@pytest.mark.parametrize("given", [False, True], ids=["no scaler", "a scaler"])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, saver: str, given: bool) -> None:
    def callback() -> PrecastCallback:
        scaler = precast.GradScaler("cpu", init_scale=2.0**10, history=3) if given else None
        return PrecastCallback("torch", scaler=scaler)

    settings = {"precision": "fp16", "broken": 1}
    _, whole = run(tmp_path / "whole", callback(), **settings)
    first = [callback()] if saver == "ours" else []
    run(tmp_path, *first, **settings, save_strategy="steps", save_steps=4)
    again = callback()
    made = trainer(tmp_path, Net(), again, precision="fp16")
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    result = {f"parameter {name}": value.detach() for name, value in made.model.named_parameters()}
    assert differences(result, {name: whole[name] for name in result}) == []
    assert made.accelerator.scaler.get_scale() == 2.0**9 == float(whole["output scale"])
    assert again.used.scaler.counters.steps == STEPS - 4


def test_events_name_parameters_and_tensorboard_is_told(tmp_path: Path) -> None:
    writer = Writer()
    with precast.observe(TensorBoard(writer)):
        run(tmp_path, PrecastCallback(), precision="fp16", broken=BROKEN)
    assert [step for name, _, step in writer.scalars if name == "scaler/scale"] == list(
        range(STEPS)
    )
    [text] = [text for _, text, _ in writer.texts]
    assert "first.weight" in text


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(precast.errors.PolicyError):
        PrecastCallback("nothing")
    callback = PrecastCallback(scaler=precast.GradScaler("cpu"))
    with pytest.raises(precast.errors.ScalerError, match="fp16=False, bf16=True on 'cpu'"):
        run(tmp_path, callback)


def test_models_on_a_pretended_gpu() -> None:
    """Eight models, each in both dtypes, in five uses: losses, gradients and weights to the bit."""
    assert pretended_cuda.run_tests(["tests/gpu/test_transformers_models.py"]) == 80
