"""Doors to other libraries: without its library each says what to install, and none is opened unasked.

What they do is tested beside the libraries, in `tests/clients/`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast._internal.events import HealthEvent, OperationNote
from precast.integrations.logging import LogEvents
from precast.integrations.wandb import WandB

ROOT = Path(__file__).parents[2]
DOORS = {  # file -> the library without which it cannot be loaded
    "lightning": "lightning",
    "transformers": "transformers",
    "ignite": "ignite",
}
PACKAGES = {"lightning": "lightning", "transformers": "transformers", "ignite": "pytorch-ignite"}


@pytest.mark.parametrize(("name", "library"), DOORS.items())
def test_without_its_library_a_door_says_what_to_install(name: str, library: str) -> None:
    program = f"""
import sys
sys.modules[{library!r}] = None
try:
    import precast.integrations.{name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("MissingExtraError ")
    assert f"pip install {PACKAGES[name]}" in done.stdout


def test_every_door_has_an_extra_of_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    doors = {path.stem for path in (ROOT / "src/precast/integrations").glob("[a-z]*.py")}
    doors -= {"logging"}  # which comes with Python
    assert doors <= set(project["optional-dependencies"])
    assert set(DOORS) <= doors


@pytest.mark.parametrize(
    "door", ["precast", "precast.integrations", "precast.integrations.accelerate"]
)
def test_no_library_is_loaded_unasked(door: str) -> None:
    program = f"""
import sys, {door}
loaded = {{"accelerate", "ignite", "lightning", "tensorboard", "transformers", "wandb"}} & set(sys.modules)
sys.exit(str(loaded) if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# --- Weights & Biases, logging ---


class Run:
    """What is documented of a run of W&B: `define_metric`, `log`, `alert`."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any]) -> None:
        json.dumps(data)
        self.logged.append(data)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


def train(observer: Any, *, on_diagnosis: Any = "ignore") -> None:
    """A good step, then one whose loss is infinite before it is scaled, then parameters that are."""
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = precast.GradScaler("cpu", init_scale=8.0, on_diagnosis=on_diagnosis)
    with precast.monitor(layer, 1), precast.observe(observer):
        for step in range(5):
            with torch.no_grad():
                layer.weight.fill_(torch.inf if step else 1.0)
            scaler.scale(layer(torch.ones(1, 2)).sum().square()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_a_run_of_wandb_gets_values_over_steps_of_their_own() -> None:
    run = Run()
    train(WandB(run, prefix="amp"))
    assert run.metrics == [
        ("amp/step", None),
        ("amp/*", "amp/step"),
        ("health/step", None),
        ("health/*", "health/step"),
    ]
    steps = [logged for logged in run.logged if "amp/step" in logged]
    assert [logged["amp/step"] for logged in steps] == [0, 1, 2, 3, 4]
    assert [logged["amp/scale"] for logged in steps] == [8.0, 8.0, 4.0, 2.0, 1.0]
    assert [logged["amp/optimizer 0/skipped"] for logged in steps] == [0, 1, 1, 1, 1]
    assert all(logged["amp/optimizer 0/seconds"] >= 0 for logged in steps)
    assert "amp/optimizer 0/not finite" not in steps[0]
    assert steps[1]["amp/optimizer 0/not finite"] > 0
    health = [logged for logged in run.logged if "health/step" in logged]
    assert health[0]["health/step"] == 0
    assert health[0]["health/infinite/parameter weight"] == 0
    assert run.alerts, "the parameters are infinite"
    assert all("lower scale" in title for title, _ in run.alerts)


def test_steps_are_lines_in_pythons_logging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "precast")
    train(LogEvents())
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("DEBUG", "step 0 of optimizer 0 was done at scale 8") in lines
    [skipped] = [text for level, text in lines if level == "WARNING" and text.startswith("step 1 ")]
    assert skipped.startswith("step 1 of optimizer 0 was skipped at scale 8: gradients of weight")
    assert "the loss was not finite either" in skipped
    assert any(level == "ERROR" for level, _ in lines)
    assert any("the monitor counted" in text for _, text in lines)
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]
    assert isinstance(events[0], (precast.events.StepEvent, HealthEvent))


def test_a_logger_of_ones_own_gets_what_its_level_lets_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("training.amp")
    caplog.set_level(logging.WARNING, "training.amp")
    observer = LogEvents(logger)
    train(observer)
    observer(OperationNote("binary_cross_entropy", "cpu", "was computed in float32"))
    assert {record.name for record in caplog.records} == {"training.amp"}
    assert {record.levelname for record in caplog.records} == {"WARNING", "ERROR"}
