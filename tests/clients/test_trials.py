"""Trainers of other libraries under `precast try`: each loop is measured without being named, and gets its recipe."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from precast.running.trial.experiment import Experiment
from precast.running.trial.plan import TrialPlan
from precast.running.trial.process import Launcher

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
images = torch.rand(1024, 64)
data = TensorDataset(images, images[:, :10].argmax(1))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loader = DataLoader(data, 32, shuffle=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PROGRAMS = {
    "lightning": """
        import lightning
        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = model
            def training_step(self, batch, _):
                return criterion(self.model(batch[0]), batch[1])
            def validation_step(self, batch, _):
                self.log("loss", criterion(self.model(batch[0]), batch[1]))
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", gradient_clip_val=1.0)
        trainer.fit(Module(), loader, DataLoader(data, 32))
    """,
    "fabric": """
        from lightning.fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(model, optimizer)
        for x, y in fabric.setup_dataloaders(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            fabric.backward(loss)
            optimizer.step()
    """,
    "accelerate": """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    """,
    "transformers": """
        from transformers import Trainer, TrainingArguments
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model
            def forward(self, x, labels):
                output = self.model(x)
                return {"loss": criterion(output, labels), "logits": output}
        rows = [{"x": x, "labels": y} for x, y in data]
        arguments = TrainingArguments(
            "out", use_cpu=True, report_to=[], max_steps=50, save_steps=3, disable_tqdm=True
        )
        Trainer(Model(), arguments, train_dataset=rows).train()
    """,
    "ignite": """
        from ignite.engine import create_supervised_trainer
        create_supervised_trainer(model, optimizer, criterion).run(loader, max_epochs=1)
    """,
}
RECIPES = {
    "lightning": 'Trainer(precision="bf16-mixed")',
    "fabric": 'Fabric(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "transformers": "TrainingArguments(bf16=True)",
    "ignite": 'create_supervised_trainer(..., amp_mode="amp")',
}


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_trainer_is_measured_without_being_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precast.running.trial.experiment._ROUNDS", 1)
    monkeypatch.setattr("precast.running.trial.experiment._MOST_ROUNDS", 1)
    monkeypatch.setattr(Experiment, "_find_reasons", lambda _: None)
    for folder in ("work", "trials"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "work" / "train.py"
    program.write_text(HEAD + textwrap.dedent(PROGRAMS[library]))
    monkeypatch.chdir(program.parent)
    plan = TrialPlan(str(program), steps=6, warm_up=2, seconds=900.0)
    result = Experiment(plan, Launcher(tmp_path / "trials"), "bfloat16", 0)
    result.run()
    [comparison] = result.comparisons()
    assert (result.base.error, comparison.setting.error) == (None, None)
    assert [each.ended for each in result.base.outcomes] == ["steps"]
    assert len(result.first.seconds) == 8
    assert result.first.trainer == library
    assert comparison.setting.edit.lines == [RECIPES[library]]
    assert comparison.is_equal
    assert os.listdir(program.parent) == ["train.py"]
