"""Lightning's Trainer and Fabric with precast's precision plugin: the bits of Lightning's own, and what that lacks.

Scenes of Lightning's own tests of its mixed precision (its `test_amp.py`, the Trainer's and Fabric's, and its
`test_amp_integration.py`) that are played here, in tests of our own: the precision inside each kind of step, `no_grad`
and `inference_mode` in a region, no scaler for bfloat16, LBFGS, clipping by value and by norm, none where it is off,
fused optimizers, gradients that are unscaled when hooks see them, a step that is left out, a scaler in checkpoints.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import precast
from precast.policy.policy import expanded_rules
from precast.policy.rows import Rule
from tests.clients.outcome import Outcome, differences, outcome
from tests.integrations.test_tensorboard import Writer

lightning = pytest.importorskip("lightning", reason="`make test-clients` runs these tests")

from lightning import Fabric, LightningModule, Trainer  # noqa: E402
from lightning.fabric.plugins import MixedPrecision as FabricsOwn  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision as TrainersOwn  # noqa: E402

from precast.integrations.lightning import Precast  # noqa: E402
from precast.integrations.tensorboard import TensorBoard  # noqa: E402

PRECISIONS = ("bf16-mixed", "16-mixed")
ROWS = 12

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")


class Module(LightningModule):
    """A network with a weight that is used twice, an overflow where it is asked for, and notes of all that it did."""

    def __init__(
        self, overflows: int = -1, optimizer: Any = torch.optim.AdamW, **settings: Any
    ) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 1)
        self.overflows, self.optimizer = overflows, lambda ps: optimizer(ps, lr=1e-2, **settings)
        self.losses: list[Tensor] = []
        self.seen: dict[str, torch.dtype] = {}
        self.norms: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.again(self.again(self.first(rows).relu()).relu())
        return self.last(self.norm(hidden))

    def loss(self, name: str, rows: Tensor) -> Tensor:
        output = self(rows)
        self.seen[name] = output.dtype
        return 1e-2 * (output.float().square().mean() + output.sin().mean())

    def training_step(self, rows: Tensor, index: int) -> Tensor | None:
        loss = self.loss("train", rows)
        self.losses.append(loss.detach())
        return loss * math.inf if index == self.overflows else loss

    def validation_step(self, rows: Tensor, index: int) -> None:
        self.loss("validate", rows)

    def test_step(self, rows: Tensor, index: int) -> None:
        self.loss("test", rows)

    def predict_step(self, rows: Tensor, index: int) -> Tensor:
        return self(rows)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(nn.utils.get_total_norm(grads).nan_to_num(-1.0))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def loader() -> DataLoader[Tensor]:
    rows = torch.randn(ROWS, 2, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(list(rows), batch_size=2)


def trainer(plugin: Any, **settings: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings = {"max_epochs": 1, **quiet, **settings}
    return Trainer(accelerator="cpu", devices=1, plugins=[plugin], **settings)


def fit(
    plugin: Any, module: Any = Module, *, made: dict[str, Any] | None = None, **settings: Any
) -> Any:
    torch.manual_seed(0)
    model = module(**(made or {}))
    trainer(plugin, **settings).fit(model, loader(), loader())
    return model


def found(plugin: Any, model: Any) -> Outcome:
    """All that a run left: losses, norms, parameters, gradients, the optimizer's state, the scale."""
    state = {
        f"{number} {name}": value
        for optimizer in model.trainer.optimizers
        for number, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    scale = {} if plugin.scaler is None else plugin.scaler.state_dict()
    scale.pop("precast", None)
    values = {**state, **{name: torch.tensor(value) for name, value in scale.items()}}
    return outcome(model, [*model.losses, *model.norms], **values)


@pytest.fixture(autouse=True)
def _policy_torch() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")


# --- the same as Lightning's own plugin, to the bit ---

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}
MADE: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "an overflow": {"overflows": 2},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("precision", "made"),
    [("bf16-mixed", "AdamW"), ("bf16-mixed", "SGD"), *(("16-mixed", made) for made in MADE)],
)
def test_a_run_of_the_trainer_has_the_bits_of_lightnings_own(
    precision: str, settings: str, made: str
) -> None:
    plugins = Precast(precision, policy="torch"), TrainersOwn(precision, "cpu")
    ours, theirs = (
        found(plugin, fit(plugin, made=MADE[made], **SETTINGS[settings])) for plugin in plugins
    )
    assert differences(ours, theirs) == []
    assert len(theirs) > 20


