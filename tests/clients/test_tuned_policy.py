"""A file as `precast tune` writes it is taken as it is by the plugins for trainers, and its rule for a module holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import precast

TUNED = """# Found by precast.tune for Net (161 parameters): default fails (the loss of step 1 is nan)
base = "default"

[measured]
device = "cpu"
machine = "another one"
torch = "2.13.0"
dtype = "bfloat16"

[modules.last.ops]
linear = {rule = "fp32", reason = "bfloat16 changes the loss by 3.1%"}
"""

pytestmark = pytest.mark.filterwarnings(
    "ignore:The policy .* was measured elsewhere", "ignore:`isinstance.treespec, LeafSpec.`"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output = self.last(hidden)
        self.seen |= {(hidden.dtype, output.dtype)}
        return output


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.toml"
    path.write_text(TUNED)
    return path


def check(model: Any) -> None:
    assert model.seen == {(torch.bfloat16, torch.float32)}


def test_lightning(tuned: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="`make test-clients` runs these tests")
    from precast.integrations.lightning import Precast

    fabric = lightning.Fabric(accelerator="cpu", plugins=[Precast("bf16-mixed", policy=tuned)])
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(4, 8)).float().square().mean())
    optimizer.step()
    check(net)


@pytest.mark.usefixtures("one_accelerator")
def test_accelerate(tuned: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="`make test-clients` runs these tests")
    from precast.integrations.accelerate import use

    made = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    net = Net()
    with use(made, net, policy=tuned):
        model = made.prepare(net)
        made.backward(model(torch.ones(4, 8)).float().square().mean())
    check(net)


def test_ignite(tuned: Path) -> None:
    pytest.importorskip("ignite", reason="`make test-clients` runs these tests")
    from ignite.engine import Engine

    from precast.integrations.ignite import supervised_training_step

    net = Net()
    update = supervised_training_step(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        lambda output, target: F.mse_loss(output.float(), target),
        precast.autocast("cpu", torch.bfloat16),
    )
    with precast.attach(net, tuned):
        Engine(update).run([(torch.ones(4, 8), torch.ones(4, 1))])
    check(net)


@pytest.mark.usefixtures("one_accelerator")
def test_transformers(tuned: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="`make test-clients` runs these tests"
    )
    from precast.integrations.transformers import PrecastCallback

    class Model(Net):
        def forward(self, rows: Tensor) -> Any:
            return {"loss": super().forward(rows).float().square().mean()}

    net = Model()
    transformers.Trainer(
        net,
        transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=True,
            max_steps=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"rows": torch.ones(8)} for _ in range(8)],
        callbacks=[PrecastCallback(tuned)],
    ).train()
    check(net)
