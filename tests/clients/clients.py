"""Programs as users of each library write them for mixed precision with PyTorch; none of them knows of precast.

A program takes the precision, None for float32, and returns all that it computed. Random numbers are seeded where it
begins; models are tiny, and weights and data made up.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.client_models import MODELS, SIZES, Batch
from tests.clients.outcome import Outcome, outcome

Program = Callable[[torch.dtype | None], Outcome]
_SIZE = SIZES["tiny"]
_BATCHES = 8
_RATE = 1e-2


@dataclass(frozen=True)
class Client:
    """A program of one library's user, and the precisions that it can ask for on the CPU."""

    library: str
    what: str
    program: Program
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def __str__(self) -> str:
        return f"{self.library}, {self.what}"

    def run(self, dtype: torch.dtype | None) -> Outcome:
        """All that the program computes, from the same random numbers at every call."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return self.program(dtype)


def loop(name: str, dtype: torch.dtype | None) -> Outcome:
    """PyTorch's own recipe: a region, a scaler, clipping; then evaluation, and generation if the model can."""
    model, batches = _model_and_batches(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = MODELS[name].loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    result = outcome(model, losses, **_used(name, model, batches[0], dtype))
    return result | {"scale": torch.tensor(scaler.get_scale())}


def _used(name: str, model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Batch:
    """The outputs of the trained model."""
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
        outputs = {"evaluation": MODELS[name].loss(model, batch)}
        if MODELS[name].generate is not None:
            outputs["tokens"] = MODELS[name].generate(model, batch)
    return outputs


def trainer(name: str, dtype: torch.dtype | None, **settings: Any) -> Outcome:
    """`transformers.Trainer`: accumulation, clipping, a schedule, evaluation, prediction."""
    from transformers import Trainer, TrainingArguments

    model, batches = _model_and_batches(name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=dtype is torch.bfloat16,
            learning_rate=_RATE,
            num_train_epochs=1,
            per_device_train_batch_size=_SIZE.batch,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        rows = _Rows(batches)
        trains = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trains.train()
        losses = [entry["loss"] for entry in trains.state.log_history if "loss" in entry]
        predicted = trains.predict(rows)
    logits = predicted.predictions
    return outcome(
        model,
        losses,
        evaluation=torch.tensor(predicted.metrics["test_loss"]),
        logits=torch.from_numpy(logits[0] if isinstance(logits, tuple) else logits),
    )


def accelerate(name: str, dtype: torch.dtype | None) -> Outcome:
    """`accelerate.Accelerator`: a prepared model, accumulation, clipping, a loss in `autocast()`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model, batches = _model_and_batches(name)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if dtype else "no", gradient_accumulation_steps=2
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    loader = DataLoader(_Rows(batches), batch_size=_SIZE.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            answer = model(**batch)
            with accelerator.autocast():
                loss = answer.loss + answer.logits.square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return outcome(accelerator.unwrap_model(model), losses)


def fabric(name: str, dtype: torch.dtype | None) -> Outcome:
    """`lightning.Fabric`: a set-up model and optimizer, backward and clipping by Fabric, `autocast()`."""
    from lightning import Fabric
    from lightning.fabric.plugins import MixedPrecision

    model, batches = _model_and_batches(name)
    fabric = Fabric(accelerator="cpu", devices=1, **_lightnings_precision(dtype, MixedPrecision))
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=_RATE))
    losses = []
    for batch in fabric.setup_dataloaders(DataLoader(_Rows(batches), batch_size=_SIZE.batch)):
        optimizer.zero_grad()
        answer = wrapped(**batch)
        with fabric.autocast():
            loss = answer.loss + answer.logits.square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.detach())
    return outcome(model, losses)


def lightning(name: str, dtype: torch.dtype | None) -> Outcome:
    """`lightning.Trainer`: a `LightningModule`, accumulation, clipping, validation."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

    class Module(LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.losses: list[Tensor] = []
            self.validated: list[Tensor] = []

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Batch, index: int) -> None:
            self.validated.append(self.model(**batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=_RATE)

    model, batches = _model_and_batches(name)
    module = Module(model)
    loader = DataLoader(_Rows(batches), batch_size=_SIZE.batch)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **_lightnings_precision(dtype, MixedPrecision),
    ).fit(module, loader, loader)
    return outcome(model, module.losses, validation=torch.stack(module.validated))


def _lightnings_precision(dtype: torch.dtype | None, plugin: Any) -> dict[str, Any]:
    """Lightning's word for a precision; "16-mixed" becomes bfloat16 on the CPU, unless its plugin is given."""
    if dtype is torch.float16:
        return {"plugins": plugin("16-mixed", "cpu")}
    return {"precision": "bf16-mixed" if dtype else "32-true"}


def ignite(name: str, dtype: torch.dtype | None) -> Outcome:
    """`ignite.engine.Engine`: a step with a region and a scaler, run by its engine."""
    from ignite.engine import Engine, Events

    model, batches = _model_and_batches(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def step(engine: Engine, batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = MODELS[name].loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    losses: list[Tensor] = []
    trains = Engine(step)
    trains.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output)
    )
    trains.run(batches, max_epochs=1)
    return outcome(model, losses)


class _Rows(Dataset[Batch]):
    """Batches taken apart, for loaders to put together again."""

    def __init__(self, batches: list[Batch]) -> None:
        self.rows = [
            {name: value[row] for name, value in batch.items()}
            for batch in batches
            for row in range(_SIZE.batch)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def _model_and_batches(name: str) -> tuple[nn.Module, list[Batch]]:
    model = MODELS[name].make(_SIZE)
    return model.train(), [MODELS[name].batch(_SIZE) for _ in range(_BATCHES)]


def _clients() -> Iterator[Client]:
    bfloat16, both = (torch.bfloat16,), (torch.bfloat16, torch.float16)
    for name, model in MODELS.items():
        does = "train, generate" if model.generate else "train, evaluate"
        slow = name == "UNet"  # PyTorch's float16 convolutions on the CPU
        yield Client(
            model.library,
            f"{name}: {does} in PyTorch's own loop",
            partial(loop, name),
            bfloat16 if slow else both,
        )
    checkpoints = partial(trainer, "Llama", activation_checkpointing=True)
    yield Client("transformers", "GPT-2: Trainer", partial(trainer, "GPT-2"))
    yield Client("transformers", "Llama: Trainer with activation checkpointing", checkpoints)
    yield Client("accelerate", "ViT: Accelerator", partial(accelerate, "ViT"))
    yield Client("lightning", "BERT: Fabric", partial(fabric, "BERT"), both)
    yield Client("lightning", "T5: Trainer", partial(lightning, "T5"), both)
    yield Client("pytorch-ignite", "GPT-2: Engine", partial(ignite, "GPT-2"), both)


CASES = {
    f"{client}, {str(dtype).removeprefix('torch.')}": (client, dtype)
    for client in _clients()
    for dtype in client.dtypes
}
"""Each program in each of its precisions, by a name with both."""