def run_fabric(plugin: Any, clip: dict[str, Any]) -> Outcome:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    bare = Module()
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    losses = []
    for number, rows in enumerate(fabric.setup_dataloaders(loader())):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = 1e-2 * model(rows).square().mean()
        assert model(rows).dtype is torch.float32
        fabric.backward(loss * (math.inf if number == 2 else 1.0))
        if clip:
            fabric.clip_gradients(model, optimizer, error_if_nonfinite=False, **clip)
        optimizer.step()
        losses.append(loss.detach())
    scale = {} if plugin.scaler is None else {"scale": torch.tensor(plugin.scaler.get_scale())}
    return outcome(bare, losses, **scale)


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.1}, {"clip_val": 1e-3}], ids=str)
def test_a_run_of_fabric_in_float16_has_the_bits_of_lightnings_own(clip: dict[str, Any]) -> None:
    ours = run_fabric(Precast("16-mixed", policy="torch"), clip)
    theirs = run_fabric(FabricsOwn("16-mixed", "cpu"), clip)
    skipped = {name for name in ours if name.startswith("gradient")} if clip else set()
    assert set(differences(ours, theirs)) <= skipped - {"loss 5"}
    assert ours["output scale"] == 2.0**15


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_kind_of_step_runs_in_the_precision(precision: str) -> None:
    plugin = Precast(precision)
    model = fit(plugin)
    again = trainer(plugin)
    again.validate(model, loader(), verbose=False)
    again.test(model, loader(), verbose=False)
    predicted = again.predict(model, loader())
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    assert model.seen == dict.fromkeys(("train", "validate", "test"), dtype)
    assert predicted[0].dtype is dtype
    assert again.precision == precision


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_was_used_without_gradients_gets_one_later(hold: bool, mode: Any) -> None:
    plugin = Precast("bf16-mixed", "cpu", hold=hold)
    layer = plugin.convert_module(nn.Linear(4, 1))
    with plugin.forward_context():
        with mode():
            layer(torch.ones(2, 4))
        layer(torch.ones(2, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((1, 4), 2.0))


def test_hooks_before_a_step_see_unscaled_gradients() -> None:
    ours = fit(Precast("16-mixed", policy=_in_float32()))
    exact = fit(Precast("bf16-mixed", policy=_in_float32()))
    torch.testing.assert_close(torch.stack(ours.norms), torch.stack(exact.norms))


def test_nothing_is_clipped_and_no_gradient_unscaled_where_clipping_is_off() -> None:
    plugin = Precast("16-mixed", "cpu")
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    plugin.scaler.scale(parameter.sum()).backward()
    plugin.clip_gradients(optimizer)
    assert not plugin.scaler.is_unscaled(optimizer)
    assert torch.equal(parameter.grad, torch.full((2,), 2.0**16))
    plugin.clip_gradients(optimizer, 0.5, gradient_clip_algorithm="value")
    assert torch.equal(parameter.grad, torch.full((2,), 0.5))


def test_a_batch_that_is_left_out_takes_no_step() -> None:
    class LeavesOut(Module):
        def training_step(self, rows: Tensor, index: int) -> Tensor | None:
            return None if index == 1 else super().training_step(rows, index)

    plugins = Precast("16-mixed", policy="torch"), TrainersOwn("16-mixed", "cpu")
    with pytest.warns(UserWarning, match="returned `None`"):
        ours, theirs = (
            fit(plugin, LeavesOut, gradient_clip_val=0.5).state_dict() for plugin in plugins
        )
    assert differences(ours, theirs) == []
    assert plugins[0].scaler.counters.steps == ROWS // 2 - 1


# --- checkpoints ---


def saved(plugin: Any, path: Path) -> Path:
    torch.manual_seed(0)
    run = trainer(plugin, max_steps=2)
    model = Module(overflows=0)
    run.fit(model, loader(), loader())
    run.save_checkpoint(path)
    return path


@pytest.mark.parametrize("saver", ["ours", "theirs"])
@pytest.mark.parametrize("loads", ["ours", "theirs"])
def test_a_run_goes_on_from_a_checkpoint_of_either_plugin(
    tmp_path: Path, saver: str, loads: str
) -> None:
    make = {
        "ours": lambda: Precast("16-mixed", policy="torch"),
        "theirs": lambda: TrainersOwn("16-mixed", "cpu"),
    }
    path = saved(make[saver](), tmp_path / "checkpoint.ckpt")
    expected = saved(make["theirs"](), tmp_path / "expected.ckpt")

    def go_on(plugin: Any, path: Path) -> Outcome:
        model = Module()
        trainer(plugin, max_steps=5).fit(model, loader(), loader(), ckpt_path=path)
        return found(plugin, model)

    ours, theirs = go_on(make[loads](), path), go_on(make["theirs"](), expected)
    assert differences(ours, theirs) == []
    assert theirs["output scale"] == 2.0**15


def test_fabric_saves_and_loads_the_plugin(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        plugin = Precast("16-mixed")
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        bare = Module()
        return plugin, fabric, fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))

    plugin, fabric, (model, optimizer) = start()
    fabric.backward(model(torch.ones(2, 8)).mean() * math.inf)
    optimizer.step()
    fabric.save(tmp_path / "state.ckpt", {"model": model, "precision": plugin})
    other, fabric, (model, _) = start()
    fabric.load(tmp_path / "state.ckpt", {"model": model, "precision": other})
    assert other.scaler.get_scale() == plugin.scaler.get_scale() == 2.0**15


