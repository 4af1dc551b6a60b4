"""The timed work of a client: a training step, inference and generation as users of each library write them.

Each is made ready once, and is then a function to be called many times. Lightning's trainer cannot be asked for one
step: it runs eight at each call, on a fresh copy of the model, set-up included.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.client_models import Batch, Model

__all__ = ["FRAMEWORKS", "WORKS", "Region"]

Region = Callable[[], AbstractContextManager[object]]
Work = Callable[[], object]
_STEPS = 8


def _training(model: nn.Module, client: Model, batch: Batch, region: Region) -> Work:
    optimizer = _optimizer(model)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        with region():
            loss = client.loss(model, batch)
        loss.backward()
        optimizer.step()

    return step


def _inference(model: nn.Module, client: Model, batch: Batch, region: Region) -> Work:
    model.eval()

    def infer() -> Tensor:
        with torch.inference_mode(), region():
            return client.loss(model, batch)

    return infer


def _generation(model: nn.Module, client: Model, batch: Batch, region: Region) -> Work | None:
    generate = client.generate
    model.eval()

    def run() -> Tensor:
        assert generate is not None
        with torch.inference_mode(), region():
            return generate(model, batch)

    return None if generate is None else run


WORKS: dict[str, Callable[[nn.Module, Model, Batch, Region], Work | None]] = {
    "training step": _training,
    "inference": _inference,
    "generation": _generation,
}


def _accelerate(model: nn.Module, batch: Batch) -> Work:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model.train(), _optimizer(model))

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()

    return step


def _fabric(model: nn.Module, batch: Batch) -> Work:
    from lightning import Fabric

    _silence_lightning()
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    wrapped, optimizer = fabric.setup(model.train(), _optimizer(model))

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(wrapped(**batch).loss)
        optimizer.step()

    return step


def _trainer(model: nn.Module, batch: Batch) -> Work:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="never written",
        use_cpu=True,
        bf16=True,
        max_steps=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=_rows(batch))
    trainer.remove_callback(PrinterCallback)
    trainer.train()  # which makes all ready for more steps

    def step() -> None:
        trainer.training_step(trainer.model_wrapped, {**batch})
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    return step


def _lightning(model: nn.Module, batch: Batch) -> Work:
    from lightning import LightningModule, Trainer

    _silence_lightning()
    loader = DataLoader(_rows(batch), batch_size=len(next(iter(batch.values()))))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def training_step(self, batch: Batch, index: int) -> Tensor:  # noqa: ARG002
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.model)

    def train() -> None:
        Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=_STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), loader)

    return train


FRAMEWORKS: dict[str, Callable[[nn.Module, Batch], Work]] = {
    "accelerate": _accelerate,
    "lightning.Fabric": _fabric,
    "transformers.Trainer": _trainer,
    "lightning.Trainer": _lightning,
}


def _silence_lightning() -> None:
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _rows(batch: Batch) -> Any:
    """The batch of every step, taken apart into rows: a dataset."""
    count = len(next(iter(batch.values())))
    return [
        {name: value[i % count] for name, value in batch.items()} for i in range(_STEPS * count)
    ]