# --- manual optimization and several optimizers ---


class Two(Module):
    """Two optimizers; their losses are computed one after the other, or both before any step."""

    def __init__(self, together: bool, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.together, self.clip = together, clip
        self.gradients: list[Tensor] = []

    def training_step(self, rows: Tensor, index: int) -> None:
        first, second = self.optimizers()
        losses = [self.first(rows).square().mean(), self.last(torch.ones(2, 16)).square().mean()]
        for optimizer in (first, second):
            optimizer.zero_grad()
        if self.together:
            for loss in losses:
                self.manual_backward(loss)
        for optimizer, loss in zip((first, second), losses, strict=True):
            if not self.together:
                self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
        self.losses += [loss.detach() for loss in losses]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.last)]


def test_manual_optimization_has_the_bits_of_lightnings_own() -> None:
    plugins = Precast("16-mixed", policy="torch"), TrainersOwn("16-mixed", "cpu")
    ours, theirs = (found(plugin, fit(plugin, Two, made={"together": False})) for plugin in plugins)
    assert differences(ours, theirs) == []


def scaler(kind: Any, **settings: Any) -> Any:
    return kind("cpu", init_scale=2.0**6, growth_interval=1, **settings)


def test_where_lightning_divides_by_another_scale_than_it_multiplied_by() -> None:
    runs = {
        "float32": fit(Precast("bf16-mixed", policy=_in_float32()), Two, made={"together": True}),
        "ours": fit(
            Precast("16-mixed", scaler=scaler(precast.GradScaler), policy=_in_float32()),
            Two,
            made={"together": True},
        ),
        "theirs": fit(
            TrainersOwn("16-mixed", "cpu", scaler=scaler(torch.amp.GradScaler)),
            Two,
            made={"together": True},
        ),
    }
    weights = {name: run.last.weight.detach() for name, run in runs.items()}
    torch.testing.assert_close(weights["ours"], weights["float32"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(weights["theirs"], weights["float32"], rtol=0.01, atol=1e-3)


def test_manual_clipping_sees_unscaled_gradients() -> None:
    settings = {"together": True, "clip": 1e-2}
    exact = fit(Precast("bf16-mixed", policy=_in_float32()), Two, made=settings)
    ours = fit(Precast("16-mixed", policy=_in_float32()), Two, made=settings)
    torch.testing.assert_close(ours.state_dict(), exact.state_dict())


def test_a_fused_optimizer_is_clipped_unscaled() -> None:
    made = {"optimizer": torch.optim.SGD, "fused": True}
    exact = fit(Precast("bf16-mixed", policy=_in_float32()), made=made, gradient_clip_val=1e-2)
    ours = fit(Precast("16-mixed", policy=_in_float32()), made=made, gradient_clip_val=1e-2)
    torch.testing.assert_close(ours.state_dict(), exact.state_dict())
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(TrainersOwn("16-mixed", "cpu"), made=made, gradient_clip_val=1e-2)


def _in_float32() -> precast.Policy:
    """A policy that lowers nothing, so that a scale alone is what differs."""
    policy = precast.Policy.load("torch")
    rows = expanded_rules(policy, "cpu")[0].items()
    return policy.replace(ops={n: "fp32" for n, row in rows if row.rule is Rule.LOWER})


def test_lbfgs_in_the_trainer() -> None:
    made = {"optimizer": torch.optim.LBFGS, "max_iter": 2}
    assert fit(Precast("bf16-mixed"), made=made).losses[-1].isfinite()
    with pytest.raises(precast.errors.ScalerError, match="bf16-mixed"):
        fit(Precast("16-mixed"), made=made)


def test_lbfgs_in_fabric_steps_under_a_scale() -> None:
    plugin = Precast("16-mixed", scaler=precast.GradScaler("cpu", init_scale=2.0**8))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    bare = Module()
    model, optimizer = fabric.setup(bare, torch.optim.LBFGS(bare.parameters(), lr=0.1, max_iter=3))
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 8)) - 1.0).square().mean()
        fabric.backward(loss)
        losses.append(loss.item())
        return loss.detach()

    for _ in range(3):
        optimizer.step(closure)
    assert losses[-1] < losses[0] / 2
    assert plugin.scaler.counters.steps == 3


# --- what precast adds ---


def test_the_policy_holds_in_every_step_and_its_rules_for_modules_too() -> None:
    policy = precast.Policy.load("default").replace(modules={"last": "fp32"})
    plugin = Precast("bf16-mixed", policy=policy)
    records = []

    class Sees(Module):
        def training_step(self, rows: Tensor, index: int) -> Tensor:
            records.append((self.first(rows).dtype, self.last(torch.ones(2, 16)).dtype))
            return super().training_step(rows, index)

    model = fit(plugin, Sees)
    assert set(records) == {(torch.bfloat16, torch.float32)}
    assert model.seen == dict.fromkeys(("train", "validate"), torch.float32)
    with torch.autocast("cpu"):
        assert model.last(torch.ones(2, 16)).dtype is torch.bfloat16, "the run is over"
    assert plugin.attachments == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_held_weights_train_the_same(precision: str) -> None:
    memory = []

    class Sees(Module):
        def on_train_epoch_end(self) -> None:
            [attachment] = self.trainer.precision_plugin.attachments
            memory.append(int(attachment.memory()))

        def forward(self, rows: Tensor) -> Tensor:  # no weight is used twice
            return self.last(self.norm(self.first(rows).relu()))

    ours = fit(Precast(precision, policy="torch", hold=True), Sees).state_dict()
    theirs = fit(Precast(precision, policy="torch"), Sees).state_dict()
    assert differences(ours, theirs) == []
    assert memory[0] > 0 == memory[1]


def test_events_name_parameters_as_the_model_does_and_tensorboard_gets_them() -> None:
    writer, events = Writer(), []
    with precast.observe(TensorBoard(writer)), precast.observe(events.append):
        fit(Precast("16-mixed"), made={"overflows": 1})
    steps = [event for event in events if isinstance(event, precast.events.StepEvent)]
    assert [bool(event.skipped) for event in steps] == [False, True, False, False, False, False]
    assert [step for name, _, step in writer.scalars if name == "scaler/scale"] == list(range(6))
    assert "first.weight" in dict(entry[:2] for entry in writer.texts)["scaler/optimizer 0/skipped"]


def test_a_plugin_can_be_sent_to_another_process() -> None:
    plugin = Precast("16-mixed", scaler=precast.GradScaler("cpu", init_scale=8.0), policy="lean")
    sent = pickle.loads(pickle.dumps(plugin))
    assert (sent.precision, sent.scaler.get_scale()) == ("16-mixed", 8.0)
    assert sent.policy.fingerprint == plugin.policy.fingerprint


# --- what is refused ---


def test_what_is_refused() -> None:
    with pytest.raises(precast.errors.RegionError, match="'16-mixed'"):
        Precast("16-true")
    with pytest.raises(precast.errors.ScalerError, match="'16-mixed'"):
        Precast("bf16-mixed", scaler=precast.GradScaler("cpu"))
    with pytest.raises(precast.errors.ScalerError, match=r"precast\.GradScaler"):
        Precast("16-mixed", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(precast.errors.PolicyError, match="nothing"):
        Precast(policy="nothing")
    assert Precast("bf16-mixed").scaler is None


# --- the older spelling ---


def test_the_plugin_is_for_the_spelling_that_a_program_has_imported() -> None:
    program = """
import warnings; warnings.simplefilter("ignore")
import sys, pytorch_lightning as pl, torch
from precast.integrations.lightning import Precast
assert "lightning.pytorch" not in sys.modules
plugin = Precast("16-mixed")
run = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, plugins=[plugin],
                 enable_progress_bar=False, enable_model_summary=False)
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, rows, index):
        assert self.layer(rows).dtype is torch.float16
        return self.layer(rows).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
run.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 4)))
assert plugin.scaler.counters.steps == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
